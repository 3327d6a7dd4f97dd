"""The launches of a layer's experts, over memory that somebody else has planned."""

from collections.abc import Sequence

import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.few_shapes import FEW_TYPES
from coldstream.kernels.dequantize.triton import dequantize_matrices
from coldstream.kernels.experts import cuda as experts_few
from coldstream.kernels.experts import cuda_many as experts_many
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.linear.reference import INTEGER_TYPES
from coldstream.kernels.ops import ExpertWeights
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.swiglu.cuda import swiglu_cuda


def is_one_launch(weights: ExpertWeights) -> bool:
    """Whether the kernels for few rows take the shared expert along."""
    types = [w.quant_type for w in (weights.shared_gate, weights.shared_up, weights.shared_down)]
    are_alike = (types[0] in INTEGER_TYPES) == (types[1] in INTEGER_TYPES)
    return are_alike and all(quant_type in FEW_TYPES for quant_type in types)


def all_experts_few(
    x: Activations,
    ids: torch.Tensor,
    weights: ExpertWeights,
    hidden: experts_few.PairRows,
    outs: experts_few.PairRows,
) -> None:
    """`experts_few_cuda` with a layer's weights; the shared expert only if `outs` has a place for it."""
    shared = (weights.shared_gate, weights.shared_up, weights.shared_down)
    experts_few.experts_few_cuda(
        experts_few.ExpertWeights(
            weights.gate, weights.up, weights.down, None if outs.shared is None else shared
        ),
        ids, hidden, outs, activations=x.quantised, x=x.values,
    )  # fmt: skip


def routed_experts_many(
    x: Activations,
    ids: torch.Tensor,
    stacks: tuple[ExpertTable, ExpertTable, ExpertTable],
    groups: experts_many.Groups,
    hidden: Activations,
    halves: tuple[torch.Tensor, torch.Tensor] | None,
    routed: torch.Tensor,
) -> None:
    """The routed experts of integer types [T, K, E], for any number of tokens.

    Gate and up of two types take two products, which leave their outputs in `halves`, [P, F] each.
    """
    gate, up, down = stacks
    ffn_size, hidden_size = gate.rows, gate.cols
    tables = experts_many.ExpertTables(gate.addresses, up.addresses, down.addresses)
    first, second, last = experts_many.choose_tilings(
        ids.numel(), len(gate.addresses), gate.quant_type, up.quant_type, down.quant_type
    )
    experts_many.group_experts(ids, tables, groups, min(first.tokens, second.tokens, last.tokens))
    if halves is None:
        experts_many.experts_gate_up_many(
            x.quantised, tables, first, ffn_size, hidden_size, groups, hidden.values
        )
        quantize_cuda(hidden.values, hidden.quantised)
    else:
        for stack, tiling, half in zip((gate, up), (first, second), halves, strict=True):
            experts_many.experts_product_many(
                x.quantised, stack.addresses, tiling, ffn_size, hidden_size, groups, half, by_token=True
            )
        swiglu_cuda(*halves, hidden.values, hidden.quantised)
    experts_many.experts_product_many(
        hidden.quantised, down.addresses, last, hidden_size, ffn_size, groups, routed, by_token=False,
    )  # fmt: skip


def experts_as_floats(
    x: Activations,
    ids: torch.Tensor,
    stacks: Sequence[ExpertTable],
    codes: Sequence[torch.Tensor | None],
    values: Sequence[torch.Tensor],
    addresses: Sequence[torch.Tensor],
    places: torch.Tensor,
    hidden: experts_few.PairRows,
    routed: torch.Tensor,
) -> None:
    """The routed experts of one token; types without products of their own are float32 first, in `values`."""
    ranks = ids.shape[1]
    tables = []
    for stack, code, matrices, found in zip(stacks, codes, values, addresses, strict=True):
        quant_type = stack.quant_type
        if quant_type in FEW_TYPES:
            torch.index_select(stack.addresses, 0, ids[0], out=found)
        else:
            dequantize_matrices(quant_type, stack.addresses, ids[0], matrices, code)
            first, step = matrices.data_ptr(), matrices[0].nbytes
            torch.arange(first, first + ranks * step, step, out=found)
            quant_type = QuantType.F32
        tables.append(ExpertTable(found, quant_type, stack.rows, stack.cols))
    torch.arange(ranks, out=places[0])
    weights = experts_few.ExpertWeights(tables[0], tables[1], tables[2], shared=None)
    experts_few.experts_few_cuda(
        weights, places, hidden, experts_few.PairRows(routed, None), activations=x.quantised, x=x.values
    )
