"""Kept prefixes on a GPU, in its memory and in tiers: the bits of a prompt computed on the CPU at once."""

from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import open_cuda
from one_sequence import open_cpu
from runner_cases import MIXED_LAYERS, token_ids, write_mixed_layers

from coldstream.kvcache import CacheSize, PrefixCache, PrefixDisk, PrefixRam
from coldstream.models.runner import ModelRunner

CONTEXT = 640
SIZE = CacheSize(num_blocks=6, num_states=4)
IDENTITY = b"the same model"


def through_cache(runner: ModelRunner, cache: PrefixCache, ids: list[int]) -> tuple[int, np.ndarray]:
    """How many tokens were held, and the logits after the prompt."""
    prefix = cache.begin(ids)
    for end in (*prefix.checkpoints, len(ids)):
        logits = np.array(runner.extend(prefix.sequence, ids[prefix.sequence.length : end]))
        if end < len(ids):
            cache.keep(ids, prefix.sequence)
    runner.release(prefix.sequence)
    return prefix.length, logits


def check_prefixes(tmp_path: Path, arch: str, kv_type: str, count: int) -> None:
    """From its memory, after it was needed for others from RAM, and from files that the CPU wrote."""
    path = write_mixed_layers(tmp_path, arch)
    ids, first = token_ids(count), count - 200
    options = {"context_length": CONTEXT, "kv_type": kv_type, "cache_size": SIZE}
    with open_cpu(path, threads=2, **options) as cpu:
        runner = cpu.runner
        cold = runner.logits(ids)[-1]
        cache = PrefixCache(runner, max_states=3, tiers=[PrefixDisk(tmp_path, IDENTITY, 1 << 30)])
        assert through_cache(runner, cache, ids[:first])[0] == 0
        cache.close()
    with open_cuda(path, **options) as gpu:
        runner = gpu.runner
        tiers = [PrefixRam(1 << 30), PrefixDisk(tmp_path, IDENTITY, 1 << 30)]
        cache = PrefixCache(runner, max_states=3, tiers=tiers)
        for held in (first - 1, count - 1, count - 1):
            length, logits = through_cache(runner, cache, ids)
            assert length == held
            assert np.array_equal(logits, cold)
        assert cache.make_room(SIZE)
        length, logits = through_cache(runner, cache, ids)
        assert length == count - 1
        assert np.array_equal(logits, cold)
        assert cache.statistics().restored == 2
        cache.close()
        assert runner.free.num_blocks == SIZE.num_blocks


@pytest.mark.gpu
@pytest.mark.parametrize(("arch", "kv_type"), MIXED_LAYERS)
def test_prefixes_on_a_gpu_give_the_bits_of_the_cpu(tmp_path: Path, arch: str, kv_type: str) -> None:
    check_prefixes(tmp_path, arch, kv_type, 600)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_prefixes_of_a_model_with_ngrams_on_the_host(tmp_path: Path) -> None:
    """Whose state also has the last tokens and rows of its convolution."""
    check_prefixes(tmp_path, "qwen4exp", "i16", 500)
