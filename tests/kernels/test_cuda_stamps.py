"""The times of a layer that its kernels record."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_row_cases import CUDA, random

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, Mailbox
from coldstream.kernels.experts.partition import (
    ExpertPlaces,
    Partition,
    Sharing,
    Staging,
    begin_of,
    partition_experts_cuda,
    sharing_of,
)
from coldstream.kernels.experts.split import MAX_NS, NUM_WORDS, MissTimes
from coldstream.kernels.experts.stamps import LAYER_STAMPS, SUMS, WORDS, read_stamps
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import ExpertOutputs, Routing, RowsElsewhere
from coldstream.kernels.rms_norm.cuda import add_rms_norm_cuda
from coldstream.kernels.router.cuda import RouterBuffers, router_gemv_cuda
from host_driver import HostDriver

EXPERTS, RANKS, COLS = 32, 4, 384
SLOT, MAPPED, STEP = 1 << 20, 1 << 30, 1 << 10  # addresses that are not read here
LAYER = 1


def test_stamps_have_the_size_that_device_code_sees() -> None:
    assert (LAYER_STAMPS.itemsize, WORDS) == (16 * 8, 16)
    assert LAYER_STAMPS.fields is not None
    assert [LAYER_STAMPS.fields[name][1] for name in ("router", "bus_pairs", "sums")] == [0, 24, 32]
    assert Sharing.stamps.offset == Sharing.box.offset + 5 * 8
    assert Sharing.request.offset == Sharing.stamps.offset + 8


def test_sums_are_found_where_kernels_leave_them() -> None:
    words = torch.arange(2 * WORDS, dtype=torch.int64).view(2, WORDS)
    words[1, -1] = -1
    with HostDriver().installed():
        sums, bus_pairs = read_stamps(words)
    assert sums.shape == (2, 2, len(SUMS))
    assert sums[0].tolist() == [list(range(4, 10)), list(range(10, 16))]
    assert sums[1, 1, -1] == 2**64 - 1
    assert bus_pairs.tolist() == [3, 19]


class Layer:
    """A router, and the sum of its experts, which are not computed."""

    def __init__(self, tokens: int, resident: list[int], on_cpu: bool) -> None:
        self.x, self.weight = random(1, tokens, COLS).to(CUDA), random(2, EXPERTS, COLS).to(CUDA)
        self.gate = random(3, 1, COLS).to(CUDA)
        slots = torch.zeros(EXPERTS, dtype=torch.int64, device=CUDA)
        slots[resident] = SLOT
        table = ExpertTable(slots, QuantType.Q4_K, 256, 256, True, None, MAPPED, STEP)
        times = torch.zeros(NUM_WORDS, dtype=torch.int32, device=CUDA)
        if not on_cpu:
            times.copy_(torch.tensor(MissTimes(1, (MAX_NS,) * MAX_MAILBOX_ROWS).words()))
        self.mailbox = Mailbox.create(RANKS, COLS)
        self.stamps = torch.zeros((LAYER + 1, WORDS), dtype=torch.int64, device=CUDA)
        self.places = Partition(
            torch.empty(3, EXPERTS, dtype=torch.int64, device=CUDA),
            torch.empty(tokens, RANKS, dtype=torch.int32, device=CUDA),
            self.stamps[LAYER],
        )
        used = torch.empty(tokens, RANKS, dtype=torch.int32, device=CUDA)
        places = ExpertPlaces.of(torch.empty(1 << 22, dtype=torch.uint8, device=CUDA), [table] * 3, EXPERTS)
        self.staging = Staging(torch.empty(1 + EXPERTS, dtype=torch.int32, device=CUDA), places)
        self.sharing = sharing_of(
            [table] * 3, times, self.mailbox, LAYER, self.places, used,
            staging=self.staging if tokens > 1 else None,
        )  # fmt: skip
        self.used = used
        self.ids = torch.empty(tokens, RANKS, dtype=torch.int32, device=CUDA)
        self.weights = torch.empty(tokens, RANKS, device=CUDA)
        self.shared_gate = torch.empty(tokens, 1, device=CUDA)
        self.logits = torch.empty(tokens, EXPERTS, device=CUDA)
        self.arrivals = torch.zeros(1, dtype=torch.int32, device=CUDA)
        self.routed = torch.zeros(tokens, RANKS, COLS, device=CUDA)

    def run(self, *, stamped: bool = True) -> None:
        tokens = len(self.x)
        router_gemv_cuda(
            self.x, self.weight, self.gate,
            RouterBuffers(self.ids, self.weights, self.shared_gate, self.logits, self.arrivals),
            self.sharing if tokens == 1 else begin_of(self.sharing),
        )  # fmt: skip
        if tokens > 1:
            partition_experts_cuda(self.ids, self.x, self.sharing)
        torch.cuda.synchronize()
        self.mailbox.done.numpy()[0] = 1  # there is no CPU's answer to wait for
        box, stamps = self.mailbox, self.places.stamps if stamped else None
        elsewhere = RowsElsewhere(self.places.cpu_ids, box.out[:tokens], box.done, stamps)
        routing = Routing(self.ids, self.weights, self.shared_gate)
        experts = ExpertOutputs(self.routed, torch.zeros_like(self.x), routing, elsewhere)
        total, out = torch.empty_like(self.x), torch.empty_like(self.x)
        add_rms_norm_cuda(self.x, experts, total, torch.ones(COLS, device=CUDA), 1e-6, out, None)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_every_step_adds_its_stamps_in_the_order_of_time(tokens: int, on_cpu: bool) -> None:
    layer = Layer(tokens, list(range(0, EXPERTS, 2)), on_cpu)
    for _ in range(5):
        layer.run()
    sums, bus_pairs = read_stamps(layer.stamps)
    missing = int((layer.ids % 2 == 1).sum())
    assert missing > 0
    kind = int(not on_cpu)
    assert sums[LAYER, kind, 0] == 5
    assert bus_pairs[LAYER] == (0 if on_cpu else 5 * missing)
    spans = np.diff(sums[LAYER, kind, 1:]).view(np.int64)
    assert (spans >= 0).all()
    if not on_cpu:
        assert spans[2] == 0  # no request to the CPU
    assert not sums[LAYER, 1 - kind].any()
    assert not sums[0].any()
    assert not layer.stamps[LAYER, 2].item(), "the next step begins without pairs"


@pytest.mark.gpu
def test_all_experts_resident_nothing_crosses_the_bus_and_nothing_waits() -> None:
    layer = Layer(2, list(range(EXPERTS)), on_cpu=False)
    layer.run()
    sums, bus_pairs = read_stamps(layer.stamps)
    assert bus_pairs.tolist() == [0, 0]
    assert sums[LAYER, 0, 0] == 1
    assert not sums[LAYER, 1].any()
    assert sums[LAYER, 0, 4] == sums[LAYER, 0, 3]


@pytest.mark.gpu
def test_without_a_place_no_time_is_kept() -> None:
    layer = Layer(MAX_MAILBOX_ROWS // 8, [0, 5], on_cpu=False)
    layer.places = replace(layer.places, stamps=None)
    layer.sharing.stamps = None
    layer.run()
    assert not layer.stamps.any()
