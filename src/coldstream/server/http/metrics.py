"""Prometheus metrics: what HTTP sees of requests, and the engine's own counts as they are when asked."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coldstream.engine.engine_statistics import EngineStatistics
from coldstream.experts.gpu_statistics import PARTS

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_BETWEEN_TOKENS_S: Final = (0.001, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0, 3.0)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._requests = Counter(
            "coldstream_http_requests",
            "Requests for answers that have ended, by how: ok, error or cancelled.",
            ["outcome"],
            registry=self._registry,
        )
        self._sleeping = Gauge(
            "coldstream_sleeping",
            "Whether the model is unloaded until the next request.",
            registry=self._registry,
        )
        for outcome in ("ok", "error", "cancelled"):
            self._requests.labels(outcome)
        self._first = Histogram(
            "coldstream_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_FIRST_TOKEN_S,
            registry=self._registry,
        )
        self._gap = Histogram(
            "coldstream_inter_token_seconds",
            "From one piece of an answer to the next.",
            buckets=_BETWEEN_TOKENS_S,
            registry=self._registry,
        )

    def count_request(self, outcome: str) -> None:
        """A request has ended: ok, error or cancelled."""
        self._requests.labels(outcome).inc()

    def observe_first(self, seconds: float) -> None:
        """The time to a first token."""
        self._first.observe(seconds)

    def observe_gap(self, seconds: float) -> None:
        """The time between two pieces of an answer."""
        self._gap.observe(seconds)

    def render(self, statistics: EngineStatistics | None, is_sleeping: bool) -> bytes:
        """Prometheus' text. Without `statistics`, while no engine runs, its metrics are left out."""
        self._engine.statistics = statistics
        self._sleeping.set(is_sleeping)
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The counts of an engine, which is asked elsewhere."""

    def __init__(self) -> None:
        self.statistics: EngineStatistics | None = None

    def collect(self) -> Iterator[Metric]:
        if self.statistics is not None:
            yield from engine_metrics(self.statistics)


def engine_metrics(statistics: EngineStatistics) -> Iterator[Metric]:
    """The engine's counts under Prometheus' names."""
    for name, what, value in _gauges(statistics):
        yield GaugeMetricFamily(f"coldstream_{name}", what, value=value)
    for name, what, value in _counters(statistics):
        yield CounterMetricFamily(f"coldstream_{name}", what, value=value)
    outcomes = CounterMetricFamily(
        "coldstream_requests", "Requests that the engine has ended, by how.", labels=["outcome"]
    )
    outcomes.add_metric(["finished"], statistics.finished_requests)
    outcomes.add_metric(["cancelled"], statistics.cancelled_requests)
    outcomes.add_metric(["failed"], statistics.failed_requests)
    yield outcomes
    if statistics.expert_hits is not None:
        uses = CounterMetricFamily(
            "coldstream_expert_uses",
            "Uses of experts, by whether they were in fast memory.",
            labels=["place"],
        )
        uses.add_metric(["fast"], statistics.expert_hits)
        uses.add_metric(["other"], statistics.expert_misses or 0)
        yield uses
    yield from _times(statistics)


def _times(statistics: EngineStatistics) -> Iterator[Metric]:
    """Where the time of steps went."""
    parts = CounterMetricFamily(
        "coldstream_step_part_seconds",
        "Time of all steps by part: drafts, launching (a CPU computes), waiting for tokens, their texts.",
        labels=["part"],
    )
    for part in ("draft", "launch", "wait", "token"):
        parts.add_metric([part], getattr(statistics, f"{part}_s"))
    yield parts
    times = statistics.expert_times
    if times is None:
        return
    layers = CounterMetricFamily(
        "coldstream_gpu_layer_seconds",
        "The GPU's time in layers that lack experts, by part, of steps that it divides itself.",
        labels=["part"],
    )
    for part, seconds in zip(PARTS, times.layers, strict=True):
        layers.add_metric([part], seconds)
    yield layers
    for name, what, value in (
        ("gpu_layer_steps", "Steps in coldstream_gpu_layer_seconds.", times.timed_steps),
        ("cpu_expert_seconds", "The CPU's time for experts that a GPU lacks, beside it.", times.cpu),
        ("disk_wait_seconds", "Waiting for the disk with nothing left to compute.", times.disk),
        ("expert_copied_bytes", "Bytes of experts copied into fast memory beside steps.", times.copied_bytes),
    ):
        yield CounterMetricFamily(f"coldstream_{name}", what, value=value)


_Values = tuple[tuple[str, str, float], ...]


def _gauges(statistics: EngineStatistics) -> _Values:
    total, free = statistics.memory, statistics.free_memory
    return (
        ("requests_running", "Answers that are computed.", statistics.running),
        ("requests_waiting", "Answers that wait for memory or a place.", statistics.waiting),
        ("kv_blocks", "Blocks of keys and values.", total.num_blocks),
        ("kv_blocks_free", "Blocks that hold nothing.", free.num_blocks),
        (
            "kv_sliding_window_blocks",
            "Blocks of layers with windows alone; 0 where these have the blocks of all layers.",
            total.num_window_blocks,
        ),
        (
            "kv_sliding_window_blocks_free",
            "Blocks of layers with windows that hold nothing.",
            free.num_window_blocks,
        ),
        ("states", "Recurrent states.", total.num_states),
        ("states_free", "Recurrent states that hold nothing.", free.num_states),
        ("prefixes_kept", "Prefixes of prompts that are kept.", statistics.prefixes.kept),
    )


def _counters(statistics: EngineStatistics) -> _Values:
    return (
        ("prompt_tokens", "Tokens of prompts that have begun.", statistics.prompt_tokens),
        ("prompt_tokens_reused", "Of these, tokens that were not computed again.", statistics.reused_tokens),
        ("generated_tokens", "Tokens of answers.", statistics.generated_tokens),
        ("steps", "Steps of the model.", statistics.steps),
        ("step_rows", "Rows of all steps.", statistics.computed_rows),
        ("step_seconds", "Time of all steps.", statistics.step_s),
        ("preemptions", "Answers that lost their memory for a while.", statistics.preemptions),
        ("prefix_prompts", "Prompts that were looked up.", statistics.prefixes.prompts),
        ("prefix_hits", "Of these, prompts of which something was kept.", statistics.prefixes.hits),
        ("prefix_evictions", "Prefixes that were given up.", statistics.prefixes.evictions),
        ("draft_tokens", "Tokens of drafts that were verified.", statistics.drafted_tokens),
        ("draft_tokens_accepted", "Of these, the model's own choice.", statistics.accepted_tokens),
    )
