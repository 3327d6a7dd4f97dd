"""Experts as GPU kernels see them: addresses."""

from dataclasses import dataclass

import torch

from coldstream.gguf.quant_types import QuantType


@dataclass(frozen=True)
class ExpertTable:
    """One matrix of every routed expert: where each lies, and what all of them are.

    addresses: int64 [num_experts] on the device; 0 for an expert that is not there. Each points to `rows`
    adjacent GGUF rows of `cols` values, on 16 bytes for Q4_K and Q5_K, 4 for F32, otherwise 2.
    """

    addresses: torch.Tensor
    quant_type: QuantType
    rows: int
    cols: int
