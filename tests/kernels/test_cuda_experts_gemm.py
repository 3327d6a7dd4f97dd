"""The routed experts of many tokens on a GPU: the very bits of the exact reference."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from cuda_gemm_cases import arch_of, check_instance, device_activations, device_weight
from cuda_row_cases import check_compiles, for_each_architecture
from guarded import Guarded
from quant_cases import same_numbers
from random_blocks import activations, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.gemm_tiles import Tiling, least_tilings
from coldstream.kernels.experts.cuda_gemm import (
    GROUP_PROGRAM,
    LARGE_TILINGS,
    PROGRAM,
    SMALL_TILINGS,
    ExpertTables,
    Groups,
    choose_tilings,
    experts_gate_up_gemm,
    experts_product_gemm,
    group_pairs,
    instance,
    max_tiles,
    plan_tiles,
)
from coldstream.kernels.experts.reference import routed_experts
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.swiglu.reference import swiglu_exact

UNWRITTEN = 1234.5
SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 1000)


@pytest.mark.sharded
@for_each_architecture
def test_grouping_compiles(arch: str) -> None:
    check_compiles(GROUP_PROGRAM, arch)


def instances_and_archs() -> Iterator[tuple[QuantType, str, str]]:
    """Every instance of each type, for one of two architectures, alternately."""
    for number, quant_type in enumerate(sorted(SMALL_TILINGS)):
        tilings = (SMALL_TILINGS[quant_type], *LARGE_TILINGS[quant_type], *least_tilings(quant_type))
        for place, (tiling, gated) in enumerate(product(dict.fromkeys(tilings), (True, False))):
            yield quant_type, instance(tiling, gated), arch_of(tiling, number + place)


@pytest.mark.sharded(18)
@pytest.mark.parametrize(
    ("quant_type", "kernel", "arch"), [*instances_and_archs()], ids=lambda each: getattr(each, "name", each)
)
def test_compiles(quant_type: QuantType, kernel: str, arch: str, tmp_path: Path) -> None:
    check_instance(PROGRAM, quant_type, kernel, arch, tmp_path)


def new_groups(num_pairs: int, num_experts: int) -> Groups:
    def ints(*shape: int) -> torch.Tensor:
        return torch.full(shape, -77, dtype=torch.int32, device="cuda")

    tiles = ints(max_tiles(num_pairs, num_experts) + 1, 4)
    return Groups(ints(num_pairs), ints(num_pairs), ints(num_experts, 2), tiles)


def addresses(stack: QuantTensor, absent: tuple[int, ...] = ()) -> torch.Tensor:
    """Where each matrix of a stack lies, 0 for those `absent`."""
    starts = [stack[e].blocks.data_ptr() if e not in absent else 0 for e in range(stack.shape[0])]
    return torch.tensor(starts, dtype=torch.int64, device="cuda")


class Experts:
    """Random experts on the host and on the device."""

    def __init__(
        self,
        num_experts: int,
        sizes: tuple[int, int],
        up_down: tuple[QuantType, QuantType],
        gate: QuantType | None = None,
    ) -> None:
        hidden, ffn = sizes
        self.up_type, self.down_type = up_down
        self.gate_type = gate or self.up_type
        self.gate = random_weight(self.gate_type, (num_experts, ffn, hidden), 1)
        self.up = random_weight(self.up_type, (num_experts, ffn, hidden), 2)
        self.down = random_weight(self.down_type, (num_experts, hidden, ffn), 3)
        self.on_device = [device_weight(stack) for stack in (self.gate, self.up, self.down)]

    @property
    def types(self) -> tuple[QuantType, QuantType, QuantType]:
        return self.gate_type, self.up_type, self.down_type

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        absent: tuple[int, ...] = (),
        tilings: Sequence[Tiling] | None = None,
    ) -> torch.Tensor:
        """[T, K, E], UNWRITTEN where nothing was written. `tilings` are of gate, up and down."""
        num_experts, ffn, hidden = self.gate.shape
        num_tokens, num_ranks = topk_ids.shape
        num_pairs = topk_ids.numel()
        gate, up, down = self.on_device
        tables = ExpertTables(addresses(gate, absent), addresses(up), addresses(down))
        groups = new_groups(num_pairs, num_experts)
        tilings = tilings or choose_tilings(num_pairs, num_experts, *self.types)
        group_pairs(topk_ids.cuda(), num_experts, groups)
        plan_tiles(num_pairs, tables, groups, min(tiling.tokens for tiling in tilings))
        if self.gate_type == self.up_type:
            gated = Guarded(num_pairs, ffn)
            quantized = device_activations(x, self.gate_type)
            experts_gate_up_gemm(quantized, tables, tilings[0], ffn, hidden, groups, gated.tensor)
            h = gated.checked()
        else:
            halves = []
            for table, tiling in ((tables.gate, tilings[0]), (tables.up, tilings[1])):
                half = Guarded(num_pairs, ffn)
                experts_product_gemm(
                    device_activations(x, tiling.quant_type),
                    table,
                    tiling,
                    ffn,
                    hidden,
                    groups,
                    half.tensor,
                    by_token=True,
                )
                halves.append(half.checked())
            h = swiglu_exact(*halves)
        out = Guarded(num_pairs, hidden)
        out.tensor.fill_(UNWRITTEN)
        experts_product_gemm(
            device_activations(h, self.down_type),
            tables.down,
            tilings[2],
            hidden,
            ffn,
            groups,
            out.tensor,
            by_token=False,
        )
        return out.checked().view(num_tokens, num_ranks, hidden)

    def expected(self, x: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return routed_experts(x, topk_ids, self.gate, self.up, self.down, linear_exact, swiglu_exact)


def random_ids(seed: int, num_tokens: int, num_ranks: int, num_experts: int) -> torch.Tensor:
    """Distinct experts for each token, a few of them far more popular than others."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(num_experts, generator=generator) ** 4 + 1e-3
    chosen = torch.multinomial(weights.expand(num_tokens, -1), num_ranks, generator=generator)
    return chosen.int()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", SIZES)
def test_kn01_every_token_count(num_tokens: int) -> None:
    experts = Experts(12, (256, 256), (QuantType.Q4_K, QuantType.Q6_K))
    x, ids = activations(num_tokens, num_tokens, 256), random_ids(num_tokens, num_tokens, 3, 12)
    assert same_numbers(experts.run(x, ids), experts.expected(x, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [5, 90])
@pytest.mark.parametrize(
    ("gate", "up", "down"),
    [
        (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q4_K),
        (QuantType.Q5_K, QuantType.Q5_K, QuantType.Q8_0),
        (QuantType.Q6_K, QuantType.Q6_K, QuantType.Q5_K),
        (QuantType.Q8_0, QuantType.Q8_0, QuantType.Q4_0),
        (QuantType.Q4_0, QuantType.Q4_0, QuantType.Q5_0),
        (QuantType.Q5_0, QuantType.Q5_0, QuantType.Q8_0),
        (QuantType.Q4_K, QuantType.Q8_0, QuantType.Q4_0),
        (QuantType.Q4_1, QuantType.Q4_1, QuantType.Q5_1),
        (QuantType.MXFP4, QuantType.MXFP4, QuantType.IQ4_NL),
        (QuantType.Q2_0, QuantType.Q2_0, QuantType.MXFP4),
    ],
)
def test_every_type(gate: QuantType, up: QuantType, down: QuantType, num_tokens: int) -> None:
    ffn = 768 if down.block_elements == 256 else 160
    experts = Experts(9, (768, ffn), (up, down), gate)
    x, ids = activations(num_tokens, num_tokens, 768), random_ids(1, num_tokens, 4, 9)
    assert same_numbers(experts.run(x, ids), experts.expected(x, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("quant_type", list(SMALL_TILINGS))
@pytest.mark.parametrize(
    "choose",
    [
        SMALL_TILINGS.__getitem__,
        lambda quant_type: LARGE_TILINGS[quant_type][-1],
        lambda quant_type: least_tilings(quant_type)[0],
        lambda quant_type: least_tilings(quant_type)[-1],
    ],
    ids=["small groups", "large groups", "little shared memory", "the least shared memory"],
)
def test_tilings_of_every_device(quant_type: QuantType, choose: Callable[[QuantType], Tiling]) -> None:
    experts = Experts(6, (512, 256), (quant_type, quant_type))
    x, ids = activations(4, 150, 512), random_ids(4, 150, 3, 6)
    tilings = [choose(quant_type) for quant_type in experts.types]
    assert same_numbers(experts.run(x, ids, tilings=tilings), experts.expected(x, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("ffn", [32, 96, 160, 224])
def test_odd_sizes(ffn: int) -> None:
    experts = Experts(5, (384, ffn), (QuantType.Q8_0, QuantType.Q5_0))
    x, ids = activations(2, 60, 384), random_ids(2, 60, 2, 5)
    assert same_numbers(experts.run(x, ids), experts.expected(x, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [1, 40, 1500])
def test_trap_05_all_rows_on_one_expert(num_experts: int) -> None:
    experts = Experts(num_experts, (256, 32), (QuantType.Q4_K, QuantType.Q8_0))
    x, ids = activations(3, 200, 256), torch.full((200, 1), num_experts - 1, dtype=torch.int32)
    assert same_numbers(experts.run(x, ids), experts.expected(x, ids))


@pytest.mark.gpu
def test_every_row_its_own_expert() -> None:
    experts = Experts(64, (256, 64), (QuantType.Q4_K, QuantType.Q8_0))
    x, ids = activations(3, 32, 256), torch.randperm(64).int().view(32, 2)
    assert same_numbers(experts.run(x, ids), experts.expected(x, ids))


@pytest.mark.gpu
def test_pairs_of_absent_experts_are_left_alone() -> None:
    experts = Experts(8, (256, 64), (QuantType.Q4_K, QuantType.Q8_0))
    x, ids = activations(5, 50, 256), random_ids(5, 50, 3, 8)
    expected = experts.expected(x, ids)
    expected[(ids == 2) | (ids == 7)] = UNWRITTEN
    ids_elsewhere = ids.clone()
    ids_elsewhere[ids == 7] = -1
    assert same_numbers(experts.run(x, ids_elsewhere, absent=(2,)), expected)


@pytest.mark.gpu
def test_groups_are_stable() -> None:
    ids = random_ids(9, 1000, 8, 32)
    tables = ExpertTables(*[torch.ones(32, dtype=torch.int64, device="cuda")] * 3)
    groups = new_groups(8000, 32)
    group_pairs(ids.cuda(), 32, groups)
    plan_tiles(8000, tables, groups, 64)
    order = ids.flatten().argsort(stable=True).int()
    assert torch.equal(groups.pairs.cpu(), order)
    assert torch.equal(groups.tokens.cpu(), order // 8)
    num_tiles = int(groups.tiles[0, 0])
    covered = [
        (expert, place)
        for count, first, expert, _ in groups.tiles[1 : num_tiles + 1].tolist()
        for place in range(first, first + count)
    ]
    assert covered == list(zip(ids.flatten()[order.long()].tolist(), range(8000), strict=True))
