"""The kernels of a draft block compute what their definitions say, and write nothing beside it.

Values are bfloat16, and definitions are computed from them in float32: results differ by a rounding or two.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cuda_row_cases import check_compiles
from guarded import Guarded

from coldstream.kernels.draft_block import HEAD_SIZES, reference
from coldstream.kernels.draft_block.cuda import (
    ATTENTION,
    CONTEXT_TYPE,
    ROWS,
    HeadShape,
    attend_cuda,
    choose_chain_cuda,
    convolve_cuda,
    norm_cuda,
    num_splits,
    parts_size,
    place_committed_rows_cuda,
    place_draft_rows_cuda,
    swiglu_cuda,
)

EPS = 1e-6
THETA = 1e6
BF16 = torch.bfloat16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The host with the kernels compiled for it, and a GPU."""
    if request.param == "cpu":
        request.getfixturevalue("host")
    return str(request.param)


def random(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """bfloat16 on the CPU."""
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(BF16)


def weights(seed: int, *shape: int) -> torch.Tensor:
    return 1 + torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 10


def bf16(*shape: int, device: str) -> Guarded:
    return Guarded(*shape, dtype=BF16, device=torch.device(device))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == BF16
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("program", [ROWS, ATTENTION], ids=["rows", "attention"])
def test_kernels_compile(program: object) -> None:
    check_compiles(program)


@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (3, 256), (8, 2048), (5, 4104)])
def test_norms(rows: int, cols: int, device: str) -> None:
    x, weight, out = random(rows, rows, cols), weights(cols, cols), bf16(rows, cols, device=device)
    norm_cuda(x.to(device), weight.to(device), EPS, out.tensor)
    assert_near(out.checked(), reference.norm(x.float(), weight, EPS))


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize(
    ("rows", "cols", "kernel", "group"), [(1, 64, 2, 16), (8, 2048, 2, 16), (5, 300, 3, 4)]
)
def test_convolutions(rows: int, cols: int, kernel: int, group: int, is_added: bool, device: str) -> None:
    """Of both sides, whose dynamic weights lie side by side in a row."""
    x, base = random(1, rows, cols), random(2, 2, kernel, cols)
    dynamic = random(3, rows, 2, kernel, cols // group)
    added = random(4, rows, cols) if is_added else None
    on_device = [each.to(device) for each in (x, base, dynamic)]
    for side in (0, 1):
        out = bf16(rows, cols, device=device)
        if added is not None:
            out.tensor.copy_(added)
        rest = (out.tensor if is_added else None, out.tensor)
        convolve_cuda(on_device[0], on_device[1][side], on_device[2][:, side], *rest)
        expected = reference.convolve(x.float(), base[side].float(), dynamic[:, side].float())
        assert_near(out.checked(), expected if added is None else expected + added.float())


@pytest.mark.parametrize(("rows", "size"), [(1, 96), (8, 768)])
def test_swiglu(rows: int, size: int, device: str) -> None:
    x, out = random(5, rows, 2 * size, scale=3), bf16(rows, size, device=device)
    swiglu_cuda(x.to(device), out.tensor)
    assert_near(out.checked(), reference.swiglu(x.float()))


@dataclass(frozen=True)
class Case:
    """Heads of a block of rows behind a context."""

    rows: int
    num_heads: int
    num_kv_heads: int
    dim: int
    length: int
    capacity: int
    window: int | None = None
    is_causal: bool = False

    def shape(self, device: str) -> HeadShape:
        turns = THETA ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim) / (2 * torch.pi)
        return HeadShape(self.num_heads, self.num_kv_heads, self.dim, EPS, turns.to(device), 1.25)

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape("cpu")
        angles = 2 * torch.pi * positions[:, None].double() * shape.turns
        return tuple((1.25 * each).float()[:, None] for each in (angles.cos(), angles.sin()))  # type: ignore[return-value]

    def split(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        heads = qkv.view(len(qkv), -1, self.dim)
        return list(heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1))

    def mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        ahead = keys[None] - queries[:, None]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.window is not None:
            seen = (ahead > -self.window) & (ahead < self.window)
        return seen & (ahead <= 0) if self.is_causal else seen


class Contexts:
    """Those of some layers on a device, inside guards."""

    def __init__(self, case: Case, layers: int, device: str) -> None:
        rows = (case.capacity, case.num_kv_heads, case.dim)
        self.keys, self.values = ([bf16(*rows, device=device) for _ in range(layers)] for _ in range(2))
        self.positions = [
            Guarded(case.capacity, dtype=torch.int32, device=torch.device(device)) for _ in range(layers)
        ]
        for each in self.positions:
            each.tensor.fill_(-1)
        table = np.zeros(layers, CONTEXT_TYPE)
        for layer in range(layers):
            parts = (self.keys[layer], self.values[layer], self.positions[layer])
            table[layer] = (*(part.tensor.data_ptr() for part in parts), case.capacity)
        self.table = torch.from_numpy(table.view(np.uint8).copy()).to(device)


PLACED = [
    Case(1, 2, 1, 32, 0, 4),
    Case(8, 32, 8, 128, 100_000, 16),
    Case(5, 6, 2, 64, 7, 5),
    Case(3, 4, 2, 36, 9, 8),
]


@pytest.mark.parametrize("case", PLACED)
def test_rows_of_the_block_are_placed(case: Case, device: str) -> None:
    shape = case.shape(device)
    qkv, both = random(6, case.rows, shape.row_size), (weights(7, case.dim), weights(8, case.dim))
    out = bf16(*qkv.shape, device=device)
    out.tensor.copy_(qkv)
    length = torch.tensor([case.length], dtype=torch.int32, device=device)
    place_draft_rows_cuda(out.tensor, shape, tuple(each.to(device) for each in both), length)  # type: ignore[arg-type]
    found, given = case.split(out.checked()), case.split(qkv)
    rotations = case.rotations(torch.arange(case.length, case.length + case.rows))
    for part in (0, 1):
        expected = reference.rotate(reference.norm(given[part].float(), both[part], EPS), rotations)
        assert_near(found[part], expected)
    assert torch.equal(found[2], given[2])


@pytest.mark.parametrize("count", [None, 0, 2])
@pytest.mark.parametrize("case", PLACED)
def test_committed_rows_are_placed_in_every_layer(case: Case, count: int | None, device: str) -> None:
    """Only so many of them, and of more than fit the last ones."""
    layers, rows, shape = 2, case.rows + 6, case.shape(device)
    kv, key_weights = random(9, layers, rows, 2 * case.num_kv_heads * case.dim), weights(10, layers, case.dim)
    contexts, first = Contexts(case, layers, device), case.length
    places: list[torch.Tensor | int | None] = [first, None]
    if count is not None:
        places = [torch.tensor([each], dtype=torch.int32, device=device) for each in (first, count)]
    on_device = kv.to(device), shape, key_weights.to(device), contexts.table
    place_committed_rows_cuda(*on_device, *places)  # type: ignore[arg-type]
    there = rows if count is None else count
    kept = range(max(0, there - case.capacity), there)
    for layer in range(layers):
        keys, values = kv[layer].view(rows, 2, case.num_kv_heads, case.dim).unbind(1)
        rotations = case.rotations(torch.arange(first, first + rows))
        placed = reference.rotate(reference.norm(keys.float(), key_weights[layer], EPS), rotations)
        found_keys, found_values = contexts.keys[layer].checked(), contexts.values[layer].checked()
        expected = [-1] * case.capacity
        for row in kept:
            place = (first + row) % case.capacity
            expected[place] = first + row
            assert_near(found_keys[place], placed[row])
            assert torch.equal(found_values[place], values[row])
        assert contexts.positions[layer].checked().tolist() == expected


ATTENDED = [
    *(Case(3, 4, 2, dim, 50, 64) for dim in HEAD_SIZES),
    Case(8, 32, 8, 128, 300, 512),
    Case(8, 8, 2, 64, 0, 8),
    Case(8, 8, 2, 64, 200, 64, window=64),
    Case(8, 8, 2, 64, 200, 64, window=64, is_causal=True),
    Case(8, 8, 2, 64, 200, 256, is_causal=True),
    Case(8, 8, 2, 64, 200, 8, window=4),
    Case(20, 6, 1, 32, 70, 80, window=9),
]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", ATTENDED)
def test_attention_sees_what_it_may(case: Case, splits: int, device: str) -> None:
    """Also where the context is a ring, and some rows of it are missing or of other positions."""
    shape, layer = case.shape(device), 1
    contexts = Contexts(case, 2, device)
    qkv, out = (
        random(11, case.rows, shape.row_size),
        bf16(case.rows, case.num_heads * case.dim, device=device),
    )
    in_ring = torch.arange(max(0, case.length - case.capacity), case.length)
    there = in_ring[torch.arange(len(in_ring)) % 7 != 3]
    stale = in_ring[torch.arange(len(in_ring)) % 7 == 3]
    keys, values = (random(seed, len(there), case.num_kv_heads, case.dim) for seed in (12, 13))
    places = (there % case.capacity).to(device)
    contexts.keys[layer].tensor[places] = keys.to(device)
    contexts.values[layer].tensor[places] = values.to(device)
    contexts.positions[layer].tensor[places] = there.int().to(device)
    contexts.positions[layer].tensor[(stale % case.capacity).to(device)] = 3 + case.length
    length = torch.tensor([case.length], dtype=torch.int32, device=device)
    parts = Guarded(parts_size(case.rows, shape, splits), device=torch.device(device))
    attend_cuda(
        qkv.to(device), shape, contexts.table, layer, length, case.window, case.is_causal, splits,
        parts.tensor, out.tensor,
    )  # fmt: skip
    queries, own_keys, own_values = case.split(qkv)
    positions = torch.arange(case.length, case.length + case.rows)
    expected = reference.attend(
        queries.float(),
        torch.cat((keys, own_keys)).float(),
        torch.cat((values, own_values)).float(),
        case.mask(positions, torch.cat((there, positions))),
    )
    parts.checked()
    assert_near(out.checked(), expected)


@pytest.mark.parametrize("is_conditional", [False, True])
@pytest.mark.parametrize(("positions", "ranks"), [(1, 1), (7, 16), (5, 40)])
def test_the_likeliest_chain(positions: int, ranks: int, is_conditional: bool, device: str) -> None:
    """Of equally likely candidates the first one."""
    generator = torch.Generator().manual_seed(ranks)
    ids = torch.randint(0, 1000, (positions, ranks), generator=generator, dtype=torch.int32)
    shape = (positions, ranks, ranks) if is_conditional else (positions, ranks)
    log_probs = -torch.randint(1, 6, shape, generator=generator).float()
    for length in {1, positions}:
        chain = Guarded(length, dtype=torch.int32, device=torch.device(device))
        choose_chain_cuda(ids.to(device), log_probs.to(device), chain.tensor)
        assert chain.checked().tolist() == reference.likeliest_chain(ids, log_probs, length)


def test_more_splits_than_parts_are_not_asked_for() -> None:
    assert num_splits(1, 128) == 1
    assert num_splits(65, 128) == 2
    assert num_splits(65, 256) == 3
    assert num_splits(10**6, 128) == 64


def test_shapes_that_disagree_are_refused() -> None:
    case = Case(3, 4, 2, 32, 5, 8)
    shape, x = case.shape("cpu"), random(1, 3, 64)
    qkv, one = random(1, 3, shape.row_size), torch.ones(32)
    length, floats = torch.zeros(1, dtype=torch.int32), torch.zeros(1000)
    table, out = torch.zeros(64, dtype=torch.uint8), random(1, 3, 128)
    with pytest.raises(ValueError, match="norm"):
        norm_cuda(x, torch.ones(63), EPS, x)
    with pytest.raises(ValueError, match="norm"):
        norm_cuda(x[:, :60], torch.ones(60), EPS, x[:, :60])
    with pytest.raises(ValueError, match="weights"):
        convolve_cuda(x, random(1, 2, 64), random(1, 3, 3, 4), None, x)
    with pytest.raises(ValueError, match="gates"):
        swiglu_cuda(x, x)
    with pytest.raises(ValueError, match="heads of 32"):
        place_draft_rows_cuda(qkv, shape, (one, torch.ones(31)), length)
    with pytest.raises(ValueError, match="heads of 32"):
        place_committed_rows_cuda(random(1, 2, 3, 127), shape, torch.ones(2, 32), table, 0)
    with pytest.raises(ValueError, match="parts"):
        attend_cuda(qkv, shape, table, 0, length, None, False, 9, floats, out)
    with pytest.raises(ValueError, match="into"):
        attend_cuda(qkv, shape, table, 0, length, None, False, 1, floats, random(1, 3, 64))
    odd = Case(3, 4, 2, 36, 5, 8).shape("cpu")
    with pytest.raises(ValueError, match="heads of 36"):
        attend_cuda(qkv, odd, table, 0, length, None, False, 1, floats, out)
    with pytest.raises(ValueError, match="candidates"):
        choose_chain_cuda(length.view(1, 1), torch.zeros(1, 2), length)
