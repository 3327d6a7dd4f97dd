"""Draft trees and several sequences in one step on a GPU: the bits of plain decoding on the CPU."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from cuda_runner_cases import open_cuda, open_partly
from one_sequence import OneSequence, open_cpu
from runner_cases import MIXED_LAYERS_OF_A_GPU, write_mixed_layers
from tree_cases import (
    CONTEXT,
    LENGTHS,
    Oracle,
    Prompts,
    Tree,
    check_batch_of_trees,
    check_mixed_lengths,
    prompt,
)

from coldstream.assets import demo_model_path
from coldstream.experts.prefetch import Prefetching
from coldstream.kvcache import Batch, CacheSize, Segment

pytestmark = pytest.mark.gpu

SIZE = CacheSize.of(len(LENGTHS) + 32, CONTEXT, num_trees=8)
CPU_SIZE = CacheSize.of(len(LENGTHS) + 64, CONTEXT, num_trees=8)


class Model(NamedTuple):
    path: Path
    kv_type: str
    oracle: Oracle


@pytest.fixture(scope="module", params=MIXED_LAYERS_OF_A_GPU, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    arch, kv_type = request.param
    path = write_mixed_layers(tmp_path_factory.mktemp("models"), arch)
    with open_cpu(path, threads=1, context_length=CONTEXT, cache_size=CPU_SIZE, kv_type=kv_type) as runner:
        yield Model(path, kv_type, Oracle(runner))


@pytest.mark.parametrize("seed", range(4))
def test_trees_are_plain_decoding(model: Model, seed: int) -> None:
    random = Random(seed)
    with open_cuda(model.path, context_length=CONTEXT, kv_type=model.kv_type, cache_size=SIZE) as runner:
        prompts = Prompts(runner)
        for _ in range(15):
            check_batch_of_trees(prompts, model.oracle, random)


@pytest.fixture(scope="module", params=["demo", "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp"])
def with_experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model whose experts may be anywhere, with the cache that they are taken with."""
    folder = tmp_path_factory.mktemp("models")
    path = demo_model_path() if request.param == "demo" else write_mixed_layers(folder, request.param)
    with open_cpu(path, threads=1, context_length=CONTEXT, cache_size=CPU_SIZE) as runner:
        yield Model(path, "i16", Oracle(runner))


@pytest.mark.parametrize(
    ("share", "streamed", "prefetching"),
    [(None, 0.0, None), (0.0, 0.0, None), (0.0, 1.0, None), (0.5, 0.5, None), (0.25, 0.0, Prefetching(1, 8))],
    ids=str,
)
def test_trees_wherever_experts_are(
    with_experts: Model, share: float | None, streamed: float, prefetching: Prefetching | None
) -> None:
    if share is None:
        opened = open_cuda(with_experts.path, context_length=CONTEXT, cache_size=SIZE)
    else:
        opened = open_partly(
            with_experts.path, share, streamed=streamed, context_length=CONTEXT, cache_size=SIZE,
            prefetching=prefetching,
        )  # fmt: skip
    random = Random(f"{share} {streamed}")
    with opened as runner:
        prompts = Prompts(runner)
        for _ in range(8):
            check_batch_of_trees(prompts, with_experts.oracle, random, num_trees=4)


def test_32_sequences_of_mixed_lengths_in_one_batch(model: Model) -> None:
    with open_cuda(model.path, context_length=CONTEXT, kv_type=model.kv_type, cache_size=SIZE) as runner:
        check_mixed_lengths(Prompts(runner), model.oracle, Random(32), 32, num_next=4)


def test_a_prompt_beside_rows_of_trees(model: Model) -> None:
    """A step with a long chain, a tree and a short chain, whose rows take different kernels."""
    tree = Tree([5, 6, 7, 8, 9], [-1, 0, 0, 1, -1])
    with open_cuda(model.path, context_length=CONTEXT, kv_type=model.kv_type, cache_size=SIZE) as runner:
        prompts = Prompts(runner)
        for length in (0, 70, 300):
            long, other, short = runner.new_sequence(), prompts.begin(length), prompts.begin(length)
            segments = (
                Segment(long, prompt(130), wanted=range(130)),
                Segment(other, tree.token_ids, tree.parents),
                Segment(short, [1, 2, 3]),
            )
            logits = [np.array(each) for each in runner.step(Batch(segments))]
            assert np.array_equal(logits[0], model.oracle.logits(0, prompt(130))[0])
            for row in range(5):
                path = [tree.token_ids[each] for each in tree.path(row)]
                assert np.array_equal(logits[1][row], model.oracle.logits(length, path)[0][-1])
            assert np.array_equal(logits[2][0], model.oracle.logits(length, [1, 2, 3])[0][-1])
            runner.commit(other, [0, 1, 3])
            (after,) = runner.step(Batch((Segment(other, [2]),)))
            assert np.array_equal(np.array(after)[0], model.oracle.logits(length, [5, 6, 8, 2])[0][-1])
            for sequence in (long, other, short):
                runner.release(sequence)


def test_a_fork_and_a_checkpoint_are_sequences_of_their_own(with_experts: Model) -> None:
    runner: OneSequence
    oracle = with_experts.oracle
    with open_cuda(with_experts.path, context_length=CONTEXT, cache_size=SIZE) as runner:
        sequence = runner.new_sequence()
        runner.runner.extend(sequence, prompt(300))
        fork, checkpoint = runner.fork(sequence), runner.checkpoint(sequence)
        for each, token in ((sequence, 4), (fork, 9)):
            found = np.array(runner.runner.extend(each, [token]))
            assert np.array_equal(found, oracle.logits(300, [token])[0][-1])
        runner.restore(sequence, checkpoint)
        found = np.array(runner.runner.extend(sequence, [7]))
        assert np.array_equal(found, oracle.logits(300, [7])[0][-1])
