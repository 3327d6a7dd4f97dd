"""The choice of a token's experts, and their weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from coldstream.kernels.arithmetic import reference as exact
from coldstream.kernels.arithmetic.reference import softplus
from coldstream.kernels.ops import PLAIN_RULE, ChoiceRule

# Added to the sum of the chosen weights, as the code of GLM-4.5 and DeepSeek-V3 does. It changes no sum of
# 1e-12 and more, and so neither that of a softmax nor, in practice, those of models without it. llama.cpp
# divides by 2^-14 at least, so that all weights of a token become small whose scores are all small.
SUM_EPSILON = 1e-20


@dataclass(frozen=True)
class _Functions:
    """What the choice is composed of, over the last dimension."""

    softmax: Callable[[torch.Tensor], torch.Tensor]
    sigmoid: Callable[[torch.Tensor], torch.Tensor]
    root_of_softplus: Callable[[torch.Tensor], torch.Tensor]
    total: Callable[[torch.Tensor], torch.Tensor]  # [T, n] → [T, 1]


def choose_experts(
    logits: torch.Tensor, num_experts_per_tok: int, rule: ChoiceRule = PLAIN_RULE
) -> tuple[torch.Tensor, torch.Tensor]:
    """The K experts of the best scores, in descending order (ties: lowest id first), and their weights.

    logits [T, experts] → contiguous int32 ids [T, K], weights [T, K]. The scores are those of `rule`: by
    default the weights are a softmax over all experts, renormalised to sum 1.
    """
    functions = _Functions(
        lambda x: x.softmax(dim=-1),
        torch.sigmoid,
        lambda x: torch.nn.functional.softplus(x).sqrt(),
        lambda x: x.sum(dim=-1, keepdim=True),
    )
    return _choose(logits, num_experts_per_tok, rule, functions)


def choose_experts_exact(
    logits: torch.Tensor, num_experts_per_tok: int, rule: ChoiceRule = PLAIN_RULE
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_experts` to the last bit, as docs/arithmetic.md defines it, float32."""
    functions = _Functions(_softmax_exact, exact.sigmoid, _root_of_softplus_exact, _total_exact)
    return _choose(logits, num_experts_per_tok, rule, functions)


def _choose(
    logits: torch.Tensor, num_experts_per_tok: int, rule: ChoiceRule, functions: _Functions
) -> tuple[torch.Tensor, torch.Tensor]:
    spec = rule.spec
    if rule.bias is not None:
        logits = logits + rule.bias
    values = {
        "softmax": functions.softmax,
        "sigmoid": functions.sigmoid,
        "softmax of the chosen": lambda x: x,
        "square root of softplus": functions.root_of_softplus,
    }[spec.gating](logits)
    scores = values if rule.selection_bias is None else values + rule.selection_bias
    if spec.num_groups > 1:
        scores = _of_best_groups(scores, spec.num_groups, spec.num_used_groups)
    ids, _ = largest(scores, num_experts_per_tok)
    weights = values.gather(-1, ids.long())
    if spec.gating == "softmax of the chosen":
        weights = functions.softmax(weights)
    elif spec.normalised:
        weights = weights / (functions.total(weights) + SUM_EPSILON)
    weights = weights * spec.scale
    return ids, weights if rule.expert_scale is None else weights * rule.expert_scale[ids.long()]


def _of_best_groups(scores: torch.Tensor, num_groups: int, num_used_groups: int) -> torch.Tensor:
    """The scores of all experts in the best groups (ties: lowest group first); −∞ for the others."""
    grouped = scores.reshape(len(scores), num_groups, -1)
    best = grouped.sort(dim=-1, descending=True)[0]
    groups, _ = largest(best[..., 0] + best[..., 1], num_used_groups)
    is_used = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, groups.long(), True)
    return torch.where(is_used.unsqueeze(-1), grouped, -torch.inf).flatten(-2)


def _total_exact(x: torch.Tensor) -> torch.Tensor:
    return exact.sum_lanes(x).unsqueeze(-1)


def _softmax_exact(x: torch.Tensor) -> torch.Tensor:
    exponentials = exact.exp(x - x.amax(dim=-1, keepdim=True))
    return exponentials / _total_exact(exponentials)


def _root_of_softplus_exact(x: torch.Tensor) -> torch.Tensor:
    # PyTorch's float32 root is off by a last bit for some inputs; one rounded from float64 never is.
    return softplus(x).double().sqrt().float()


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of [T, n], ties by lowest index: contiguous int32 indices and the values."""
    values, ids = torch.sort(values, dim=-1, descending=True, stable=True)
    # A slice of the sorted ids is strided, but kernels read ids as contiguous.
    return ids[:, :count].to(torch.int32, memory_format=torch.contiguous_format), values[:, :count]


def check_topk_ids(topk_ids: torch.Tensor, num_experts: int) -> None:
    """ValueError unless topk_ids is a contiguous int32 [T, K] tensor of ids below num_experts."""
    if topk_ids.dtype != torch.int32 or topk_ids.dim() != 2 or not topk_ids.is_contiguous():
        raise ValueError(
            f"expert ids must be a contiguous int32 [T, K] tensor, not {topk_ids.dtype} of shape "
            f"{tuple(topk_ids.shape)} with strides {topk_ids.stride()}"
        )
    if topk_ids.numel() and not 0 <= int(topk_ids.min()) <= int(topk_ids.max()) < num_experts:
        raise ValueError(
            f"expert ids from {int(topk_ids.min())} to {int(topk_ids.max())}, but only {num_experts} experts"
        )
