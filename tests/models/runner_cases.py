"""Tiny models that runners of every device are held to, and what the definition says of them."""

from pathlib import Path

import numpy as np
import torch

from builders import Dims, MixedAttention, write_gguf
from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.ops import Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache.cache import ModelCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec

MIX = {
    "*_exps.weight": "Q4_K",
    "*.ffn_down_exps.weight": "Q6_K",
    "*.attn_qkv.weight": "Q5_K",
    "token_embd.weight": "Q4_0",
}
VARIANTS = {
    "moe": ("qwen35moe", {"types": MIX}),
    "moe-nextn-fused": (
        "qwen35moe",
        {"nextn": True, "fused_experts": True, "fused_attention": True, "quant": "Q4_K"},
    ),
    "small-tensors-quantised": (
        "qwen35moe",
        {
            "types": {
                "*.ffn_gate_inp.weight": "Q8_0",
                "*.ssm_alpha.weight": "Q4_K",
                "*.ssm_beta.weight": "F16",
            }
        },
    ),
    "dense-tied": ("qwen35", {"tied": True, "quant": "Q5_0"}),
    "experts-of-floats": ("qwen35moe", {"quant": "F16"}),
    "gates-and-ups-of-two-types": (
        "qwen35moe",
        {
            "types": {
                **MIX,
                "*.ffn_up_exps.weight": "Q5_K",
                "*.ffn_gate_shexp.weight": "F16",
                "*.ffn_up_shexp.weight": "Q8_0",
            }
        },
    ),
    "qwen3next": ("qwen3next", {"types": {**MIX, "*.ssm_ba.weight": "Q8_0"}}),
    "qwen3next-first-converters": ("qwen3next", {"ssm_in": True, "quant": "Q4_K", "nextn": True}),
    "float": ("qwen35moe", {"quant": "BF16", "types": {"*_exps.weight": "IQ4_XS"}}),
    "every-tensor-another-type": (
        "qwen35moe",
        {
            "quant": "IQ4_NL",
            "types": {
                "token_embd.weight": "IQ2_S",
                "output.weight": "TQ2_0",
                "*.ffn_gate_exps.weight": "Q2_K",
                "*.ffn_up_exps.weight": "MXFP4",
                "*.ffn_down_exps.weight": "Q2_0",
                "*.ffn_gate_shexp.weight": "IQ3_S",
                "*.ffn_up_shexp.weight": "Q5_1",
                "*.attn_q.weight": "Q3_K",
                "*.attn_k.weight": "IQ1_M",
                "*.attn_qkv.weight": "IQ2_XXS",
            },
        },
    ),
    "qwen3moe": ("qwen3moe", {"types": MIX}),
    "laguna": ("laguna", {"types": MIX}),
    "gpt-oss": ("gpt-oss", {"types": MIX}),
    "gemma4": ("gemma4", {"types": MIX, "fused_experts": True}),
    "laguna-gates-of-elements": ("laguna", {"quant": "Q4_K", "element_gates": True, "tied": True}),
    "mixed-attention": ("qwen3moe", {"types": MIX, "mixed": MixedAttention()}),
    "qwen3moe-fused-tied": (
        "qwen3moe",
        {"fused_experts": True, "fused_attention": True, "tied": True, "quant": "Q4_K"},
    ),
    "qwen4exp": ("qwen4exp", {"types": MIX}),
    "qwen4exp-nextn-fused": (
        "qwen4exp",
        {
            "nextn": True,
            "fused_experts": True,
            "quant": "Q4_K",
            "types": {"*_up.weight": "BF16", "*_inject.weight": "Q8_0"},
        },
    ),
    "qwen4exp-ngrams": ("qwen4exp", {"ngrams": True, "types": {**MIX, "per_layer_*": "IQ4_NL"}}),
    # Whose rows attend to few of the positions before them.
    "qwen4exp-indexed": ("qwen4exp", {"types": MIX, "dims": Dims(top_k=16)}),
}
# A model of each architecture with experts.
FAMILIES = (
    *("moe", "qwen3moe", "qwen3next", "qwen4exp", "qwen4exp-ngrams", "qwen4exp-indexed"),
    *("laguna", "gpt-oss", "gemma4"),
)
# Architectures whose layers differ, each with the types of cache that tests over several take it with.
MIXED_LAYERS = [
    ("qwen35moe", "i16"),
    ("qwen35moe", "i8"),
    ("qwen3next", "i4"),
    ("qwen3moe", "i3"),
    ("qwen4exp", "i16"),
    ("gemma4", "i8"),
]
# On the host these take as many minutes again.
MIXED_LAYERS_OF_A_GPU = [
    *MIXED_LAYERS,
    ("qwen3next", "i16"),
    ("qwen3moe", "i16"),
    ("laguna", "i16"),
    ("gpt-oss", "i8"),
    ("gemma4", "i16"),
]


def write_variant(folder: Path, name: str) -> Path:
    """The model of `VARIANTS` with that name."""
    arch, options = VARIANTS[name]
    path = folder / f"{name}.gguf"
    write_gguf(path, arch, **options)  # type: ignore[arg-type]
    return path


def write_mixed_layers(folder: Path, arch: str) -> Path:
    """A model of one layer of each kind that `arch` has, and of several types of weights."""
    path, has_ngrams = folder / f"{arch}.gguf", arch == "qwen4exp"
    count = 2 + has_ngrams  # which do not enter the first layer, nor one that attends
    # An indexer leaves out positions of all but short texts.
    dims = Dims(layers=count, interval=count, top_k=32)
    write_gguf(path, arch, types=MIX, dims=dims, ngrams=has_ngrams)
    return path


def token_ids(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(count).integers(0, 256, count)]


def reference_logits(path: Path, ids: list[int], kv_type: str = "f32") -> torch.Tensor:
    """What docs/arithmetic.md and the reference operations say."""
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        ops = ReferenceOps(exact=True)
        model = CausalLM.load(file, spec, ops)
    cache = ModelCache(spec, ops, num_states=1, context_length=len(ids), kv_type=kv_type)
    rows = Rows(torch.arange(len(ids), dtype=torch.int32), torch.zeros(len(ids), dtype=torch.int32))
    return model.logits(model.forward(torch.tensor(ids, dtype=torch.int32), rows, cache))


def write_family(folder: Path, name: str) -> Path:
    """A model with experts, many of which a short text does not use; "demo" is the bundled one."""
    if name == "demo":
        return demo_model_path()
    return write_gguf(folder / "tiny.gguf", name, types=MIX, dims=Dims(experts=32, experts_used=4))[0]
