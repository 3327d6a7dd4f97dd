"""A second card computes experts for a first one: both on the host, at the same time."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from expert_client import LIMIT_S
from gpu_cases import on_gpu
from random_blocks import activations, random_weight
from same_bits import assert_same_bits
from test_expert_server import K_TYPES, NUM_EXPERTS, RANKS, Types, random_ids
from test_expert_server import E as WIDTH
from test_expert_server import F as SIZE

from coldstream.errors import GenerationFault
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import empty_activations
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import HostArray
from coldstream.kernels.experts.cuda import ExpertMatrices, PairRows, experts_gemv_cuda
from coldstream.kernels.experts.mailbox import UNWRITTEN, Mailbox
from coldstream.kernels.experts.reference import routed_experts
from coldstream.kernels.experts.requests import (
    RequestedRows,
    Server,
    end_requests_cuda,
    last_request_cuda,
    next_request_cuda,
    request_of,
)
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.ops import ExpertOutputs, Routing, RowsElsewhere
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.rms_norm.cuda import add_rms_norm_cuda
from coldstream.kernels.swiglu.reference import swiglu_exact
from host_device import HostDevice
from second_device import beside, meanwhile

CPU = torch.device("cpu")
SHAPES = ((SIZE, WIDTH), (SIZE, WIDTH), (WIDTH, SIZE))
MOST_ROWS = 4


@pytest.fixture(autouse=True)
def second(host: HostDevice, tmp_path: Path) -> Iterator[HostDevice]:
    with beside(host, tmp_path) as second:
        yield second


@dataclass
class Layer:
    """Experts of the second card, and the addresses that it finds them by: 0 behind the last."""

    stacks: list[QuantTensor]
    placed: list[list[QuantTensor]]
    tables: list[torch.Tensor]

    @classmethod
    def of(cls, seed: int, types: Types = K_TYPES) -> "Layer":
        stacks = [
            random_weight(kind, (NUM_EXPERTS, *shape), 10 * seed + i)
            for i, (kind, shape) in enumerate(zip(types, SHAPES, strict=True))
        ]
        placed = [[on_gpu(stack[e], device="cpu") for e in range(NUM_EXPERTS)] for stack in stacks]
        tables = [torch.tensor([*(each.blocks.data_ptr() for each in parts), 0]) for parts in placed]
        return cls(stacks, placed, tables)

    @property
    def matrices(self) -> ExpertMatrices:
        gate, up, down = (
            ExpertTable(table, stack.quant_type, *shape)
            for table, stack, shape in zip(self.tables, self.stacks, SHAPES, strict=True)
        )
        return ExpertMatrices(gate, up, down, None)

    def outputs(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """By definition; undefined where an id is −1."""
        return routed_experts(x, ids.clamp(min=0), *self.stacks, linear_exact, swiglu_exact)


def sum_of(update: ExpertOutputs) -> torch.Tensor:
    """Over ranks, as the kernel behind a layer adds them up."""
    rows = len(update.routed)
    x, total = torch.zeros(rows, WIDTH), torch.empty(rows, WIDTH)
    add_rms_norm_cuda(x, update, total, torch.ones(WIDTH), 1e-6, torch.empty_like(x), None)
    return total


class Cards:
    """A mailbox, the loop that answers it, and a first card whose part Python plays."""

    def __init__(self, layers: Sequence[Layer], seed: int = 0) -> None:
        self.layers, self.random = layers, random.Random(seed)
        self.box = Mailbox.create(RANKS, WIDTH, MOST_ROWS, is_marked=True)
        failure = HostArray.of(np.zeros(1, np.int32))
        self.server = Server(self.box, torch.zeros(2, dtype=torch.int32), failure)

    def serve(self, rows: int) -> None:
        """The loop of a step of so many rows; runs on the second card."""
        values = torch.full((rows, WIDTH), torch.nan)
        x = Activations(values, empty_activations(rows, WIDTH, CPU))
        taken = RequestedRows(x, torch.full((rows, RANKS), -7, dtype=torch.int32), NUM_EXPERTS)
        hidden = PairRows(torch.full((rows, RANKS, SIZE), torch.nan), None)
        outs = PairRows(self.box.out[:rows], None)
        for number, layer in enumerate(self.layers):
            self.pause()
            next_request_cuda(self.server, number, taken)
            self.pause()
            experts_gemv_cuda(layer.matrices, taken.ids, hidden, outs, activations=x.quantised, x=x.values)
        last_request_cuda(self.server, len(self.layers))

    def pause(self) -> None:
        """Now and then: each card may be the faster one."""
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 1e-3)

    def ask(self, layer: int, x: torch.Tensor, ids: torch.Tensor) -> None:
        """Words arrive in any order, the request's last."""
        self.wait()
        words = [(self.box.x.numpy().reshape(-1), x.reshape(-1).numpy())]
        words.append((self.box.ids.numpy().reshape(-1), ids.reshape(-1).numpy()))
        self.random.shuffle(words)
        for to, values in words:
            order = np.array(self.random.sample(range(len(values)), len(values)))
            for part in np.array_split(order, 3):
                to[part] = values[part]
                self.pause()
        self.box.done.numpy()[0] = 0
        self.box.request.numpy()[0] = request_of(layer, len(x))

    def wait(self) -> None:
        until = time.monotonic() + LIMIT_S
        while not self.box.done.numpy()[0]:
            assert time.monotonic() < until, "no answer came"

    def total(self, outputs: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The sum over ranks on the first card: of rows that the mailbox gets where an id is not −1."""
        rows, own = len(ids), outputs.masked_fill((ids >= 0)[..., None], torch.nan)
        there = RowsElsewhere(ids, self.box.out[:rows], self.box.done, is_marked=True)
        return sum_of(ExpertOutputs(own, None, Routing(ids, weights, None), there))

    def step(self, rows: int, asked: Sequence[int], seed: int) -> None:
        """A step of which some layers ask; each sum has the bits of one card that has all experts."""
        try:
            for number in asked:
                x = activations(seed + number, rows, WIDTH)
                ids, all_ids = (random_ids(rows, share, seed + number) for share in (0.3, 0.0))
                outputs = self.layers[number].outputs(x, all_ids)
                weights = torch.rand(rows, RANKS).softmax(-1)
                self.ask(number, x, ids)
                wanted = sum_of(ExpertOutputs(outputs, None, Routing(all_ids, weights, None)))
                assert_same_bits(self.total(outputs, weights, ids), wanted)
        finally:
            end_requests_cuda(self.box, len(self.layers))

    def check(self) -> None:
        self.wait()
        self.server.check()
        assert self.server.state.tolist() == [0, 0]
        assert (self.box.out.numpy().view(np.uint32) == UNWRITTEN).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_have_the_bits_of_one_card(rows: int) -> None:
    """Steps in which all layers ask, some, the last alone, and none."""
    cards = Cards([Layer.of(seed) for seed in range(3)], rows)
    for seed, asked in enumerate([(0, 1, 2), (1,), (0, 2), (2,), (), (0,)]):
        with meanwhile(lambda: cards.serve(rows)):
            cards.step(rows, asked, 10 * seed)
    cards.check()


def request_in(cards: Cards, word: int) -> None:
    cards.box.done.numpy()[0] = 0
    cards.box.request.numpy()[0] = word


@pytest.mark.parametrize(("layer", "rows"), [(0, 1), (1, 2)], ids=["of a layer before", "of other rows"])
def test_a_request_in_another_order_is_answered_and_an_error(layer: int, rows: int) -> None:
    """The card that asks must not wait for rows that nobody computes."""
    cards = Cards([Layer.of(0), Layer.of(1)])
    with meanwhile(lambda: cards.serve(1)):
        cards.box.ids.numpy().fill(0)
        request_in(cards, request_of(1, 1) if layer == 0 else request_of(0, 1))
        cards.wait()
        request_in(cards, request_of(layer, rows))
        cards.wait()
        end_requests_cuda(cards.box, 2)
    with pytest.raises(GenerationFault, match="another order"):
        cards.server.check()


def test_a_step_ends_behind_its_last_answer(host: HostDevice) -> None:
    cards = Cards([Layer.of(0)])
    cards.box.done.numpy()[0] = 0  # a request is being computed
    launches = host.launches

    def answer() -> None:
        while host.launches == launches:
            pass
        assert all(cards.box.request.numpy()[0] == 0 for _ in range(10_000))
        cards.box.done.numpy()[0] = 1

    with meanwhile(answer):
        end_requests_cuda(cards.box, 1)
    assert cards.box.request.numpy()[0] == request_of(1, 1)
    assert cards.box.done.numpy()[0] == 0


@pytest.mark.parametrize(
    ("rows", "cols", "ranks"), [(MOST_ROWS + 1, WIDTH, RANKS), (1, WIDTH + 8, RANKS), (1, WIDTH, RANKS + 1)]
)
def test_rows_that_do_not_fit_the_mailbox_are_refused(rows: int, cols: int, ranks: int) -> None:
    x = Activations(torch.zeros(rows, cols), empty_activations(rows, cols, CPU))
    taken = RequestedRows(x, torch.zeros(rows, ranks, dtype=torch.int32), NUM_EXPERTS)
    with pytest.raises(ValueError, match="mailbox"):
        next_request_cuda(Cards([]).server, 0, taken)


@pytest.mark.parametrize(
    "types", [(QuantType.Q8_0, QuantType.Q5_0, QuantType.MXFP4), (QuantType.F16,) * 3], ids=str
)
def test_other_types_of_weights(types: Types) -> None:
    cards = Cards([Layer.of(1, types)])
    with meanwhile(lambda: cards.serve(1)):
        cards.step(1, (0,), 7)
    cards.check()
