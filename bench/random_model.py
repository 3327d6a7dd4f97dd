"""Writes random-weight GGUF files of the real model's shape, for benchmarks: the bytes cost what real ones
cost.

    python -m bench.random_model cut.gguf    4 layers and 16 experts in the shape of Qwen3.6-35B-A3B: 220 MB
    python -m bench.random_model cut.gguf --experts Q2_K                 the same with its experts in Q2_K
    python -m bench.random_model small.gguf --small --weights Q2_K       a small model, every matrix in Q2_K

Blocks are random bytes with scales chosen so that weights have a standard deviation near 1/sqrt(inputs):
activations stay of order one and routing is spread over the experts. Layer kinds, tensor names and metadata
are the real ones.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import gguf
from bench.random_blocks import random_blocks
from coldstream.gguf.quant_types import QuantType

Q4_K, Q6_K = QuantType.Q4_K, QuantType.Q6_K


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model; the defaults are those of the model for CPU benchmarks."""

    hidden: int = 2048
    layers: int = 4
    experts: int = 16
    experts_per_token: int = 4
    expert_ffn: int = 512
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    key_heads: int = 16
    value_heads: int = 32
    state_dim: int = 128
    vocab: int = 1024
    context: int = 32768
    dense_ffn: int = 0  # of every layer, which then has no experts
    has_nextn: bool = False  # whether a block for multi-token prediction follows the layers

    @property
    def architecture(self) -> str:
        """As `general.architecture` says it."""
        return "qwen35" if self.dense_ffn else "qwen35moe"


SMALL_SHAPE = Shape(
    hidden=512, layers=8, experts=32, expert_ffn=256, heads=8, head_dim=64, key_heads=4, value_heads=8,
    state_dim=64, vocab=4096,
)  # fmt: skip


def add_metadata(out: gguf.GGUFWriter, shape: Shape, name: str, file_type: int = 15) -> None:
    """The model's numbers under their real keys."""
    out.add_name(name)
    experts = {
        "expert_count": shape.experts,
        "expert_used_count": shape.experts_per_token,
        "expert_feed_forward_length": shape.expert_ffn,
        "expert_shared_feed_forward_length": shape.expert_ffn,
    }
    arch = shape.architecture
    for key, value in {
        "block_count": shape.layers + shape.has_nextn,
        **({"nextn_predict_layers": 1} if shape.has_nextn else {}),
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": 64,
        **({"feed_forward_length": shape.dense_ffn} if shape.dense_ffn else experts),
        "ssm.conv_kernel": 4,
        "ssm.state_size": shape.state_dim,
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.inner_size": shape.value_heads * shape.state_dim,
        "full_attention_interval": 4,
    }.items():
        out.add_uint32(f"{arch}.{key}", value)
    out.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    out.add_float32(f"{arch}.rope.freq_base", 1e7)
    out.add_array(f"{arch}.rope.dimension_sections", [11, 11, 10, 0])
    out.add_file_type(file_type)
    out.add_quantization_version(2)


def byte_tokens() -> list[str]:
    """The 256 tokens of one byte, written in the byte-level alphabet."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in letters]
    alphabet = {b: chr(b) for b in letters} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [alphabet[b] for b in range(256)]


MERGES = ("t h", "h e", "i n")


def add_tokenizer(
    out: gguf.GGUFWriter, tokens: list[str], kinds: list[int], eos_id: int, pre: str = "qwen35"
) -> None:
    """A vocabulary with three merges; one without their results is none for coldstream's tokenizer."""
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types(kinds)
    out.add_token_merges(MERGES)
    out.add_eos_token_id(eos_id)


class RandomModelWriter:
    """Adds tensors of random content to a GGUF file of `shape`."""

    def __init__(
        self,
        path: Path,
        shape: Shape,
        seed: int,
        *,
        experts: QuantType | None = None,
        weights: QuantType | None = None,
    ) -> None:
        """experts: the type of all routed experts. weights: that of all other matrices. None: as they are."""
        self.shape, self.expert_type, self.weight_type = shape, experts, weights
        self.rng = np.random.default_rng(seed)
        self.out = gguf.GGUFWriter(path, shape.architecture)

    def quantised(self, name: str, qtype: QuantType, *dims: int) -> None:
        """A matrix or a stack, in `qtype` unless the writer has another type for all of its kind."""
        other = self.expert_type if "_exps." in name else self.weight_type
        qtype = other or qtype
        *stack, rows, cols = dims
        blocks = random_blocks(self.rng, qtype, int(np.prod(stack, initial=1)) * rows, cols)
        # The writer converts the shape of uint8 by its own table of types, which lacks some.
        self.out.add_tensor(name, blocks.view(np.int8), raw_shape=dims, raw_dtype=qtype)

    def floats(self, name: str, values: np.ndarray) -> None:
        self.out.add_tensor(name, values.astype(np.float32))

    def normal(self, *dims: int) -> np.ndarray:
        return self.rng.standard_normal(dims) * dims[-1] ** -0.5

    def tokenizer(self) -> None:
        """The 256 byte tokens and an end token; the rest of the vocabulary is unused."""
        tokens = [*byte_tokens(), "<|endoftext|>"]
        kinds = [1] * 256 + [3]
        tokens += [f"<unused{i}>" for i in range(self.shape.vocab - len(tokens))]
        kinds += [5] * (self.shape.vocab - len(kinds))
        add_tokenizer(self.out, tokens, kinds, 256)

    def attention_block(self, name: str) -> None:
        s = self.shape
        self.quantised(f"{name}.attn_q.weight", Q4_K, s.heads * s.head_dim * 2, s.hidden)
        self.quantised(f"{name}.attn_k.weight", Q4_K, s.kv_heads * s.head_dim, s.hidden)
        self.quantised(f"{name}.attn_v.weight", Q6_K, s.kv_heads * s.head_dim, s.hidden)
        self.quantised(f"{name}.attn_output.weight", Q4_K, s.hidden, s.heads * s.head_dim)
        self.floats(f"{name}.attn_q_norm.weight", np.ones(s.head_dim))
        self.floats(f"{name}.attn_k_norm.weight", np.ones(s.head_dim))

    def delta_net_block(self, name: str) -> None:
        s = self.shape
        key_dim, value_dim = s.key_heads * s.state_dim, s.value_heads * s.state_dim
        self.quantised(f"{name}.attn_qkv.weight", Q4_K, 2 * key_dim + value_dim, s.hidden)
        self.quantised(f"{name}.attn_gate.weight", Q4_K, value_dim, s.hidden)
        self.floats(f"{name}.ssm_alpha.weight", self.normal(s.value_heads, s.hidden))
        self.floats(f"{name}.ssm_beta.weight", self.normal(s.value_heads, s.hidden))
        self.floats(f"{name}.ssm_a", -self.rng.uniform(0.1, 4, s.value_heads))
        self.floats(f"{name}.ssm_dt.bias", self.rng.uniform(-4, 1, s.value_heads))
        self.floats(f"{name}.ssm_conv1d.weight", self.normal(2 * key_dim + value_dim, 4))
        self.floats(f"{name}.ssm_norm.weight", np.ones(s.state_dim))
        self.quantised(f"{name}.ssm_out.weight", Q4_K, s.hidden, value_dim)

    def moe(self, name: str, down_type: QuantType) -> None:
        s = self.shape
        self.floats(f"{name}.ffn_gate_inp.weight", self.normal(s.experts, s.hidden))
        self.floats(f"{name}.ffn_gate_inp_shexp.weight", self.normal(s.hidden))
        for suffix, stack in (("exps", (s.experts,)), ("shexp", ())):
            self.quantised(f"{name}.ffn_gate_{suffix}.weight", Q4_K, *stack, s.expert_ffn, s.hidden)
            self.quantised(f"{name}.ffn_up_{suffix}.weight", Q4_K, *stack, s.expert_ffn, s.hidden)
            self.quantised(f"{name}.ffn_down_{suffix}.weight", down_type, *stack, s.hidden, s.expert_ffn)

    def write(self) -> None:
        s = self.shape
        add_metadata(self.out, s, "random Qwen3.6-35B-A3B")
        self.tokenizer()
        self.quantised("token_embd.weight", Q4_K, s.vocab, s.hidden)
        self.floats("output_norm.weight", np.ones(s.hidden))
        self.quantised("output.weight", Q6_K, s.vocab, s.hidden)
        for layer in range(s.layers):
            name = f"blk.{layer}"
            self.floats(f"{name}.attn_norm.weight", np.ones(s.hidden))
            self.floats(f"{name}.post_attention_norm.weight", np.ones(s.hidden))
            if (layer + 1) % 4 == 0:
                self.attention_block(name)
            else:
                self.delta_net_block(name)
            # llama-quantize gives the down projections of the outer layers and of every third layer between
            # more bits.
            self.moe(name, Q6_K if layer in (0, s.layers - 1) else Q4_K)
        self.out.write_header_to_file()
        self.out.write_kv_data_to_file()
        self.out.write_tensors_to_file()
        self.out.close()


def quant_type(name: str) -> QuantType:
    """The type of that name. Raises argparse.ArgumentTypeError if there is none."""
    try:
        return QuantType[name]
    except KeyError:
        known = ", ".join(known.name for known in QuantType)
        raise argparse.ArgumentTypeError(f"no weight type {name!r}: there are {known}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--small", action="store_true", help="hidden size 512, 8 layers, 32 experts")
    parser.add_argument("--experts", type=quant_type, metavar="TYPE", help="of routed experts")
    parser.add_argument("--weights", type=quant_type, metavar="TYPE", help="of all matrices, experts too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    experts = options.experts or options.weights
    shape = SMALL_SHAPE if options.small else Shape()
    RandomModelWriter(options.path, shape, options.seed, experts=experts, weights=options.weights).write()
    print(f"{options.path}: {options.path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
