"""Damaged models through the whole loader and the C++ kernels: an answer or a typed error, never a crash.

`make sanitize` runs this file against the extension built with sanitizers.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from one_sequence import open_cpu

from builders import Dims, write_gguf
from coldstream.errors import ColdstreamError

MUTANTS_PER_SEED = 60
DIMS = Dims(layers=2, interval=2, hidden=256, vocab=288, experts=4, experts_used=2, expert_ffn=256, ffn=256)
SEEDS: dict[str, dict[str, Any]] = {
    "MoE, K-types": {"quant": "Q4_K", "types": {"*down_exps*": "Q6_K", "*attn*": "Q5_K"}},
    "MoE, 32-types": {
        "quant": "Q4_0",
        "types": {"*_exps.weight": "Q5_0", "*ssm*": "Q8_0"},
        "fused_experts": True,
    },
    "MoE, tables": {"quant": "IQ2_S", "types": {"*down*": "IQ1_M", "*attn*": "IQ4_XS", "*up*": "IQ3_XXS"}},
    "dense, floats": {"arch": "qwen35", "quant": "BF16", "types": {"*ffn*": "MXFP4", "*attn*": "Q3_K"}},
}


def mutate(data: bytearray, rng: random.Random) -> None:
    """Changes a few bits anywhere, or overwrites a run of bytes with extremes."""
    for _ in range(rng.choice((1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.5:
        start = rng.randrange(len(data))
        stop = min(len(data), start + rng.choice((4, 64, 4096)))
        data[start:stop] = bytes([rng.choice((0x00, 0x7F, 0x80, 0xFF))]) * (stop - start)


@pytest.mark.parametrize("name", SEEDS)
def test_gg17_damaged_models_answer_or_are_refused(
    name: str, tmp_path: Path, part_of_examples: slice
) -> None:
    path = tmp_path / "seed.gguf"
    write_gguf(path, dims=DIMS, **SEEDS[name])
    original = path.read_bytes()
    rng = random.Random(name)
    outcomes = {"answered": 0, "refused": 0}
    for number in range(MUTANTS_PER_SEED):
        data = bytearray(original)
        mutate(data, rng)
        if number not in range(MUTANTS_PER_SEED)[part_of_examples]:
            continue
        mutant = tmp_path / "mutant.gguf"
        mutant.write_bytes(data)
        try:
            with open_cpu(mutant, threads=2, context_length=16) as runner:
                logits = runner.prefill([1, 2, 3])
                assert logits.shape == (runner.spec.vocab_size,), number
            outcomes["answered"] += 1
        except ColdstreamError:
            outcomes["refused"] += 1
    assert outcomes["answered"] > 0
