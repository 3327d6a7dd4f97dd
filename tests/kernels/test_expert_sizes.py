"""Experts whose rows are no multiple of 256, as models have them: every kernel against the definition.

The sizes leave what those of the models leave of 256: 2880 leaves 64, 640 leaves 128, 704 leaves 192.
"""

import pytest
import torch
from cpu_cases import same_bits
from glu_cases import CLAMPED, EXACT, GEGLU, Sizes, Types, check_on_gpu, on_cpu, random_experts, random_ids
from quant_cases import VECTOR_TIERS
from random_blocks import activations

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.ops import SWIGLU, Activation, ExpertWeights, Routing

Q4K, Q50, Q51, Q8 = QuantType.Q4_K, QuantType.Q5_0, QuantType.Q5_1, QuantType.Q8_0
MXFP4, IQ4_NL = QuantType.MXFP4, QuantType.IQ4_NL
# (activation, whether there are biases, types, (experts, hidden size, FFN size))
MODELS: dict[str, tuple[Activation, bool, Types, Sizes]] = {
    "gpt-oss": (CLAMPED, True, (MXFP4, MXFP4, MXFP4), (4, 320, 320)),
    "gpt-oss in Q8_0 and Q5_0": (CLAMPED, True, (Q8, Q8, Q50), (4, 320, 320)),
    "qwen4exp": (SWIGLU, False, (Q4K, Q4K, Q50), (4, 512, 384)),
    "qwen4exp in IQ4_NL": (SWIGLU, False, (Q4K, Q4K, IQ4_NL), (4, 256, 128)),
    "gemma4": (GEGLU, False, (Q4K, Q4K, Q51), (4, 256, 448)),
    "gemma4 in Q8_0": (GEGLU, False, (Q8, Q8, Q8), (4, 512, 192)),
    "gemma4's dense network": (GEGLU, False, (Q8, Q8, Q8), (3, 256, 320)),
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def experts(name: str) -> ExpertWeights:
    activation, has_biases, types, sizes = MODELS[name]
    return random_experts(types, sizes, activation, has_biases=has_biases)


@EVERY_MODEL
@pytest.mark.parametrize("tier", ["generic", *VECTOR_TIERS])
def test_every_tier(name: str, tier: str) -> None:
    weights = experts(name)
    num_experts, _, cols = weights.gate.shape
    for rows in (1, 3, 8, 9, 40, 70):
        x, ids = activations(rows, rows, cols), random_ids(rows, 2, num_experts, seed=rows)
        expected = EXACT.experts(x, Routing(ids, None, None), weights).routed
        for threads in (1, 3):
            assert same_bits(on_cpu(_csrc.Runtime(threads, tier), x, ids, weights), expected), rows


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("host")
@EVERY_MODEL
@pytest.mark.parametrize("rows", [1, 7, 11, 32, 45])
def test_every_kernel_of_a_gpu(name: str, rows: int) -> None:
    check_on_gpu(rows, experts(name))


@pytest.mark.parametrize("tier", VECTOR_TIERS)
def test_a_whole_expert_of_gpt_oss(tier: str) -> None:
    """Of its real size, against plain loops."""
    weights = random_experts((MXFP4, MXFP4, Q50), (2, 2880, 2880), CLAMPED, has_biases=True)
    for rows in (1, 5, 20):
        x = activations(rows, rows, 2880)
        ids = torch.tensor([[1, 0]] * rows, dtype=torch.int32)
        plain, fast = (on_cpu(_csrc.Runtime(2, each), x, ids, weights) for each in ("generic", tier))
        assert same_bits(fast, plain)
