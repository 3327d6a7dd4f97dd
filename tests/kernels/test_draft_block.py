"""The kernels of a draft block compute what their definitions say, and write nothing beside it.

Keys and values that are kept are bfloat16: they differ from float32 by a rounding.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cuda_row_cases import check_compiles, for_each_architecture
from guarded import Guarded

from coldstream.kernels.cuda.compiler import compile_instance
from coldstream.kernels.draft_block import HEAD_SIZES, reference
from coldstream.kernels.draft_block.cuda import (
    ATTENTION,
    CONTEXT_TYPE,
    MAX_COMMITTED_LAYERS,
    PLACE,
    PLACE_COMMITTED,
    ROWS,
    CommittedRowsOfLayer,
    DraftRows,
    HeadShape,
    LayerView,
    attend_cuda,
    choose_chain_cuda,
    convolve_cuda,
    forget_rows_cuda,
    norm_features_cuda,
    num_splits,
    parts_shape,
    place_committed_rows_cuda,
    place_draft_rows_cuda,
    score_pairs_cuda,
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
    """float32 on the CPU."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(seed: int, *shape: int) -> torch.Tensor:
    return 1 + torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 10


def bf16(*shape: int, device: str) -> Guarded:
    return Guarded(*shape, dtype=BF16, device=torch.device(device))


def floats(*shape: int, device: str) -> Guarded:
    return Guarded(*shape, device=torch.device(device))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Of float32, and of bfloat16 up to its rounding."""
    if found.dtype == BF16:
        torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=2**-12)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sharded(of="compiled kernels")
@for_each_architecture
@pytest.mark.parametrize("program", [ROWS, ATTENTION], ids=["rows", "attention"])
def test_kernels_compile(program: object, arch: str) -> None:
    check_compiles(program, arch)


@pytest.mark.sharded(of="compiled kernels")
@for_each_architecture
@pytest.mark.parametrize("template", [PLACE, PLACE_COMMITTED])
def test_kernels_of_rows_with_biases_compile(template: str, arch: str) -> None:
    """They are compiled for drafters that have biases, and not with the others."""
    instance = template.format("true")
    assert instance not in ROWS.instances
    assert compile_instance(ROWS.source, instance, arch).cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("rows", "cols", "kernel", "group"), [(1, 64, 2, 16), (8, 2048, 2, 16), (5, 300, 3, 4)]
)
def test_convolutions(rows: int, cols: int, kernel: int, group: int, device: str) -> None:
    """Of both sides, whose dynamic weights lie side by side in a row."""
    x, base = random(1, rows, cols), random(2, 2, kernel, cols)
    dynamic = random(3, rows, 2, kernel, cols // group)
    on_device = [each.to(device) for each in (x, base, dynamic)]
    for side in (0, 1):
        out = floats(rows, cols, device=device)
        convolve_cuda(on_device[0], on_device[1][side], on_device[2][:, side], out.tensor)
        assert_near(out.checked(), reference.convolve(x, base[side], dynamic[:, side]))


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

    def products(self, seed: int, rows: int) -> list[torch.Tensor]:
        """Queries, keys and values [rows, heads, dim]."""
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return [random(seed + i, rows, count, self.dim) for i, count in enumerate(counts)]

    def biases(self, seed: int) -> list[torch.Tensor]:
        """Of queries, keys and values, [heads, dim]."""
        return [each[0] for each in self.products(seed, 1)]

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


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("case", PLACED)
def test_rows_of_the_block_are_placed(case: Case, has_bias: bool, device: str) -> None:
    shape = case.shape(device)
    queries, keys, values = case.products(6, case.rows)
    biases = case.biases(30) if has_bias else None
    both = (weights(7, case.dim), weights(8, case.dim))
    placed = floats(case.rows, shape.query_dim, device=device)
    placed.tensor.copy_(queries.flatten(1))
    kv = bf16(case.rows, 2 * shape.kv_dim, device=device)
    length = torch.tensor([case.length], dtype=torch.int32, device=device)
    place_draft_rows_cuda(
        DraftRows(placed.tensor, kv.tensor),
        keys.flatten(1).to(device),
        values.flatten(1).to(device),
        shape,
        (both[0].to(device), both[1].to(device)),
        length,
        None if biases is None else tuple(each.flatten().to(device) for each in biases),  # type: ignore[arg-type]
    )
    if biases is not None:
        queries, keys, values = queries + biases[0], keys + biases[1], values + biases[2]
    rotations = case.rotations(torch.arange(case.length, case.length + case.rows))
    found_keys, found_values = kv.checked().view(case.rows, 2, case.num_kv_heads, case.dim).unbind(1)
    for found, given, weight in ((placed.checked(), queries, both[0]), (found_keys, keys, both[1])):
        expected = reference.rotate(reference.norm(given, weight, EPS), rotations)
        assert_near(found.view(expected.shape), expected)
    assert torch.equal(found_values, values.to(BF16))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("count", [None, 0, 2])
@pytest.mark.parametrize("case", PLACED)
def test_committed_rows_are_placed_in_every_layer(
    case: Case, count: int | None, has_bias: bool, device: str
) -> None:
    """Only so many of them, and of more than fit the last ones."""
    layers, rows, shape = 2, case.rows + 6, case.shape(device)
    given = [(*case.products(20 + layer, rows)[1:], weights(10 + layer, case.dim)) for layer in range(layers)]
    contexts, first = Contexts(case, layers, device), case.length
    places: list[torch.Tensor | int | None] = [first, None]
    if count is not None:
        places = [torch.tensor([each], dtype=torch.int32, device=device) for each in (first, count)]
    biases = [case.biases(40 + layer)[1:] if has_bias else None for layer in range(layers)]
    committed = [
        CommittedRowsOfLayer(
            keys.flatten(1).to(device),
            values.flatten(1).to(device),
            weight.to(device),
            None if bias is None else tuple(each.flatten().to(device) for each in bias),  # type: ignore[arg-type]
        )
        for (keys, values, weight), bias in zip(given, biases, strict=True)
    ]
    place_committed_rows_cuda(committed, shape, contexts.table, *places)  # type: ignore[arg-type]
    there = rows if count is None else count
    kept = range(max(0, there - case.capacity), there)
    for layer, (keys, values, weight) in enumerate(given):
        if (bias := biases[layer]) is not None:
            keys, values = keys + bias[0], values + bias[1]
        rotations = case.rotations(torch.arange(first, first + rows))
        placed = reference.rotate(reference.norm(keys, weight, EPS), rotations)
        found_keys, found_values = contexts.keys[layer].checked(), contexts.values[layer].checked()
        expected = [-1] * case.capacity
        for row in kept:
            place = (first + row) % case.capacity
            expected[place] = first + row
            assert_near(found_keys[place], placed[row])
            assert torch.equal(found_values[place], values[row].to(BF16))
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


@pytest.mark.parametrize(("splits", "is_gated"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("case", ATTENDED)
def test_attention_sees_what_it_may(case: Case, splits: int, is_gated: bool, device: str) -> None:
    """Also where the context is a ring, and some rows of it are missing or of other positions."""
    shape, layer = case.shape(device), 1
    contexts = Contexts(case, 2, device)
    queries, *own = case.products(14, case.rows)
    own_keys, own_values = (each.to(BF16) for each in own)
    out = floats(case.rows, shape.query_dim, device=device)
    in_ring = torch.arange(max(0, case.length - case.capacity), case.length)
    there = in_ring[torch.arange(len(in_ring)) % 7 != 3]
    stale = in_ring[torch.arange(len(in_ring)) % 7 == 3]
    keys, values = (random(seed, len(there), case.num_kv_heads, case.dim).to(BF16) for seed in (12, 13))
    places = (there % case.capacity).to(device)
    contexts.keys[layer].tensor[places] = keys.to(device)
    contexts.values[layer].tensor[places] = values.to(device)
    contexts.positions[layer].tensor[places] = there.int().to(device)
    contexts.positions[layer].tensor[(stale % case.capacity).to(device)] = 3 + case.length
    length = torch.tensor([case.length], dtype=torch.int32, device=device)
    parts = floats(*parts_shape(case.rows, shape, splits), device=device)
    kv = torch.cat((own_keys.flatten(1), own_values.flatten(1)), dim=1)
    gates = random(15, case.rows, case.num_heads, scale=3.0) if is_gated else None
    attend_cuda(
        DraftRows(queries.flatten(1).to(device), kv.to(device)),
        shape,
        contexts.table,
        LayerView(layer, case.window, case.is_causal),
        length,
        parts.tensor,
        out.tensor,
        None if gates is None else gates.to(device),
    )
    positions = torch.arange(case.length, case.length + case.rows)
    expected = reference.attend(
        queries,
        torch.cat((keys, own_keys)).float(),
        torch.cat((values, own_values)).float(),
        case.mask(positions, torch.cat((there, positions))),
    )
    parts.checked()
    assert_near(out.checked(), expected if gates is None else reference.gated(expected, gates))


@pytest.mark.parametrize(("rows", "layers", "cols"), [(1, 1, 64), (7, 5, 2048), (3, 2, 300)])
def test_features_are_normed_layer_by_layer(rows: int, layers: int, cols: int, device: str) -> None:
    """Each layer's part of a row by its own weights, though layers differ a hundredfold."""
    of_layers = 100.0 ** torch.arange(layers).repeat_interleave(cols)
    features, weight = (random(1, rows, layers * cols) * of_layers).to(BF16), weights(2, layers, cols)
    out = floats(rows, layers * cols, device=device)
    norm_features_cuda(features.to(device), weight.to(device), EPS, out.tensor)
    assert_near(out.checked(), reference.norm_features(features.float(), weight, EPS))


@pytest.mark.parametrize(("positions", "ranks", "size"), [(1, 1, 32), (7, 16, 100), (3, 5, 256)])
def test_pairs_of_candidates(positions: int, ranks: int, size: int, device: str) -> None:
    before, successors = (random(seed, positions, ranks, size) for seed in (1, 2))
    projected, own = random(3, positions, size, scale=0.1), random(4, positions, ranks)
    out = floats(positions, ranks, ranks, device=device)
    given = (each.to(device) for each in (before, projected, successors, own))
    score_pairs_cuda(*given, out.tensor)
    assert_near(out.checked(), reference.pair_log_probs(before, projected, successors, own))


def test_a_pair_that_is_no_number_shows(device: str) -> None:
    """And one that the head excludes has no probability."""
    own = torch.tensor([[0.0, torch.nan], [0.0, -torch.inf]], device=device)
    zeros, out = torch.zeros(2, 2, 32, device=device), torch.empty(2, 2, 2, device=device)
    score_pairs_cuda(zeros, torch.zeros(2, 32, device=device), zeros, own, out)
    found = out.cpu()
    assert not found[0].amax(dim=-1).isfinite().any()
    assert torch.equal(found[1], torch.tensor([[0.0, -torch.inf]] * 2))


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


@pytest.mark.parametrize("count", [1, 256, 700])
def test_rows_behind_a_length_are_forgotten(count: int, device: str) -> None:
    """Places without a row have a negative position, and keep it."""
    positions = torch.randint(-1, 1000, (count,), generator=torch.Generator().manual_seed(count)).int()
    for length in (0, 500, 1000):
        memory = Guarded(count, dtype=torch.int32, device=torch.device(device))
        memory.tensor.copy_(positions)
        forget_rows_cuda(memory.tensor, length)
        assert torch.equal(memory.checked(), torch.where(positions >= length, -1, positions))


def test_more_splits_than_parts_are_not_asked_for() -> None:
    assert num_splits(1, 128) == 1
    assert num_splits(65, 128) == 2
    assert num_splits(65, 256) == 3
    assert num_splits(10**6, 128) == 64


def test_shapes_that_disagree_are_refused() -> None:
    case = Case(3, 4, 2, 32, 5, 8)
    shape, x, one = case.shape("cpu"), random(1, 3, 64), torch.ones(32)
    rows = DraftRows(random(1, 3, 128), torch.zeros(3, 128, dtype=BF16))
    length, view = torch.zeros(1, dtype=torch.int32), LayerView(0, None, False)
    table, out = torch.zeros(64, dtype=torch.uint8), random(1, 3, 128)
    parts = torch.zeros(parts_shape(3, shape, 1))
    with pytest.raises(ValueError, match="weights"):
        convolve_cuda(x, random(1, 2, 64), random(1, 3, 3, 4), x)
    with pytest.raises(ValueError, match="heads of 32"):
        place_draft_rows_cuda(rows, x, random(1, 3, 63), shape, (one, one), length)
    with pytest.raises(ValueError, match="heads of 32"):
        place_draft_rows_cuda(DraftRows(rows.queries, rows.kv[:, :64]), x, x, shape, (one, one), length)
    with pytest.raises(ValueError, match="norms"):
        place_draft_rows_cuda(rows, x, x, shape, (one, torch.ones(31)), length)
    with pytest.raises(ValueError, match="heads of 32"):
        place_committed_rows_cuda([CommittedRowsOfLayer(x, random(1, 3, 63), one)], shape, table, 0)
    with pytest.raises(ValueError, match="heads of 32"):
        place_committed_rows_cuda([CommittedRowsOfLayer(x, x, torch.ones(31))], shape, table, 0)
    wide, narrow = torch.ones(128), torch.ones(63)
    with pytest.raises(ValueError, match=r"biases \(128,\), \(64,\), \(63,\) of rows of 128, 64, 64"):
        place_draft_rows_cuda(rows, x, x, shape, (one, one), length, (wide, wide[:64], narrow))
    with pytest.raises(ValueError, match="of rows of 64, 64"):
        place_committed_rows_cuda([CommittedRowsOfLayer(x, x, one, (narrow, narrow))], shape, table, 0)
    some = [CommittedRowsOfLayer(x, x, one), CommittedRowsOfLayer(x, x, one, (wide[:64], wide[:64]))]
    with pytest.raises(ValueError, match="others have none"):
        place_committed_rows_cuda(some, shape, table, 0)
    layers = [CommittedRowsOfLayer(x, x, one)] * (MAX_COMMITTED_LAYERS + 1)
    with pytest.raises(ValueError, match="contexts"):
        place_committed_rows_cuda(layers, shape, torch.zeros(1024, dtype=torch.uint8), 0)
    with pytest.raises(ValueError, match="contexts"):
        place_committed_rows_cuda(layers[:3], shape, table, 0)
    with pytest.raises(ValueError, match="parts"):
        attend_cuda(rows, shape, table, view, length, parts[:, :-1], out)
    with pytest.raises(ValueError, match="into"):
        attend_cuda(rows, shape, table, view, length, parts, random(1, 3, 64))
    with pytest.raises(ValueError, match="gates"):
        attend_cuda(rows, shape, table, view, length, parts, out, torch.zeros(3, 3))
    with pytest.raises(ValueError, match="features"):
        norm_features_cuda(rows.kv, torch.ones(3, 32), EPS, out)
    with pytest.raises(ValueError, match="contiguous"):
        norm_features_cuda(rows.kv, torch.ones(32, 4).t(), EPS, out)
    odd = Case(3, 4, 2, 36, 5, 8).shape("cpu")
    with pytest.raises(ValueError, match="heads of 36"):
        attend_cuda(rows, odd, table, view, length, parts, out)
    pairs = random(1, 3, 17, 8)
    with pytest.raises(ValueError, match="pairs"):
        score_pairs_cuda(pairs, x, pairs, random(1, 3, 17), random(1, 3, 17, 17))
    with pytest.raises(ValueError, match="17 candidates"):
        score_pairs_cuda(pairs, x[:, :8], pairs, random(1, 3, 17), random(1, 3, 17, 17))
    with pytest.raises(ValueError, match="candidates"):
        choose_chain_cuda(length.view(1, 1), torch.zeros(1, 2), length)
