"""`millpond serve`: a server, and its engine in a process of its own or in the same one.

Brings torch only for the second: a server that has its engine elsewhere needs none of it.
"""

from __future__ import annotations

import logging
import socket
from importlib import import_module
from pathlib import Path

from rich.console import Console

from millpond.config import ModelFacts, Resolved
from millpond.errors import Refused
from millpond.front import plan, server
from millpond.front.directory import Texts, locate
from millpond.front.flags import ServeFlags
from millpond.front.guard import Limits, read_keys
from millpond.front.process.remote import RemoteEngine
from millpond.front.service import Room, Service
from millpond.telemetry import log_to_stderr, logger
from millpond.units import parse_memory

log = logger("start")


def serve(flags: ServeFlags) -> int:
    """Serve until told to stop. Returns an exit status: 1 when the engine has failed."""
    log_to_stderr(flags.log_level, requests=flags.enable_log_requests)
    options = server.Options(
        limits=Limits(keys=_keys(flags), max_body=_max_body(flags.max_body)),
        admin=flags.enable_admin,
        drain_seconds=flags.drain_seconds,
        log_level=flags.log_level,
    )
    with server.bind(flags.server_name, flags.server_port) as address:
        return (_embedded if flags.embedded else _apart)(flags, address, options)


def _apart(flags: ServeFlags, address: socket.socket, options: server.Options) -> int:
    """The engine in a process of its own; HTTP is answered while the model is loading."""
    directory = locate(flags.model)
    engine = RemoteEngine(
        None if flags.model is None else str(directory), flags.engine(), flags.speculative()
    )
    try:
        texts = Texts.read(directory)
        planned = engine.plan()
        _show(planned.resolved, planned.facts)
        texts.fit(planned.vocab_size)
        service = Service.of(
            texts,
            planned.resolved,
            planned.vocab_size,
            engine,
            engine.startup,
            name=flags.model_name,
        )
        engine.sized.add_done_callback(lambda sized: service.take_numbers(sized.result()))
        return _run(service, flags, address, options)
    finally:
        engine.close(drain=False, timeout=10.0)


def _embedded(flags: ServeFlags, address: socket.socket, options: server.Options) -> int:
    """The engine in a thread of this process; HTTP is answered once it is ready."""
    compose = import_module("millpond.front.compose")
    service: Service = compose.open_service(
        flags.model,
        flags.engine(),
        flags.speculative(),
        name=flags.model_name,
        on_plan=lambda planned: _show(planned.resolved, planned.facts),
    )
    try:
        return _run(service, flags, address, options)
    finally:
        service.engine.close(drain=False, timeout=10.0)


def _run(
    service: Service, flags: ServeFlags, address: socket.socket, options: server.Options
) -> int:
    service.force_usage = flags.force_usage
    service.room = Room(service.resolved.max_batch_size + flags.max_queued)
    return server.serve(service, address, options)


def _show(resolved: Resolved, facts: ModelFacts) -> None:
    """The plan as a table; where only warnings are wanted, what of it is one."""
    if not log.isEnabledFor(logging.INFO):
        for note in resolved.notes:
            log.warning("%s", note)
        return
    Console(stderr=True, highlight=False).print(plan.table(resolved, facts))


def _keys(flags: ServeFlags) -> tuple[str, ...]:
    """Keys of the command line and of the file. Raises `Refused` for a file without one."""
    keys = tuple(key for key in flags.api_key if key)
    if len(keys) != len(flags.api_key):
        raise Refused("api_key: a key must not be empty")
    if flags.api_key_file is None:
        return keys
    try:
        found = read_keys(Path(flags.api_key_file).read_text("utf-8").splitlines())
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read the key file {flags.api_key_file}: {error}") from error
    if not found:
        raise Refused(f"the key file {flags.api_key_file} holds no key")
    return keys + found


def _max_body(text: str) -> int:
    try:
        return parse_memory(text, 0)
    except Refused:
        raise Refused(f"max_body: {text!r} is not a size such as 8MiB") from None
