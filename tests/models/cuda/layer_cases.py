"""Dense models on a GPU that lacks FFNs of some layers."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from one_sequence import OneSequence

from bench.runners import layers_plan, open_model_file
from builders import Dims, write_gguf
from coldstream.kvcache import CacheSize
from coldstream.models.cuda.runner import CudaRunner

CHUNK_SIZE = 512
NUM_LAYERS = 6
ALL = tuple(range(NUM_LAYERS))
# Of different sizes in the ring.
TYPES = {"*.ffn_gate.weight": "Q4_K", "*.ffn_up.weight": "Q5_K", "blk.[024].ffn_down.weight": "Q6_K"}
ONLY_CPU = 1e-9  # of `streamed`


def write_dense(folder: Path) -> Path:
    """A dense model with a layer of attention and one of DeltaNet in turn."""
    dims = Dims(layers=NUM_LAYERS, interval=2, ffn=768)
    return write_gguf(folder / "dense.gguf", "qwen35", types=TYPES, dims=dims, nextn=True)[0]


def open_layers(
    path: Path,
    missing: Collection[int],
    streamed: float,
    *,
    num_places: int = 2,
    context_length: int = 256,
    cache_size: CacheSize | None = None,
    has_mtp: bool = False,
) -> OneSequence:
    """Without the FFNs of the layers `missing`: that share comes over the bus in decode steps."""
    file, spec = open_model_file(path)
    sizes = {"context_length": context_length, "chunk_size": CHUNK_SIZE}
    plan = layers_plan(file, spec, missing, **sizes, threads=2, streamed=streamed, num_places=num_places)
    if has_mtp:
        fixed = replace(plan.placement.fixed, num_tree_rows=8)
        plan = replace(plan, placement=replace(plan.placement, fixed=fixed), spec_type="mtp")
    return OneSequence(CudaRunner.load(file, spec, plan, cache_size=cache_size))
