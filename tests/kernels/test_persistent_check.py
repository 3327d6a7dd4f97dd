"""Lists of one launch a token are right, and what is planted into them is found."""

from collections.abc import Callable

import pytest

from bench.kernels.token_layers import full_size_kinds
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.persistent.check import faults_of
from coldstream.kernels.persistent.program import (
    describe,
    plan,
)
from coldstream.kernels.persistent.shapes import (
    DELTA_OUT,
    NO_COUNTER,
    PROJECTED,
    ROUTED,
    SHARED,
    BlockProgram,
    LayerShape,
    Part,
    ProgramError,
    Ring,
    Sizes,
    TokenLists,
)

SIZES = Sizes(512, 256, 24, 3, 2, 4)
TYPES = dict.fromkeys((*ROUTED, *SHARED, "attn_qkv", "attn_gate", DELTA_OUT), QuantType.Q4_K)
RINGS = (Ring(2, 8192), Ring(2, 10240), Ring(2, 16384))
BLOCKS = 5


def small() -> TokenLists:
    return plan([LayerShape.of(SIZES, TYPES, Part.DELTA_NET, (0, 1, 0, 1))], BLOCKS, RINGS)


def planted(plant: Callable[[BlockProgram], None], *, by_words: bool, block: int = 2) -> list[str]:
    lists = small()
    plant(lists.blocks[0][block])
    return faults_of(lists, by_words=by_words)


@pytest.mark.sharded(4)
@pytest.mark.parametrize("by_words", [True, False])
@pytest.mark.parametrize("has_mixer", [True, False])
def test_lists_of_the_full_size_model_are_right(*, has_mixer: bool, by_words: bool) -> None:
    kinds, _ = full_size_kinds(40, has_mixer=has_mixer)
    assert faults_of(plan(kinds, 132), by_words=by_words) == []


@pytest.mark.parametrize("by_words", [True, False])
def test_small_lists_are_right(*, by_words: bool) -> None:
    assert faults_of(small(), layers=3, by_words=by_words) == []


@pytest.mark.parametrize("phase", ["in", "out", "route", "down"])
def test_a_step_that_does_not_wait_is_found(phase: str) -> None:
    def plant(block: BlockProgram) -> None:
        block.steps[block.names.index(phase)].wait = NO_COUNTER

    found = planted(plant, by_words=False)
    assert any(each.startswith(f"block 2's consumers reads inputs of {phase}") for each in found)


def test_a_producer_that_does_not_wait_for_the_router_is_found() -> None:
    def plant(block: BlockProgram) -> None:
        for piece in block.pieces[2]:
            piece.wait = NO_COUNTER

    assert any(
        "producer of ring 2 reads the router's logits" in each for each in planted(plant, by_words=False)
    )


def without_rows(block: BlockProgram) -> None:
    """A block that leaves its rows of the output projection out."""
    step = block.steps[block.names.index("out")]
    pieces = block.pieces[step.ring]
    del pieces[step.first_piece : step.first_piece + step.num_pieces]
    for each in block.steps:
        if each.ring == step.ring and each.first_piece > step.first_piece:
            each.first_piece -= step.num_pieces
    step.num_pieces = 0


def answer_before_router(block: BlockProgram) -> None:
    """The router's rows behind experts, in the ring whose producer waits for the router."""
    step = block.steps[block.names.index("route")]
    pieces = block.pieces[step.ring]
    moved = pieces[step.first_piece : step.first_piece + step.num_pieces]
    del pieces[step.first_piece : step.first_piece + step.num_pieces]
    for each in block.steps:
        if each.ring == step.ring and each.first_piece > step.first_piece:
            each.first_piece -= step.num_pieces
    step.ring, step.first_piece = 2, len(block.pieces[2])
    block.pieces[2].extend(moved)


@pytest.mark.parametrize("plant", [without_rows, answer_before_router])
def test_planted_deadlocks_are_found(plant: Callable[[BlockProgram], None]) -> None:
    found = planted(plant, by_words=True)
    assert any(each.startswith("deadlock of") for each in found)


def test_words_that_two_blocks_write_are_found() -> None:
    def plant(block: BlockProgram) -> None:
        step = block.steps[block.names.index("gate and up")]
        for piece in block.pieces[step.ring][step.first_piece : step.first_piece + step.num_pieces]:
            piece.first_row = 0

    assert any("twice, which was taken to be there" in each for each in planted(plant, by_words=True))


def test_keeping_inputs_that_others_still_read_is_found() -> None:
    """The key head's inputs are kept behind the output projection's wait, not before."""

    def plant(block: BlockProgram) -> None:
        step = block.steps[block.names.index("in")]
        step.load, step.keeps_key, step.key_head = 2, 1, 1

    assert any("key head's inputs" in each for each in planted(plant, by_words=False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 500}, "hidden size: 500"),
        ({"experts": 300}, "experts: 300"),
        ({"value_heads": 3}, "ssm_alpha: 3 rows"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, int], message: str) -> None:
    sizes = Sizes(**{**vars(SIZES), **changes})
    types = {**TYPES, **dict.fromkeys(PROJECTED, QuantType.Q4_K)}
    if changes.get("value_heads") is None:
        types = TYPES
    with pytest.raises(ProgramError, match=message):
        plan([LayerShape.of(sizes, types, Part.DELTA_NET, (0, 1, 0, 1))], BLOCKS, RINGS)


def test_a_type_without_a_product_here_is_refused() -> None:
    with pytest.raises(ProgramError, match="ssm_out in Q8_0"):
        plan(
            [LayerShape.of(SIZES, {**TYPES, DELTA_OUT: QuantType.Q8_0}, Part.DELTA_NET, (0, 1, 0, 1))],
            BLOCKS,
            RINGS,
        )


def test_a_list_is_printed_by_step() -> None:
    lines = list(describe(small(), 1))
    assert lines[0].startswith("in: waits for down = 5, ")
    assert "some behind route" in lines[-1]
