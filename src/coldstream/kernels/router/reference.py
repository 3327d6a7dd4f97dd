"""The choice of a token's experts, and their weights."""

import torch

from coldstream.kernels.arithmetic.reference import exp, sum_lanes

SMALLEST_SUM = 2.0**-14  # of the chosen probabilities


def choose_experts(logits: torch.Tensor, num_experts_per_tok: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, the K largest (ties: lowest id first), renormalised to sum 1.

    logits [T, experts] → contiguous int32 ids [T, K] in descending order of probability, weights [T, K].
    The K largest of n probabilities sum to at least K/n, so the division is safe.
    """
    ids, chosen = largest(logits.softmax(dim=-1), num_experts_per_tok)
    return ids, chosen / chosen.sum(dim=-1, keepdim=True)


def choose_experts_exact(logits: torch.Tensor, num_experts_per_tok: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_experts` to the last bit, as docs/arithmetic.md defines it, float32."""
    exponentials = exp(logits - logits.amax(dim=-1, keepdim=True))
    ids, chosen = largest(exponentials / sum_lanes(exponentials).unsqueeze(-1), num_experts_per_tok)
    return ids, chosen / sum_lanes(chosen).clamp(min=SMALLEST_SUM).unsqueeze(-1)


def largest(probabilities: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of [T, experts], ties by lowest id: contiguous int32 ids and the values."""
    values, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
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
