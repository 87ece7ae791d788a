"""What the server's process and the engine's tell each other. Plain data, in msgpack."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from millpond.config import ModelFacts, Resolved
from millpond.engine.constraint import Constraint
from millpond.engine.settings import EngineSettings
from millpond.engine.types import Delta, EngineRequest, EngineStats
from millpond.plan.step import Capabilities


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first words to an engine's process, on its standard input, one line of JSON.

    `opener` is "module:function"; `engine` and `speculative` are configurations in JSON. `requests`
    and `answers` are the addresses it connects to, in `folder`, which goes when both sides have.
    """

    opener: str
    requests: str
    answers: str
    folder: str
    log_level: str
    log_requests: bool
    model: str | None = None
    engine: str = "{}"
    speculative: str | None = None


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """One message; its name travels with it."""


# To the engine.


class Submit(_Message, frozen=True):
    """Serve a request, whose form has been checked."""

    request: EngineRequest


class Abort(_Message, frozen=True):
    """End a request."""

    request_id: str


class Flush(_Message, frozen=True):
    """Forget every prefix, then answer with the same ticket."""

    ticket: int


class Count(_Message, frozen=True):
    """Answer with the counters."""

    ticket: int


class Prepare(_Message, frozen=True):
    """Compile what answers will be written in, then answer with the same ticket."""

    ticket: int
    constraint: Constraint


class Close(_Message, frozen=True):
    """Take no more requests, finish what runs (`drain`) for `timeout` seconds, and leave."""

    drain: bool
    timeout: float | None


ToEngine: TypeAlias = Submit | Abort | Flush | Count | Prepare | Close


# From the engine.


class Phase(_Message, frozen=True):
    """The start has come to a new phase: starting, planning, loading, warm-up and so on."""

    name: str


class Plan(_Message, frozen=True):
    """What will be served and with which numbers; no weights have been read yet."""

    directory: str
    facts: ModelFacts
    resolved: Resolved
    vocab_size: int


class Sized(_Message, frozen=True):
    """The numbers once memory has been measured, or those of the plan where it is not."""

    resolved: Resolved


class Ready(_Message, frozen=True):
    """Requests are served from now on."""

    settings: EngineSettings
    capabilities: Capabilities


class Deltas(_Message, frozen=True):
    """What one step gave all requests."""

    deltas: list[Delta]


class Turned(_Message, frozen=True):
    """A request that was not taken after all."""

    request_id: str
    why: str


class Done(_Message, frozen=True):
    """An order with this ticket has been carried out; with counters where they were asked for."""

    ticket: int
    stats: EngineStats | None = None


class Declined(_Message, frozen=True):
    """An order that cannot be carried out, with the field to blame; `later`: not now."""

    ticket: int
    why: str
    param: str | None = None
    code: str = ""
    later: bool = False


class Failed(_Message, frozen=True):
    """The process is about to end. `refused`: the model or configuration cannot be served."""

    why: str
    refused: bool = False


FromEngine: TypeAlias = Phase | Plan | Sized | Ready | Deltas | Turned | Done | Declined | Failed
