"""Prefetching makes no copies other than the counted ones, within its cap."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from bus_bytes import BusBytes
from cuda_runner_cases import open_partly
from one_sequence import OneSequence
from runner_cases import token_ids

from builders import Dims, write_gguf
from coldstream.experts.executor import PartialExecutor
from coldstream.experts.prefetch import Prefetching
from coldstream.experts.prefetch_ring import PrefetchRing
from coldstream.models.cuda.runner import CudaRunner
from device_arrays import view_of
from host_device import HostDevice
from host_gpu import gpu_on

LAYERS, SHARE = 5, 0.25
OPTIONS: dict[str, Any] = {"streamed": 1.0, "context_length": 128}
CAP = 340_000  # for 3 experts of a layer, where 8 are asked for


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    dims = Dims(layers=LAYERS, hidden=128, experts=16, experts_used=3, expert_ffn=64, shared_ffn=64)
    write_gguf(path, dims=dims, types={"blk.3.ffn_down_exps.weight": "F32"})
    return path


def answers(runner: OneSequence) -> list[np.ndarray]:
    """In steps of several rows and of one, also after a prompt that uses the ring."""
    found = []
    for count in (5, 3, 70):
        runner.reset()
        found.append(runner.prefill(token_ids(count)))
        found += [runner.decode(token) for token in token_ids(6)]
    return found


def slot_copies(runner: OneSequence) -> list[int]:
    """Bytes by layer."""
    assert runner.runner.expert_cache is not None
    copied: list[int] = runner.runner.expert_cache.counters.copied_bytes.tolist()
    return copied


def ring_of(runner: OneSequence) -> PrefetchRing:
    assert isinstance(runner.runner, CudaRunner)
    executor = runner.runner._loaded.ops.model_executor
    assert isinstance(executor, PartialExecutor)
    assert executor.prefetch is not None
    return executor.prefetch


def in_places(ring: PrefetchRing) -> tuple[np.ndarray, np.ndarray]:
    """Experts in places, and the used ones of them, by layer, not yet counted."""
    keys = view_of(ring._keys)
    keys = keys[keys != 0]
    layers = ((keys & 0x7FFFFFFF) - 1) >> 16
    return np.bincount(layers, minlength=LAYERS), np.bincount(layers[keys < 0], minlength=LAYERS)


class OnDemand(NamedTuple):
    bus: BusBytes
    answers: list[np.ndarray]
    into_slots: list[int]


@pytest.fixture(scope="module")
def on_demand(path: Path, compiled_for_the_host: HostDevice) -> OnDemand:
    """Without prefetching."""
    bus = BusBytes(LAYERS)
    with gpu_on(compiled_for_the_host), open_partly(path, SHARE, **OPTIONS) as runner, bus.noted():
        return OnDemand(bus, answers(runner), slot_copies(runner))


@pytest.mark.sharded
@pytest.mark.parametrize(
    ("prefetching", "tardy"),
    [(Prefetching(1, 4), 0), (Prefetching(2, 2), 3), (Prefetching(1, 8, CAP), 5)],
    ids=["on time", "two layers ahead", "capped"],
)
def test_trap_15_copies_are_no_more_than_on_demand_but_for_what_is_counted_as_wasted(
    path: Path, compiled_for_the_host: HostDevice, on_demand: OnDemand, prefetching: Prefetching, tardy: int
) -> None:
    ahead = BusBytes(LAYERS, tardy)
    with (
        gpu_on(compiled_for_the_host),
        open_partly(path, SHARE, **OPTIONS, prefetching=prefetching) as runner,
    ):
        ring = ring_of(runner)
        view_of(ring._keys).fill(0)  # of the steps before the first
        with ahead.noted():
            found = answers(runner)
        assert slot_copies(runner) == on_demand.into_slots
        experts = runner.runner.gpu_experts
        assert experts is not None
        counted = experts.prefetch
        assert counted is not None
        lying, lying_used = in_places(ring)
        num_places, place_bytes = ring._keys.numel(), ring._place_bytes
    assert all(np.array_equal(one, other) for one, other in zip(found, on_demand.answers, strict=True))
    fetched, used = lying + counted.fetched, lying_used + counted.used
    assert fetched.tolist() == ahead.num_copies.tolist()
    sizes = ahead.copied // np.maximum(1, ahead.num_copies)
    assert (on_demand.bus.read - ahead.read).tolist() == (used * sizes).tolist(), (
        "what came ahead is not read again"
    )
    wasted = np.array(counted.wasted_bytes) + np.array(counted.given_up_bytes) + (lying - lying_used) * sizes
    assert (ahead.read + ahead.copied <= on_demand.bus.read + wasted).all()
    assert (sum(counted.given_up) > 0) == (tardy > 0)
    assert sum(used) > 0
    assert sum(counted.wasted_bytes) > 0
    if prefetching.cap_bytes is not None:
        assert num_places == 2 * 3
        assert num_places * place_bytes <= prefetching.cap_bytes
