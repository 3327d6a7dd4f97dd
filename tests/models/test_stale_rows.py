"""Keys and values that a sequence has left behind, or that another one has, never reach a sum.

A NaN times a weight of 0 is a NaN: what is masked must not be multiplied.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_runner_cases import open_cuda
from one_sequence import open_cpu
from runner_cases import FAMILIES, token_ids, write_variant

from coldstream.kernels import _csrc
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS, INTEGER_CACHE_TYPES
from coldstream.kvcache import AttentionState, Batch, CacheSize, Segment
from coldstream.models.runner import ModelRunner
from device_arrays import change

CONTEXT = 700
# Around blocks of 64 positions, chunks of 256, and decode steps.
SIZES = (1, 2, 7, 9, 17, 63, 64, 65, 130, 256, 257, 600)
CPU_SIZES = (1, 9, 65, 257, 600)
# Chunks of rows are those of the other tiers, and long chunks are slow.
GENERIC_SIZES = (1, 9, 65, 257)
# All types of cache with one family, and the others with the one that is the default.
OTHERS = [(family, "i16") for family in FAMILIES[1:]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: write_variant(folder, family) for family in FAMILIES}


def fill_with_nan(tensors: Sequence[Any], state_id: int) -> None:
    """All of a state; the scales of integer types, which are floats in bytes, become NaN too."""

    def fill(values: np.ndarray) -> None:
        values[state_id] = np.nan if values.dtype.kind == "f" else -1

    for tensor in tensors:
        change(tensor, fill)


def answers(runner: ModelRunner, size: int) -> list[np.ndarray]:
    """Logits after a prompt, and after three tokens more."""
    logits = [np.array(runner.prefill(token_ids(size)))]
    return logits + [np.array(runner.decode(token)) for token in (3, 1, 4)]


def assert_same(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert np.isfinite(expected).all()
    assert np.array_equal(actual, expected)


@pytest.mark.sharded(9)
@pytest.mark.parametrize(("family", "kv_type"), [*((FAMILIES[0], name) for name in CACHE_LAYOUTS), *OTHERS])
@pytest.mark.parametrize("tier", _csrc.supported_tiers())
def test_nf01_what_a_reset_leaves_behind_on_a_cpu(
    paths: dict[str, Path], tier: str, family: str, kv_type: str
) -> None:
    options = {"tier": tier, "context_length": CONTEXT, "kv_type": kv_type}
    with open_cpu(paths[family], threads=2, **options) as runner:
        for size in GENERIC_SIZES if tier == "generic" else CPU_SIZES:
            runner.reset()
            expected = answers(runner, size)
            for block in range(runner._sequences.blocks.num_blocks):
                fill_with_nan(
                    [tensor for tensor in runner._sequences.tensors.tensors() if block < len(tensor)], block
                )
            assert np.isnan(runner.prefill([5])).all()
            runner.reset()
            assert_same(answers(runner, size), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "kv_type"), [*((FAMILIES[0], name) for name in INTEGER_CACHE_TYPES), *OTHERS]
)
def test_nf01_what_a_reset_leaves_behind_on_a_gpu(paths: dict[str, Path], family: str, kv_type: str) -> None:
    with open_cuda(paths[family], context_length=CONTEXT, kv_type=kv_type) as runner:
        for size in (*SIZES, *SIZES):  # plainly, then from captured graphs
            runner.reset()
            expected = answers(runner, size)
            fill_with_nan(runner._sequences.tensors.tensors(), 0)
            assert np.isnan(runner.prefill([5])).all()
            runner.reset()
            assert_same(answers(runner, size), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_nf01_sequences_beside_a_damaged_one_keep_their_bits(paths: dict[str, Path], family: str) -> None:
    """In the same step, plainly and from a captured graph."""
    prompts = [token_ids(size) for size in (5, 70, 300, 33)]
    next_ids = (3, 1, 4, 1)
    size = CacheSize.of(2 * len(prompts), CONTEXT)
    with open_cuda(paths[family], context_length=CONTEXT, cache_size=size) as runner:
        for _ in range(3):
            alone, sequences = [], [runner.new_sequence() for _ in prompts]
            for sequence, prompt, token in zip(sequences, prompts, next_ids, strict=True):
                runner.runner.extend(sequence, prompt)
                fork = runner.fork(sequence)
                alone.append(np.array(runner.runner.extend(fork, [token])))
                runner.release(fork)
            damaged = sequences[1]
            runner.release(runner.fork(damaged))
            for layer in runner._sequences.tensors.layers:
                is_attention = isinstance(layer, AttentionState)
                (place,) = damaged.blocks if is_attention else [damaged.state]
                parts = [part for part in (layer, getattr(layer, "ngram", None)) if part is not None]
                own = (field for part in parts for field in vars(part).values())
                fill_with_nan([each for each in own if hasattr(each, "data_ptr")], place)
            segments = [Segment(each, [token]) for each, token in zip(sequences, next_ids, strict=True)]
            together = [np.array(logits)[0] for logits in runner.step(Batch(tuple(segments)))]
            assert np.isnan(together[1]).all()
            for i in (0, 2, 3):
                assert np.array_equal(together[i], alone[i])
            for sequence in sequences:
                runner.release(sequence)
