"""C++ attention over integers, in batches and contexts of up to 262,144 positions: the definition's bits."""

from functools import partial

import pytest
import torch
from attention_batches import BatchCase, Kind, Part, line, random_tree, some_kinds, some_parts
from attention_cases import EPS, Case, make_case, records
from cpu_cases import Output, Results, run_everywhere, same_bits
from deep_attention import LARGEST_CONTEXT, fast_definition, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels import _csrc
from coldstream.kernels.attention.exact import attention_exact, first_position
from coldstream.kernels.ops import BLOCK_POSITIONS, AttentionHeads, Caches, Rows

Runtimes = list[_csrc.Runtime]
INTEGER_TYPES = ("i16", "i8", "i4", "i3")
MOST_ROWS = 64
COUNTS = (64, 9, 8, 2, 1)  # rows of a call, which ends with the last row
SAMPLE = [0, 56, 63]  # the first of 64 rows, the first of 8, and the last
SHALLOW = 40_000  # positions up to which two queries share a head of keys and values, beyond only one
SHALLOW_POSITIONS = 3000  # up to which all rows are compared with the definition, beyond only the sample


@pytest.fixture(scope="module")
def tiers(runtimes: Runtimes) -> Runtimes:
    """Every tier on one thread, and the best one on several."""
    return [*(runtime for runtime in runtimes if runtime.threads == 1), runtimes[-1]]


def deep_case(name: str, last: int, window: int | None) -> Case:
    """Rows up to position `last`."""
    heads = {"num_heads": 1 if last > SHALLOW else 2, "num_kv_heads": 1, "head_dim": 32}
    return make_case((0, last + 1 - MOST_ROWS, MOST_ROWS), cache_name=name, window=window, **heads)


def deep_caches(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What no row sees, and the rows' own places, decode to NaN."""
    first = int(case.positions[0])
    unseen = case.cache_type.encode(torch.full((case.head_dim,), torch.nan))
    caches = []
    for seed in (1, 2):
        cache = random_rows(case.cache_name, (1, case.num_positions), case.num_kv_heads, case.head_dim, seed)
        cache[0, : first_position(first, case.window)] = unseen
        cache[0, first:] = unseen
        caches.append(cache)
    return caches[0], caches[1]


def expected_rows(case: Case, rows: list[int]) -> Results:
    """The results of some rows by the definition, and what all rows leave at their places in the caches."""
    query_gate, key, value, *norms, angles = case.inputs()
    caches = deep_caches(case)
    with fast_definition():
        # Writes keys and values; only the wanted rows see more than themselves.
        alone = records(query_gate, key, value, *norms, angles, window=1)
        attention_exact(*alone, Caches(*caches), case.rows)
        wanted = (query_gate[rows], key[rows], value[rows], *norms, angles[rows])
        out = attention_exact(
            *records(*wanted, window=case.window),
            Caches(*caches),
            Rows(case.positions[rows], case.state_ids[rows]),
        )
    return out, *(cache[0, int(case.positions[0]) :] for cache in caches)


def run_last(
    runtime: _csrc.Runtime, case: Case, caches: tuple[torch.Tensor, torch.Tensor], count: int
) -> Results:
    """Only the last `count` rows; the caches have the keys and values of the others."""
    unseen = case.cache_type.encode(torch.full((case.head_dim,), torch.nan))
    part = slice(MOST_ROWS - count, MOST_ROWS)
    for cache in caches:
        cache[0, case.positions[part].long()] = unseen
    query_gate, key, value, q_norm, k_norm, angles = case.inputs()
    out = Output(count, case.num_heads * case.head_dim)
    _csrc.attention(
        runtime, query_gate[part], key[part], value[part], angles[part],
        AttentionHeads(q_norm, k_norm, EPS, window=case.window), *caches,
        case.positions[part], case.state_ids[part], out.rows,
    )  # fmt: skip
    return out.checked(), *(cache[0, int(case.positions[0]) :].clone() for cache in caches)


# Each depth between the least and the most with two of the types.
@pytest.mark.sharded
@pytest.mark.parametrize(
    ("name", "last", "window"),
    [
        (name, last, window)
        for i, name in enumerate(INTEGER_TYPES)
        for last, window in (
            (2048, None),
            (32_768 if i % 2 else 131_072, None),
            (LARGEST_CONTEXT - 1, None),
            (LARGEST_CONTEXT - 1, 300),
            (LARGEST_CONTEXT - 1, 4096),
        )
    ],
)
def test_deep_rows_have_the_bits_of_the_definition(
    tiers: Runtimes, name: str, last: int, window: int | None
) -> None:
    case = deep_case(name, last, window)
    compared = list(range(MOST_ROWS)) if min(last, window or last) < SHALLOW_POSITIONS else SAMPLE
    expected, *places = expected_rows(case, compared)
    caches = deep_caches(case)
    outputs = []
    for count in COUNTS:
        run = partial(run_last, case=case, caches=caches, count=count)
        out, *written = run_everywhere(run, tiers)
        assert all(same_bits(a, b) for a, b in zip(places, written, strict=True))
        outputs.append(out)
        for row, wanted in zip(compared, expected, strict=True):
            if row >= MOST_ROWS - count:
                assert same_bits(out[row - MOST_ROWS], wanted), (count, row)
    assert all(same_bits(out, outputs[0][-len(out) :]) for out in outputs)


def check(tiers: Runtimes, case: BatchCase) -> None:
    with fast_definition():
        expected = case.expected()
    found = run_everywhere(case.on_cpu, tiers)
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("num_rows", "committed"), [(1, 700), (3, 200), (40, 500)])
def test_heads_of_keys_are_divided_in_any_way(threads: int, num_rows: int, committed: int) -> None:
    """As many tasks as workers want have one head of five to all."""
    for parents in (None, line(num_rows)):
        case = BatchCase([Part(committed, num_rows, parents)], "i8", (10, 5, 16), seed=threads)
        check([_csrc.Runtime(threads, "auto")], case)


@pytest.mark.sharded
@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_any_batch_has_the_bits_of_the_definition(tiers: Runtimes, name: str) -> None:
    """Up to three sequences with up to 64 rows each, in chains or draft trees."""

    @settings(max_examples=7)
    @given(
        parts=some_parts(most_rows=MOST_ROWS),
        heads=st.sampled_from([(4, 2, 64), (3, 3, 32), (6, 1, 96)]),
        window=st.sampled_from([None, None, 1, 60, 300]),
        seed=st.integers(0, 99),
        kind=some_kinds(),
    )
    def check_all(
        parts: list[Part],
        heads: tuple[int, int, int],
        window: int | None,
        seed: int,
        kind: Kind,
    ) -> None:
        check(tiers, BatchCase(parts, name, heads, window, seed, kind=kind))

    check_all()


@pytest.mark.sharded
@pytest.mark.parametrize("name", INTEGER_TYPES)
@pytest.mark.parametrize(
    ("committed", "num_rows", "window"),
    [(250, 64, None), (250, 64, 20), (500, 64, 300), (500, 8, None), (500, 8, 300)],
)
def test_trees_have_the_bits_of_the_definition(
    tiers: Runtimes, name: str, committed: int, num_rows: int, window: int | None
) -> None:
    """From one chunk of positions into the next, and at the beginning of windows."""
    check(tiers, BatchCase([random_tree(committed, num_rows, seed=4)], name, (2, 1, 32), window))


@pytest.mark.sharded
@pytest.mark.parametrize("name", INTEGER_TYPES)
@pytest.mark.parametrize(
    ("committed", "num_rows", "window"),
    [
        (32_760, 9, None),
        (LARGEST_CONTEXT - 3, 3, None),
        (LARGEST_CONTEXT - 9, 9, 300),
    ],
)
def test_deep_trees_have_the_bits_of_the_definition(
    tiers: Runtimes, name: str, committed: int, num_rows: int, window: int | None
) -> None:
    most_positions = -(-(committed + num_rows) // BLOCK_POSITIONS) * BLOCK_POSITIONS
    tree = random_tree(committed, num_rows, seed=5)
    check(tiers, BatchCase([tree], name, (1, 1, 32), window, 1, most_positions))
