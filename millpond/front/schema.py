"""What OpenAI-style requests may say: types, names, and what is refused; builds no answers.

Types are strict: `true` is no number. Null and, for optional fields, empty equal absent. Unknown
fields are kept by name only, so that the answer can say that they were ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from millpond.config import GenerationConfig
from millpond.engine.constraint import Constraint
from millpond.errors import Rejected
from millpond.front.structured import FIELDS, from_fields, from_response_format, only_one

REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "functions": ("use tools", ()),
    "function_call": ("use tool_choice", ("none", "auto")),
    "audio": ("audio output", ()),
    "prediction": ("predicted output", ()),
    "web_search_options": ("searching", ()),
    "suffix": ("text to insert before", ()),
    "use_beam_search": ("beam search", ()),
    "length_penalty": ("beam search", (1, 1.0)),
    "early_stopping": ("beam search", ()),
    "bad_words": ("forbidden words; use logit_bias", ()),
    "allowed_token_ids": ("a list of all that is allowed; use logit_bias", ()),
    "logprob_token_ids": ("log probabilities of chosen tokens", ()),
    "truncate_prompt_tokens": ("shortening a prompt", (-1,)),
    "include_stop_str_in_output": ("an answer that ends with its stop string", ()),
    "no_stop_trim": ("an answer that ends with its stop string", ()),
    "stop_regex": ("stopping at an expression; use stop", ()),
    "spaces_between_special_tokens": ("text without the spaces", (True,)),
    "logits_processors": ("code in a request", ()),
    "custom_logit_processor": ("code in a request", ()),
    "custom_params": ("code in a request", ()),
    "chat_template": ("a template of the request's own", ()),
    "documents": ("documents beside messages", ()),
    "prompt_embeds": ("embeddings as a prompt", ()),
    "input_embeds": ("embeddings as a prompt", ()),
    "mm_processor_kwargs": ("other media than text", ()),
    "image_data": ("other media than text", ()),
    "audio_data": ("other media than text", ()),
    "video_data": ("other media than text", ()),
    "kv_transfer_params": ("a prompt computed elsewhere", ()),
    "return_hidden_states": ("hidden states", ()),
    "structural_tag": ("a structural tag", ()),
    "lora_path": ("adapters", ()),
}
"""Fields that are known and not served: what they ask for, and values that ask for nothing."""


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


def _unicode(value: str) -> str:
    """Text that can be written as UTF-8, which half of a surrogate pair cannot."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("is not valid Unicode") from error
    return value


Text = Annotated[str, AfterValidator(_unicode)]
StopField = Annotated[tuple[str, ...], PlainValidator(_stop), WithJsonSchema(_STRINGS)]


def _null_is_absent(schema: dict[str, Any]) -> None:
    """Describe what is true of every body: an optional field may be null."""
    needed, null = schema.get("required", ()), {"type": "null"}
    for name, field in schema.get("properties", {}).items():
        if name not in needed and null not in field.get("anyOf", ()):
            kind = {k: field.pop(k) for k in list(field) if k not in ("title", "default")}
            field["anyOf"] = [*kind.pop("anyOf", [kind]), null]


@cache
def _kinds(model: type[BaseModel], name: str) -> frozenset[type]:
    """Which of text, list and object a field may be; of those an empty one says nothing."""
    if name not in model.model_fields:
        return frozenset((str, list, dict))
    return frozenset(_members(model.model_fields[name].annotation))


def _members(annotation: Any) -> Iterator[type]:
    if annotation is Any:
        yield from (str, list, dict)
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (list, tuple):
        yield from (str, list)  # one or several
    elif origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        yield dict
    elif annotation is str:
        yield str


class Request(BaseModel):
    """What all request bodies share."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        frozen=True,
        json_schema_extra=_null_is_absent,
    )
    required: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            k: v
            for k, v in data.items()
            if v is not None and (v or k in cls.required or type(v) not in _kinds(cls, k))
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


class Sampling(Request):
    """How an answer is drawn: fields that every route which generates text takes by these names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int = Field(default=1, ge=1)
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
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def constraint(self) -> Constraint | None:
        """What the answer must look like. Raises `Rejected` for two wishes at once."""
        fields = {n: getattr(self, n) for n in (*FIELDS, "structured_outputs")}
        return only_one(from_response_format(self.response_format), from_fields(fields))

    def refuse_unsupported(self) -> None:
        """Raise `Rejected` naming a field that is known but cannot be served."""
        for name, value in (self.model_extra or {}).items():
            what, harmless = REFUSED.get(name, ("", (value,)))
            if value is not False and value not in harmless:
                raise Rejected(f"{name} is not supported: {what}", param=name, code="unsupported")

    def wish(self, *, max_tokens: int | None, logprobs: int | None) -> GenerationConfig:
        """The same request in the words of `GenerationConfig`."""
        try:
            bias = {int(k): v for k, v in self.logit_bias.items()}
        except ValueError as error:
            raise Rejected("logit_bias: keys must be token ids", param="logit_bias") from error
        if any(not -100 <= v <= 100 for v in bias.values()):
            raise Rejected("logit_bias: values must be from -100 to 100", param="logit_bias")
        least = self.min_tokens if self.min_tokens is not None else self.min_new_tokens
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


class Generate(Sampling):
    """Fields that chat completions and completions share."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    best_of: int | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: Text = ""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    return_token_ids: bool = False
    include_metrics: bool = False

    def refuse_unsupported(self) -> None:
        """As for every route, and what a stream cannot carry."""
        super().refuse_unsupported()
        if self.best_of is not None and self.best_of != 1:
            raise Rejected("best_of must be 1", param="best_of", code="unsupported")
        if self.stream and self.prompt_logprobs is not None:
            raise Rejected(
                "prompt_logprobs does not go with stream",
                param="prompt_logprobs",
                code="unsupported",
            )
