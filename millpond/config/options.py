"""What a user may say: every option, its type and its default. Knows no other number.

No environment variable is read, here or elsewhere: none changes behaviour.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from millpond.errors import Rejected
from millpond.strict import Ints, Strict, Strings, explain

PAGE = 64
"""Tokens of a page, the grid on which every alignment and interval lies."""

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


def num_drafts(speculative: SpeculativeConfig | None) -> int:
    """Draft tokens a step."""
    return 0 if speculative is None else speculative.num_speculative_tokens
