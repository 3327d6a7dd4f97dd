"""A plan reads every weight once, in pieces that fit, and refuses what does not."""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_token_cases import SMALL, small

from bench.full_size_model import FULL_SHAPE
from bench.kernels.one_token_designs import BEST, DESIGNS, FIRST
from bench.kernels.one_token_program import (
    MOST_DYNAMIC_BYTES,
    DesignError,
    TokenProgram,
    describe,
    plan,
    share,
)
from bench.kernels.one_token_shapes import KIB, Design, LayerShape, Piece, Ring

REAL = LayerShape.of(FULL_SHAPE, layer=5)


def pieces_of(program: TokenProgram) -> Iterator[Piece]:
    for block in program.blocks[0]:
        for ring in block.pieces:
            yield from ring


@given(st.integers(0, 5000), st.integers(1, 200))
def test_shares_are_adjacent_and_alike(total: int, parts: int) -> None:
    shares = [share(total, parts, index) for index in range(parts)]
    assert [i for each in shares for i in each] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@settings(max_examples=20)
@given(st.sampled_from(DESIGNS), st.integers(3, 40))
def test_every_weight_of_a_token_is_read_once(design: Design, blocks: int) -> None:
    design = small(design)
    blocks -= blocks % design.cluster
    program = plan(SMALL, design, blocks)
    read = Counter[int]()
    for piece in pieces_of(program):
        if piece.is_state or piece.only_near:
            continue
        for copy in range(piece.copies):
            rank = piece.rank + copy if piece.rank >= 0 else 0
            begin = piece.offset + rank * SMALL.layer_bytes  # chosen experts are other bytes
            read.update(range(begin, begin + piece.copy_bytes, 16))
    assert set(read.values()) == {1}
    assert 16 * len(read) == SMALL.read_bytes


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.name)
def test_pieces_of_the_real_layer_fit(design: Design) -> None:
    program = plan(REAL, design, 132)
    assert program.shared_bytes <= MOST_DYNAMIC_BYTES
    for block in program.blocks[0]:
        for ring, pieces in zip(program.design.rings, block.pieces, strict=False):
            for piece in pieces:
                assert piece.copies * piece.copy_bytes <= ring.stage_bytes
                assert piece.copy_bytes % 16 == piece.offset % 16 == 0
    expected = REAL.read_bytes + (REAL.state_bytes if design.state == "ring" else 0)
    moved = sum(piece.copies * piece.copy_bytes for piece in pieces_of(program) if not piece.only_near)
    assert moved == expected


def test_bytes_of_the_real_layer() -> None:
    """Of 10.7 million words of the DeltaNet's projections, 0.5 of the router and 15 of nine experts."""
    names = {matrix.name: matrix.row_bytes for matrix in REAL.matrices}
    assert names["attn_qkv"] == 2048 // 256 * 176
    assert names["ffn_gate_inp"] == 2048 * 4
    assert names["ffn_down_exps"] == 512 // 256 * 144
    assert REAL.state_bytes == 32 * 128 * 128 * 4
    assert REAL.moved_bytes == REAL.read_bytes + 2 * REAL.state_bytes
    assert 14.0 < REAL.floor_us(2.97e12) < 15.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rings": (Ring(2, 2 * KIB), Ring(4, 18 * KIB))}, "two rows of 1408 bytes exceed"),
        ({"rings": (Ring(9, 22 * KIB), Ring(4, 18 * KIB))}, "bytes of shared memory"),
        ({"rings": (Ring(17, KIB), Ring(4, 18 * KIB))}, "of 16 stages"),
        ({"cluster": 5, "poll": "cluster"}, "132 blocks in clusters of 5"),
        ({"counter_splits": 4}, "only a warp looks"),
        ({"norm": "phase", "combine": "reader"}, "readers would have to sum"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DesignError, match=message):
        plan(REAL, FIRST.changed("x", "", **changes), 132)


def test_a_list_is_printed_by_step() -> None:
    lines = list(describe(plan(REAL, BEST, 132), 131))
    assert lines[0].startswith("in: waits for down = 132, 7 pieces of ring 0")
    assert "some behind router" in lines[-1]
