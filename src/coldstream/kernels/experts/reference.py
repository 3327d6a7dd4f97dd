"""The routed experts of a mixture-of-experts FFN, and the sum that joins them with the shared expert.

The outputs of a token's experts are kept apart until they are summed by rank, so that the sum does not
depend on who computed which expert.
"""

from collections.abc import Callable

import torch

from coldstream.kernels.linear.reference import linear
from coldstream.kernels.ops import Weight
from coldstream.kernels.router.reference import check_topk_ids
from coldstream.kernels.swiglu.reference import swiglu

Function = Callable[..., torch.Tensor]


def routed_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    gate: Weight,
    up: Weight,
    down: Weight,
    multiply: Function = linear,
    activate: Function = swiglu,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """down_e(silu(gate_e x) · up_e x) for each chosen expert e, kept apart: x [T, E], ids [T, K] → [T, K, E].

    gate and up are [experts, F, E], down is [experts, E, F]; `multiply` and `activate` say how one expert's
    products and activation are computed. biases: of gate and up, [experts, F] each, added before the
    activation. ValueError if shapes disagree or an id names no expert.
    """
    num_experts, ffn_size, hidden_size = gate.shape
    fits = up.shape == gate.shape and tuple(down.shape) == (num_experts, hidden_size, ffn_size)
    if not fits or x.shape[-1] != hidden_size:
        raise ValueError(
            f"experts of shapes gate {tuple(gate.shape)}, up {tuple(up.shape)} and down {tuple(down.shape)} "
            f"do not fit each other and inputs of {x.shape[-1]} values"
        )
    check_topk_ids(topk_ids, num_experts)
    num_tokens, num_ranks = topk_ids.shape
    flat_ids = topk_ids.flatten()
    outputs, pairs = [x[:0]], [torch.empty(0, dtype=torch.int64)]
    for expert in sorted(set(flat_ids.tolist())):
        chosen = (flat_ids == expert).nonzero().flatten()
        inputs = x[chosen // num_ranks]
        parts = [multiply(inputs, matrix[expert]) for matrix in (gate, up)]
        if biases is not None:
            parts = [part + bias[expert] for part, bias in zip(parts, biases, strict=True)]
        hidden = activate(*parts)
        outputs.append(multiply(hidden, down[expert]))
        pairs.append(chosen)
    return torch.cat(outputs)[torch.cat(pairs).argsort()].reshape(num_tokens, num_ranks, hidden_size)


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a · b + c, differentiable."""
    return a * b + c


def combine_experts(
    routed: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    fma: Function = multiply_add,
    sigmoid: Function = torch.sigmoid,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Σ_k weight_k · routed_k in rank order, then + sigmoid(shared_gate) · shared.

    routed [T, K, E], topk_weights [T, K], shared [T, E], shared_gate [T, 1] → [T, E]. With None for
    the gate + shared, with None for the last two the sum alone. bias [T, K, E]: of each row's expert, is
    first added to routed.
    """
    if bias is not None:
        routed = routed + bias
    total = torch.zeros_like(routed[:, 0])
    for rank in range(routed.shape[1]):
        total = fma(topk_weights[:, rank : rank + 1], routed[:, rank], total)
    if shared is None:
        return total
    return total + shared if shared_gate is None else fma(sigmoid(shared_gate), shared, total)
