"""Models and fixed parts for tests of placement."""

import numpy as np
from hypothesis import strategies as st

from coldstream.placement.plan import FixedPart
from coldstream.placement.sizes import ModelSizes

FINGERPRINT = "ac98d166eabcd4c77c6349aa95570033"


def sizes(*expert_bytes: int, num_experts: int = 4, num_experts_per_tok: int = 1) -> ModelSizes:
    """A model whose experts have these sizes, by layer."""
    return ModelSizes(
        fingerprint=FINGERPRINT,
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        expert_bytes=expert_bytes,
        dense_bytes=1000,
        dense_token_bytes=800,
        kv_token_bytes=4,
        state_bytes=100,
        token_parameters=3000,
        expert_parameters=10,
        attention_width=64,
    )


def fixed(
    *, weights: int = 0, caches: int = 0, workspace: int = 0, ctx_size: int = 16, drafter: int = 0
) -> FixedPart:
    return FixedPart(ctx_size, "f16", 8, weights, caches, workspace, drafter)


@st.composite
def models(draw: st.DrawFn) -> ModelSizes:
    """Few layers of few experts, of one size or two."""
    num_layers, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    kinds = draw(st.lists(st.integers(1, 40), min_size=1, max_size=2))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=num_layers, max_size=num_layers))
    per_tok = draw(st.integers(1, num_experts))
    return sizes(*chosen, num_experts=num_experts, num_experts_per_tok=per_tok)


def random_uses(model: ModelSizes, seed: int) -> np.ndarray:
    """Counts with many equal ones."""
    shape = (model.num_layers, model.num_experts)
    return np.random.default_rng(seed).integers(0, 6, shape).astype(np.float64)
