"""Opening a model on a GPU, what its chains are held to, and a GPU without memory."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from one_sequence import OneSequence
from runner_cases import token_ids

from bench.runners import open_model_file, partial_plan, resident_plan
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.cuda.runtime import allocations, calls, copies
from coldstream.kernels.cuda.runtime.allocations import Allocation
from coldstream.kvcache import CacheSize
from coldstream.models.cuda.runner import CudaRunner
from coldstream.placement.policies import Policy

CHUNK_SIZE = 512


def open_cuda(
    path: Path, context_length: int = 256, kv_type: str = "i16", cache_size: CacheSize | None = None
) -> OneSequence:
    file, spec = open_model_file(path)
    plan = resident_plan(file, spec, context_length, kv_type)
    return OneSequence(CudaRunner.load(file, spec, plan, cache_size=cache_size))


def open_partly(
    path: Path,
    share: float,
    *,
    streamed: float = 0.0,
    policy: Policy | None = None,
    threads: int = 2,
    pinned: tuple[int, ...] = (),
    ring_bytes: int = 8 * 2**20,
    context_length: int = 256,
    chunk_size: int = CHUNK_SIZE,
    cache_size: CacheSize | None = None,
    prefetching: Prefetching | None = None,
    layer_weights: tuple[float, ...] = (),
    in_ram: float | None = None,
    is_early: bool = False,
    card: int | None = None,
) -> OneSequence:
    """With slots for that share of the experts, and that share of what a token misses read over the bus.

    All experts of `pinned` layers are there besides. in_ram: the share of the experts that a pool in RAM
    begins with, while all others are on the disk; None: the file is mapped. card: a further one, which has
    all experts that the first may lack.
    """
    file, spec = open_model_file(path)
    plan = partial_plan(
        file,
        spec,
        round(share * spec.num_experts),
        context_length=context_length,
        chunk_size=chunk_size,
        ring_bytes=ring_bytes,
        threads=threads,
        streamed=streamed,
        pinned=pinned,
        layer_weights=layer_weights,
        prefetching=prefetching,
        num_in_ram=None if in_ram is None else max(2, round(in_ram * spec.num_experts)),
    )
    plan = replace(plan, card=card)
    runner = CudaRunner.load(file, spec, plan, policy=policy, cache_size=cache_size, is_early=is_early)
    return OneSequence(runner)


def poisoned_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of blocks that was never written makes NaN of floats."""
    block = allocations.block

    def poisoned(num_bytes: int) -> Allocation:
        allocation = block(num_bytes)
        copies.fill_bytes(allocation.address, 0xFF, num_bytes)
        calls.synchronize()  # other streams may write at once
        return allocation

    monkeypatch.setattr(allocations, "block", poisoned)


class TakenMemory:
    """Counts bytes of the device that the runtime has given out and not got back."""

    def __init__(self) -> None:
        self.num_bytes = self.most = 0

    def counted(self, allocate: Callable[[int], Allocation]) -> Callable[[int], Allocation]:
        """The same function; what it gives out is counted."""

        def allocated(num_bytes: int) -> Allocation:
            allocation = allocate(num_bytes)
            self.num_bytes += num_bytes
            self.most = max(self.most, self.num_bytes)
            free = allocation._free

            def freed() -> None:
                self.num_bytes -= num_bytes
                free()

            allocation._free = freed
            return allocation

        return allocated

    def now(self) -> int:
        """Once nothing is left in cycles."""
        gc.collect()
        return self.num_bytes


@contextmanager
def taken_memory() -> Iterator[TakenMemory]:
    """Inside, all memory of the runtime's is counted."""
    taken = TakenMemory()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("block", "scratch"):
            patch.setattr(allocations, name, taken.counted(getattr(allocations, name)))
        yield taken


def check_chains(runner: OneSequence, plain: OneSequence, lengths: Iterable[int] = (1, 5, 20, 130)) -> None:
    """Tokens that follow prompts of these lengths have the same logits: three behind the first and the last.

    Between them one is enough, which reads all that the prompt has left.
    """
    lengths = list(lengths)
    for length in lengths:
        for each in (runner, plain):
            each.reset()
            each.prefill(token_ids(length))
        for token in (3, 1, 2) if length in (lengths[0], lengths[-1]) else (3,):
            assert np.array_equal(runner.decode(token), plain.decode(token)), length
