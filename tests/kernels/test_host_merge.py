"""Chunks merged as the GPU's kernels do it, on the host: the definition's bits for any number of them."""

from itertools import product

import pytest
import torch
from attention_batches import GATES
from deep_attention import LARGEST_CONTEXT
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.arithmetic.reference import empty_activations, quantize_activations, sigmoid, softplus
from coldstream.kernels.attention.arguments import AttentionShape, DecodeWorkspace
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.chunks import CHUNK_SIZE
from coldstream.kernels.attention.exact import first_position, merge_chunks
from coldstream.kernels.attention.merge_cuda import MERGE_BATCH, MergeKernels, gates_of
from coldstream.kernels.attention.reference import finish, split_gate
from coldstream.kernels.ops import AttentionHeads, AttentionInputs, OutputGate, Rows

MOST_POSITIONS = (2 * MERGE_BATCH + 10) * CHUNK_SIZE
SHARED_PER_BLOCK = (64 << 10, 99 << 10, 227 << 10)  # of Turing, of later consumers' devices, of Hopper


def check(
    shape: AttentionShape,
    window: int | None,
    positions: list[int],
    max_chunks: int,
    seed: int,
    shared_per_block: int = 99 << 10,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_rows, width = len(positions), shape.num_heads * shape.head_dim
    values, stats = (
        torch.randn(size, generator=generator)
        for size in DecodeWorkspace.shapes(shape, num_rows, max_chunks * CHUNK_SIZE)
    )
    stats[..., 0] *= 20
    stats[..., 1] = stats[..., 1].abs() + 1
    widths = {"query": 2 * width, "head": shape.num_heads}
    gates = 3 * torch.randn(num_rows, widths.get(shape.output_gate, width) + 4, generator=generator)[:, :-4]
    expected = torch.zeros(num_rows, shape.num_heads, shape.head_dim)
    sinks = 20 * torch.randn(shape.num_heads, generator=generator) if shape.has_sinks else None
    for row, position in enumerate(positions):
        if position < 0:
            continue
        first = first_position(position, window) // CHUNK_SIZE
        count = min(position // CHUNK_SIZE - first + 1, max_chunks)
        chunks = [(stats[row, :, i, 0], stats[row, :, i, 1], values[row, :, i]) for i in range(count)]
        expected[row] = merge_chunks(chunks, sinks)
        values[row, :, count:] = stats[row, :, count:] = torch.nan
    expected = shape.cache_type.rotate_back(expected)
    ones = torch.ones(shape.head_dim)
    heads = AttentionHeads(ones, ones, 1e-6, shape.output_gate, window, sinks=sinks)
    query_gate = gates if shape.output_gate == "query" else torch.zeros(num_rows, width)
    inputs = AttentionInputs(query_gate, ones, ones, ones, gates)
    _, gate = split_gate(inputs, shape.head_dim, heads)
    expected = finish(expected, gate, heads, sigmoid, softplus)
    out, quantised = torch.empty(num_rows, width), empty_activations(num_rows, width, torch.device("cpu"))
    at = torch.tensor(positions, dtype=torch.int32)
    rows = Rows(at, torch.zeros_like(at))
    kernels = MergeKernels(shape, shared_per_block)
    workspace = DecodeWorkspace(values, stats)
    kernels.merge(gates_of(inputs, heads), heads, rows, workspace, out=out, quantised=quantised)
    assert torch.equal(out, expected)
    padded = torch.nn.functional.pad(expected, (0, quantised.q.shape[1] - width))
    for found, wanted in zip(
        vars(quantised).values(), vars(quantize_activations(padded)).values(), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("output_gate", GATES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 256), (4, 128), (5, 96), (6, 64), (9, 32)])
def test_chunks_are_merged_as_the_definition_says(
    num_heads: int, head_dim: int, output_gate: OutputGate
) -> None:
    @settings(max_examples=10)
    @given(
        positions=st.lists(
            st.integers(-1, 9 * CHUNK_SIZE) | st.integers(0, MOST_POSITIONS), min_size=1, max_size=3
        ),
        spare_chunks=st.integers(1, 40),
        window=st.sampled_from([None, None, 300]),
        seed=st.integers(0, 99),
        has_sinks=st.booleans(),
        shared_per_block=st.sampled_from(SHARED_PER_BLOCK),
    )
    def check_all(
        positions: list[int],
        spare_chunks: int,
        window: int | None,
        seed: int,
        has_sinks: bool,
        shared_per_block: int,
    ) -> None:
        shape = AttentionShape(num_heads, 1, head_dim, CACHE_TYPES["i16"], output_gate, has_sinks)
        check(
            shape, window, positions, max(positions) // CHUNK_SIZE + 1 + spare_chunks, seed, shared_per_block
        )

    check_all()


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("shared_per_block", SHARED_PER_BLOCK)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 256), (9, 32)])
def test_as_many_chunks_as_a_context_has_are_merged(
    num_heads: int, head_dim: int, shared_per_block: int
) -> None:
    for positions, window in (([LARGEST_CONTEXT - 1, 5], None), ([LARGEST_CONTEXT - 1, 3000], 4096)):
        shape = AttentionShape(num_heads, 1, head_dim, CACHE_TYPES["i16"])
        check(shape, window, positions, LARGEST_CONTEXT // CHUNK_SIZE, 5, shared_per_block)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("output_gate", GATES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 256), (4, 128), (5, 96), (6, 64), (9, 32)])
def test_what_is_merged_already_is_only_finished(
    num_heads: int, head_dim: int, output_gate: OutputGate
) -> None:
    for window, has_sinks in product((None, 300), (False, True)):
        shape = AttentionShape(num_heads, 1, head_dim, CACHE_TYPES["i8"], output_gate, has_sinks)
        check(shape, window, [5, 100_000, -1, 255, 256, 70_000, 3], 1, seed=4)
