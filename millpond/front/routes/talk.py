"""A conversation in any vendor's words, as the one thing that is asked of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.config import GenerationConfig
from millpond.engine.constraint import Constraint
from millpond.errors import Rejected
from millpond.front.answer import Ask
from millpond.front.parsing.wish import ToolWish
from millpond.front.service import Service


@dataclass(frozen=True, slots=True)
class Talk:
    """Messages in the chat route's shape, the tools, and how much the model is to reason.

    `variables` are the template's own; `budget` is the number of tokens after which the think
    block is closed.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: ToolWish = field(default_factory=ToolWish.none)
    effort: str | None = None
    budget: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def template(self, service: Service) -> dict[str, Any]:
        """Arguments of `ChatTemplate.render`. Raises `Rejected` for an effort it does not know."""
        extra = dict(self.variables)
        if self.effort is not None and service.template is not None:
            extra |= service.template.effort(self.effort)
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "extra": extra,
        }

    def ask(
        self,
        service: Service,
        wish: GenerationConfig,
        *,
        fill: bool = False,
        constraint: Constraint | None = None,
        prompt_logprobs: int | None = None,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Ask:
        """What is asked of the engine. Raises `Rejected`."""
        return service.ask_chat(
            self.messages,
            wish,
            fill=fill,
            template=self.template(service),
            tools=self.tools,
            thinking_budget=self.budget,
            constraint=constraint,
            prompt_logprobs=prompt_logprobs,
            cache_salt=cache_salt,
            priority=priority,
        )

    def count(self, service: Service) -> int:
        """Tokens of the prompt that `ask` would make. Raises `Rejected`."""
        if service.template is None:
            raise Rejected(f"{service.name} has no chat template", param="messages")
        prompt = service.template.render(
            self.messages, tools=self.tools.for_template, **self.template(service)
        )
        return len(prompt.encode(service.tokenizer))


def unread(service: Service, variables: Mapping[str, Any]) -> list[str]:
    """Names of template variables that this model's template does not read, as fields."""
    known = service.template.unknown(variables) if service.template is not None else ()
    return [f"chat_template_kwargs.{name}" for name in known]


def text_of(content: Any, where: str, kinds: Sequence[str]) -> str:
    """The text of a string or of parts of these kinds; `where` is named when there is another."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Rejected(f"{where} must be a string or a list of parts", param=where.split("[")[0])
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in kinds or not isinstance(text, str):
            raise Rejected(
                f"{where}: parts of type {kind!r} are not supported, only text",
                param=where.split("[")[0],
                code="unsupported",
            )
        texts.append(text)
    return "".join(texts)
