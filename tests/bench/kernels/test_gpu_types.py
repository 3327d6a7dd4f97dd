"""The time of a type of weights beside Q4_K: what is launched and counted, on the host."""

from collections.abc import Callable, Sequence

import pytest
import torch

from bench.kernels import gpu_types
from bench.kernels.random_blocks import random_blocks
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.quant_tensor import QuantTensor
from host_device import HostDevice, HostMemory

SIZES = {"HIDDEN": 512, "FFN": 256, "EXPERTS": 4, "RANKS": 2, "DENSE_ROWS": 128, "LAUNCHES": 2, "TURNS": 1}


@pytest.mark.sharded(of="measurements")
@pytest.mark.parametrize(("what", "rows"), [("dense", 1), ("dense", 70), ("experts", 2), ("experts", 40)])
def test_a_type_is_timed_beside_q4_k(
    what: str, rows: int, host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SIZES.items():
        monkeypatch.setattr(gpu_types, name, value)
    launches: list[int] = []

    def run(calls: Sequence[Callable[[], object]], _replays: int) -> float:
        before = host.launches
        for call in calls:
            call()
        launches.append(host.launches - before)
        return 2e-6 * len(launches)

    monkeypatch.setattr(gpu_types, "graph_seconds", run)
    monkeypatch.setattr(gpu_types, "new_ops", lambda: CudaOps(HostMemory(), 16, 512))
    result = gpu_types.compare(what, QuantType.Q2_K, rows)
    assert len(launches) == 2
    assert all(count >= SIZES["LAUNCHES"] for count in launches)
    assert (result["us"], result["q4_k_us"], result["ratio"]) == (2, 4, 0.5)
    assert result["bytes_ratio"] == pytest.approx(84 / 144, abs=1e-3)
    assert (result["what"], result["type"], result["rows"]) == (what, "Q2_K", rows)


@pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda kind: kind.name)
def test_random_blocks_have_finite_values(quant_type: QuantType) -> None:
    blocks = torch.from_numpy(random_blocks(quant_type, (50, 512), 1))
    values = dequantize(QuantTensor(blocks, quant_type, (50, 512)))
    assert values.isfinite().all()
    assert len(values.unique()) > 100
