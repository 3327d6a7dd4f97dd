"""The n-gram embedding: its definition against `transformers`, its bits on CPUs, and rows of its table."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_cases import AWKWARD_SIZES, Output, Results, random, run_everywhere, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from all_pairs import all_pairs
from coldstream.kernels import _csrc
from coldstream.kernels.ngram.reference import ngram_conv_exact, ngram_gate, ngram_gate_exact, ngram_ids
from coldstream.kernels.ops import CommittedPath, NgramHash, NgramState, Rows
from coldstream.kernels.reference_ops import ReferenceOps

Runtimes = list[_csrc.Runtime]
END = 5
HASH = NgramHash((2**40 + 15, 2**39 + 7, 2**38 + 1), (11, 13, 17, 19), (0, 11, 24, 41), END, 2)
ROW_BYTES, NUM_ROWS = 34, 1000  # of Q8_0, 32 columns


def chain(count: int, state_id: int = 1) -> Rows:
    ids = torch.full((count,), state_id, dtype=torch.int32)
    return Rows(torch.arange(count, dtype=torch.int32), ids)


def state_of(width: int = 1, history: int = 9) -> NgramState:
    return NgramState(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, history, width))


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4], [END, 2, END, END, 3, 4, 9], [7], list(range(12)) * 3])
def test_rows_of_the_table_are_those_of_transformers(tokens: list[int]) -> None:
    # Here, as only this test needs it: it is not there where kernels of another machine are tested.
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    config = Qwen4ExpTextConfig(
        hidden_size=16, vocab_size=50, heads_per_ngram=2, ngram_vocab_size_base=100, eos_token_id=END
    )
    model = Qwen4ExpTextNGramEmbedding(config, 16, layer_idx=1)
    with torch.no_grad():
        model.ngram_embedding.weight.copy_(torch.arange(len(model.ngram_embedding.weight))[:, None])
        expected = model(torch.tensor([tokens]), None)[0].reshape(len(tokens), 4, 4)[..., 0]
    sizes, offsets = tuple(model.head_vocab_sizes), tuple(model.head_offsets)
    hashing = NgramHash(tuple(model.layer_multipliers.tolist()), sizes, offsets, END, 2)
    found = ngram_ids(torch.tensor(tokens, dtype=torch.int32), hashing, state_of(), chain(len(tokens)))
    assert torch.equal(found.float(), expected)


def cpu_ids(
    runtime: _csrc.Runtime, tokens: list[int], state: torch.Tensor, state_id: int = 1
) -> torch.Tensor:
    out = torch.full((len(tokens), 4), -1, dtype=torch.int32)
    ids = torch.full((len(tokens),), state_id, dtype=torch.int32)
    _csrc.ngram_ids(
        runtime, torch.tensor(tokens, dtype=torch.int32), HASH.multipliers, HASH.sizes, HASH.offsets, END,
        state, ids, out,
    )  # fmt: skip
    return out


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 7), min_size=1, max_size=20), ends=st.sets(st.integers(1, 19), max_size=5)
)
def test_any_division_of_a_text_has_the_rows_of_the_definition(
    fastest: _csrc.Runtime, tokens: list[int], ends: set[int]
) -> None:
    """Ends of texts among them, and steps shorter than the longest n-gram."""
    expected_state, state = state_of(), state_of()
    expected = ngram_ids(torch.tensor(tokens, dtype=torch.int32), HASH, expected_state, chain(len(tokens)))
    bounds = [0, *sorted(end for end in ends if end < len(tokens)), len(tokens)]
    found = [cpu_ids(fastest, tokens[a:b], state.tokens) for a, b in pairwise(bounds)]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(state.tokens, expected_state.tokens)
    assert not state.tokens[[0, 2]].any()


@all_pairs(size=[*AWKWARD_SIZES, 2560], num_streams=[2, 4])
def test_a_gate_has_the_bits_of_the_definition(runtimes: Runtimes, size: int, num_streams: int) -> None:
    key, query = random(1, 3, num_streams * size), random(2, 3, num_streams * size)
    value = random(3, 3, size)
    key[0] = 0  # whose gate has no sign

    def call(runtime: _csrc.Runtime) -> Results:
        out = Output(3, num_streams * size)
        _csrc.ngram_gate(runtime, key, query, value, out.rows)
        return (out.checked(),)

    (found,) = run_everywhere(call, runtimes)
    assert same_bits(found, ngram_gate_exact(key, query, value))
    torch.testing.assert_close(found, ngram_gate(key, query, value), rtol=1e-4, atol=1e-5)


@all_pairs(
    width=[1, 17, 1024, 2050], taps=[(4, 3), (2, 1), (5, 4), (3, 8)], bounds=[(0, 30), (0, 1, 4, 15, 30)]
)
def test_a_convolution_has_the_bits_of_the_definition(
    runtimes: Runtimes, width: int, taps: tuple[int, int], bounds: tuple[int, ...]
) -> None:
    num_taps, dilation = taps
    streams, gated, normed = (random(seed, 30, width) for seed in (1, 2, 3))
    weights, history = random(4, width, num_taps), (num_taps - 1) * dilation
    expected_state = NgramState(state_of().tokens, random(5, 3, history, width))
    expected = ngram_conv_exact(streams, gated, normed, weights, dilation, expected_state, chain(30))

    def call(runtime: _csrc.Runtime) -> Results:
        state, outs = random(5, 3, history, width), []
        for a, b in pairwise(bounds):
            out = Output(b - a, width)
            _csrc.ngram_conv(
                runtime, streams[a:b], gated[a:b], normed[a:b], weights, dilation, state,
                torch.ones(b - a, dtype=torch.int32), out.rows,
            )  # fmt: skip
            outs.append(out.checked())
        return torch.cat(outs), state

    found, state = run_everywhere(call, runtimes)
    assert same_bits(found, expected)
    assert same_bits(state, expected_state.conv)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_a_commit_leaves_the_states_of_a_chain(runtimes: Runtimes, count: int) -> None:
    kept_tokens = torch.arange(20, dtype=torch.int32) + 1
    kept_rows, sources = random(1, 20, 7), torch.randperm(20)[:count].to(torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    path = CommittedPath(one, torch.tensor([count]), one, sources, sources, one)
    expected = NgramState(state_of().tokens, random(2, 3, 9, 7), kept_tokens, kept_rows)
    ReferenceOps(exact=True).commit_ngram(expected, path)

    def call(runtime: _csrc.Runtime) -> Results:
        tokens, conv = state_of().tokens, random(2, 3, 9, 7)
        _csrc.commit_ngram(runtime, kept_tokens, kept_rows, tokens, conv, one, sources)
        return tokens, conv

    tokens, conv = run_everywhere(call, runtimes)
    assert same_bits(tokens, expected.tokens)
    assert same_bits(conv, expected.conv)


@pytest.fixture
def table_path(tmp_path: Path) -> Path:
    path = tmp_path / "table"
    blocks = np.random.default_rng(0).integers(0, 256, (NUM_ROWS, ROW_BYTES), np.uint8)
    blocks[:, :2] = np.array([1.0], np.float16).view(np.uint8)
    path.write_bytes(bytes(100) + blocks.tobytes())
    return path


def open_table(path: Path, cache_bytes: int) -> _csrc.NgramTable:
    with path.open("rb") as file:
        return _csrc.NgramTable(file.fileno(), 100, 8, NUM_ROWS, 32, ROW_BYTES, cache_bytes)


def rows_of(runtime: _csrc.Runtime, table: _csrc.NgramTable, ids: np.ndarray) -> np.ndarray:
    out = np.full((len(ids), ids.shape[1] * 32), np.nan, np.float32)
    _csrc.ngram_rows(runtime, table, ids.astype(np.int32), out)
    return out


@pytest.mark.parametrize("cache_bytes", [0, 500, 2000, 10**6])
def test_rows_are_those_of_the_file_whatever_is_kept(
    runtimes: Runtimes, table_path: Path, cache_bytes: int
) -> None:
    values = np.frombuffer(table_path.read_bytes()[100:], np.int8).reshape(NUM_ROWS, ROW_BYTES)[:, 2:]
    random_ids = np.random.default_rng(1)
    for runtime in runtimes:
        table = open_table(table_path, cache_bytes)
        assert table.cache_bytes <= cache_bytes
        for _ in range(5):
            ids = random_ids.integers(0, random_ids.choice([20, NUM_ROWS]), (40, 4))
            assert np.array_equal(rows_of(runtime, table, ids).reshape(40, 4, 32), values[ids])
        assert table.hits + table.misses == 5 * 160
        assert (table.hits > 0) == (cache_bytes > 0)
        assert table.problem == 0


def test_rows_that_are_used_stay(fastest: _csrc.Runtime, table_path: Path) -> None:
    """Beside a stream of others that would each be the first to go."""
    table, often = open_table(table_path, 20_000), np.array([[3, 500]])
    for row in range(0, NUM_ROWS, 2):
        rows_of(fastest, table, often)
        rows_of(fastest, table, np.array([[row, row + 1]]))
    rows_of(fastest, table, often)
    assert table.misses == NUM_ROWS, "every row was read once from the file"
    assert table.cache_bytes < NUM_ROWS * ROW_BYTES


def test_fl01_a_table_that_shrinks_is_noticed(fastest: _csrc.Runtime, table_path: Path) -> None:
    table = open_table(table_path, 0)
    os.truncate(table_path, 100 + 10 * ROW_BYTES)
    rows_of(fastest, table, np.array([[9, 0]]))
    assert table.problem == 0
    rows_of(fastest, table, np.array([[9, 10]]))
    assert table.problem == -1


def test_what_is_refused(fastest: _csrc.Runtime, table_path: Path) -> None:
    table = open_table(table_path, 0)
    with pytest.raises(ValueError, match="a row lies outside the table"):
        rows_of(fastest, table, np.array([[0, NUM_ROWS]]))
    with pytest.raises(ValueError, match="a row's state lies outside the states"):
        cpu_ids(fastest, [1, 2], state_of().tokens, state_id=3)
    x, ids = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="over 6 rows 4 apart reaches too far back"):
        _csrc.ngram_conv(fastest, x, x, x, torch.zeros(4, 6), 4, torch.zeros(1, 20, 4), ids, x)
