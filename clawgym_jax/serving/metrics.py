"""What the engine did: on a Prometheus endpoint, and as differences for a run's log.

The endpoint has counters, from which the reader takes rates (docs/serving.md has the queries); the
log has the same over one training step. Not here: counting (`batcher`, the drivers).
Invariant: the driver's counters are read when somebody asks, and never written.
Source: Prometheus, "Metric and label naming" and "Writing exporters".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.serving.request import DriverStats

LOCALHOST = "127.0.0.1"
COUNTERS = {  # field of DriverStats -> (name without _total, what it is)
    "sampled_tok": ("clawgym_sampled_tokens", "Tokens sampled"),
    "prefilled_tok": ("clawgym_prefilled_tokens", "Prompt tokens computed"),
    "cached_tok": ("clawgym_cached_tokens", "Prompt tokens found in a slot or in the pool"),
    "pooled_tok": ("clawgym_pooled_tokens", "Of the cached tokens, those found in the pool"),
    "evicted_pages": ("clawgym_evicted_pages", "Pages of the pool given to other tokens"),
    "steps": ("clawgym_decode_steps", "Decode steps"),
    "slot_steps": ("clawgym_busy_slot_steps", "Slots that decoded, summed over steps"),
    "restarts": ("clawgym_engine_restarts", "Restarts of the engine after a fault"),
    "busy_s": ("clawgym_busy_seconds", "Seconds of the driver's thread with requests at hand"),
    "device_s": ("clawgym_device_wait_seconds", "Of the busy seconds, those waiting for the chip"),
    "idle_s": ("clawgym_idle_seconds", "Seconds of the driver's thread without any request"),
}


class Measured(Protocol):
    """A driver, as far as it is measured."""

    @property
    def stats(self) -> DriverStats: ...

    @property
    def version(self) -> int: ...


class DriverCollector(Collector):
    """A driver's counters in Prometheus's terms, read at every scrape."""

    def __init__(self, driver: Measured, slots: int) -> None:
        self._driver = driver
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        stats = self._driver.stats
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        yield SummaryMetricFamily(
            "clawgym_queue_seconds",
            "From a request's arrival to its slot",
            count_value=stats.requests,
            sum_value=stats.queue_s,
        )
        yield SummaryMetricFamily(
            "clawgym_first_token_seconds",
            "From a request's arrival to its first sampled token",
            count_value=stats.first_tokens,
            sum_value=stats.first_token_s,
        )
        yield GaugeMetricFamily("clawgym_slots", "Slots of the engine", value=self._slots)
        yield GaugeMetricFamily(
            "clawgym_weight_version", "Version of the weights served", value=self._driver.version
        )


class MetricsEndpoint:
    """http://HOST:PORT/metrics, served by a thread. Use as a context manager."""

    def __init__(self, driver: Measured, slots: int, port: int, host: str = LOCALHOST) -> None:
        """port: 0 = any free one."""
        registry = CollectorRegistry()
        registry.register(DriverCollector(driver, slots))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics: expected a free port of this machine, got {host}:{port} ({error}); "
                "choose another --metrics_port, 0 for any"
            ) from error
        self.port: int = self._server.server_port
        self.url = f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class UsageMeter:
    """What a driver did since the last look, in numbers for a run's log."""

    def __init__(self, driver: Measured, slots: int) -> None:
        self._driver = driver
        self._slots = slots
        self._last = replace(driver.stats)

    def since_last(self) -> dict[str, float]:
        now = replace(self._driver.stats)
        last, self._last = self._last, now
        return usage(last, now, self._slots)


def usage(before: DriverStats, after: DriverStats, slots: int) -> dict[str, float]:
    """Sums, means and shares of what happened between two readings; 0 where nothing did."""

    def spent(field: str) -> float:
        return float(getattr(after, field) - getattr(before, field))

    def per(field: str, *others: str, times: int = 1) -> float:
        whole = sum(spent(other) for other in others) * times
        return spent(field) / whole if whole else 0.0

    return {
        "serving_busy_s": spent("busy_s"),
        "decoded_tok": spent("sampled_tok"),
        "prefilled_tok": spent("prefilled_tok"),
        "cached_tok": spent("cached_tok"),
        "pooled_tok": spent("pooled_tok"),
        "decode_steps": spent("steps"),
        "evicted_pages": spent("evicted_pages"),
        "engine_restarts": spent("restarts"),
        "decoded_tok_per_s": per("sampled_tok", "busy_s"),  # of the seconds with requests at hand
        "slot_use": per("slot_steps", "steps", times=slots),  # mean share of slots that decode
        "queue_s": per("queue_s", "requests"),  # mean wait for a slot
        "first_token_s": per("first_token_s", "first_tokens"),  # mean
        "prefix_hit_rate": per("cached_tok", "cached_tok", "prefilled_tok"),  # share of tokens
    }
