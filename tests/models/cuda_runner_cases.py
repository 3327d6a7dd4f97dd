"""Opening a model on a GPU, and a GPU without memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from cuda.bindings import driver
from one_sequence import OneSequence

from coldstream.engine.routing_profile import routed_model
from coldstream.experts.prefetching import LAYERS_AHEAD, Prefetching
from coldstream.gguf.reader import GGUFFile
from coldstream.kvcache import CacheSize
from coldstream.models.cuda_runner import CudaRunner, ExpertSetup
from coldstream.models.footprint import model_sizes
from coldstream.models.spec import ModelSpec
from coldstream.placement.plan import FixedPart, PlacementPlan
from coldstream.placement.policies import Policy
from coldstream.placement.run_plan import RunPlan

CHUNK_SIZE = 512


def open_cuda(
    path: Path, context_length: int = 256, kv_type: str = "i16", cache_size: CacheSize | None = None
) -> OneSequence:
    file = GGUFFile.open(path)
    spec = ModelSpec.from_gguf(file.metadata, file.tensors)
    runner = CudaRunner.load(
        file, spec, context_length=context_length, kv_type=kv_type, cache_size=cache_size
    )
    return OneSequence(runner)


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
    cache_size: CacheSize | None = None,
    prefetching: Prefetching | None = None,
    layer_weights: tuple[float, ...] = (),
) -> OneSequence:
    """With slots for that share of the experts, and that share of what a token misses read over the bus.

    All experts of `pinned` layers are there besides.
    """
    file = GGUFFile.open(path)
    spec = ModelSpec.from_gguf(file.metadata, file.tensors)
    sizes = model_sizes(spec, file.tensors, file.fingerprint, 0)
    count = round(share * spec.num_experts)
    plan = PlacementPlan(
        model=routed_model(file, spec),
        tier="vram",
        budget_bytes=2**40,
        fixed=FixedPart(context_length, "i16", CHUNK_SIZE, 0, 0, 0),
        ring_bytes=ring_bytes,
        expert_bytes=sizes.expert_bytes,
        resident=tuple(
            tuple(range(spec.num_experts if layer in pinned else count)) for layer in range(spec.num_layers)
        ),
        pinned_layers=pinned,
        layer_weights=layer_weights,
    )
    by_misses = tuple(round(streamed * misses) for misses in range(spec.num_experts_per_tok + 1))
    run = RunPlan(plan, threads, streamed=by_misses)
    if prefetching and (fitting := prefetching.fitting(ring_bytes, max(sizes.expert_bytes))):
        assert fitting.cap_bytes
        run = replace(run, prefetch=fitting.experts, prefetch_bytes=fitting.cap_bytes)
    ahead = prefetching.distance if prefetching else LAYERS_AHEAD
    setup = ExpertSetup(run, policy=policy, layers_ahead=ahead)
    runner = CudaRunner.load(
        file, spec, context_length=context_length, kv_type="i16", cache_size=cache_size, expert_setup=setup
    )
    return OneSequence(runner)


@contextmanager
def no_memory_left() -> Iterator[None]:
    """Another program has taken all of the device's memory."""
    torch.cuda.empty_cache()
    taken, size = [], 2**36
    while size >= 2**12:
        status, address = driver.cuMemAlloc(size)
        if status == driver.CUresult.CUDA_SUCCESS:
            taken.append(address)
        else:
            size //= 2
    try:
        yield
    finally:
        for address in taken:
            driver.cuMemFree(address)
