"""Rows that the CPU writes for a sum of experts: read as soon as they are there, and marked behind it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cuda_row_cases import random, spiky
from same_bits import assert_same_bits

from all_pairs import all_pairs
from coldstream.kernels.experts.mailbox import UNWRITTEN, Mailbox
from coldstream.kernels.ops import ExpertOutputs, Routing, RowsElsewhere
from coldstream.kernels.rms_norm.cuda import add_rms_norm_cuda
from host_device import HostDevice


@pytest.fixture(autouse=True)
def device(host: HostDevice, monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    """One whose waits last as long as those of a GPU."""
    monkeypatch.setattr(host, "keeps_time", True)
    return host


@dataclass
class Case:
    """Outputs of experts, of which the CPU computes some, and the mailbox that it writes to."""

    outputs: torch.Tensor
    weights: torch.Tensor
    mine: torch.Tensor
    box: Mailbox

    @classmethod
    def of(cls, rows: int, size: int, ranks: int, *, is_marked: bool = True) -> "Case":
        mine = torch.arange(rows * ranks).view(rows, ranks) % 3 != 1
        box = Mailbox.create(ranks, size, rows, is_marked=is_marked)
        box.done.numpy()[0] = 0
        return cls(spiky(1, rows, ranks, size), random(2, rows, ranks).softmax(-1), mine, box)

    def write(self) -> None:
        """As the CPU does."""
        out = self.box.out.numpy()
        out[self.mine.numpy()] = self.outputs[self.mine].numpy()

    def total(self, *, elsewhere: bool) -> torch.Tensor:
        """The sum, with the CPU's rows from the mailbox or with all rows in place."""
        rows, ranks, size = self.outputs.shape
        ids = torch.arange(rows * ranks, dtype=torch.int32).view(rows, ranks)
        update = ExpertOutputs(self.outputs, None, Routing(ids, self.weights, None))
        if elsewhere:
            routed = self.outputs.masked_fill(self.mine[..., None], torch.nan)
            ids = ids.masked_fill(~self.mine, -1)
            box = self.box
            there = RowsElsewhere(ids, box.out, box.done, is_marked=box.is_marked)
            update = replace(update, routed=routed, elsewhere=there)
        x, total = torch.zeros(rows, size), torch.empty(rows, size)
        add_rms_norm_cuda(x, update, total, torch.ones(size), 1e-6, torch.empty(rows, size), None)
        return total

    def is_unwritten(self) -> bool:
        return bool((self.box.out.numpy().view(np.uint32) == UNWRITTEN).all())


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Does `work` on another thread."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    assert not failures, failures


@all_pairs(size=[1, 7, 100, 256], ranks=[1, 8, 10])
def test_one_row_needs_no_flag(size: int, ranks: int) -> None:
    case = Case.of(1, size, ranks)
    assert case.is_unwritten()
    case.write()
    assert not case.is_unwritten()
    assert_same_bits(case.total(elsewhere=True), case.total(elsewhere=False))
    assert case.is_unwritten()


@pytest.mark.parametrize("size", [7, 100])
def test_floats_may_come_one_by_one(device: HostDevice, size: int) -> None:
    case = Case.of(1, size, 8)
    wanted, launches = case.total(elsewhere=False), device.launches
    row = case.box.out.numpy().reshape(-1)
    order = torch.randperm(len(row), generator=torch.Generator().manual_seed(size))
    mine = case.mine[..., None].expand(case.outputs.shape).reshape(-1)
    values = case.outputs.reshape(-1)

    def write() -> None:
        while device.launches == launches:
            pass
        for i in order.tolist():
            if mine[i]:
                row[i] = values[i]

    with meanwhile(write):
        assert_same_bits(case.total(elsewhere=True), wanted)
    assert case.is_unwritten()


def test_the_flag_is_for_rows_with_those_very_bits(device: HostDevice) -> None:
    case, launches = Case.of(1, 7, 2), device.launches
    case.outputs.view(torch.int32)[0, 0, 3] = -1
    case.write()

    def set_flag() -> None:
        while device.launches == launches:
            pass
        case.box.done.numpy()[0] = 1

    with meanwhile(set_flag):
        total = case.total(elsewhere=True)
    assert total.isnan().nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize(("rows", "is_marked"), [(3, True), (1, False), (3, False)])
def test_others_wait_for_the_flag(device: HostDevice, rows: int, *, is_marked: bool) -> None:
    """Several rows, and one without marks."""
    case = Case.of(rows, 7, 8, is_marked=is_marked)
    wanted, launches, out = case.total(elsewhere=False), device.launches, case.box.out.numpy()

    def answer() -> None:
        out[:] = 1.0  # not yet what it will be
        while device.launches == launches:
            pass
        case.write()
        case.box.done.numpy()[0] = 1

    with meanwhile(answer):
        assert_same_bits(case.total(elsewhere=True), wanted)
    mine = case.mine.numpy()
    assert (out[~mine] == 1.0).all()
    assert (out[mine].view(np.uint32) == UNWRITTEN).all() == is_marked
