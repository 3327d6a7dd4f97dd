"""Indexers: what rows choose, and attention to what they have chosen, to the bit on every tier."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_batches import BatchCase, Part, line, random_tree, some_parts
from cpu_cases import random, run_everywhere, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from indexer_cases import IndexCase

from coldstream.kernels import _csrc
from coldstream.kernels.attention.reference import attention
from coldstream.kernels.indexer.records import ChosenBlocks
from coldstream.kernels.indexer.reference import (
    best_blocks,
    choose_blocks,
    scores,
    scores_exact,
    seen_positions,
)
from coldstream.kernels.ops import Caches

Runtimes = list[_csrc.Runtime]
INPUTS = ("query", "key", "angles", "block_angles")
LONG = [Part(700, 20), random_tree(509, 40, 1), Part(0, 64)]


def check(runtimes: Runtimes, case: IndexCase) -> None:
    words, cache = run_everywhere(case.on_cpu, runtimes)
    expected_words, expected_cache = case.expected()
    assert torch.equal(words, expected_words)
    assert torch.equal(cache.nan_to_num(), expected_cache.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64])
def test_every_tier_chooses_the_blocks_of_the_definition(
    runtimes: Runtimes, dtype: torch.dtype, block_size: int
) -> None:
    check(runtimes, IndexCase(LONG, dtype=dtype, block_size=block_size))


@pytest.mark.parametrize(("num_heads", "size"), [(1, 16), (4, 128), (2, 40), (70, 16)])
def test_heads(runtimes: Runtimes, num_heads: int, size: int) -> None:
    check(runtimes, IndexCase([Part(259, 5), random_tree(250, 9, 2)], num_heads, size, num_blocks=16))


@settings(max_examples=15, deadline=None)
@given(parts=some_parts(), num_blocks=st.sampled_from([1, 3, 10]), seed=st.integers(0, 99))
def test_chains_and_trees_side_by_side(
    runtimes: Runtimes, parts: list[Part], num_blocks: int, seed: int
) -> None:
    check(runtimes, IndexCase(parts, num_blocks=num_blocks, seed=seed))


def test_of_equal_blocks_the_first_are_chosen(runtimes: Runtimes) -> None:
    case = IndexCase([Part(90, 3), Part(600, 12)], has_ties=True)
    check(runtimes, case)
    words, _ = case.expected()
    # At position 90 three positions lie behind the last complete block, which is number 21; at 91 none.
    assert words[:3, 0].tolist() == [0b111 | 1 << 22, 0b111, 0b111 | 1 << 23]
    assert best_blocks(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]), 3).tolist() == [
        True,
        True,
        False,
        True,
        False,
    ]


def test_a_short_text_is_seen_whole() -> None:
    """Up to the positions behind the last block that may be chosen; one more leaves a block out."""
    words, _ = IndexCase([Part(0, 17)], num_blocks=3).expected()
    seen = [seen_positions(ChosenBlocks(words, 4), row, row + 1) for row in range(17)]
    assert [bool(each.all()) for each in seen] == [True] * 15 + [False] * 2
    assert seen[15].sum() == 12
    assert seen[16].sum() == 13


def test_the_definition_to_the_bit_is_that_of_floats() -> None:
    case = IndexCase(LONG, dtype=torch.float32)
    words, cache = case.expected()
    near = case.cache()
    of_floats = choose_blocks(case.inputs(), case.heads(), near, case.rows()).words
    assert torch.allclose(near.nan_to_num(), cache.nan_to_num(), atol=1e-5)
    assert torch.equal(of_floats, words)
    query, keys = random(1, 4, 48), random(2, 30, 48)
    assert torch.allclose(scores(query, keys), scores_exact(query, keys), atol=1e-4)


def test_a_key_that_is_no_number_is_never_better(runtimes: Runtimes) -> None:
    """It is that of block 1."""
    case = IndexCase([Part(300, 4)], spoilt=7)
    check(runtimes, case)
    words, _ = case.expected()
    assert not (words[:, 0] >> 1 & 1).any()


@settings(max_examples=15, deadline=None)
@given(
    bounds=st.sets(st.integers(1, 59), max_size=6),
    first=st.integers(0, 600),
    tier=st.sampled_from(_csrc.supported_tiers()),
)
def test_no_chunking_changes_a_choice(runtimes: Runtimes, bounds: set[int], first: int, tier: str) -> None:
    """A block that one call begins and another ends has the key that it has in one call."""
    (alone,) = [each for each in runtimes if each.tier == tier and each.threads == 1]
    case = IndexCase([Part(first, 60)])
    words, cache = case.on_cpu(alone)
    inputs, heads, rows = case.inputs(), case.heads(), case.rows()
    parts, again = [], case.cache()
    ends = sorted({*bounds, 60})
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        part = slice(start, end)
        batch = rows.batch
        assert batch is not None
        parents = batch.parents[part] - start
        parents[0] = -1
        found = torch.empty(end - start, words.shape[1], dtype=torch.int32)
        _csrc.choose_blocks(
            alone, *(getattr(inputs, name)[part] for name in INPUTS), heads, again,
            rows.positions[part], rows.state_ids[part], found,
            _csrc.BatchRows(
                batch.segments[part], batch.tables, batch.indices[part], parents, batch.kept[part]
            ),
        )  # fmt: skip
        parts.append(found)
    assert torch.equal(torch.cat(parts), words)
    assert same_bits(again, cache)


def test_rows_of_a_tree_have_the_choices_of_their_paths(fastest: _csrc.Runtime) -> None:
    """Each of several rows that end a block has a key of its own ancestors for it."""
    tree = Part(301, 12, (-1, 0, 1, 0, 3, 3, 5, 6, -1, 8, 9, 10))
    case = IndexCase([tree], num_blocks=2)
    words, _ = case.on_cpu(fastest)
    inputs, rows = case.inputs(), case.rows()
    assert rows.batch is not None
    for row in range(tree.num_rows):
        path = [row]
        while (parent := tree.parents[path[0]]) >= 0:  # type: ignore[index]
            path.insert(0, parent)
        chain = IndexCase([Part(301, len(path), line(len(path)))], num_blocks=2)
        found = torch.empty(len(path), words.shape[1], dtype=torch.int32)
        of_chain = chain.rows()
        assert of_chain.batch is not None
        batch = replace(of_chain.batch, tables=rows.batch.tables)
        _csrc.choose_blocks(
            fastest, *(getattr(inputs, name)[path].contiguous() for name in INPUTS), case.heads(),
            case.cache(), of_chain.positions, of_chain.state_ids, found,
            _csrc.BatchRows(batch.segments, batch.tables, batch.indices, batch.parents, batch.kept),
        )  # fmt: skip
        assert torch.equal(found[-1], words[row])


CHOSEN_PARTS = [
    [Part(700, 3)],
    [Part(500, 15), Part(0, 30)],
    [random_tree(509, 12, 3), Part(300, 1)],
    [random_tree(250, 5, 4)],
]


@pytest.mark.sharded(3)
@pytest.mark.parametrize("share", [0.02, 0.9])
@pytest.mark.parametrize("cache_name", ["f16", "i16", "i8", "i4"])
def test_attention_to_chosen_blocks(runtimes: Runtimes, cache_name: str, share: float) -> None:
    for number, parts in enumerate(CHOSEN_PARTS):
        case = BatchCase(parts, cache_name, (3, 1, 32), seed=number, choice=(4 << number, share))
        got = run_everywhere(case.on_cpu, runtimes)
        for want, each in zip(case.expected(), got, strict=True):
            assert same_bits(want, each)


@pytest.mark.parametrize("window", [5, 300])
def test_attention_to_chosen_blocks_of_a_window(runtimes: Runtimes, window: int) -> None:
    """Of blocks that all lie before its window a row would see nothing, so that all are chosen."""
    for parts in CHOSEN_PARTS:
        case = BatchCase(parts, "i16", (2, 2, 32), window, choice=(8, 1.0))
        got = run_everywhere(case.on_cpu, runtimes)
        whole = replace(case, choice=None).expected()
        for want, each in zip(whole, got, strict=True):
            assert same_bits(want, each)


@pytest.mark.parametrize("parts", CHOSEN_PARTS)
def test_what_was_not_chosen_does_not_matter(fastest: _csrc.Runtime, parts: list[Part]) -> None:
    """Attention to the chosen positions alone, by floats; and its bits whatever the others hold."""
    case = BatchCase(parts, "f32", (4, 2, 32), choice=(4, 0.1))
    out, *caches = case.on_cpu(fastest)
    near = attention(case.inputs(), case.layer(), case.caches(), case.rows())
    assert torch.allclose(out, near, atol=1e-4)
    rows, changed = case.rows(), Caches(*(cache.clone() for cache in caches))
    assert rows.batch is not None
    seen = torch.zeros(changed.k.shape[:2], dtype=torch.bool)
    chosen = case.inputs().chosen
    assert chosen is not None
    for row, (position, segment) in enumerate(zip(rows.positions, rows.batch.segments, strict=True)):
        committed = parts[segment].committed
        places = torch.arange(committed)[seen_positions(chosen, row, int(position) + 1)[:committed]]
        seen[rows.batch.tables[segment].long()[places // 256], places % 256] = True
    for cache in (changed.k, changed.v):
        cache[~seen] = 7.0
    assert not seen.all()
    assert same_bits(out, case.attend_on_cpu(fastest, changed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 3}, "blocks of 3 positions: they may have 4, 8, 16, 32 or 64"),
        ({"num_blocks": 0}, "chooses nothing"),
        ({"dtype": torch.float64}, "must be float16 or float32"),
    ],
)
def test_bad_arguments_are_refused(fastest: _csrc.Runtime, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(IndexCase([Part(8, 4)]), **change).on_cpu(fastest)


def test_rows_outside_the_cache_are_refused(fastest: _csrc.Runtime) -> None:
    case = IndexCase([Part(8, 4)])
    inputs, cache, rows = case.inputs(), case.cache(), case.rows()
    words = torch.zeros(4, 8, dtype=torch.int32)
    tables = np.array([[0, 99, 1]], np.int32)
    batch = rows.batch
    assert batch is not None
    for positions, table in ((rows.positions + 800, batch.tables.numpy()), (rows.positions, tables + 50)):
        with pytest.raises(ValueError, match=r"(attention|choose_blocks): a "):
            _csrc.choose_blocks(
                fastest, inputs.query, inputs.key, inputs.angles, inputs.block_angles, case.heads(), cache,
                positions, rows.state_ids, words,
                _csrc.BatchRows(batch.segments, table, positions, batch.parents, batch.kept),
            )  # fmt: skip
