"""Lists of every design are right, and what is planted into one is found."""

from collections.abc import Callable

import pytest
from one_token_cases import SMALL, named, small

from bench.full_size_model import FULL_SHAPE
from bench.kernels.one_token_check import faults_of
from bench.kernels.one_token_designs import BEST, DESIGNS
from bench.kernels.one_token_program import BlockProgram, plan
from bench.kernels.one_token_shapes import NO_COUNTER, Design, LayerShape

BLOCKS = 6


def step_of(lists: BlockProgram, name: str) -> int:
    return lists.names.index(name)


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.name)
def test_lists_of_every_design_are_right(design: Design) -> None:
    blocks = BLOCKS - BLOCKS % design.cluster
    assert faults_of(plan(SMALL, small(design), blocks)) == []


@pytest.mark.parametrize("phase", ["in", "mix", "out", "router", "down"])
def test_a_step_that_does_not_wait_is_found(phase: str) -> None:
    program = plan(SMALL, named("first"), BLOCKS)
    for kind in program.blocks:
        kind[2].steps[step_of(kind[2], phase)].wait = NO_COUNTER
    assert any(
        "block 2's consumers" in fault and "before it has waited" in fault for fault in faults_of(program)
    )


def test_a_producer_that_does_not_wait_for_the_router_is_found() -> None:
    program = plan(SMALL, named("joined"), BLOCKS)
    for kind in program.blocks:
        for piece in kind[1].pieces[2]:
            piece.wait = NO_COUNTER
    assert any("producer of ring 2 reads the router's answer" in fault for fault in faults_of(program))


def without_raise(lists: BlockProgram) -> None:
    setattr(lists.steps[step_of(lists, "router")], "raise", NO_COUNTER)


def answer_before_router(lists: BlockProgram) -> None:
    """Experts in front of the router's rows in one ring, where their producer waits for ever."""
    step = lists.steps[step_of(lists, "router")]
    pieces = lists.pieces[step.ring]
    router = pieces.pop(step.first_piece)
    pieces.append(router)
    for each in lists.steps:
        if each.ring == step.ring and each.first_piece > step.first_piece:
            each.first_piece -= 1
    step.first_piece = len(pieces) - 1


def waits_for_more(lists: BlockProgram) -> None:
    lists.steps[step_of(lists, "out")].target += 1


def waits_for_itself(lists: BlockProgram) -> None:
    step = lists.steps[step_of(lists, "mix")]
    step.wait = getattr(step, "raise")


@pytest.mark.parametrize("plant", [without_raise, answer_before_router, waits_for_more, waits_for_itself])
@pytest.mark.parametrize("name", ["first", "warp polls"])
def test_planted_deadlocks_are_found(plant: Callable[[BlockProgram], None], name: str) -> None:
    program = plan(SMALL, named(name), BLOCKS)
    for kind in program.blocks:
        plant(kind[BLOCKS - 1])
    faults = faults_of(program)
    assert any(fault.startswith("deadlock of") for fault in faults)
    assert all("before it has waited" not in fault for fault in faults)


def test_a_piece_that_another_step_takes_is_found() -> None:
    program = plan(SMALL, named("first"), BLOCKS)
    for kind in program.blocks:
        lists = kind[0]
        out, router = (lists.steps[step_of(lists, name)] for name in ("out", "router"))
        out.first_piece, router.first_piece = router.first_piece, out.first_piece
    assert any("takes another piece than ring 1 has" in fault for fault in faults_of(program))


def test_writing_over_what_others_still_read_is_found() -> None:
    program = plan(SMALL, named("first"), BLOCKS)
    for block in program.blocks[0]:
        block.steps[step_of(block, "out")].out = program.buffers.mixed
    assert any("while another reads what was there" in fault for fault in faults_of(program))


def test_a_signal_that_overtakes_is_found() -> None:
    """A cluster's poller tells a peer twice if the peer takes no part in between."""
    program = plan(SMALL, named("cluster of 2"), BLOCKS)
    for kind in program.blocks:
        for block in (1, 3, 5):
            lists = kind[block]
            at = step_of(lists, "mix")
            setattr(lists.steps[at], "raise", NO_COUNTER)
        for block in kind:
            block.steps[step_of(block, "out")].target = BLOCKS // 2
    assert any("signals again before" in fault for fault in faults_of(program))


def test_lists_of_the_real_layer_are_right() -> None:
    program = plan(LayerShape.of(FULL_SHAPE, layer=5), BEST, 132)
    assert faults_of(program, layers=2) == []
