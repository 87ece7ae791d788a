"""Seeded, versioned generator of the dialogues the bundled models learn and are graded on.

Knows words, tasks and the held-out rule; knows no tokenizer, template, tensor or engine.
"""

from millpond.tasks.dialogue import Dialogue, Message, Split
from millpond.tasks.generator import VERSION, make, stream, task_names

__all__ = ["VERSION", "Dialogue", "Message", "Split", "make", "stream", "task_names"]
