"""Running kernels on the host shows the faults that it is there for."""

import pytest
import torch

from coldstream.kernels.cuda.program import Argument, CudaProgram
from host_device import HOST, HostDevice

SWITCHED = ("pass_on", "pass_on_in_warp", "overwrite", "add_blocks", "copy")
KERNELS = (
    *(f"{name}<{flag}>" for name in SWITCHED for flag in ("true", "false")),
    *("leave_half", "meet_differently", "write_behind", "wait_for_blocks"),
)
PROGRAM = CudaProgram(HOST / "faulty.cu", KERNELS)
LAUNCHES = 20


def launch(kernel: str, threads: int, *args: Argument, blocks: int = 1, shared_bytes: int = 0) -> None:
    PROGRAM.kernel(kernel).launch((blocks, 1, 1), threads, args, shared_bytes=shared_bytes)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("kernel", "distance"), [("pass_on", 32), ("pass_on_in_warp", 0)])
def test_a_missing_barrier_is_seen(kernel: str, distance: int) -> None:
    values = torch.arange(256, dtype=torch.int32)
    expected = values.roll(-distance) if distance else values ^ 1
    right = {"true": 0, "false": 0}
    for flag in right:
        for _ in range(LAUNCHES):
            out = torch.zeros(256, dtype=torch.int32)
            launch(f"{kernel}<{flag}>", 256, values, out)
            right[flag] += torch.equal(out, expected)
    assert right == {"true": LAUNCHES, "false": 0}


@pytest.mark.usefixtures("host")
def test_a_lane_does_not_speak_for_its_warp() -> None:
    def is_right(flag: str) -> bool:
        values, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
        launch(f"overwrite<{flag}>", 64, values, out, shared_bytes=16 + 4 * 32)
        return torch.equal(out, values)

    assert {is_right("true") for _ in range(10 * LAUNCHES)} == {True}
    # About one order of lanes in fifteen shows it.
    assert {is_right("false") for _ in range(10 * LAUNCHES)} == {False, True}


@pytest.mark.usefixtures("host")
def test_what_a_block_writes_after_it_has_arrived_is_missed() -> None:
    def add_blocks(flag: str) -> int:
        parts, total, arrivals = (torch.zeros(n, dtype=torch.int32) for n in (7, 1, 1))
        launch(f"add_blocks<{flag}>", 256, parts, total, arrivals, blocks=7)
        return int(total)

    assert {add_blocks("false") for _ in range(LAUNCHES)} == {7}
    # About one order of threads in twenty shows it.
    assert any(add_blocks("true") < 7 for _ in range(30 * LAUNCHES))


@pytest.mark.usefixtures("host")
def test_blocks_wait_for_as_many_as_have_a_place() -> None:
    for blocks in (1, 2, 3) * LAUNCHES:
        arrivals = torch.zeros(1, dtype=torch.int32)
        launch("wait_for_blocks", 64, arrivals, blocks=blocks)
        assert arrivals.item() == blocks
    with pytest.raises(AssertionError, match=r"wait_for_blocks.*waits for blocks that do not come"):
        launch("wait_for_blocks", 64, torch.zeros(1, dtype=torch.int32), blocks=4)


@pytest.mark.usefixtures("host")
def test_all_blocks_of_a_cooperative_launch_have_a_place() -> None:
    arrivals = torch.zeros(1, dtype=torch.int32)
    PROGRAM.kernel("wait_for_blocks").launch((7, 1, 1), 64, (arrivals,), together=True)
    assert arrivals.item() == 7


@pytest.mark.usefixtures("host")
def test_lanes_that_do_not_come_are_reported() -> None:
    with pytest.raises(AssertionError, match=r"leave_half.*waits for a lane that is not there"):
        launch("leave_half", 32)
    with pytest.raises(AssertionError, match=r"meet_differently.*meets other instructions"):
        launch("meet_differently", 32, torch.zeros(32, dtype=torch.int32))
    values, out = torch.arange(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    launch("pass_on<true>", 256, values, out)
    assert torch.equal(out, values.roll(-32)), "a launch after one that failed is as any other"


@pytest.mark.usefixtures("host")
def test_a_copy_is_there_for_who_waits_for_it() -> None:
    """And may be there before, where others still read what it overwrites."""
    values, out = torch.full((4,), 3.0), torch.zeros(1)
    found = []
    for _ in range(20):
        launch("copy<true>", 1, values, out, shared_bytes=16)
        assert out.item() == 3.0
        launch("copy<false>", 1, values, out, shared_bytes=16)
        found.append(out.item() == 3.0)
    assert set(found) == {False, True}


@pytest.mark.usefixtures("host")
def test_writes_behind_the_shared_memory_are_reported() -> None:
    launch("write_behind", 1, 3, shared_bytes=16)
    with pytest.raises(AssertionError, match="written behind the dynamic shared memory"):
        launch("write_behind", 1, 4, shared_bytes=16)


def test_each_launch_has_an_order_of_its_own(host: HostDevice) -> None:
    before = host.launches
    launch("write_behind", 1, 3, shared_bytes=16)
    assert host.launches == before + 1
