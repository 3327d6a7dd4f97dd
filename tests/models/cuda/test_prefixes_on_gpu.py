"""Kept prefixes on a GPU, in its memory and in tiers: the bits of a prompt computed on the CPU at once."""

from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import open_cuda
from one_sequence import open_cpu
from runner_cases import MIXED_LAYERS, token_ids, write_mixed_layers

from coldstream.kvcache import CacheSize, PrefixCache, PrefixDisk, PrefixRam
from coldstream.models.runner import ModelRunner

pytestmark = pytest.mark.gpu

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


@pytest.mark.parametrize(("arch", "kv_type"), MIXED_LAYERS)
def test_prefixes_on_a_gpu_give_the_bits_of_the_cpu(tmp_path: Path, arch: str, kv_type: str) -> None:
    """From its memory, after it was needed for others from RAM, and from files that the CPU wrote."""
    path = write_mixed_layers(tmp_path, arch)
    ids = token_ids(600)
    options = {"context_length": CONTEXT, "kv_type": kv_type, "cache_size": SIZE}
    with open_cpu(path, threads=2, **options) as cpu:
        runner = cpu.runner
        cold = runner.logits(ids)[-1]
        cache = PrefixCache(runner, max_states=3, tiers=[PrefixDisk(tmp_path, IDENTITY, 1 << 30)])
        assert through_cache(runner, cache, ids[:400])[0] == 0
        cache.close()
    with open_cuda(path, **options) as gpu:
        runner = gpu.runner
        tiers = [PrefixRam(1 << 30), PrefixDisk(tmp_path, IDENTITY, 1 << 30)]
        cache = PrefixCache(runner, max_states=3, tiers=tiers)
        for held in (399, 599, 599):
            length, logits = through_cache(runner, cache, ids)
            assert length == held
            assert np.array_equal(logits, cold)
        assert cache.make_room(SIZE.num_blocks, SIZE.num_states)
        length, logits = through_cache(runner, cache, ids)
        assert length == 599
        assert np.array_equal(logits, cold)
        assert cache.statistics().restored == 2
        cache.close()
        assert runner.free.num_blocks == SIZE.num_blocks
