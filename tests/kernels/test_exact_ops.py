"""The C++ operations equal docs/arithmetic.md, written a second time in PyTorch, bit for bit."""

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_cases import random
from random_blocks import random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.ops import (
    AttentionHeads,
    AttentionInputs,
    Caches,
    DeltaNetInputs,
    DeltaNetWeights,
    ExpertWeights,
    RopeScaling,
    RopeSpec,
    RouterWeights,
    Rows,
)
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kernels.rope.scaling import Yarn, linear, yarn_magnitude

EPS = 1e-6


@pytest.fixture(scope="module")
def exact() -> ReferenceOps:
    return ReferenceOps(exact=True)


@pytest.fixture(scope="module")
def cpu() -> CpuOps:
    return CpuOps(2)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small cost more to share out than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def as_arrays(value: Any) -> Any:
    """The same argument for CpuOps: tensors as numpy arrays on the same memory."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, QuantTensor):
        *stack, rows, columns = value.shape
        data = value.blocks.numpy().reshape(-1)
        return _csrc.Weight.from_array(data, int(value.quant_type), rows, columns, *stack)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{name: as_arrays(part) for name, part in vars(value).items()})
    return [as_arrays(part) for part in value] if isinstance(value, list) else value


def copied(value: Any) -> Any:
    """With copies of all tensors, also of those in records."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{name: copied(each) for name, each in vars(value).items()})


def changeable(value: Any) -> list[Any]:
    """Tensors or arrays that an operation might change, of records too; no weights."""
    if is_dataclass(value) and not isinstance(value, QuantTensor):
        return [each for field in vars(value).values() for each in changeable(field)]
    return [value] if isinstance(value, torch.Tensor | np.ndarray) else []


def assert_same_bits(exact: ReferenceOps, cpu: CpuOps, name: str, *arguments: Any, **options: Any) -> None:
    """Calls the operation `name` of both, on copies, and compares results and changed arguments."""
    ours = [copied(value) for value in arguments]
    theirs = [as_arrays(copied(value)) for value in arguments]
    results = getattr(exact, name)(*ours, **options), getattr(cpu, name)(*theirs, **options)
    pairs = list(zip(*((r if isinstance(r, tuple) else (r,)) for r in results), strict=True))
    for one, other in zip(ours, theirs, strict=True):
        if not isinstance(one, QuantTensor):
            pairs += zip(changeable(one), changeable(other), strict=True)
    for a, b in pairs:
        # == takes −0 for 0: whether an empty lane was added decides the sign of a zero sum.
        np.testing.assert_array_equal(a.numpy(), b)


def rows_at(first: int, count: int, state_id: int = 0) -> Rows:
    positions = torch.arange(first, first + count, dtype=torch.int32)
    return Rows(positions, torch.full((count,), state_id, dtype=torch.int32))


@pytest.mark.parametrize("size", [64, 100, 256])
def test_rms_norm(exact: ReferenceOps, cpu: CpuOps, size: int) -> None:
    assert_same_bits(exact, cpu, "rms_norm", random(1, 500, size), random(2, size), EPS)


@pytest.mark.parametrize("size", [64, 100, 256])
def test_rms_norm_pair(exact: ReferenceOps, cpu: CpuOps, size: int) -> None:
    """Each half with its own weights, whatever lies in the other."""
    x, y = random(1, 50, size), random(2, 50, size, scale=30)
    weights = random(3, size), random(4, size)
    assert_same_bits(exact, cpu, "rms_norm_pair", x, weights[0], y, weights[1], EPS)
    pair = exact.rms_norm_pair(x, weights[0], y, weights[1], EPS)
    assert torch.equal(pair[:, :size], exact.rms_norm(x, weights[0], EPS))
    assert torch.equal(pair[:, size:], exact.rms_norm(y, weights[1], EPS))


def test_swiglu_and_add(exact: ReferenceOps, cpu: CpuOps) -> None:
    for name in ("glu", "add"):
        assert_same_bits(exact, cpu, name, random(1, 9, 300, scale=20), random(2, 9, 300))


@pytest.mark.parametrize("scaled", ["plain", "linear", "yarn"])
@pytest.mark.parametrize(("num_dims", "theta"), [(64, 1e7), (16, 1e7), (32, 1e4)])
def test_rope_angles(exact: ReferenceOps, cpu: CpuOps, num_dims: int, theta: float, scaled: str) -> None:
    positions = torch.cat((torch.arange(300), torch.tensor([4095, 65536, 262143, 1048575]))).int()
    rope = RopeSpec(num_dims, theta)
    if scaled == "linear":
        rope = replace(rope, scaling=linear(rope, 4.0, 1.25))
    elif scaled == "yarn":
        rope = replace(
            rope, scaling=RopeScaling(Yarn(4.0, 32768).frequency_factors(rope), yarn_magnitude(4.0))
        )
    assert_same_bits(exact, cpu, "rope_angles", positions, rope)


@pytest.mark.sharded(6)
@pytest.mark.parametrize("first", [0, 60, 250, 510])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention(exact: ReferenceOps, cpu: CpuOps, first: int, dtype: torch.dtype) -> None:
    """Across the edges of blocks (64 positions) and chunks (256)."""
    heads, groups, size, count = 4, 2, 32, 9
    inputs = [
        random(1, count, 2 * heads * size),
        random(2, count, groups * size),
        random(3, count, groups * size),
    ]
    caches = [random(seed, 2, 520, groups, size).to(dtype) for seed in (4, 5)]
    rows = rows_at(first, count, state_id=1)
    angles = exact.rope_angles(rows.positions, RopeSpec(16, 1e4))
    norms = [random(6, size), random(7, size)]
    heads = AttentionHeads(*norms, EPS)
    assert_same_bits(exact, cpu, "attention", AttentionInputs(*inputs, angles), heads, Caches(*caches), rows)


@pytest.mark.parametrize("key_head_ids", [[0, 1, 0, 1], [0, 0, 1, 1]], ids=["tiled", "grouped"])
def test_gated_delta_net(exact: ReferenceOps, cpu: CpuOps, key_head_ids: list[int]) -> None:
    key_heads, value_heads, size, count = 2, 4, 32, 9
    channels = (2 * key_heads + value_heads) * size
    weights = DeltaNetWeights(
        conv_taps=random(1, channels, 4),
        a=-random(2, value_heads).abs(),
        dt_bias=random(3, value_heads, scale=10),
        norm=random(4, size),
        key_head_ids=torch.tensor(key_head_ids, dtype=torch.int32),
        num_key_heads=key_heads,
        eps=EPS,
    )
    widths = (channels, value_heads * size, value_heads, value_heads)
    inputs = [random(5 + i, count, width) for i, width in enumerate(widths)]
    states = [random(9, 2, 3, channels), random(10, 2, value_heads, size, size)]
    projections = DeltaNetInputs(*inputs, rows_at(0, count, state_id=1))
    assert_same_bits(exact, cpu, "gated_delta_net", projections, weights, *states)


@pytest.mark.parametrize("quant_type", list(QuantType), ids=lambda t: t.name)
def test_linear(exact: ReferenceOps, cpu: CpuOps, quant_type: QuantType) -> None:
    weight = random_weight(quant_type, (7, 512), seed=int(quant_type))
    assert_same_bits(exact, cpu, "linear", random(1, 3, 512), [weight])


@pytest.mark.parametrize("quant_type", [QuantType.F32, QuantType.F16, QuantType.BF16], ids=lambda t: t.name)
def test_router(exact: ReferenceOps, cpu: CpuOps, quant_type: QuantType) -> None:
    weight = random_weight(quant_type, (40, 64), seed=1)
    assert_same_bits(exact, cpu, "choose_experts", random(2, 9, 64), RouterWeights(weight, None, 5))


def test_routed_experts_and_their_sum(exact: ReferenceOps, cpu: CpuOps) -> None:
    types = (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K)
    stacks = [random_weight(quant_type, (6, 256, 256), seed=int(quant_type)) for quant_type in types]
    scores = torch.rand(9, 6, generator=torch.Generator().manual_seed(1))
    ids = scores.argsort(dim=-1)[:, :3].int().contiguous()
    assert_same_bits(exact, cpu, "routed_experts", random(2, 9, 256), ids, ExpertWeights(*stacks))
    assert_same_bits(
        exact,
        cpu,
        "combine_experts",
        random(3, 9, 3, 64),
        scores[:, :3].contiguous(),
        random(4, 9, 64),
        random(5, 9, 1),
    )
