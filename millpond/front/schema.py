"""What OpenAI-style requests may say: types, names, and what is refused; builds no answers.

Types are strict: `true` is no number. Null and, for optional fields, empty equal absent. Unknown
fields are kept by name only, so that the answer can say that they were ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from millpond.config import GenerationConfig
from millpond.errors import Rejected

_REFUSED: dict[str, str] = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "audio output",
    "prediction": "predicted output",
    "suffix": "text to insert before",
    "use_beam_search": "beam search",
    "prompt_logprobs": "use echo with logprobs on completions",
    "structured_outputs": "structured output",
    "guided_json": "structured output",
    "guided_regex": "structured output",
    "guided_choice": "structured output",
    "guided_grammar": "structured output",
    "regex": "structured output",
    "ebnf": "structured output",
    "json_schema": "structured output",
    "thinking_token_budget": "a thinking budget",
    "lora_path": "adapters",
}


def explain(error: ValidationError) -> str:
    """One line that names every wrong field, without the input's whole text."""
    parts = []
    for problem in error.errors(include_url=False, include_context=False):
        where = ".".join(str(p) for p in problem["loc"] if not str(p).startswith("function-"))
        parts.append(f"{where}: {problem['msg']}" if where else str(problem["msg"]))
    return "; ".join(parts)


def _prompt(value: Any) -> Any:
    """A string, strings, ids, or lists of ids; checked here because a union would try all of it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        first = value[0]
        if isinstance(first, str) and all(isinstance(v, str) for v in value):
            return value
        if isinstance(first, list):
            if all(isinstance(v, list) and all(type(i) is int for i in v) for v in value):
                return value
        elif all(type(i) is int for i in value):
            return value
    raise ValueError("must be a string, strings, token ids, or lists of token ids, and not empty")


def _stop(value: Any) -> tuple[str, ...]:
    """One stop string or several."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
        raise ValueError("must be a string or a list of strings")
    if len(texts) > 64:
        raise ValueError("at most 64 stop strings")
    return tuple(t for t in texts if t)


_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = {"type": "array", "items": {"type": "integer"}}
PromptField = Annotated[
    Any,
    PlainValidator(_prompt),
    WithJsonSchema({"anyOf": [*_STRINGS["anyOf"], _IDS, {"type": "array", "items": _IDS}]}),
]
StopField = Annotated[tuple[str, ...], PlainValidator(_stop), WithJsonSchema(_STRINGS)]


class Request(BaseModel):
    """What all request bodies share."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)
    required: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            k: v
            for k, v in data.items()
            if v is not None and (k in cls.required or v not in ([], {}, ""))
        }

    @property
    def ignored(self) -> list[str]:
        """Names of fields that nothing here knows."""
        return sorted(self.model_extra or ())


class StreamOptions(BaseModel):
    """What a stream carries beside text."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generate(Request):
    """Fields of every route that generates text."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int = Field(default=1, ge=1)
    best_of: int | None = None
    stop: StopField = ()
    stop_token_ids: list[int] = []
    seed: int | None = None
    logit_bias: dict[str, float] = {}
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    min_tokens: int | None = Field(default=None, ge=0)
    min_new_tokens: int | None = Field(default=None, ge=0)
    skip_special_tokens: bool = True
    response_format: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: str = ""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    return_token_ids: bool = False

    def refuse_unsupported(self) -> None:
        """Raise `Rejected` naming a field that is known but cannot be served."""
        for name, what in _REFUSED.items():
            if (self.model_extra or {}).get(name) not in (None, False):
                raise Rejected(f"{name} is not supported: {what}", param=name, code="unsupported")
        try:
            self.cache_salt.encode()
        except UnicodeEncodeError as error:
            raise Rejected("cache_salt is not valid Unicode", param="cache_salt") from error
        if self.best_of is not None and self.best_of != 1:
            raise Rejected("best_of must be 1", param="best_of", code="unsupported")
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise Rejected(
                f"response_format {kind!r} is not supported yet",
                param="response_format",
                code="unsupported",
            )

    def wish(self, *, max_tokens: int | None, logprobs: int | None) -> GenerationConfig:
        """The same request in the words of `GenerationConfig`; limits are checked there."""
        try:
            bias = {int(k): v for k, v in self.logit_bias.items()}
        except ValueError as error:
            raise Rejected("logit_bias: keys must be token ids", param="logit_bias") from error
        if any(not -100 <= v <= 100 for v in bias.values()):
            raise Rejected("logit_bias: values must be from -100 to 100", param="logit_bias")
        least = self.min_tokens if self.min_tokens is not None else self.min_new_tokens
        try:
            return GenerationConfig(
                max_new_tokens=1 if max_tokens is None else max_tokens,
                do_sample=self.temperature != 0,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=0 if self.top_k == -1 else self.top_k,
                min_p=self.min_p,
                random_seed=None if self.seed is None else self.seed % 2**63,
                stop_words=self.stop,
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                min_new_tokens=least,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=bias or None,
                skip_special_tokens=self.skip_special_tokens,
                logprobs=logprobs,
                n=self.n,
            )
        except ValidationError as error:
            first = error.errors()[0]["loc"]
            raise Rejected(explain(error), param=str(first[0]) if first else None) from error


class ChatRequest(Generate):
    """Body of `/v1/chat/completions`."""

    required: ClassVar[frozenset[str]] = frozenset({"messages"})
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[str] = []
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def refuse_unsupported(self) -> None:
        """As for every route, and what concerns tools and other media."""
        super().refuse_unsupported()
        if self.tool_choice not in (None, "auto", "none"):
            raise Rejected(
                f"tool_choice {self.tool_choice!r} is not supported yet, only auto and none",
                param="tool_choice",
                code="unsupported",
            )
        if any(m != "text" for m in self.modalities):
            raise Rejected("modalities: only text", param="modalities", code="unsupported")
        if self.top_logprobs is not None and not self.logprobs:
            raise Rejected("top_logprobs needs logprobs: true", param="top_logprobs")


class CompletionRequest(Generate):
    """Body of `/v1/completions`."""

    required: ClassVar[frozenset[str]] = frozenset({"prompt"})
    prompt: PromptField
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    add_special_tokens: bool = True


class TokenizeRequest(Request):
    """Body of `/tokenize`: a prompt, or messages for the chat template."""

    required: ClassVar[frozenset[str]] = frozenset({"prompt"})
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeRequest(Request):
    """Body of `/detokenize`."""

    required: ClassVar[frozenset[str]] = frozenset({"tokens"})
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False
