"""What each command does once its flags are read."""

from __future__ import annotations

from contextlib import closing

from millpond.config import GenerationConfig
from millpond.front import doctor as doctor_command
from millpond.front import terminal
from millpond.front.compose import open_service
from millpond.front.distant import Distant
from millpond.front.flags import ChatFlags, DoctorFlags
from millpond.front.load.wire import Target
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
    if flags.url is not None:
        with closing(Distant(Target(flags.url, flags.api_key), flags.model)) as there:
            return _talk(there, flags, wish)
    with Pipeline(open_service(flags.model, flags.engine(), flags.speculative())) as pipe:
        return _talk(pipe, flags, wish)


def _talk(partner: terminal.Partner, flags: ChatFlags, wish: GenerationConfig) -> int:
    if flags.prompt is not None:
        return terminal.ask(
            partner, flags.prompt, wish, system=flags.system, reasoning=flags.show_reasoning
        )
    talk = terminal.Chat(partner, wish, system=flags.system, reasoning=flags.show_reasoning)
    return talk.run()


def doctor(flags: DoctorFlags) -> int:
    """Print what there is and what fits."""
    log_to_stderr(flags.log_level)
    return doctor_command.run(flags.model, flags.engine(), flags.speculative())
