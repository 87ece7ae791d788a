"""Splits one memory budget between slots, pages and seats. Knows bytes, not what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.config.options import PAGE, PytorchEngineConfig
from millpond.errors import Refused
from millpond.units import human, parse_memory


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the plan needs of a model: bytes per slot, page and seat, and positions in tokens."""

    name: str
    slot_bytes: int
    page_bytes: int
    seat_bytes: int
    weight_bytes: int
    max_position: int


class Sizes:
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
