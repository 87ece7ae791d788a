"""`/generate` in SGLang's shape: text or ids in, cumulative text and ids out, no chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from millpond.errors import MillpondError, Rejected
from millpond.front import replies
from millpond.front.answer import Answer, Ask, Piece, TextToken
from millpond.front.routes.common import STREAMED, View, accept, pieces, respond
from millpond.front.routes.completions import prompts_of
from millpond.front.schema import PromptField, Request, Sampling, Text
from millpond.front.service import Flight, Service
from millpond.front.transport import DONE, event


class SamplingParams(Sampling):
    """`sampling_params` of a request."""

    max_new_tokens: int | None = Field(default=128, ge=0)
    sampling_seed: int | None = None


def _several(value: Any) -> Any:
    """One set of parameters for all prompts is a list of one."""
    return [value] if isinstance(value, dict) else value


class GenerateRequest(Request):
    """Body of `/generate`."""

    model: str | None = None
    text: PromptField | None = None
    input_ids: PromptField | None = None
    sampling_params: Annotated[list[SamplingParams], BeforeValidator(_several)] = Field(
        default_factory=lambda: [SamplingParams()]
    )
    return_logprob: bool = False
    logprob_start_len: int = Field(default=-1, ge=-1)
    top_logprobs_num: int = Field(default=0, ge=0, le=20)
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: Text = ""
    extra_key: Text = ""

    unsupported: ClassVar[tuple[str, ...]] = (
        "lora_path", "image_data", "audio_data", "video_data", "input_embeds", "token_ids_logprob",
        "custom_logit_processor", "return_hidden_states", "session_params", "bootstrap_host",
        "return_routed_experts", "background",
    )  # fmt: skip

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Texts or lists of ids. Raises `Rejected` for both or neither."""
        if (self.text is None) == (self.input_ids is None):
            raise Rejected("send either text or input_ids", param="text")
        return prompts_of(self.input_ids if self.text is None else self.text)

    @property
    def ignored_everywhere(self) -> list[str]:
        """Names of unknown fields, those inside of `sampling_params` too."""
        inner = {f"sampling_params.{n}" for p in self.sampling_params for n in p.ignored}
        return [*self.ignored, *sorted(inner)]


def routes(service: Service) -> APIRouter:
    """The route over one service."""
    router = APIRouter()

    @router.post("/generate", responses=STREAMED)
    async def generate(body: GenerateRequest, request: HttpRequest) -> Response:
        """Continue one or more prompts."""
        accept(service, body)
        for name in body.unsupported:
            if (body.model_extra or {}).get(name) not in (None, False):
                raise Rejected(f"{name} is not supported", param=name, code="unsupported")
        for params in body.sampling_params:
            params.refuse_unsupported()
        source = "text" if body.text is not None else "input_ids"
        given_id = body.rid or request.state.request_id
        return await respond(
            service,
            request,
            lambda: _asks(service, body),
            lambda flight: _Generated(service, body, flight, given_id),
            stream=body.stream,
            ignored=body.ignored_everywhere,
            spoken={"prompt": source, "max_tokens": "max_new_tokens", "seed": "sampling_seed"},
        )

    return router


def _asks(service: Service, body: GenerateRequest) -> list[Ask]:
    prompts, params = body.prompts, body.sampling_params
    if len(params) not in (1, len(prompts)):
        raise Rejected(
            f"{len(params)} sampling_params for {len(prompts)} prompts", param="sampling_params"
        )
    if len({p.n for p in params}) > 1:
        raise Rejected("n must be the same for all prompts", param="n")
    scored = body.return_logprob and body.logprob_start_len >= 0
    made = []
    for i, prompt in enumerate(prompts):
        own = params[i if len(params) > 1 else 0]
        limit = own.max_new_tokens
        if own.sampling_seed is not None:
            own = own.model_copy(update={"seed": own.sampling_seed})
        top = body.top_logprobs_num
        made.append(
            service.ask(
                prompt,
                own.wish(
                    max_tokens=None if limit is None else max(1, limit),
                    logprobs=top if body.return_logprob else None,
                ),
                fill=limit is None,
                prompt_logprobs=top if scored else None,
                constraint=own.constraint(),
                cache_salt=body.cache_salt + ("\0" + body.extra_key if body.extra_key else ""),
                priority=body.priority,
            )
        )
    return made


class _Generated(View):
    """One growing dictionary per sample of every prompt."""

    def __init__(
        self, service: Service, body: GenerateRequest, flight: Flight, answer_id: str
    ) -> None:
        super().__init__(service, flight)
        self.body, self.id, self._begin = body, answer_id, time.perf_counter()
        self._n = body.sampling_params[0].n
        self._silent = [
            body.sampling_params[i if len(body.sampling_params) > 1 else 0].max_new_tokens == 0
            for i in range(len(flight.answers))
        ]
        count = len(flight.answers) * self._n
        self._texts = [""] * count
        self._tokens: list[list[TextToken]] = [[] for _ in range(count)]
        self._reasons: list[dict[str, Any] | None] = [None] * count
        given = body.text if body.text is not None else body.input_ids
        self._batched = isinstance(given, list) and not isinstance(given[0], int)

    def take(self, prompt: int, piece: Piece) -> None:
        at = prompt * self._n + piece.index
        if not self._silent[prompt]:
            self._texts[at] += piece.raw
            self._tokens[at] += piece.tokens
        if piece.finish_reason == "length":
            self._reasons[at] = {"type": "length", "length": len(self._tokens[at])}
        elif piece.finish_reason is not None:
            self._reasons[at] = {"type": "stop", "matched": piece.stop_reason}

    def whole(self) -> Any:
        made = [self._made(at) for at in range(len(self._texts))]
        return made if self._batched or self._n > 1 else made[0]

    async def events(self) -> AsyncGenerator[bytes]:
        several = self._batched or self._n > 1
        try:
            async with aclosing(pieces(self.service, self.flight)) as found:
                async for prompt, piece in found:
                    self.take(prompt, piece)
                    at = prompt * self._n + piece.index
                    yield event(self._made(at) | ({"index": at} if several else {}))
        except MillpondError as error:
            yield event(replies.error_of(error))
        yield DONE

    def _made(self, at: int) -> dict[str, Any]:
        answer, tokens = self.flight.answers[at // self._n], self._tokens[at]
        several = len(self._texts) > 1
        meta: dict[str, Any] = {
            "id": f"{self.id}-{at}" if several else self.id,
            "finish_reason": self._reasons[at],
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(tokens),
            "cached_tokens": answer.cached_tokens,
            "prefix_outcome": answer.outcome.reason if answer.outcome else None,
        }
        if self._reasons[at] is not None:
            meta["e2e_latency"] = time.perf_counter() - self._begin
        if self.body.return_logprob:
            meta |= self._logprobs(answer, tokens)
        return {
            "text": self._texts[at],
            "output_ids": [t.out.token for t in tokens],
            "meta_info": meta,
        }

    def _logprobs(self, answer: Answer, tokens: Sequence[TextToken]) -> dict[str, Any]:
        start, count = self.body.logprob_start_len, self.body.top_logprobs_num
        made: dict[str, Any] = {
            "output_token_logprobs": [self._row(t.out.token, t.out.logprob) for t in tokens],
        }
        if count:
            made["output_top_logprobs"] = [[self._row(*x) for x in t.out.top] for t in tokens]
        if start < 0:
            return made | {"input_token_logprobs": []}
        known = {e.position: e for e in answer.prompt_logprobs or ()}
        rows: list[Any] = []
        tops: list[Any] = []
        for i, token in enumerate(answer.ask.tokens[start:], start):
            found = known.get(i)
            rows.append(self._row(token, found.logprob if found else None))
            tops.append([self._row(*x) for x in found.top] if found else None)
        made["input_token_logprobs"] = rows
        if count:
            made["input_top_logprobs"] = tops
        return made

    def _row(self, token: int, logprob: float | None) -> list[Any]:
        text = self.service.tokenizer.token_text(token)
        shown = None if logprob is None else replies.finite(logprob)
        return [shown, token, text if self.body.return_text_in_logprobs else None]
