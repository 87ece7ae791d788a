"""Prometheus metrics of one engine and its doors, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millpond.engine.types import EngineStats
from millpond.errors import Unavailable
from millpond.front.startup import Startup
from millpond.front.store_metrics import store_families
from millpond.plan.counts import DeviceCounts

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Histograms fed by the doors, and gauges and counters read from the engine when asked."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first = self._histogram("time_to_first_token", "Seconds to a request's first token")
        self._between = self._histogram("inter_token_latency", "Seconds between tokens")
        self._queue = self._histogram("queue_time", "Seconds a request waited for a seat")
        self._whole = self._histogram("request_latency", "Seconds from a request to its end")
        self._http = Counter(
            "millpond_http_requests",
            "HTTP requests by route and status",
            ("route", "status"),
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"millpond_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)

    def observe_tokens(self, count: int, seconds: float, first: bool) -> None:
        """`count` tokens of one request came `seconds` after the last, or after its start."""
        if first:
            self._first.observe(seconds)
        else:
            for _ in range(count):
                self._between.observe(seconds / count)

    def observe_queue(self, seconds: float) -> None:
        """A request waited `seconds` before it was let in."""
        self._queue.observe(seconds)

    def observe_request(self, seconds: float) -> None:
        """A request ended `seconds` after it came."""
        self._whole.observe(seconds)

    def observe_http(self, route: str, status: int) -> None:
        """An HTTP request was answered."""
        self._http.labels(route, str(status)).inc()

    def read_engine(self, stats: Callable[[], EngineStats]) -> None:
        """Read the engine's own counters through `stats` at every collection."""
        self.registry.register(_EngineCollector(stats))

    def read_startup(self, startup: Startup) -> None:
        """Read how long each phase of the start took, at every collection."""
        self.registry.register(_StartupCollector(startup))

    def exposition(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Turns one snapshot of the engine into metric families."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Nothing up front: the engine need not run yet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All families, from one snapshot; none of an engine that has never answered."""
        try:
            s = self._stats()
        except Unavailable:
            return
        yield _gauge("requests_running", "Requests with a seat", s.requests_running)
        waiting = GaugeMetricFamily(
            "millpond_requests_waiting", "Requests without a seat", labels=["reason"]
        )
        waiting.add_metric(["capacity"], s.requests_waiting - s.requests_held)
        waiting.add_metric(["shared_prefix"], s.requests_held)
        yield waiting
        pages = GaugeMetricFamily(
            "millpond_kv_pages", "Pages of 64 tokens by state", labels=["state"]
        )
        for state, pages_in in (
            ("free", s.pages_free),
            ("used", s.pages_used),
            ("indexed", s.pages_indexed),
        ):
            pages.add_metric([state], pages_in)
        yield pages
        slots = GaugeMetricFamily(
            "millpond_state_slots", "State slots by state and kind", labels=["state", "kind"]
        )
        slots.add_metric(["free", ""], s.slots_free)
        slots.add_metric(["used", "runtime"], s.slots_running)
        slots.add_metric(["used", "checkpoint"], s.slots_checkpoint)
        yield slots
        yield _counters(
            "prefix_tokens", "Prompt tokens by outcome of the match", "outcome", s.prefix_tokens
        )
        yield _counters(
            "checkpoints_published", "Checkpoints by kind", "kind", s.checkpoints_published
        )
        yield _counters(
            "checkpoints_skipped", "Checkpoints not made", "reason", s.checkpoints_skipped
        )
        yield _counters("prefix_hits", "Requests by anchor hit", "kind", s.prefix_hits)
        yield _counters(
            "prefix_hit_tokens", "Cached prompt tokens by anchor hit", "kind", s.prefix_hit_tokens
        )
        yield _counters("holds", "Requests held for a shared prefix, by end", "end", s.holds)
        yield _counters(
            "steps_waited",
            "Steps not planned ahead of the one in flight, by reason",
            "reason",
            s.steps_waited,
        )
        yield _gauge("checkpoint_budget", "Slots checkpoints may hold", s.checkpoint_budget)
        yield _counters("requests", "Requests by finish reason", "finish_reason", s.finished)
        for name, text, value in (
            ("steps", "Forwards", s.steps),
            ("steps_failed", "Forwards that failed", s.steps_failed),
            ("steps_ahead", "Steps planned while another was in flight", s.steps_ahead),
            ("rows_wasted", "Rows of samples that had ended meanwhile", s.rows_wasted),
            ("prompt_tokens", "Prompt tokens", s.prompt_tokens),
            ("generation_tokens", "Generated tokens", s.generated_tokens),
            ("checkpoints_evicted", "Checkpoints given up for others", s.checkpoints_evicted),
            ("held_seconds", "Seconds that requests were held", s.held_seconds),
            ("preemptions", "Requests preempted", s.preemptions),
            ("nonfinite_logits", "Requests ended for logits that are not finite", s.nonfinite),
        ):
            family = CounterMetricFamily(f"millpond_{name}", text)
            family.add_metric([], value)
            yield family
        if s.store is not None:
            yield from store_families(s.store)
        if s.device is not None:
            yield from _device(s.device)
        yield from _drafts("millpond_", s)
        if s.accepted_per_position:  # under the names that load clients look for
            yield from _drafts("vllm:", s)


class _StartupCollector(Collector):
    """Seconds of each phase of the start that is over."""

    def __init__(self, startup: Startup) -> None:
        self._startup = startup

    def describe(self) -> Iterable[Metric]:
        """Nothing up front: phases are known when they are over."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """One family."""
        family = GaugeMetricFamily("millpond_startup_seconds", "Seconds to start", labels=["phase"])
        for phase, seconds in dict(self._startup.seconds).items():
            family.add_metric([phase], seconds)
        yield family


def _device(counts: DeviceCounts) -> Iterable[Metric]:
    """Kernels and graphs; one compiled while serving is one that a request waited for."""
    yield _counters(
        "jit_compiles",
        "Kernels compiled, or loaded from the cache of compiled ones",
        "phase",
        {"start": counts.compiles, "serving": counts.late_compiles},
    )
    yield _gauge("graph_captures", "Graphs of steady steps", counts.graph_captures)
    replays = CounterMetricFamily("millpond_graph_replays", "Graphs replayed")
    replays.add_metric([], counts.graph_replays)
    yield replays


def _drafts(prefix: str, s: EngineStats) -> Iterable[Metric]:
    """Draft tokens: how many rows verified any, how many they were, how many were right."""
    for name, text, value in (
        ("num_drafts", "Rows that verified draft tokens", s.drafts),
        ("num_draft_tokens", "Draft tokens verified", s.draft_tokens),
        ("num_accepted_tokens", "Draft tokens accepted", s.accepted_tokens),
    ):
        family = CounterMetricFamily(f"{prefix}spec_decode_{name}", text)
        family.add_metric([], value)
        yield family
    accepted = CounterMetricFamily(
        f"{prefix}spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by place in the row",
        labels=["position"],
    )
    for position, value in enumerate(s.accepted_per_position):
        accepted.add_metric([str(position)], value)
    yield accepted


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"millpond_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"millpond_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
