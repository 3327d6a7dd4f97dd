"""Files with an MTP block, and what the definition says of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from runner_cases import MIX

from builders import TinyModel, make_model, write_model
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.ops import Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache import ModelCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.cpu.mtp import CpuMtp
from coldstream.models.mtp.model import MtpModel
from coldstream.models.read_spec import read_spec

CONTEXT = 600
# With everything that a block may have of its own, with nothing of it, with other layouts and types.
VARIANTS = {
    "moe": ("qwen35moe", {"types": MIX}),
    "dense": ("qwen35", {"quant": "Q4_K"}),
    "tied": ("qwen35", {"tied": True, "quant": "Q5_0"}),
    "fused": ("qwen35moe", {"fused_experts": True, "fused_attention": True, "quant": "Q4_K"}),
    "qwen3next": ("qwen3next", {"types": MIX}),
    "floats": ("qwen35moe", {"quant": "F32"}),
    "own tables": ("qwen35", {"quant": "Q8_0"}),
    "no norm of its own": ("qwen35moe", {"quant": "Q8_0"}),
    "streams": ("qwen4exp", {"types": MIX}),
    "streams, n-grams": ("qwen4exp", {"quant": "Q4_K", "ngrams": True}),
}


def make_variant(name: str, **options: object) -> TinyModel:
    arch, of_variant = VARIANTS[name]
    model = make_model(arch, nextn=True, **{**of_variant, **options})  # type: ignore[arg-type]
    prefix, rng = "blk.4.nextn.", np.random.default_rng(9)
    if name == "own tables":
        for own, shared in (("embed_tokens", "token_embd"), ("shared_head_head", "output")):
            table = rng.permutation(model.tensors[f"{shared}.weight"])
            model.tensors[f"{prefix}{own}.weight"] = table
            model.types[f"{prefix}{own}.weight"] = model.types[f"{shared}.weight"]
    if name == "no norm of its own":
        del model.tensors[f"{prefix}shared_head_norm.weight"]
    if arch != "qwen3next":
        # Sections that cover all pairs, or llama.cpp leaves some of them where they are.
        model.metadata[f"{arch}.rope.dimension_sections"] = [3, 3, 2, 0]
    return model


def write_variant(folder: Path, name: str, **options: object) -> Path:
    return write_model(folder / "mtp.gguf", make_variant(name, **options))[0]


@dataclass(frozen=True)
class Outputs:
    """By row: normed outputs [T, E], logits [T, vocab], and states of rows that follow."""

    hidden: np.ndarray
    logits: np.ndarray
    states: np.ndarray


class Reference:
    """Trunk and block of a file over the operations in PyTorch, each fed from position 0 on."""

    def __init__(self, path: Path, *, exact: bool, kv_type: str = "f32", window: int | None = None) -> None:
        self.ops = ReferenceOps(exact=exact)
        with GGUFFile.open(path) as file:
            spec = read_spec(file.metadata, file.tensors).with_window(window)
            self.trunk = CausalLM.load(file, spec, self.ops)
            self.block = MtpModel.load(file, self.trunk, self.ops)
        self._trunk_cache = ModelCache(spec, self.ops, 1, CONTEXT, kv_type)
        self._block_cache = ModelCache(self.block.layer.spec, self.ops, 1, CONTEXT, kv_type)
        self.num_rows = 0  # of the block

    @torch.no_grad()
    def feed_trunk(self, token_ids: Sequence[int]) -> np.ndarray:
        """Hidden states of a prompt [T, E], or all residual streams after the last layer [T, C·E]."""
        ids, streams = torch.tensor(token_ids, dtype=torch.int32), []
        rows, cache = _rows(0, len(ids)), self._trunk_cache
        hidden = self.trunk.forward(ids, rows, cache, lambda layer, x: streams.append(x))
        return (hidden if self.trunk.spec.hyper_connections is None else streams[-1]).numpy()

    @torch.no_grad()
    def feed_block(self, token_ids: Sequence[int], hidden: np.ndarray) -> Outputs:
        """The block's next rows."""
        ids, rows = torch.tensor(token_ids, dtype=torch.int32), _rows(self.num_rows, len(token_ids))
        found = self.block.forward(ids, torch.from_numpy(np.array(hidden)), rows, self._block_cache)
        self.num_rows += len(token_ids)
        logits = self.block.logits(found.outputs)
        return Outputs(found.outputs.numpy(), logits.numpy(), found.states.numpy())


def _rows(first: int, count: int) -> Rows:
    positions = torch.arange(first, first + count, dtype=torch.int32)
    return Rows(positions, torch.zeros(count, dtype=torch.int32))


def keys_and_values(block: CpuMtp, sequence: object) -> np.ndarray:
    """Those of all rows of a sequence of the block, in order, as bytes."""
    record = sequence._sequence  # type: ignore[attr-defined]
    (state,) = block._sequences.tensors.layers
    rows = [
        cache[record.blocks].reshape(-1, *cache.shape[2:])[: record.length] for cache in (state.k, state.v)
    ]
    return np.stack(rows).view(np.uint8)
