"""Experts with every gated unit and with biases, and what PyTorch's floats say of them."""

from dataclasses import replace

import torch
from cpu_cases import Output
from gpu_cases import assert_same, on_gpu
from quant_cases import load
from random_blocks import activations, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import expert_glu
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import SWIGLU, Activation, ExpertBiases, ExpertOutputs, ExpertWeights, Routing
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.reference_ops import ReferenceOps
from device_arrays import fill
from host_device import HostMemory

EXACT = ReferenceOps(exact=True)

CLAMPED, GEGLU = Activation("clamped swiglu", 7.0), Activation("geglu")
ACTIVATIONS = (SWIGLU, CLAMPED, GEGLU)
# (activation, whether there are biases)
UNITS = ((SWIGLU, False), (CLAMPED, False), (CLAMPED, True), (GEGLU, False), (GEGLU, True))

Types = tuple[QuantType, QuantType, QuantType]
Sizes = tuple[int, int, int]  # experts, hidden size, FFN size


def of_floats(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The gated unit as its authors write it, in float64."""
    gate, up = gate.double(), up.double()
    if activation.kind == "clamped swiglu":
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    if activation.kind == "geglu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


def random_experts(
    types: Types, sizes: Sizes, activation: Activation, *, has_biases: bool, seed: int = 0
) -> ExpertWeights:
    """Stacks of the definition (`ReferenceOps(exact=True)`); products reach the limit of the clamped unit."""
    num_experts, cols, size = sizes
    shapes = (num_experts, size, cols), (num_experts, size, cols), (num_experts, cols, size)
    gate, up, down = (
        random_weight(kind, shape, seed + i)
        for i, (kind, shape) in enumerate(zip(types, shapes, strict=True))
    )
    weights = ExpertWeights(gate, up, down, activation=activation)
    if not has_biases:
        return weights
    generator = torch.Generator().manual_seed(seed)
    biases = [4 * torch.randn(num_experts, rows, generator=generator) for rows in (size, size, cols)]
    return replace(weights, biases=ExpertBiases(*biases, on_host=(biases[0].numpy(), biases[1].numpy())))


def float_outputs(x: torch.Tensor, ids: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """Outputs of the chosen experts with the bias of down, [T, K, E], without a product over integers."""
    stacks = [dequantize(stack).double() for stack in (weights.gate, weights.up, weights.down)]
    biases = weights.biases
    outputs = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float64)
    for row, rank in torch.cartesian_prod(*(torch.arange(size) for size in ids.shape)).tolist():
        expert = int(ids[row, rank])
        gate, up = (stack[expert] @ x[row].double() for stack in stacks[:2])
        if biases is not None:
            gate, up = gate + biases.gate[expert], up + biases.up[expert]
        outputs[row, rank] = stacks[2][expert] @ of_floats(gate, up, weights.activation)
        if biases is not None:
            outputs[row, rank] += biases.down[expert]
    return outputs


def random_ids(rows: int, ranks: int, num_experts: int, seed: int) -> torch.Tensor:
    """int32 [rows, ranks], none twice in a row."""
    scores = torch.rand(rows, num_experts, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(dim=-1)[:, :ranks].int().contiguous()


def stacks_of(weights: ExpertWeights) -> tuple[QuantTensor, QuantTensor, QuantTensor]:
    """Gate, up and down."""
    return weights.gate, weights.up, weights.down


def on_cpu(
    runtime: _csrc.Runtime, x: torch.Tensor, ids: torch.Tensor, weights: ExpertWeights
) -> torch.Tensor:
    out, unit = Output(*ids.shape, x.shape[1]), expert_glu(weights.activation, weights.biases)
    _csrc.routed_experts(runtime, x, ids, *map(load, stacks_of(weights)), out.rows, unit)
    return out.checked()


def tables_of(weights: ExpertWeights) -> tuple[ExpertWeights, list[object]]:
    """The same as the GPU's kernels take them on the host, and what keeps their memory."""
    kept, tables = [], []
    for stack in stacks_of(weights):
        parts = [on_gpu(stack[e], device="cpu") for e in range(stack.shape[0])]
        addresses = torch.tensor([part.blocks.data_ptr() for part in parts])
        tables.append(ExpertTable(addresses, stack.quant_type, *stack.shape[1:]))
        kept.append(parts)
    gate, up, down = tables
    return ExpertWeights(gate, up, down, activation=weights.activation, biases=weights.biases), kept


def on_host(ops: CudaOps, x: torch.Tensor) -> Activations:
    rows = ops.activations(*x.shape)
    fill(rows.values, x)
    quantize_cuda(rows.values, rows.quantised)
    return rows


def check_on_gpu(rows: int, weights: ExpertWeights) -> None:
    """The bits of the definition, of the products and of the sum; also where an expert is not there."""
    num_experts, _, cols = weights.gate.shape
    x, ids = activations(rows, rows, cols), random_ids(rows, 2, num_experts, seed=rows)
    ops, (tables, _kept) = CudaOps(HostMemory(), 16, 512), tables_of(weights)
    tables.gate.addresses[1] = 0
    routed, shared = MoeKernels(ops).outputs(on_host(ops, x), ids, tables)
    assert shared is None
    routing = Routing(ids, activations(7, rows, 2).softmax(-1), None)
    expected = EXACT.experts(x, routing, weights)
    is_there = ids != 1
    found = torch.as_tensor(routed.numpy())
    assert_same(found[is_there].contiguous(), expected.routed[is_there].contiguous())
    whole = ExpertOutputs(expected.routed, None, routing, bias=expected.bias)
    total, normed = ops.add_norm(x, whole, torch.ones(cols), 1e-6)
    for ours, defined in zip(
        (total, normed.values), EXACT.add_norm(x, whole, torch.ones(cols), 1e-6), strict=True
    ):
        assert_same(ours, defined)
