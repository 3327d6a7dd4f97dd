"""Streamed experts on a GPU: chosen, listed and copied by the launches of a step."""

import pytest
import torch
from cuda_row_cases import CUDA, check_compiles, for_each_architecture
from test_cuda_prefetch import COLS, EXPERTS, RANKS, stacks_of, zeros

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, Mailbox
from coldstream.kernels.experts.partition import (
    ExpertPlaces,
    Partition,
    Staging,
    partition_experts_cuda,
    sharing_of,
)
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.split import MissTimes
from coldstream.kernels.experts.stage import PROGRAM, stage_experts_cuda


@for_each_architecture
def test_kernels_compile(arch: str) -> None:
    check_compiles(PROGRAM, arch)


@pytest.mark.gpu
@pytest.mark.parametrize("quant_type", [QuantType.F32, QuantType.Q8_0])
@pytest.mark.parametrize("num_places", [0, 3, EXPERTS])
def test_what_the_bus_reads_is_where_its_address_says(quant_type: QuantType, num_places: int) -> None:
    stacks, memories = stacks_of(quant_type, num_places)
    place_bytes = sum(-(-memory.shape[1] // 256) * 256 for memory in memories)
    data = zeros((num_places * place_bytes,), "uint8")
    slow_cpu = MissTimes(1, (1000,) * MAX_MAILBOX_ROWS)
    times = torch.tensor(slow_cpu.words(), dtype=torch.int32, device=CUDA)
    for tokens in (2, 9, 64):
        generator = torch.Generator().manual_seed(tokens)
        odds = torch.ones(tokens, EXPERTS)
        ids = torch.multinomial(odds, RANKS, generator=generator).int().to(CUDA)
        x = torch.randn(tokens, COLS, generator=generator).to(CUDA)
        places = Partition(
            torch.zeros(MATRICES, EXPERTS, dtype=torch.int64, device=CUDA), zeros((tokens, RANKS), "int32")
        )
        staging = Staging(zeros((1 + EXPERTS,), "int32"), ExpertPlaces.of(data, stacks, EXPERTS))
        sharing = sharing_of(
            stacks, times, Mailbox.create(RANKS, COLS), 3, places, zeros((tokens, RANKS), "int32"),
            staging=staging,
        )  # fmt: skip
        partition_experts_cuda(ids, x, sharing)
        stage_experts_cuda(stacks, staging)
        torch.cuda.synchronize()
        num_staged = 0
        for expert in ids.unique().tolist():
            for address, memory in zip(places.addresses[:, expert].tolist(), memories, strict=True):
                if address:
                    first = address - data.data_ptr()
                    staged = data[first : first + memory.shape[1]].cpu()
                    assert torch.equal(staged, memory[expert])
            num_staged += bool(places.addresses[0, expert])
        assert num_staged == min(num_places, len(ids.unique()))
