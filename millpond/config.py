"""Every knob a user may turn, and `resolve()`, which derives all other numbers; knows no tensors.

The only module that may read the environment. It reads none: no variable changes behaviour.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError

from millpond.errors import Refused, Rejected
from millpond.strict import Ints, Strict, Strings, explain
from millpond.units import GIB, human, parse_memory

PAGE = 64  # tokens per page, and the grid on which everything lies

DEVICES = re.compile(r"auto|cpu|cuda(:\d{1,3})?")

LEAST_SESSION = 2
"""Tokens of the shortest sequence that can be served: one of a prompt, one of an answer."""

DRAFT_METHOD = "deepseek_mtp"
"""Drafts are chained from the model's own multi-token-prediction layer."""


class GenerationConfig(Strict):
    """How an answer is drawn. None means the model's own default where it has one.

    `do_sample=False` is greedy whatever `temperature` says. `stop_words` are strings of any length,
    found across token boundaries, not part of the answer. `logprobs` is the number of alternatives
    reported for every token (at most 20). `random_seed` makes sampled text reproducible; without
    one, one is drawn.
    """

    max_new_tokens: int = Field(default=512, ge=1)
    do_sample: bool = False
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    random_seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop_words: Strings | None = None
    stop_token_ids: Ints | None = None
    ignore_eos: bool = False
    min_new_tokens: int | None = Field(default=None, ge=0)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
    logprobs: int | None = Field(default=None, ge=0, le=20)
    n: int = Field(default=1, ge=1, le=1024)
    response_format: dict[str, Any] | None = None

    @classmethod
    def refusal(cls, error: ValidationError) -> Rejected:
        """It comes with a request, and is that request's fault."""
        where = error.errors()[0]["loc"]
        param = str(where[0]) if where else None
        return Rejected(explain(error, cls.model_fields), param=param)


class SpeculativeConfig(Strict):
    """Speculative decoding: `num_speculative_tokens` drafts a step, 0 is none.

    The only `method` is "deepseek_mtp", the model's own draft layer.
    """

    method: str = DRAFT_METHOD
    num_speculative_tokens: int = Field(default=1, ge=0)


class PytorchEngineConfig(Strict):
    """What a user may say about the engine; what is left out is derived, and shown at start.

    Sizes are in tokens, slots and pages of 64 tokens. `cache_memory` is one budget for slots and
    pages: "8GiB", a number of bytes, or a share of the free memory such as 0.5. Names follow
    LMDeploy; `num_gpu_blocks` is another name of `num_kv_pages`, 0 means derived.
    """

    backend: Literal["pytorch"] = "pytorch"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tp: int = Field(default=1, ge=1)
    distributed_executor_backend: Literal["uni", "mp", "ray"] = "uni"
    language_model_only: bool = True
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    max_batch_size: int | None = Field(default=None, ge=1)
    session_len: int | None = Field(default=None, ge=1)
    max_prefill_token_num: int = Field(default=2048, ge=1)
    cache_memory: str | int | float | None = None
    num_state_slots: int | None = Field(default=None, ge=1)
    num_kv_pages: int | None = Field(default=None, ge=0)
    num_gpu_blocks: int | None = Field(default=None, ge=0)
    block_size: int = PAGE
    enable_prefix_caching: bool = True
    prefix_cache_state_budget: int | None = Field(default=None, ge=0)
    prefill_save_alignment: int = PAGE
    checkpoint_mode: Literal["interior", "split", "off"] | None = None
    checkpoint_interval: int = Field(default=4096, ge=1)
    decode_checkpoint_interval: int | None = Field(default=None, ge=0)
    hold_and_join: bool = True
    max_overtakes: int = Field(default=64, ge=0)
    watchdog_timeout: float = Field(default=300.0, ge=0)
    kda_prefill_backend: Literal["auto", "torch", "triton", "fla", "flash_kda"] = "auto"
    debug_audit: bool = False
    debug_poison: bool = False
    # A store for checkpoints; `millpond.store.config` reads all five.
    kv_transfer_config: dict[str, Any] | None = None
    store: str | None = None
    store_size: str | int | None = None
    store_staging: str | int | None = None
    store_optional: bool = False
    # Known elsewhere, not served here: any value but the default is refused by name.
    dp: int = 1
    ep: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    role: str = "hybrid"
    quant_policy: int = 0
    num_cpu_blocks: int = 0
    adapters: dict[str, str] | None = None
    enable_return_routed_experts: bool = False


NOT_SERVED = {
    "dp": "data parallelism",
    "ep": "expert parallelism",
    "prefill_context_parallel_size": "prefill context parallelism",
    "decode_context_parallel_size": "decode context parallelism",
    "role": "prefill/decode disaggregation",
    "quant_policy": "a quantised KV cache",
    "num_cpu_blocks": "KV paging to CPU memory",
    "adapters": "adapters",
    "enable_return_routed_experts": "routed-expert output",
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the plan needs of a model: bytes per slot, page and seat, and positions in tokens."""

    name: str
    slot_bytes: int
    page_bytes: int
    seat_bytes: int
    weight_bytes: int
    max_position: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """Every number the engine runs with; `notes` says which defaults were changed, and why."""

    device: str
    dtype: str
    load_format: str
    kda_prefill_backend: str
    max_batch_size: int
    session_len: int
    max_prefill_tokens: int
    num_slots: int
    checkpoint_budget: int
    num_pages: int
    num_seats: int
    prefix_caching: bool
    checkpoint_mode: Literal["interior", "split", "off"]
    prefill_save_alignment: int
    checkpoint_interval: int
    decode_checkpoint_interval: int  # 0: none along an answer
    hold_and_join: bool
    max_overtakes: int
    watchdog_timeout: float  # seconds, 0: none
    num_draft_tokens: int
    cache_budget: int  # bytes that slots, pages and seats may take
    cache_bytes: int  # bytes that they take
    debug_audit: bool
    debug_poison: bool
    notes: tuple[str, ...]


def check(config: PytorchEngineConfig, speculative: SpeculativeConfig | None = None) -> None:
    """Refuse what cannot be served whatever the model is; needs no file and no device."""
    for name, what in NOT_SERVED.items():
        if getattr(config, name) != PytorchEngineConfig.model_fields[name].default:
            raise Refused(
                f"{name}={getattr(config, name)!r}: {what} is not supported, leave it out"
            )
    if config.tp > 1:
        raise Refused(f"tp={config.tp}: tensor parallelism is not supported yet, use tp=1")
    if config.distributed_executor_backend != "uni":
        raise Refused(
            f"distributed_executor_backend={config.distributed_executor_backend!r} is not "
            "supported yet, use 'uni'"
        )
    if not config.language_model_only:
        raise Refused("language_model_only=False: the vision tower is not supported")
    if speculative is not None and speculative.method != DRAFT_METHOD:
        raise Refused(
            f"speculative method {speculative.method!r} is not supported, use {DRAFT_METHOD!r}"
        )
    if config.block_size != PAGE:
        raise Refused(f"block_size={config.block_size}: a page holds {PAGE} tokens, use {PAGE}")
    if DEVICES.fullmatch(config.device) is None:
        raise Refused(f"device={config.device!r} is none of auto, cpu, cuda, cuda:0, cuda:1, ...")
    if config.session_len is not None and config.session_len < LEAST_SESSION:
        raise Refused(
            f"session_len={config.session_len} leaves no room for a token of a prompt and one of an"
            f" answer: use at least {LEAST_SESSION}, or leave it out for all that the model can"
        )
    save, mode = config.prefill_save_alignment, config.checkpoint_mode
    if save <= 0 or save % PAGE:
        raise Refused(
            f"prefill_save_alignment={save} is not a positive multiple of the page size {PAGE}"
        )
    interval = config.checkpoint_interval
    if "checkpoint_interval" in config.model_fields_set and interval % save:
        raise Refused(
            f"checkpoint_interval={interval} is not a multiple of prefill_save_alignment={save}"
        )
    along = config.decode_checkpoint_interval
    if along and along % PAGE:
        raise Refused(
            f"decode_checkpoint_interval={along} is not a multiple of the page size {PAGE}"
        )
    if along and (mode == "off" or not config.enable_prefix_caching):
        raise Refused(
            f"decode_checkpoint_interval={along} needs prefix caching and checkpoints, one of which"
            " is off"
        )
    if mode in ("interior", "split") and not config.enable_prefix_caching:
        raise Refused(
            f"checkpoint_mode={mode!r} needs prefix caching, but enable_prefix_caching is off"
        )
    pages, blocks = config.num_kv_pages or 0, config.num_gpu_blocks or 0
    if pages and blocks and pages != blocks:
        raise Refused(f"num_kv_pages={pages} and its other name num_gpu_blocks={blocks} disagree")
    if config.cache_memory is not None:
        parse_memory(config.cache_memory, GIB)
    caches = mode != "off" and config.enable_prefix_caching
    if (config.store or config.kv_transfer_config) and not caches:
        raise Refused("a store needs prefix caching and checkpoints, one of which is off")


def num_drafts(speculative: SpeculativeConfig | None) -> int:
    """Draft tokens a step."""
    return 0 if speculative is None else speculative.num_speculative_tokens


def resolve(
    config: PytorchEngineConfig,
    facts: ModelFacts,
    *,
    available: int,
    device: str = "cpu",
    speculative: SpeculativeConfig | None = None,
) -> Resolved:
    """Derive every number from the configuration, the model and the free memory in bytes.

    Defaults are clamped to what fits, and a note says so; an explicit value that does not fit
    raises `Refused` with the number that would. `device` is the one chosen ("cpu" or "cuda:0").
    """
    check(config, speculative)
    caching = config.enable_prefix_caching and config.checkpoint_mode != "off"
    mode = (config.checkpoint_mode or "interior") if config.enable_prefix_caching else "off"
    save = config.prefill_save_alignment
    along = config.decode_checkpoint_interval
    auto = "float32" if device == "cpu" else "bfloat16"
    sizes = _Sizes(config, facts, available, device.startswith("cuda"), caching)
    prefill = max(PAGE, config.max_prefill_token_num // PAGE * PAGE)
    notes = list(sizes.notes)
    if prefill != config.max_prefill_token_num:
        notes.append(
            f"max_prefill_token_num {config.max_prefill_token_num} -> {prefill}, whole pages"
        )
    if caching and save >= sizes.session_len:
        notes.append(
            f"prefix caching can never hit: the smallest reusable prefix, {save} tokens, leaves no "
            f"room in session_len {sizes.session_len}"
        )
    return Resolved(
        device=device,
        dtype=auto if config.dtype == "auto" else config.dtype,
        load_format=config.load_format,
        kda_prefill_backend=config.kda_prefill_backend,
        max_batch_size=sizes.batch,
        session_len=sizes.session_len,
        max_prefill_tokens=prefill,
        num_slots=sizes.slots,
        checkpoint_budget=sizes.checkpoints,
        num_pages=sizes.pages,
        num_seats=sizes.batch,
        prefix_caching=config.enable_prefix_caching,
        checkpoint_mode=mode,
        prefill_save_alignment=save,
        checkpoint_interval=-(-config.checkpoint_interval // save) * save,
        decode_checkpoint_interval=(save if along is None else along) if caching else 0,
        hold_and_join=config.hold_and_join,
        max_overtakes=config.max_overtakes,
        watchdog_timeout=config.watchdog_timeout,
        num_draft_tokens=num_drafts(speculative),
        cache_budget=sizes.budget,
        cache_bytes=sizes.bytes(),
        debug_audit=config.debug_audit,
        debug_poison=config.debug_poison,
        notes=tuple(notes),
    )


class _Sizes:
    """The split of one memory budget between slots, pages and seats.

    Seats first: each running request has a slot and a seat, and one spare slot is the source of a
    fan-out. Then the pages of one sequence of the longest length. On a GPU, where memory is what
    bounds them, checkpoints and pages share the rest as prefixes need them: a checkpoint closes at
    most a ladder's interval of tokens, so each comes with the pages of one, up to `MOST_KEPT` or
    four for each request of the batch; what is left becomes pages. Elsewhere it is four for each
    request, and pages are what is left. What does not fit is taken from the checkpoints first, then
    the batch, then the session length.
    """

    MOST_KEPT = 1024

    def __init__(
        self,
        config: PytorchEngineConfig,
        facts: ModelFacts,
        available: int,
        on_gpu: bool,
        caching: bool,
    ) -> None:
        self.facts, self.config = facts, config
        self.notes: list[str] = []
        given = config.cache_memory
        self.budget = parse_memory(
            given if given is not None else (0.9 if on_gpu else 0.5), available
        )
        if on_gpu and self.budget > available:
            raise Refused(
                f"cache_memory={given} is more than the {human(available)} that the GPU has beside"
                f" weights and activations: ask for less, or for a share such as 0.9"
            )
        self.pages = config.num_kv_pages or config.num_gpu_blocks or 0
        self.session_len = config.session_len or facts.max_position
        if self.session_len > facts.max_position:
            raise Refused(
                f"session_len={self.session_len} is more than the model's {facts.max_position}"
            )
        self.batch = config.max_batch_size or (256 if on_gpu else 32)
        budget = config.prefix_cache_state_budget
        self.checkpoints = (4 * self.batch if budget is None else budget) if caching else 0
        if on_gpu and budget is None and caching and config.num_state_slots is None:
            self.checkpoints = self.with_their_pages(max(self.MOST_KEPT, self.checkpoints))
        if config.num_state_slots is None:
            self.fit_slots()
        else:
            self.share_slots(config.num_state_slots)
        self.fit_pages()
        self.slots = config.num_state_slots or self.batch + 1 + self.checkpoints

    def bytes(self, pages: int | None = None) -> int:
        """Bytes of all three arenas with `pages` pages."""
        slots = self.config.num_state_slots or self.batch + 1 + self.checkpoints
        f, pages = self.facts, self.pages if pages is None else pages
        return slots * f.slot_bytes + pages * f.page_bytes + self.batch * f.seat_bytes

    def session_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.session_len // PAGE)

    def with_their_pages(self, most: int) -> int:
        """How many checkpoints have room beside the pages that they go with."""
        f, config = self.facts, self.config
        interval = -(-config.checkpoint_interval // config.prefill_save_alignment)
        tokens = min(interval * config.prefill_save_alignment, self.session_len)
        runs = (self.batch + 1) * f.slot_bytes + self.batch * f.seat_bytes
        each = f.slot_bytes
        if self.pages:  # their number is given: what they leave is for slots
            runs += self.pages * f.page_bytes
        else:
            runs += self.session_pages() * f.page_bytes
            each += tokens // PAGE * f.page_bytes
        return max(1, min(most, (self.budget - runs) // each))

    def fit_slots(self) -> None:
        """Lower defaults until the slots, and pages for one sequence, fit the budget."""
        least = self.pages or self.session_pages()
        slot, seat = self.facts.slot_bytes, self.facts.seat_bytes
        for name, field, unit in (
            ("checkpoints", "prefix_cache_state_budget", slot),
            ("batch", "max_batch_size", slot + seat),
        ):
            have, excess = getattr(self, name), self.bytes(least) - self.budget
            if getattr(self.config, field) is None and have > 1 and excess > 0:
                less = max(1, have - -(-excess // unit))
                self.notes.append(f"{field} {have} -> {less}, to fit {human(self.budget)}")
                setattr(self, name, less)

    def share_slots(self, slots: int) -> None:
        """Share out an explicit number of slots: one spare, then as asked, else a third to run."""
        room, config = slots - 1, self.config
        if config.max_batch_size is None:
            left = room - self.checkpoints if config.prefix_cache_state_budget else room // 3
            self.batch = max(1, min(self.batch, left if self.checkpoints else room))
        if config.prefix_cache_state_budget is None and self.checkpoints:
            self.checkpoints = max(0, room - self.batch)
        if room < 1 or self.batch + self.checkpoints > room:
            raise Refused(
                f"max_batch_size={self.batch} and prefix_cache_state_budget={self.checkpoints} "
                f"need {self.batch + self.checkpoints + 1} slots, num_state_slots={slots}: "
                f"a batch of {max(0, room - self.checkpoints)} fits"
            )

    def fit_pages(self) -> None:
        """Give the rest of the budget to pages, no more than could ever be used at once."""
        config, page = self.config, self.facts.page_bytes
        room = (self.budget - self.bytes(0)) // page
        if self.pages:
            if self.pages > room:
                raise Refused(
                    f"num_kv_pages={self.pages} does not fit {human(self.budget)}: {max(0, room)} "
                    f"fit beside {self.batch} requests and {self.checkpoints} checkpoints"
                )
        else:
            self.pages = min(room, (self.batch + self.checkpoints) * self.session_pages())
        if self.pages < 1:
            fit = (self.budget - page * self.session_pages()) // self.facts.slot_bytes
            raise Refused(
                f"slots for {self.batch} requests and {self.checkpoints} checkpoints take "
                f"{human(self.bytes(0))} of {human(self.budget)} and leave no page; "
                f"{max(0, fit)} slots fit beside one request of {self.session_len} tokens"
            )
        if self.pages < self.session_pages():
            if config.session_len is not None:
                raise Refused(
                    f"session_len={self.session_len} needs {self.session_pages()} pages, "
                    f"{self.pages} fit: at most {self.pages * PAGE} tokens"
                )
            self.notes.append(
                f"session_len {self.session_len} -> {self.pages * PAGE}, to fit {self.pages} pages"
            )
            self.session_len = self.pages * PAGE
