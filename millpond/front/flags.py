"""Command line flags and the configuration file: `millpond.config` under other spellings."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import (
    CLI_SUPPRESS,
    BaseSettings,
    CliPositionalArg,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from millpond.config import DRAFT_METHOD, NOT_SERVED, PytorchEngineConfig, SpeculativeConfig
from millpond.errors import Refused
from millpond.strict import explain
from millpond.telemetry import LEVELS

HELP = {
    "backend": "only pytorch",
    "device": "where the model runs: auto, cpu, cuda or one of several GPUs, such as cuda:1",
    "dtype": "auto: float32 on the CPU, bfloat16 on a GPU",
    "tp": "tensor parallel ranks; only 1 so far",
    "distributed_executor_backend": "only uni so far",
    "language_model_only": "leave vision towers out; always so",
    "load_format": "dummy draws random weights",
    "max_batch_size": "requests that run at once",
    "session_len": "tokens of a prompt and its answer together",
    "max_prefill_token_num": "prompt tokens of one forward",
    "cache_memory": "one budget for slots and pages: 8GiB, or a share such as 0.5",
    "num_state_slots": "state slots; derived when absent",
    "num_kv_pages": "pages of 64 tokens; derived when absent",
    "num_gpu_blocks": "another name of --num-kv-pages",
    "block_size": "tokens per page; only 64",
    "enable_prefix_caching": "reuse states and pages of shared prefixes",
    "prefix_cache_state_budget": "slots kept for checkpoints; derived when absent",
    "prefill_save_alignment": "tokens; checkpoints of prompts lie on its multiples",
    "checkpoint_mode": "interior (default), split or off",
    "checkpoint_interval": "tokens between checkpoints along a long prompt",
    "decode_checkpoint_interval": "tokens between checkpoints along an answer; 0 is none",
    "hold_and_join": "let a request wait for another that computes the beginning they share",
    "max_overtakes": "requests of higher priority that may overtake a waiting one",
    "watchdog_timeout": "seconds after which a step that has not ended is given up; 0 is never",
    "kda_prefill_backend": "kernels of the chunked recurrence",
    "debug_audit": "check every invariant after every step",
    "debug_poison": "fill what is freed with NaN",
    "kv_transfer_config": "a store for checkpoints, as JSON: kv_connector and what goes with it",
    "store": "a store for checkpoints: host, file:DIRECTORY or mooncake:CONFIGURATION.json",
    "store_size": "bytes that a store of one's own may take, such as 32GiB",
    "store_staging": "host memory between a GPU and a store, such as 256MiB; derived when absent",
    "store_optional": "start and serve without the store if it cannot be reached",
    "config": "a TOML or JSON file with the same names; flags win",
    "model": "a directory, or the name of a bundled model",
    "model_name": "the name clients use; default: the model's own",
    "server_name": "address to listen on",
    "server_port": "port to listen on",
    "log_level": "DEBUG, INFO, WARNING or ERROR",
    "enable_log_requests": "log a line for each request: how its prompt met the prefix cache",
    "embedded": "run the engine in the server's own process",
    "api_key": "a key that clients must send; may be given several times",
    "api_key_file": "a file with a key a line",
    "enable_admin": "open the routes that change what others are served",
    "force_usage": "put usage into every stream, asked for or not",
    "max_queued": "prompts that may wait beside those that run; more are told to come back",
    "max_body": "the largest body of a request, such as 8MiB",
    "url": "the server's address",
    "endpoint": "which route is asked",
    "bench_model": "the name to ask for; default: the server's first",
    "client_key": "the key to send along",
    "num_prompts": "requests in all",
    "concurrency": "users who each ask again once answered (closed loop)",
    "request_rate": "requests a second, at random moments (open loop)",
    "input_len": "words of a prompt, or tokens with --token-ids",
    "output_len": "tokens of an answer",
    "shared_prefix_len": "of the input, how much all prompts have in common",
    "token_ids": "send token ids below this number instead of words",
    "dataset": "a file of JSON lines with prompt or messages, instead of random words",
    "ignore_eos": "ask for answers of full length",
    "warmup": "requests before the clock starts",
    "bench_seed": "of the random words and moments",
    "plot": "write a picture of the times here",
    "drain_seconds": "how long running requests may go on after a signal to end",
    "speculative_algorithm": "deepseek_mtp: the model's own draft layer",
    "speculative_num_draft_tokens": "drafts a step, 0 to 7",
    "chat_url": "talk to the model of this server instead; --model is then its name there",
    "prompt": "a question; without one, a conversation starts",
    "max_new_tokens": "longest answer, in tokens",
    "temperature": "0 is greedy; default: greedy",
    "seed": "makes sampled text reproducible",
    "system": "a system message",
    "show_reasoning": "print the think block too",
    "tasks": "some of the tasks, with commas; default: all",
    "cases": "held-out dialogues of each task",
    "eval_seed": "the first of their seeds",
    "scale": "stretches the long tasks: 1 is up to about 512 tokens, 8 about 4096",
    "warm": "send each prompt once before it is graded, so that it starts from a hit",
    "compare": "what a second mode does otherwise, such as no-enable-prefix-caching; or none",
    "gates": "hold a bundled model against its release gates",
    "gate": "thresholds of your own, such as accuracy=0.9,ledger.margin=5,drift=0.01",
    "json_path": "write all numbers to this file",
}

# What LMDeploy, vLLM and SGLang call the commonest flags.
ALIASES = {
    "--cache-block-seq-len": "--block-size",
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--tp-size": "--tp",
    "--max-model-len": "--session-len",
    "--enable-force-include-usage": "--force-usage",
    "--context-length": "--session-len",
    "--max-num-seqs": "--max-batch-size",
    "--max-running-requests": "--max-batch-size",
    "--max-num-batched-tokens": "--max-prefill-token-num",
    "--chunked-prefill-size": "--max-prefill-token-num",
    "--num-gpu-blocks-override": "--num-gpu-blocks",
    "--kv-cache-memory-bytes": "--cache-memory",
    "--gpu-memory-utilization": "--cache-memory",
    "--mem-fraction-static": "--cache-memory",
    "--cache-max-entry-count": "--cache-memory",
    "--max-mamba-cache-size": "--num-state-slots",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--served-model-name": "--model-name",
    "--log-requests": "--enable-log-requests",
    "--disable-log-requests": "--no-enable-log-requests",
    "--host": "--server-name",
    "--port": "--server-port",
    "--model-path": "--model",
    "--json": "--json-path",
}
QUIET = {"--cache-block-seq-len", "--json"}  # nothing to tell: LMDeploy's own, and a short form


class _Base(BaseSettings):
    """Flags first, then the configuration file; the environment is not read."""

    model_config = SettingsConfigDict(
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_exit_on_error=False,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        extra="forbid",
        allow_inf_nan=False,
    )
    config: Annotated[str | None, Field(description=HELP["config"])] = None
    log_level: Annotated[str, Field(description=HELP["log_level"])] = "WARNING"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is handed in; the command line is put before it."""
        return (init_settings,)


class _Flags(_Base):
    """The flags of a command that runs an engine."""

    speculative_algorithm: Annotated[
        str | None, Field(description=HELP["speculative_algorithm"])
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None, Field(ge=0, description=HELP["speculative_num_draft_tokens"])
    ] = None

    def engine(self) -> PytorchEngineConfig:
        """The engine's part; what was not said stays unsaid."""
        names = PytorchEngineConfig.model_fields.keys() & self.model_fields_set
        return PytorchEngineConfig(**{n: getattr(self, n) for n in names})

    def speculative(self) -> SpeculativeConfig | None:
        """The drafts asked for, or None."""
        drafts = self.speculative_num_draft_tokens
        if self.speculative_algorithm is None and not drafts:
            return None
        return SpeculativeConfig(
            method=self.speculative_algorithm or DRAFT_METHOD,
            num_speculative_tokens=1 if drafts is None else drafts,
        )


def _engine_fields() -> dict[str, Any]:
    """The fields of the engine's configuration, ready to be read from text."""
    found: dict[str, Any] = {}
    for name, field in PytorchEngineConfig.model_fields.items():
        info = FieldInfo.merge_field_infos(field, description=HELP.get(name))
        kind: Any = field.annotation
        found[name] = (Annotated[kind, CLI_SUPPRESS] if name in NOT_SERVED else kind, info)
    return found


_Engine: type[_Flags] = create_model("_Engine", __base__=_Flags, **_engine_fields())


def _help(name: str) -> Any:
    return Field(description=HELP[name])


class ServeFlags(_Engine):  # type: ignore[valid-type,misc]
    """Serve a model over HTTP, OpenAI-compatible."""

    model: Annotated[CliPositionalArg[str | None], _help("model")] = None
    model_name: Annotated[str | None, _help("model_name")] = None
    server_name: Annotated[str, _help("server_name")] = "127.0.0.1"
    server_port: Annotated[int, Field(ge=0, le=65535, description=HELP["server_port"])] = 23333
    enable_log_requests: Annotated[bool, _help("enable_log_requests")] = False
    embedded: Annotated[bool, _help("embedded")] = False
    api_key: Annotated[tuple[str, ...], _help("api_key")] = ()
    api_key_file: Annotated[str | None, _help("api_key_file")] = None
    enable_admin: Annotated[bool, _help("enable_admin")] = False
    force_usage: Annotated[bool, _help("force_usage")] = False
    max_queued: Annotated[int, Field(ge=0, description=HELP["max_queued"])] = 4096
    max_body: Annotated[str, _help("max_body")] = "8MiB"
    drain_seconds: Annotated[float, Field(gt=0, description=HELP["drain_seconds"])] = 30.0
    log_level: Annotated[str, _help("log_level")] = "INFO"


class ChatFlags(_Engine):  # type: ignore[valid-type,misc]
    """Talk to a model in the terminal."""

    prompt: Annotated[CliPositionalArg[str | None], _help("prompt")] = None
    model: Annotated[str | None, _help("model")] = None
    url: Annotated[str | None, _help("chat_url")] = None
    api_key: Annotated[str | None, _help("client_key")] = None
    system: Annotated[str | None, _help("system")] = None
    max_new_tokens: Annotated[int, Field(ge=1, description=HELP["max_new_tokens"])] = 512
    temperature: Annotated[float | None, Field(ge=0, description=HELP["temperature"])] = None
    seed: Annotated[int | None, Field(ge=0, description=HELP["seed"])] = None
    show_reasoning: Annotated[bool, _help("show_reasoning")] = False


class DoctorFlags(_Engine):  # type: ignore[valid-type,misc]
    """Say what this machine can do, and what a model would take on it."""

    model: Annotated[str | None, _help("model")] = None


class EvalFlags(_Engine):  # type: ignore[valid-type,misc]
    """Grade a model on tasks whose right answers are known, in any mode."""

    model: Annotated[CliPositionalArg[str | None], _help("model")] = None
    tasks: Annotated[str | None, _help("tasks")] = None
    cases: Annotated[int, Field(ge=1, description=HELP["cases"])] = 32
    seed: Annotated[int, Field(ge=0, description=HELP["eval_seed"])] = 0
    scale: Annotated[int, Field(ge=1, le=8, description=HELP["scale"])] = 1
    warm: Annotated[bool, _help("warm")] = True
    compare: Annotated[str | None, _help("compare")] = None
    gates: Annotated[bool, _help("gates")] = True
    gate: Annotated[str | None, _help("gate")] = None
    json_path: Annotated[str | None, _help("json_path")] = None


class BenchFlags(_Base):
    """Put a server under load and measure what its users would see."""

    url: Annotated[CliPositionalArg[str], _help("url")] = "http://127.0.0.1:23333"
    endpoint: Annotated[Literal["chat", "completions"], _help("endpoint")] = "chat"
    model: Annotated[str | None, _help("bench_model")] = None
    api_key: Annotated[str | None, _help("client_key")] = None
    num_prompts: Annotated[int, Field(ge=1, description=HELP["num_prompts"])] = 100
    concurrency: Annotated[int | None, Field(ge=1, description=HELP["concurrency"])] = None
    request_rate: Annotated[float | None, Field(gt=0, description=HELP["request_rate"])] = None
    input_len: Annotated[int, Field(ge=1, description=HELP["input_len"])] = 128
    output_len: Annotated[int, Field(ge=1, description=HELP["output_len"])] = 64
    shared_prefix_len: Annotated[int, Field(ge=0, description=HELP["shared_prefix_len"])] = 0
    token_ids: Annotated[int | None, Field(ge=1, description=HELP["token_ids"])] = None
    dataset: Annotated[str | None, _help("dataset")] = None
    ignore_eos: Annotated[bool, _help("ignore_eos")] = True
    warmup: Annotated[int, Field(ge=0, description=HELP["warmup"])] = 1
    seed: Annotated[int, Field(ge=0, description=HELP["bench_seed"])] = 0
    json_path: Annotated[str | None, _help("json_path")] = None
    plot: Annotated[str | None, _help("plot")] = None


class ModeFlags(_Engine):  # type: ignore[valid-type,misc]
    """The engine's flags alone: a second mode to compare with."""


POSITIONAL: dict[type[_Base], str] = {ServeFlags: "model", EvalFlags: "model", BenchFlags: "url"}
"""Arguments without a name that may be given with one."""


def parse(flags: type[_Base], command: str, argv: Sequence[str]) -> tuple[Any, list[str]]:
    """(flags, notes about spellings). Raises `Refused` with one line for a bad one."""
    positional = POSITIONAL.get(flags)
    argv, notes = _spell(argv, positional)
    known = _spellings(flags)
    for word in argv:
        name = word.split("=", 1)[0]
        if name == "--":
            break
        if name.startswith("-") and not _is_number(name) and name not in known:
            near = difflib.get_close_matches(name, [*known, *ALIASES], 1)
            raise Refused(f"unknown flag {name}" + (f", did you mean {near[0]}?" if near else ""))
    try:
        values = _read_file(argv)
        values |= {"_cli_prog_name": f"millpond {command}", "_cli_parse_args": list(argv)}
        made = flags(**values)
    except ValidationError as error:
        raise Refused(explain(error, flags.model_fields)) from error
    except SettingsError as error:
        raise Refused(" ".join(str(error).split()).removeprefix("error parsing CLI: ")) from error
    if made.log_level.upper() not in LEVELS:
        raise Refused(f"log_level: {made.log_level!r} is none of {', '.join(LEVELS)}")
    return made, notes


def _spell(argv: Sequence[str], positional: str | None) -> tuple[list[str], list[str]]:
    """Other engines' spellings to ours, and a note for each."""
    found, notes = [], []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        ours = ALIASES.get(name, name)
        if ours != name and name not in QUIET:
            notes.append(f"{name} read as {ours}")
        if positional is not None and ours == f"--{positional}":
            found.append(value if equals else next(words, ""))
        else:
            found.append(ours + equals + value)
    return found, notes


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _spellings(flags: type[_Base]) -> set[str]:
    """Every flag of a command."""
    found = {"-h", "--help"}
    for name, field in flags.model_fields.items():
        kebab = "--" + name.replace("_", "-")
        found.add(kebab)
        if field.annotation is bool:
            found.add("--no-" + kebab[2:])
    return found


def _read_file(argv: Sequence[str]) -> dict[str, Any]:
    """The values of the file named by `--config`, if one is."""
    path = None
    for i, word in enumerate(argv):
        if word.startswith("--config="):
            path = word.partition("=")[2]
        elif word == "--config" and i + 1 < len(argv):
            path = argv[i + 1]
    if path is None:
        return {}
    try:
        text = Path(path).read_text("utf-8")
        found = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read the configuration file {path}: {error}") from error
    if not isinstance(found, dict):
        raise Refused(f"the configuration file {path} is not a table of names and values")
    return {str(k).replace("-", "_"): v for k, v in found.items()}
