"""Attention of a GPU to blocks that an indexer has chosen, and the indexer's kernels: the definition's bits.

On the host, and on a GPU where there is one.
"""

from dataclasses import replace

import pytest
import torch
from attention_batches import (
    LIMITS,
    WITH_WARPGROUPS,
    BatchCase,
    Kind,
    Part,
    check_launched,
    line,
    random_tree,
    some_parts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from indexer_cases import IndexCase

from coldstream.kernels import _csrc
from coldstream.kernels.attention.arguments import AttentionShape, DecodeWorkspace, IntegerQueries
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.cuda import IntegerKernels
from coldstream.kernels.cuda.limits import DeviceLimits, device_limits
from coldstream.kernels.indexer.cuda import score_bytes
from coldstream.kernels.indexer.records import INDEXED_BLOCK_SIZES
from coldstream.kernels.indexer.workspace_sizes import rows_at_once
from host_device import TURING_LIMITS

SHARES = (0.0, 0.03, 0.9)  # of blocks that a row sees beside one
SMALL, WIDE = (4, 2, 64), (4, 2, 128)
Form = tuple[list[Part], tuple[int, int, int], DeviceLimits, bool]
# Rows, heads, the device and whether it counts the rows as far into a text, by the kernel that takes them.
DECODE: dict[str, Form] = {
    "rows": ([Part(700, 1), Part(90, 1)], SMALL, LIMITS, True),
    "chains": ([Part(500, 3), Part(62, 4, line(4))], SMALL, LIMITS, False),
    "a pair of heads": ([Part(700, 1)], (2, 2, 256), LIMITS, True),
}
PREFILL: dict[str, Form] = {
    "trees": ([random_tree(509, 12, 3), Part(300, 1)], SMALL, LIMITS, True),
    "a tree of two tiles": ([random_tree(250, 60, 5)], SMALL, LIMITS, True),
    "a prompt": ([Part(600, 70)], SMALL, LIMITS, True),
    "prompts": ([Part(500, 60), Part(0, 20)], SMALL, LIMITS, False),
    "heads of 512": ([Part(300, 3), Part(60, 5, (-1, 0, 0, 2, 2))], (2, 1, 512), LIMITS, True),
}
WARPGROUPS: dict[str, Form] = {
    "one": ([Part(700, 5), Part(40, 1)], WIDE, WITH_WARPGROUPS, True),
    "two": ([Part(250, 20), Part(600, 50)], WIDE, WITH_WARPGROUPS, True),
}
FORMS = (*DECODE.values(), *PREFILL.values(), *WARPGROUPS.values())
LONG = [Part(700, 20), random_tree(509, 40, 1), Part(0, 64)]
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> str:
    """Where kernels run, and arrays lie."""
    name = str(request.param)
    if name == "cpu":
        request.getfixturevalue("host")
    return name


def check_attention(form: Form, share: float) -> None:
    """Workspaces hold NaN at first: no merge reads a chunk of which a row sees nothing."""
    parts, heads, limits, is_deep = form
    for number, cache_name in enumerate(["i16", "i8"]):
        kind = Kind(has_sinks=number == 1)
        choice = INDEXED_BLOCK_SIZES[len(parts) + number], share
        case = BatchCase(parts, cache_name, heads, seed=number, kind=kind, is_deep=is_deep, choice=choice)
        check_launched(case, case.expected(), limits)


@pytest.mark.sharded(3)
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("form", DECODE.values(), ids=DECODE)
def test_decode_of_chosen_blocks(form: Form, share: float) -> None:
    check_attention(form, share)


@pytest.mark.sharded(5)
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("form", PREFILL.values(), ids=PREFILL)
def test_trees_and_prompts_of_chosen_blocks(form: Form, share: float) -> None:
    check_attention(form, share)


@pytest.mark.sharded(2)
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("form", WARPGROUPS.values(), ids=WARPGROUPS)
def test_warpgroups_of_chosen_blocks(form: Form, share: float) -> None:
    check_attention(form, share)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (24, 2, 256), (16, 2, 512)])
def test_a_gpu_attends_to_them_too(cache_name: str, heads: tuple[int, int, int]) -> None:
    for number, (parts, _, _, is_deep) in enumerate(FORMS):
        for share in SHARES:
            choice = INDEXED_BLOCK_SIZES[number % len(INDEXED_BLOCK_SIZES)], share
            case = BatchCase(parts, cache_name, heads, seed=number, is_deep=is_deep, choice=choice)
            check_launched(case, case.expected(), device_limits(), "cuda")


def test_whoever_sees_all_has_the_bits_of_attention_without_a_choice(device: str) -> None:
    limits = LIMITS if device == "cpu" else device_limits()
    case = BatchCase([Part(400, 2), random_tree(300, 9, 2)], "i16", (4, 2, 64), choice=(4, 1.0))
    expected = replace(case, choice=None).expected()
    check_launched(case, expected, limits, device)


def test_kernels_of_other_rows_are_refused() -> None:
    case = BatchCase([Part(9, 1)], "i16", (4, 2, 64), choice=(4, 0.5))
    queries = IntegerQueries(torch.empty(1, 4, 2, 64, dtype=torch.int8), torch.empty(1, 4), case.chosen())
    for has_choice, window in ((False, None), (True, 60)):
        shape = AttentionShape(4, 2, 64, CACHE_TYPES["i16"], has_choice=has_choice)
        workspace = DecodeWorkspace(*map(torch.empty, DecodeWorkspace.shapes(shape, 1, 256)))
        with pytest.raises(ValueError, match="a choice of blocks"):
            IntegerKernels(shape, LIMITS).attend(queries, window, case.caches(), case.rows(), workspace)


def check_choice(case: IndexCase, device: str, at_once: int | None = None) -> None:
    words, cache = case.on_gpu(device, at_once)
    expected_words, expected_cache = case.expected()
    assert torch.equal(cache.nan_to_num(), expected_cache.nan_to_num())
    assert torch.equal(words, expected_words)


@pytest.mark.parametrize("block_size", INDEXED_BLOCK_SIZES)
def test_blocks_of_every_size(block_size: int, device: str) -> None:
    """With the scores of some rows at a time."""
    check_choice(IndexCase(LONG, block_size=block_size), device, at_once=50)


@pytest.mark.parametrize(("num_heads", "size"), [(1, 16), (4, 128), (2, 40), (70, 16)])
def test_heads(num_heads: int, size: int, device: str) -> None:
    parts = [Part(259, 5), random_tree(250, 9, 2)]
    check_choice(IndexCase(parts, num_heads, size, num_blocks=16), device)


def test_chains_and_trees_side_by_side(device: str) -> None:
    @settings(max_examples=10 if device == "cpu" else 50, deadline=None)
    @given(some_parts(), st.sampled_from([1, 3, 10]), st.integers(0, 99))
    def check_all(parts: list[Part], num_blocks: int, seed: int) -> None:
        check_choice(IndexCase(parts, num_blocks=num_blocks, seed=seed), device)

    check_all()


def test_of_equal_blocks_the_first_are_chosen(device: str) -> None:
    """All scores are equal, then a key is no number."""
    check_choice(IndexCase([Part(90, 3), Part(600, 12)], has_ties=True), device)
    check_choice(IndexCase([Part(600, 12)], num_blocks=37, has_ties=True), device)
    check_choice(IndexCase([Part(300, 4)], spoilt=7), device)


def test_a_row_of_no_sequence_leaves_the_cache_alone(device: str) -> None:
    case = IndexCase([Part(300, 5)])
    words, cache = case.on_gpu(device, num_padding=3)
    expected_words, expected_cache = case.expected()
    assert torch.equal(cache.nan_to_num(), expected_cache.nan_to_num())
    assert torch.equal(words[:5], expected_words)
    assert not words[5:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 2}, "blocks of 2 positions"),
        ({"size": 136}, "no kernels for heads of 136 values"),
        ({"size": 20}, "no kernels for heads of 20 values"),
        ({"dtype": torch.float32}, "float32 where the kernel reads float16"),
    ],
)
def test_what_no_kernel_takes_is_refused(change: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        replace(IndexCase([Part(8, 4)]), **change).on_gpu()


def test_a_block_that_scores_fits_every_card() -> None:
    assert score_bytes(128, 32) <= TURING_LIMITS.shared_per_block
    assert rows_at_once(2048, 512) == 2048
    assert rows_at_once(2048, 65536) == 64
    assert rows_at_once(9, 8 << 20) == 1


@pytest.mark.gpu
def test_choices_far_into_a_text(fastest: _csrc.Runtime) -> None:
    """More scores than threads of a block, and 512 blocks chosen."""
    case = IndexCase([Part(30000, 9)], 4, 128, num_blocks=512, most_positions=32768)
    words, cache = case.on_gpu("cuda")
    expected_words, expected_cache = case.on_cpu(fastest)
    assert torch.equal(words, expected_words)
    assert torch.equal(cache.nan_to_num(), expected_cache.nan_to_num())
