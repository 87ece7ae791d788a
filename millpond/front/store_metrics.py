"""Metric families of the store beyond the device; nothing of one that there is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from millpond.engine.types import StoreStats

BREAKER_STATES = ("closed", "open", "trying", "hung", "refused")


def store_families(s: StoreStats) -> Iterable[Metric]:
    """All of them, from one snapshot."""
    yield _counters("tier_hit_tokens", "Cached prompt tokens by where they came from", s.hit_tokens)
    for name, text, values in (
        ("store_jobs", "Lookups, gets and puts that ended, by how", s.jobs),
        ("store_sheds", "Lookups, gets and puts not begun, by why", s.sheds),
        ("store_moved_bytes", "Bytes moved, by kind of job", s.moved_bytes),
        ("store_waits", "Requests that waited for the store, by how that ended", s.waits),
    ):
        yield _counters(name, text, values, label="kind" if name.endswith("bytes") else "end")
    rates = GaugeMetricFamily(
        "millpond_store_bytes_per_second", "Measured rates, per rank", labels=["kind"]
    )
    rates.add_metric(["get"], s.get_rate)
    rates.add_metric(["put"], s.put_rate)
    yield rates
    breaker = GaugeMetricFamily("millpond_store_breaker", "1 for its state", labels=["state"])
    for state in BREAKER_STATES:
        breaker.add_metric([state], state == s.breaker)
    yield breaker
    for name, text, value in (
        ("store_breaker_trips", "Times the store was found to be gone", s.breaker_trips),
        ("store_waited_seconds", "Seconds that requests waited for the store", s.waited_seconds),
    ):
        counter = CounterMetricFamily(f"millpond_{name}", text)
        counter.add_metric([], value)
        yield counter
    for name, text, gauge in (
        ("store_waiting", "Requests waiting for the store", s.waiting),
        ("store_slots_held", "Slots that transfers hold", s.slots_held),
        ("store_pages_held", "Pages that transfers hold", s.pages_held),
        ("store_bytes", "Bytes the store holds, where it tells", s.bytes_held),
    ):
        if gauge is not None:
            yield GaugeMetricFamily(f"millpond_{name}", text, value=gauge)


def _counters(
    name: str, text: str, values: Mapping[str, int], label: str = "tier"
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"millpond_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
