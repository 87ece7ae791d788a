"""OpenAI-style answers and errors as plain dictionaries; knows no transport but its JSON."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response

from millpond.errors import Busy, MillpondError, Rejected, Unavailable
from millpond.front.answer import Answer, TextToken
from millpond.front.text import Tokenizer
from millpond.plan.step import TokenLogprob

_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def dump(body: Any) -> bytes:
    """JSON in ASCII: there are clients that break lines at any character which Unicode calls one.

    Text that is not valid Unicode is escaped instead of failing.
    """
    with suppress(UnicodeEncodeError, OverflowError):
        quick = msgspec.json.encode(body)
        if quick.isascii():
            return quick
    return _ENCODER.encode(body).encode()


def reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(dump(body), status, headers=headers, media_type="application/json")


def error_body(
    message: str, *, kind: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The wrapped error shape that client libraries unwrap."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(
    path: str, body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None
) -> Response:
    """An error in the shape that the clients of `path` read; `body` is in the wrapped one."""
    return reply(messages_error(body, status) if speaks_anthropic(path) else body, status, headers)


def speaks_anthropic(path: str) -> bool:
    """Whether a route answers in the shapes of Anthropic's messages API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_error(body: dict[str, Any], status: int) -> dict[str, Any]:
    """The wrapped shape turned into that of Anthropic's API."""
    kind = _ANTHROPIC_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


def status_of(error: MillpondError) -> int:
    """4xx for what the caller did, 503 for what time may cure, 500 for our own faults."""
    if isinstance(error, Busy):
        return 429
    if isinstance(error, Rejected):
        return 404 if error.code in ("model_not_found", "not_found") else 400
    return 503 if isinstance(error, Unavailable) else 500


def error_of(error: MillpondError) -> dict[str, Any]:
    """The body for an error of ours."""
    if isinstance(error, Rejected):
        return error_body(
            str(error), kind="invalid_request_error", code=error.code, param=error.param
        )
    if isinstance(error, Busy):
        return error_body(str(error), kind="rate_limit_error", code="queue_full")
    if isinstance(error, Unavailable):
        return error_body(str(error), kind="service_unavailable", code="unavailable")
    return error_body(str(error), kind="server_error", code=type(error).__name__)


def usage(answers: Iterable[Answer]) -> dict[str, Any]:
    """Token counts over all prompts of a request, and how the prompts met the prefix cache.

    `prefix_outcomes` is in tokens, as the metric is; `held_seconds`, of the prompt that was longest
    held back for another that computed what they share, is there if one was.
    """
    answers = list(answers)
    prompt = sum(a.prompt_tokens for a in answers)
    completion = sum(a.completion_tokens for a in answers)
    accepted = sum(a.accepted for a in answers)
    outcomes = [a.outcome for a in answers if a.outcome]
    met: Counter[str] = Counter()
    for outcome in outcomes:
        met[outcome.reason] += outcome.tokens
    held = max((outcome.held_seconds for outcome in outcomes), default=0.0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(a.cached_tokens for a in answers),
            "prefix_outcomes": dict(met),
            **({"held_seconds": round(held, 3)} if held else {}),
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(a.reasoning_tokens for a in answers),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(a.drafted for a in answers) - accepted,
        },
    }


def metrics(answer: Answer, width: int) -> dict[str, Any]:
    """What one answer took, as vLLM shows it; with drafts, how those of up to `width` fared.

    Milliseconds; null for what cannot be told of an answer of no token, or of one.
    """
    begun, first, last = answer.begun, answer.first_at, answer.last_at
    made: dict[str, Any] = dict.fromkeys(
        ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
         "tokens_per_second")
    )  # fmt: skip
    if answer.outcome is not None:
        made["queue_time_ms"] = round(1000 * answer.outcome.queued_seconds, 3)
    if first is not None and last is not None:
        made["time_to_first_token_ms"] = round(1000 * (first - begun), 3)
        made["generation_time_ms"] = round(1000 * (last - first), 3)
        after = answer.completion_tokens - 1
        if after > 0 and last > first:
            made["mean_itl_ms"] = round(1000 * (last - first) / after, 3)
            made["tokens_per_second"] = round(after / (last - first), 3)
    steps = answer.runs.total()
    if width and steps:
        made["speculative_decoding"] = {
            "mean_acceptance_length": 1 + answer.accepted / steps,
            "draft_acceptance_rate": answer.accepted / answer.drafted,
            "acceptance_histogram": [answer.runs[kept] for kept in range(width + 1)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": answer.accepted,
            "num_draft_tokens": answer.drafted,
            "num_spec_tokens": width,
        }
    return made


def envelope(kind: str, request_id: str, model: str, created: int | None = None) -> dict[str, Any]:
    """What every answer and chunk begins with."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()) if created is None else created,
        "model": model,
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TextToken]) -> dict[str, Any]:
    """Log probabilities as the chat route shows them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    return {
        "content": [
            {
                **entry(t.out.token, t.out.logprob or 0.0),
                "top_logprobs": [entry(i, p) for i, p in t.out.top],
            }
            for t in tokens
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """Log probabilities as the completions route shows them, with running text offsets."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def prompt(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprob] | None, count: int | None
    ) -> dict[str, Any]:
        """Of an echoed prompt with `count` alternatives; its first token has none."""
        known = {e.position: e for e in entries or ()}
        made = self._empty()
        for i, token in enumerate(tokens):
            found = known.get(i)
            top = found.top[:count] if found else ()
            self._add(made, token, found.logprob if found else None, top)
        return made

    def generated(self, tokens: Sequence[TextToken]) -> dict[str, Any]:
        """Of generated tokens."""
        made = self._empty()
        for t in tokens:
            self._add(made, t.out.token, t.out.logprob, t.out.top)
        return made

    def _empty(self) -> dict[str, Any]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _add(
        self,
        made: dict[str, Any],
        token: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
    ) -> None:
        made["tokens"].append(self._label(token))
        made["token_logprobs"].append(None if logprob is None else finite(logprob))
        best = {self._label(i): finite(p) for i, p in top}
        if logprob is not None:  # the token itself is always among them
            best.setdefault(self._label(token), finite(logprob))
        made["top_logprobs"].append(best or None)
        made["text_offset"].append(self._offset)
        self._offset += len(self._tokenizer.token_text(token))

    def _label(self, token: int) -> str:
        """A token's text; its bytes where they are no text, so that no two tokens look alike."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def prompt_logprobs(
    tokenizer: Tokenizer, answer: Answer, count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Log probabilities of a prompt's tokens by token id, as vLLM shows them; none of the first.

    The token itself comes first, then `count` alternatives; `rank` is 1 for the likeliest, null
    for a token that is not among the alternatives.
    """

    def entry(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = tokenizer.token_text(token)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    made: list[dict[str, dict[str, Any]] | None] = [None] * answer.prompt_tokens
    for found in answer.prompt_logprobs or ():
        ranks = {token: rank for rank, (token, _) in enumerate(found.top[:count], 1)}
        own = {str(found.token): entry(found.token, found.logprob, ranks.get(found.token))}
        others = {str(t): entry(t, p, ranks[t]) for t, p in found.top[:count]}
        made[found.position] = own | others
    return made


def finite(logprob: float) -> float:
    """Minus infinity has no JSON; a very unlikely token says the same."""
    return max(float(logprob), -9999.0)
