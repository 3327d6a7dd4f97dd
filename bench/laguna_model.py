"""The file of Laguna-XS-2.1 (33B-A3B), about 20 GB, that family_models.py writes.

The first layer is dense. One layer of four sees all positions. The others see a window and have more heads.
"""

from typing import Final

import numpy as np

import gguf
from bench.full_size_model import FullSizeWriter
from bench.random_model import Shape

# heads: of a layer with a window. Source: the configuration of the checkpoint.
LAGUNA_SHAPE: Final = Shape(
    hidden=2048, layers=40, experts=256, experts_per_token=8, expert_ffn=512, heads=64, kv_heads=8,
    head_dim=128, vocab=100352, context=131072,
)  # fmt: skip
FULL_HEADS: Final = 48  # of a layer that sees all positions
PERIOD: Final = 4  # of these, the first of which comes first
WINDOW: Final = 512
DENSE_FFN: Final = 8192  # of the first layer


class LagunaWriter(FullSizeWriter):
    """Plans and writes the tensors of a Laguna; see the base class."""

    @property
    def architecture(self) -> str:
        return "laguna"

    @property
    def model_name(self) -> str:
        return "Laguna-XS-2.1"

    @property
    def is_windowed(self) -> list[bool]:
        """Of each layer."""
        return [layer % PERIOD != 0 for layer in range(self.shape.layers)]

    @property
    def heads(self) -> list[int]:
        """Of each layer."""
        return [self.shape.heads if windowed else FULL_HEADS for windowed in self.is_windowed]

    def add_metadata(self, out: gguf.GGUFWriter, name: str) -> None:
        s, arch = self.shape, self.architecture
        out.add_name(name)
        for key, value in {
            "block_count": s.layers,
            "context_length": s.context,
            "embedding_length": s.hidden,
            "feed_forward_length": DENSE_FFN,
            "leading_dense_block_count": 1,
            "attention.head_count_kv": s.kv_heads,
            "attention.key_length": s.head_dim,
            "attention.value_length": s.head_dim,
            "attention.sliding_window": WINDOW,
            "rope.dimension_count": s.head_dim // 2,
            "rope.dimension_count_swa": s.head_dim,
            "rope.scaling.original_context_length": 4096,
            "expert_count": s.experts,
            "expert_used_count": s.experts_per_token,
            "expert_feed_forward_length": s.expert_ffn,
            "expert_shared_feed_forward_length": s.expert_ffn,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
        }.items():
            out.add_uint32(f"{arch}.{key}", value)
        out.add_array(f"{arch}.attention.head_count", self.heads)
        out.add_array(f"{arch}.attention.sliding_window_pattern", self.is_windowed)
        out.add_bool(f"{arch}.expert_weights_norm", True)
        out.add_string(f"{arch}.rope.scaling.type", "yarn")
        for key, number in {
            "attention.layer_norm_rms_epsilon": 1e-6,
            "expert_weights_scale": 2.5,
            "rope.freq_base": 5e5,
            "rope.freq_base_swa": 1e4,
            "rope.scaling.factor": 32.0,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "rope.scaling.yarn_attn_factor": 1.0,
        }.items():
            out.add_float32(f"{arch}.{key}", number)
        out.add_file_type(self.mix.file_type)
        out.add_quantization_version(2)

    def block(self, layer: int) -> None:
        s, name, heads = self.shape, f"blk.{layer}", self.heads[layer]
        norm = np.ones(s.hidden)
        self.floats(f"{name}.attn_norm.weight", norm)
        self.matrix(f"{name}.attn_q.weight", heads * s.head_dim, s.hidden)
        self.matrix(f"{name}.attn_k.weight", s.kv_heads * s.head_dim, s.hidden)
        self.matrix(f"{name}.attn_v.weight", s.kv_heads * s.head_dim, s.hidden)
        self.matrix(f"{name}.attn_gate.weight", heads, s.hidden)
        self.matrix(f"{name}.attn_output.weight", s.hidden, heads * s.head_dim, adds_to_stream=True)
        self.floats(f"{name}.attn_q_norm.weight", np.ones(s.head_dim))
        self.floats(f"{name}.attn_k_norm.weight", np.ones(s.head_dim))
        self.floats(f"{name}.ffn_norm.weight", norm)
        if layer == 0:
            self.gated_unit(f"{name}.ffn_{{}}.weight", DENSE_FFN)
            return
        self.router(name)
        self.floats(f"{name}.exp_probs_b.bias", np.zeros(s.experts))
        self.stacks(name)
