"""The operations on a GPU with weights of every quantised type."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cuda_row_cases import CUDA
from glu_cases import EXACT, UNITS, Types, random_experts, random_ids, stacks_of
from gpu_cases import on_gpu
from random_blocks import activations, random_weight
from same_bits import assert_same_bits

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.memory import DeviceMemory, MemoryPlan
from coldstream.kernels.cuda.program import note_kernels
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.dequantize.cuda import PROGRAM as DEQUANTIZE
from coldstream.kernels.dequantize.cuda import instance_of
from coldstream.kernels.experts.reference import routed_experts
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.ops import Activation, ExpertBiases, ExpertWeights, Routing
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.swiglu.cuda import PROGRAM as SWIGLU
from coldstream.kernels.swiglu.reference import swiglu_exact
from device_arrays import fill, tensor_of

EVERY_TYPE = pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
NUM_EXPERTS, RANKS, HIDDEN, FFN = 6, 2, 512, 256


def device_ops() -> CudaOps:
    return CudaOps(DeviceMemory(1 << 20, 64 << 20), 16, 512)


def on_device(ops: CudaOps, x: torch.Tensor) -> Activations:
    rows = ops.activations(*x.shape)
    fill(rows.values, x)
    quantize_cuda(rows.values, rows.quantised)
    return rows


def stack_on_gpu(stack: QuantTensor) -> tuple[ExpertTable, list[QuantTensor]]:
    """Each expert in memory of its own, which the caller keeps."""
    copies = [on_gpu(stack[expert]) for expert in range(stack.shape[0])]
    addresses = torch.tensor([copy.blocks.data_ptr() for copy in copies], device=CUDA)
    return ExpertTable(addresses, stack.quant_type, *stack.shape[1:]), copies


@pytest.mark.parametrize("quant_type", list(QuantType), ids=lambda t: t.name)
def test_kernels_are_known_before_anything_runs(quant_type: QuantType) -> None:
    ops = CudaOps(MemoryPlan(), 16, 512, notes_kernels=True)
    blocks = ops.memory.persistent((50, quant_type.row_bytes(512)), "uint8")
    with note_kernels() as noted:
        x = ops.embed(QuantTensor(blocks, quant_type, (50, 512)), ops.memory.workspace((3,), "int32"))
        ops.glu(x, x)
    assert noted == {(DEQUANTIZE, instance_of(quant_type)), (SWIGLU, "swiglu_rows<true, 256>")}


@pytest.mark.gpu
@EVERY_TYPE
@pytest.mark.parametrize("rows", [1, 9, 100])
def test_products(quant_type: QuantType, rows: int) -> None:
    ops, x = device_ops(), activations(rows, rows, HIDDEN)
    weight = random_weight(quant_type, (48, HIDDEN), 3)
    (product,) = ops.linear(on_device(ops, x), (on_gpu(weight),))
    assert_same_bits(tensor_of(product), linear_exact(x, weight))


@pytest.mark.gpu
@EVERY_TYPE
@pytest.mark.parametrize("tokens", [1, 11, 100])
def test_experts(quant_type: QuantType, tokens: int) -> None:
    """Gates and downs of the type, ups of another."""
    ops, x = device_ops(), activations(tokens, tokens, HIDDEN)
    shapes = ((quant_type, FFN, HIDDEN), (QuantType.Q8_0, FFN, HIDDEN), (quant_type, HIDDEN, FFN))
    stacks = [random_weight(kind, (NUM_EXPERTS, *shape), i) for i, (kind, *shape) in enumerate(shapes)]
    shared = [random_weight(kind, tuple(shape), 9 + i) for i, (kind, *shape) in enumerate(shapes)]
    tables, kept = zip(*map(stack_on_gpu, stacks), strict=True)
    scores = torch.rand(tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(tokens))
    ids = scores.argsort(dim=1)[:, :RANKS].int().contiguous()
    weights = torch.full((tokens, RANKS), 0.5, device=CUDA)
    routing = Routing(ids.to(CUDA), weights, torch.zeros(tokens, 1, device=CUDA))
    outputs = ops.experts(on_device(ops, x), routing, ExpertWeights(*tables, *map(on_gpu, shared)))
    expected = routed_experts(x, ids, *stacks, linear_exact, swiglu_exact)
    assert_same_bits(tensor_of(outputs.routed), expected)
    gate, up, down = shared
    hidden = swiglu_exact(linear_exact(x, gate), linear_exact(x, up))
    assert_same_bits(tensor_of(outputs.shared), linear_exact(hidden, down))
    del kept


@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "has_biases"), UNITS, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 11, 100])
@pytest.mark.parametrize("types", [(QuantType.Q4_K,) * 3, (QuantType.MXFP4,) * 3], ids=str)
def test_experts_of_every_gated_unit(
    types: Types, tokens: int, activation: Activation, *, has_biases: bool
) -> None:
    """Products, and their sum with the biases of down; of MXFP4 in rows that are no multiple of 256."""
    ops, sizes = device_ops(), (6, 512, 256) if QuantType.Q4_K in types else (6, 320, 192)
    defined = random_experts(types, sizes, activation, has_biases=has_biases)
    tables, _kept = zip(*map(stack_on_gpu, stacks_of(defined)), strict=True)
    weights = ExpertWeights(*tables, activation=activation)
    if defined.biases is not None:
        gate, up, down = (
            bias.to(CUDA) for bias in (defined.biases.gate, defined.biases.up, defined.biases.down)
        )
        weights = replace(weights, biases=ExpertBiases(gate, up, down, defined.biases.on_host))
    x, ids = activations(tokens, tokens, sizes[1]), random_ids(tokens, RANKS, sizes[0], seed=tokens)
    shares = torch.full((tokens, RANKS), 0.5)
    outputs = ops.experts(on_device(ops, x), Routing(ids.to(CUDA), shares.to(CUDA), None), weights)
    expected = EXACT.experts(x, Routing(ids, shares, None), defined)
    assert_same_bits(tensor_of(outputs.routed), expected.routed)
    norm = torch.ones(sizes[1])
    total, _ = ops.add_norm(x.to(CUDA), outputs, norm.to(CUDA), 1e-6)
    assert_same_bits(tensor_of(total), EXACT.add_norm(x, expected, norm, 1e-6)[0])


def test_operations_that_outlive_the_interpreter_keep_no_runtime_of_the_cpu() -> None:
    """As those of a model that is open when a command ends: nanobind would report what it finds then."""
    script = """
import gc
from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.memory import MemoryPlan
from coldstream.kernels.cuda_ops import CudaOps

ops = CudaOps(MemoryPlan(), 8, 8)
ops.itself = ops
file = GGUFFile.open(demo_model_path())
for info in file.tensors.values():
    if len(info.shape) == 1 or "norm" in info.name:
        ops.read_values(file, info)
gc.freeze()
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
