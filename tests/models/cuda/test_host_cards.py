"""A model on two cards of the host: what the second computes for the first has the bits of the CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_runner_cases import check_chains, open_partly
from one_sequence import open_cpu
from runner_cases import write_mixed_layers

from coldstream.errors import DeviceError, OutOfMemoryError
from coldstream.experts import card_experts
from coldstream.kernels.cuda.device import Gpu
from coldstream.kernels.cuda.runtime import calls
from coldstream.kernels.cuda.runtime.graphs import Graph
from coldstream.kernels.experts.shapes import MAX_CARD_ROWS
from host_device import HostDevice
from second_device import SECOND, SecondDevice, beside

CONTEXT = 288


@pytest.fixture
def second(compiled_for_the_host: HostDevice, gpu: None, tmp_path: Path) -> Iterator[SecondDevice]:
    with beside(compiled_for_the_host, tmp_path) as second:
        yield second


@pytest.mark.parametrize(("arch", "share"), [("qwen35moe", 0.0), ("qwen3moe", 0.5)])
def test_steps_that_ask_the_second_card(
    second: SecondDevice, tmp_path: Path, arch: str, share: float
) -> None:
    path = write_mixed_layers(tmp_path, arch)
    with (
        open_cpu(path, threads=1, context_length=CONTEXT) as plain,
        open_partly(path, share, context_length=CONTEXT, card=SECOND) as runner,
    ):
        launches = second.launches
        check_chains(runner, plain, (1, 5, MAX_CARD_ROWS, 20, 90))
        assert second.launches > launches


def test_a_step_that_was_not_launched_leaves_no_loop_behind(
    second: SecondDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is launched first, and nothing asks it."""
    path = write_mixed_layers(tmp_path, "qwen3moe")
    with (
        open_cpu(path, threads=1, context_length=CONTEXT) as plain,
        open_partly(path, 0.5, context_length=CONTEXT, card=SECOND) as runner,
    ):
        check_chains(runner, plain, (1,))
        launch = Graph.launch

        def fail_on_the_first_card(graph: Graph) -> None:
            if calls.device_index() == calls.DEVICE:
                raise DeviceError("out of order")
            launch(graph)

        with monkeypatch.context() as patch:
            patch.setattr(Graph, "launch", fail_on_the_first_card)
            with pytest.raises(DeviceError, match=r"^out of order$"):
                runner.decode(3)
        assert not second.queued[-1].done()
        check_chains(runner, plain, (1,))
        for each in second.queued:
            each.result(timeout=60)  # the last one may still end


def test_a_card_that_is_not_there_is_refused(second: SecondDevice, tmp_path: Path) -> None:
    path = write_mixed_layers(tmp_path, "qwen3moe")
    with pytest.raises(DeviceError, match=r"^device 2: the driver shows 2 .*: name others, or use one$"):
        open_partly(path, 0.0, context_length=CONTEXT, card=2)


@pytest.mark.usefixtures("second")
def test_a_card_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Gpu("a GPU", (8, 0), 1, 2**40, card_experts.RESERVE_BYTES)
    monkeypatch.setattr(card_experts, "find_card", lambda index: full)
    path = write_mixed_layers(tmp_path, "qwen3moe")
    said = r"^device 1: .* GiB of experts that the first GPU may lack do not fit, 0\.25 GiB are free"
    with pytest.raises(OutOfMemoryError, match=said):
        open_partly(path, 0.0, context_length=CONTEXT, card=SECOND)


def test_room_for_experts_is_counted_to_the_byte() -> None:
    card_experts.check_room(1, card_experts.RESERVE_BYTES + 5, 5)
    with pytest.raises(OutOfMemoryError):
        card_experts.check_room(1, card_experts.RESERVE_BYTES + 5, 6)
