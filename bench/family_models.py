"""Writes random-weight files of the shapes and types of gpt-oss, gemma-4, Qwen3.8-Flash-Next and Laguna.

    python -m bench.family_models gpt-oss-20b oss.gguf                     12 GB
    python -m bench.family_models gpt-oss-20b small.gguf --layers 4 --vocab 8192
    python -m bench.family_models Qwen3.8-Flash-Next fn.gguf --mix Q2_0-experts --ngram-rows 1000000

Routing is as local as that of trained models, and text walks through the vocabulary, by the construction of
full_size_model.py. It has to hold in each family:

- biases of what adds to the residual stream are 0 in the protected channels, too;
- hyper-connections: gates of these channels are equal in all streams, so that what routers and the head read
  of them depends on the token alone;
- n-grams: their values are 0 in these channels;
- gemma-4: the weights of what a part gives are 0 there, too, and so is its norm. The head is a matrix of its
  own, as one that is tied to the embedding cannot say the next token.

The table of n-grams is a third of a Qwen3.8-Flash-Next. With as many rows as published it is a hole in the
file, which takes no place on a disk and reads as zeros. With fewer rows its weights are random.
"""

import argparse
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

import gguf
from bench.full_size_mixes import MIXES, PLAIN, Mix, mix_named
from bench.full_size_model import (
    CODE,
    OUTPUT_GAIN,
    PROTECTED,
    Buffers,
    FullSizeWriter,
    Piece,
    Tensor,
    fitting,
)
from bench.laguna_model import LAGUNA_SHAPE, LagunaWriter
from bench.random_model import Shape

BIAS = 0.1  # the deviation of biases
SINK = 2.0  # of the logits of sinks
NGRAM_DEVIATION = 1.0
NGRAM_PIECE = 1 << 16  # blocks


def add_keys(out: gguf.GGUFWriter, prefix: str, keys: Mapping[str, Any]) -> None:
    """Writes `{prefix}.{key}` with the type that the value has in Python; integers have 32 bits."""
    kinds = {bool: out.add_bool, int: out.add_uint32, float: out.add_float32, str: out.add_string}
    for key, value in keys.items():
        add = out.add_array if isinstance(value, list) else kinds[type(value)]
        add(f"{prefix}.{key}", value)


class FamilyWriter(FullSizeWriter, ABC):
    """What the writers of families share; see the base class."""

    @abstractmethod
    def keys(self) -> dict[str, Any]:
        """The model's numbers, without the architecture in front."""

    def common_keys(self) -> dict[str, Any]:
        """Those of all families."""
        s = self.shape
        return {
            "block_count": s.layers,
            "context_length": s.context,
            "embedding_length": s.hidden,
            "attention.head_count": s.heads,
            "attention.head_count_kv": s.kv_heads,
            "attention.key_length": s.head_dim,
            "attention.value_length": s.head_dim,
            "expert_count": s.experts,
            "expert_used_count": s.experts_per_token,
            "expert_feed_forward_length": s.expert_ffn,
        }

    def add_metadata(self, out: gguf.GGUFWriter, name: str) -> None:
        out.add_name(name)
        add_keys(out, self.architecture, {**self.common_keys(), **self.keys()})
        out.add_file_type(self.mix.file_type)
        out.add_quantization_version(2)

    def bias(self, name: str, *dims: int, adds_to_stream: bool = False) -> None:
        """A random one; with `adds_to_stream`, protected channels are 0."""
        values = self.rng.standard_normal(dims, np.float32) * BIAS
        if adds_to_stream:
            values[..., :PROTECTED] = 0
        self.floats(name, values)


OSS_WINDOW: Final = 128


class GptOssWriter(FamilyWriter):
    """gpt-oss: attention with biases and sinks, and experts with biases."""

    tokenizer = "gpt-4o"
    architecture = "gpt-oss"

    @property
    def model_name(self) -> str:
        return "gpt-oss-20b" if self.shape.experts < 128 else "gpt-oss-120b"

    def keys(self) -> dict[str, Any]:
        return {
            "feed_forward_length": self.shape.expert_ffn,
            "attention.sliding_window": OSS_WINDOW,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": self.shape.head_dim,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        }

    def block(self, layer: int) -> None:
        s, name = self.shape, f"blk.{layer}"
        self.floats(f"{name}.attn_norm.weight", np.ones(s.hidden))
        for part, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            self.matrix(f"{name}.attn_{part}.weight", heads * s.head_dim, s.hidden)
            self.bias(f"{name}.attn_{part}.bias", heads * s.head_dim)
        self.matrix(f"{name}.attn_output.weight", s.hidden, s.heads * s.head_dim, adds_to_stream=True)
        self.bias(f"{name}.attn_output.bias", s.hidden, adds_to_stream=True)
        self.floats(f"{name}.attn_sinks.weight", SINK * self.rng.standard_normal(s.heads))
        norm = np.ones(s.hidden)
        norm[:CODE] = self.gains[layer]
        self.floats(f"{name}.post_attention_norm.weight", norm)
        self.router(name)
        self.floats(f"{name}.ffn_gate_inp.bias", np.zeros(s.experts))
        self.gated_unit(f"{name}.ffn_{{}}_exps.weight", s.expert_ffn, s.experts)
        self.bias(f"{name}.ffn_gate_exps.bias", s.experts, s.expert_ffn)
        self.bias(f"{name}.ffn_up_exps.bias", s.experts, s.expert_ffn)
        self.bias(f"{name}.ffn_down_exps.bias", s.experts, s.hidden, adds_to_stream=True)


GEMMA_WINDOW: Final = 1024
GEMMA_PERIOD: Final = 6  # of these layers, the last of which has no window
TURNING: Final = 4  # of so many pairs, one turns in layers without a window


class Gemma4Writer(FamilyWriter):
    """gemma-4: norms of what each part gives, a dense network beside the experts, and larger heads."""

    architecture = "gemma4"

    @property
    def model_name(self) -> str:
        return "gemma-4-26B-A4B"

    @property
    def dense_size(self) -> int:
        """Of the network beside the experts."""
        return 3 * self.shape.expert_ffn

    @property
    def is_windowed(self) -> list[bool]:
        """Of each layer."""
        return [(layer + 1) % GEMMA_PERIOD != 0 for layer in range(self.shape.layers)]

    def heads(self, layer: int) -> tuple[int, int]:
        """Heads of keys and values, and the size of a head."""
        s = self.shape
        return (
            (s.kv_heads, s.head_dim) if self.is_windowed[layer] else (max(1, s.kv_heads // 4), 2 * s.head_dim)
        )

    def keys(self) -> dict[str, Any]:
        s = self.shape
        sizes = {f"attention.{part}_length": 2 * s.head_dim for part in ("key", "value")}
        return {
            **sizes,
            **{f"{name}_swa": s.head_dim for name in sizes},
            "feed_forward_length": self.dense_size,
            "embedding_length_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "attention.head_count_kv": [self.heads(layer)[0] for layer in range(s.layers)],
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.shared_kv_layers": 0,
            "attention.sliding_window": GEMMA_WINDOW,
            "attention.sliding_window_pattern": self.is_windowed,
            "rope.dimension_count": 2 * s.head_dim,
            "rope.dimension_count_swa": s.head_dim,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
        }

    def last_norm(self) -> None:
        super().last_norm()
        factors = np.full(self.shape.head_dim, 1e30)
        factors[: self.shape.head_dim // TURNING] = 1
        self.floats("rope_freqs.weight", factors)

    def block(self, layer: int) -> None:
        s, name = self.shape, f"blk.{layer}"
        ones = np.ones(s.hidden)
        for norm in ("attn_norm", "ffn_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            self.floats(f"{name}.{norm}.weight", ones)
        # As large beside the embedding, which is scaled, as what other families add.
        added = ones * OUTPUT_GAIN * s.hidden**0.5
        for norm in ("post_attention_norm", "post_ffw_norm"):
            self.floats(f"{name}.{norm}.weight", added)
        self.floats(f"{name}.layer_output_scale.weight", np.ones(1))
        self.plain_attention(name, *self.heads(layer), projects_values=self.is_windowed[layer])
        self.router(name)
        scale = ones * s.hidden**0.5
        scale[:CODE] *= self.gains[layer]
        self.floats(f"{name}.ffn_gate_inp.scale", scale)
        self.floats(f"{name}.ffn_down_exps.scale", np.ones(s.experts))
        self.matrix(f"{name}.ffn_gate_up_exps.weight", s.experts, 2 * s.expert_ffn, s.hidden)
        self.matrix(f"{name}.ffn_down_exps.weight", s.experts, s.hidden, s.expert_ffn, adds_to_stream=True)
        self.gated_unit(f"{name}.ffn_{{}}.weight", self.dense_size)

    def plain_attention(self, name: str, kv_heads: int, size: int, *, projects_values: bool) -> None:
        """Without gates; scores are not divided by the root of the heads' size, but queries are here."""
        hidden, width = self.shape.hidden, self.shape.heads * size
        self.matrix(f"{name}.attn_q.weight", width, hidden)
        for part in ("k", "v") if projects_values else ("k",):
            self.matrix(f"{name}.attn_{part}.weight", kv_heads * size, hidden)
        self.matrix(f"{name}.attn_output.weight", hidden, width, adds_to_stream=True)
        self.floats(f"{name}.attn_q_norm.weight", np.full(size, size**-0.5))
        self.floats(f"{name}.attn_k_norm.weight", np.ones(size))


@dataclass(frozen=True)
class NgramShape:
    """The table of n-grams and what reads it: as many values for each token as a stream has."""

    rows: int
    heads: int = 8  # of each length of n-grams: 2 and 3
    length: int = 3
    taps: int = 4
    layer: int = 1

    @property
    def num_heads(self) -> int:
        """Rows that a token takes."""
        return self.heads * (self.length - 1)

    @property
    def sizes(self) -> list[int]:
        """Of the heads' parts of the table: about as large, and no two alike."""
        mean = self.rows // self.num_heads
        return [mean - 2 * head for head in range(self.num_heads)]


PUBLISHED_ROWS: Final = 320_001_536
NGRAM: Final = NgramShape(PUBLISHED_ROWS)
STREAMS, RANK = 4, 320
INDEXER_HEADS, INDEXER_DIM, INDEXER_BLOCK, INDEXER_TOP_K = 4, 128, 4, 2048


class Qwen4ExpWriter(FamilyWriter):
    """Qwen3.8-Flash-Next: the mixers of Qwen3.6, hyper-connections, indexers, and n-grams."""

    architecture = "qwen4exp"
    ngram = NGRAM  # with 0 rows: none

    @property
    def model_name(self) -> str:
        return "Qwen3.8-Flash-Next"

    @property
    def ngram_columns(self) -> int:
        """Of the table."""
        return self.shape.hidden // self.ngram.num_heads

    @property
    def is_attention(self) -> list[bool]:
        """Of each layer."""
        return [(layer + 1) % 4 == 0 for layer in range(self.shape.layers)]

    def keys(self) -> dict[str, Any]:
        s = self.shape
        return {
            "expert_shared_feed_forward_length": s.expert_ffn,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
            "rope.freq_base": 1e7,
            "ssm.conv_kernel": 4,
            "ssm.state_size": s.state_dim,
            "ssm.group_count": s.key_heads,
            "ssm.time_step_rank": s.value_heads,
            "ssm.inner_size": s.value_heads * s.state_dim,
            "full_attention_interval": 4,
            "hyper_connection.count": STREAMS,
            "hyper_connection.low_rank": RANK,
            "attention.indexer.head_count": INDEXER_HEADS,
            "attention.indexer.key_length": INDEXER_DIM,
            "attention.indexer.top_k": INDEXER_TOP_K,
            "attention.compress_ratios": [INDEXER_BLOCK * attends for attends in self.is_attention],
        }

    def add_metadata(self, out: gguf.GGUFWriter, name: str) -> None:
        super().add_metadata(out, name)
        ngram, prefix = self.ngram, f"{self.architecture}.ple"
        if not ngram.rows:
            return
        keys = {
            "ngram_size": ngram.length,
            "heads_per_ngram": ngram.heads,
            "conv_kernel": ngram.taps,
            "eos_token_id": self.shape.vocab - 1,
            "layers": [ngram.layer],
        }
        add_keys(out, prefix, keys)
        out.add_uint32(f"{self.architecture}.embedding_length_per_layer_input", self.ngram_columns)
        multipliers = np.random.default_rng(0).integers(1 << 40, 1 << 45, ngram.length) | 1
        for key, numbers in {
            "layer_multipliers": multipliers.tolist(),
            "head_offsets": np.cumsum([0, *ngram.sizes[:-1]]).tolist(),
            "head_vocab_sizes": ngram.sizes,
        }.items():
            kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64
            out.add_key_value(f"{prefix}.{key}", numbers, *kinds)

    def block(self, layer: int) -> None:
        name = f"blk.{layer}"
        if self.ngram.rows and layer == self.ngram.layer:
            self.ngram_block(name)
        self.mixer(f"{name}.hc_attn", np.ones(CODE))
        if self.is_attention[layer]:
            self.attention(name)
            self.indexer(f"{name}.indexer")
        else:
            self.delta_net(name)
        self.mixer(f"{name}.hc_ffn", self.gains[layer])
        self.experts(name)

    def last_norm(self) -> None:
        self.mixer("output_hc", np.ones(CODE), enters_streams=False)

    def mixer(self, name: str, gains: np.ndarray, *, enters_streams: bool = True) -> None:
        """A hyper-connection. gains: of the code's channels."""
        hidden = self.shape.hidden
        norm = np.ones((STREAMS, hidden))
        norm[:, :CODE] = gains
        self.floats(f"{name}_norm.weight", norm.ravel())
        self.matrix(f"{name}_down.weight", RANK, STREAMS * hidden)
        self.matrix(f"{name}_up.weight", STREAMS, hidden, RANK, adds_to_stream=True)
        self.tensors[-1] = replace(self.tensors[-1], dims=(STREAMS * hidden, RANK))
        if enters_streams:
            self.matrix(f"{name}_inject.weight", STREAMS, STREAMS * hidden)

    def indexer(self, name: str) -> None:
        """Its projections stay in float32: llama-quantize leaves them as they are."""
        hidden, dim = self.shape.hidden, INDEXER_DIM
        for part, rows in (("q", INDEXER_HEADS * dim), ("k", dim)):
            self.floats(f"{name}.{part}_proj.weight", self.rng.standard_normal((rows, hidden)) * hidden**-0.5)
            self.floats(f"{name}.{part}_norm.weight", np.ones(dim))

    def ngram_block(self, name: str) -> None:
        hidden, width = self.shape.hidden, STREAMS * self.shape.hidden
        self.matrix(f"{name}.ple_key.weight", width, hidden)
        self.matrix(f"{name}.ple_value.weight", hidden, hidden, adds_to_stream=True)
        for part in ("key", "query", "conv"):
            self.floats(f"{name}.ple_norm_{part}.weight", np.ones(width))
        self.floats(f"{name}.ple_conv1d.weight", self.rng.standard_normal((width, self.ngram.taps)) / 2)
        self.ngram_table("per_layer_token_embd.weight")

    def ngram_table(self, name: str) -> None:
        """See the module docstring."""
        dims = (self.ngram.rows, self.ngram_columns)
        qtype = fitting(self.type_of(name), self.ngram_columns)
        if self.ngram.rows == PUBLISHED_ROWS:
            self.tensors.append(Tensor(name, qtype, dims, lambda: iter(()), is_hole=True))
            return
        pool, count = self.pool(qtype, NGRAM_DEVIATION), dims[0] * dims[1] // qtype.block_elements
        starts = range(0, count, NGRAM_PIECE)
        firsts = self.rng.integers(0, len(pool) - NGRAM_PIECE, len(starts))

        def blocks(first: int, number: int) -> Buffers:
            return [pool[first : first + number]]

        def pieces() -> Iterator[Piece]:
            for start, first in zip(starts, firsts.tolist(), strict=True):
                number = min(NGRAM_PIECE, count - start)
                yield start * qtype.block_bytes, lambda first=first, number=number: blocks(first, number)

        self.tensors.append(Tensor(name, qtype, dims, pieces))


@dataclass(frozen=True)
class Family:
    """A published model: its writer, its shape, and the mix of types that is usual."""

    writer: type[FullSizeWriter]
    shape: Shape
    mix: Mix


# Sources: the configurations of the checkpoints.
OSS_SHAPE: Final = Shape(
    hidden=2880, layers=24, experts=32, experts_per_token=4, expert_ffn=2880, heads=64, kv_heads=8,
    head_dim=64, value_heads=0, vocab=201088, context=131072,
)  # fmt: skip
GEMMA_SHAPE: Final = Shape(  # heads: of a layer with a window
    hidden=2816, layers=30, experts=128, experts_per_token=8, expert_ffn=704, heads=16, kv_heads=8,
    head_dim=256, vocab=262144, context=262144,
)  # fmt: skip
FLASH_NEXT_SHAPE: Final = Shape(
    hidden=2560, layers=48, experts=512, experts_per_token=10, expert_ffn=640, heads=24, value_heads=48,
    vocab=248320, context=262144,
)  # fmt: skip
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "gpt-oss-20b": Family(GptOssWriter, OSS_SHAPE, MIXES["MXFP4"]),
        "gpt-oss-120b": Family(GptOssWriter, replace(OSS_SHAPE, layers=36, experts=128), MIXES["MXFP4"]),
        "gemma-4-26B-A4B": Family(Gemma4Writer, GEMMA_SHAPE, PLAIN),
        "Qwen3.8-Flash-Next": Family(Qwen4ExpWriter, FLASH_NEXT_SHAPE, MIXES["Q2_0-experts"]),
        "Laguna-XS-2.1": Family(LagunaWriter, LAGUNA_SHAPE, PLAIN),
    }
)


def writer_of(options: argparse.Namespace) -> FullSizeWriter:
    """The writer that a command line asks for."""
    family = FAMILIES[options.family]
    shape, mix = family.shape, options.mix or family.mix
    shape = replace(shape, layers=options.layers or shape.layers, vocab=options.vocab or shape.vocab)
    writer = family.writer(options.path, shape, options.seed, options.threads, mix=mix)
    if isinstance(writer, Qwen4ExpWriter):
        writer.ngram = replace(NGRAM, rows=options.ngram_rows)
    return writer


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--mix", type=mix_named, help=f"{', '.join(MIXES)}; by default the usual one")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--vocab", type=int, help="instead of the model's")
    parser.add_argument(
        "--ngram-rows", type=int, default=PUBLISHED_ROWS, help="of the table of n-grams; 0: no n-grams"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


def main(words: Sequence[str] | None = None) -> int:
    writer = writer_of(arguments().parse_args(words))
    seconds = writer.write()
    about = writer.path.stat()
    print(f"{writer.path}: {about.st_size / 1e9:.2f} GB, {about.st_blocks * 512 / 1e9:.2f} of them written,")
    print(f"in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
