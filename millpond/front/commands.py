"""What each command does once its flags are read."""

from __future__ import annotations

from millpond.config import GenerationConfig
from millpond.front import doctor as doctor_command
from millpond.front import terminal
from millpond.front.compose import open_service
from millpond.front.flags import ChatFlags, DoctorFlags
from millpond.front.pipeline import Pipeline
from millpond.telemetry import log_to_stderr


def chat(flags: ChatFlags) -> int:
    """Answer one question, or talk."""
    log_to_stderr(flags.log_level)
    wish = GenerationConfig(
        max_new_tokens=flags.max_new_tokens,
        do_sample=bool(flags.temperature),
        temperature=flags.temperature,
        random_seed=flags.seed,
    )
    with Pipeline(open_service(flags.model, flags.engine(), flags.speculative())) as pipe:
        if flags.prompt is not None:
            return terminal.ask(
                pipe, flags.prompt, wish, system=flags.system, reasoning=flags.show_reasoning
            )
        talk = terminal.Chat(pipe, wish, system=flags.system, reasoning=flags.show_reasoning)
        return talk.run()


def doctor(flags: DoctorFlags) -> int:
    """Print what there is and what fits."""
    log_to_stderr(flags.log_level)
    return doctor_command.run(flags.model, flags.engine(), flags.speculative())
