"""Writes a random-weight file of the shape and types of Qwen3.6-35B-A3B Q4_K_M, about 21 GB, whose routing
is as local as that of trained models, or of the dense Qwen3.6-27B, about 16 GB.

    python -m bench.full_size_model full.gguf
    python -m bench.full_size_model full.gguf --mix UD-IQ3_S                   the types of another download
    python -m bench.full_size_model full.gguf --shared-popularity             all texts like some experts
    python -m bench.full_size_model full.gguf --guess-recall 0.8              a fifth of guesses is wrong
    python -m bench.full_size_model full.gguf --like-neighbours               neighbours share more experts
    python -m bench.full_size_model dense.gguf --shape 27B
    python -m bench.full_size_model routing.gguf --layers 4 --vocab 32768      the same construction, smaller

Types are those of published files: full_size_mixes.py has them by the names that people download.

Only the embedding writes the first 256 channels of the residual stream: in matrices that add to the stream
the rows of these channels have scale 0. So every layer reads them unchanged but for the norm's factor:
- the first 32 hold a code that drifts slowly from each token id to the next, and routers read nothing else.
  Which experts a token takes depends on the token alone, and neighbouring ids take similar ones;
- the others hold a random signature of the token, and the head's row t + 1 is the signature of t. The most
  likely token after t is t + 1, whatever came before: generation walks through the vocabulary.

A router that reads an earlier layer's input would choose what it does in its own layer. With --guess-recall
the norms in front of routers weigh the code's channels differently in each layer, so that the stated part of
guesses two layers ahead is right. All other tensors stay the same.

All other weights are slices of a pool of random blocks, no two experts of a tensor the same one. Threads
write them straight from the pool, so that memory stays small and the disk sets the time.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

import gguf
from bench.full_size_mixes import MIXES, PLAIN, Mix, mix_named
from bench.level_blocks import level_blocks
from bench.random_blocks import random_blocks
from bench.random_model import MERGES, Shape, add_metadata, add_tokenizer, byte_tokens
from coldstream.gguf.quant_types import QuantType

FULL_SHAPE = Shape(layers=40, experts=256, experts_per_token=8, vocab=248320, context=262144)
DENSE_SHAPE = Shape(
    hidden=5120, layers=64, heads=24, kv_heads=4, value_heads=48, vocab=248320, context=262144,
    dense_ffn=17408,
)  # fmt: skip
SHAPES = {"35B-A3B": FULL_SHAPE, "27B": DENSE_SHAPE}

PROTECTED = 256  # channels that only the embedding writes: whole blocks of every type
CODE = 32  # of them the code, which routers read; the rest is the signature, which the head reads
SLOW_IDS, FAST_IDS = 300, 4  # over which two parts of the code drift
# With a shared popularity so much of the variance is common to all tokens instead. It is fitted to 6 to 8 %
# of missing experts, with room for 37 % and eight interleaved texts, which FreeToken's users report.
POPULAR_SHARE = 0.40
# Four levels of an embedding round the code. This adds to the token's own share, which is drawn smaller.
ROUNDED_SHARE = {QuantType.Q2_K: 0.14}
# How much a router's norm weighs a channel of the code more or less than others, as a deviation from 1. These
# weights drift from layer to layer. So guesses one and three layers ahead are right as often as in a trained
# model (docs/results/guess_recall.json), if those two layers ahead are.
NORM_DEVIATION = 0.5
CODE_STEPS = 3.0  # quantisation steps per standard deviation of the code
ROUTER_GAIN = 4.0

# What llama-quantize takes for rows that are no whole blocks of a type.
FALLBACKS: Mapping[QuantType, QuantType] = MappingProxyType(
    {
        **dict.fromkeys((QuantType.Q2_0, QuantType.Q2_K, QuantType.Q3_K, QuantType.TQ2_0), QuantType.Q4_0),
        QuantType.Q4_K: QuantType.Q5_0,
        QuantType.Q5_K: QuantType.Q5_1,
        QuantType.Q6_K: QuantType.Q8_0,
        **{kind: QuantType.IQ4_NL for kind in QuantType if kind.name.startswith("IQ")},
    }
)

RECALL_SAMPLES = 2000
POOL_BYTES = 48 << 20  # at least, and at least twice the largest matrix
EMBEDDING_DEVIATION = 4.6  # of the protected channels too: levels 0 … 15 in steps of 1
OUTPUT_GAIN = 0.5  # of matrices that add to the stream, so that the embedding stays a large part of it
HEAD_STEP = 1 / 4  # between levels of the signature in the head
HEAD_NOISE = 1.15 / 16  # of the head's other channels, low enough for the signature, 1.15, to win
ROWS_PER_PIECE = 4096

Buffers = Sequence[np.ndarray]
Piece = tuple[int, Callable[[], Buffers]]  # (byte within the tensor, what to write there)


@dataclass(frozen=True)
class CodeShares:
    """The code of a token id is a sum of three parts with these shares of its variance: two that drift over
    `SLOW_IDS` and `FAST_IDS`, and one of the token alone.
    """

    slow: float
    fast: float
    own: float


# Fitted with routing_locality.py: to published hit rates of LRU caches; and to the distinct experts of two to
# eight neighbouring tokens as well.
APART, LIKE_NEIGHBOURS = CodeShares(0.56, 0.04, 0.40), CodeShares(0.50, 0.30, 0.20)


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file, `dims` in numpy order, and the pieces that fill it; is_hole: nothing does."""

    name: str
    qtype: QuantType
    dims: tuple[int, ...]
    pieces: Callable[[], Iterator[Piece]]
    is_hole: bool = False

    @property
    def num_bytes(self) -> int:
        *rows, cols = self.dims
        return int(np.prod(rows, initial=1)) * self.qtype.row_bytes(cols)


def token_levels(
    rng: np.random.Generator, vocab: int, shares: CodeShares = APART, popular_share: float = 0.0
) -> np.ndarray:
    """The protected channels of every token, uint8 levels 0 … 15 [vocab, PROTECTED]: code, signature.

    popular_share: of the code's variance, for a part that all tokens have in common.
    """
    code = np.sqrt(shares.own) * rng.standard_normal((vocab, CODE))
    for share, ids in ((shares.slow, SLOW_IDS), (shares.fast, FAST_IDS)):
        keep = np.exp(-1 / ids)
        steps = rng.standard_normal((vocab, CODE)) * np.sqrt(1 - keep**2)
        state = rng.standard_normal(CODE)
        for token_id in range(vocab):
            state = keep * state + steps[token_id]
            code[token_id] += np.sqrt(share) * state
    if popular_share:
        common = rng.standard_normal(CODE)
        common *= np.sqrt(popular_share / np.mean(common**2))
        code = np.sqrt(1 - popular_share) * code + common
    levels = np.empty((vocab, PROTECTED), np.uint8)
    levels[:, :CODE] = np.clip(np.rint(7.5 + CODE_STEPS * code), 0, 15)
    levels[:, CODE:] = rng.integers(0, 16, (vocab, PROTECTED - CODE), dtype=np.uint8)
    return levels


def recall_of(likeness: float, experts: int, chosen: int) -> float:
    """Share of the chosen experts that are guessed from logits with so much correlation to theirs."""
    rng = np.random.default_rng(0)
    logits, others = rng.standard_normal((2, RECALL_SAMPLES, experts))
    guesses = likeness * logits + np.sqrt(max(0.0, 1 - likeness**2)) * others
    right, guessed = (np.partition(each, -chosen, axis=1)[:, -chosen, None] for each in (logits, guesses))
    return float(((logits >= right) & (guesses >= guessed)).sum() / (RECALL_SAMPLES * chosen))


def code_gains(seed: int, layers: int, recall: float, experts: int, chosen: int) -> np.ndarray:
    """What each layer's norm multiplies the channels of the code by, float64 [layers, CODE].

    recall: of guesses two layers ahead, 1 for equal weights. Raises ValueError for one out of reach.
    """
    variance = NORM_DEVIATION**2
    least = recall_of(1 / (1 + variance), experts, chosen)
    if not least < recall <= 1:
        raise ValueError(f"guesses of which {recall:.0%} are right: more than {least:.0%}, and 100 % at most")
    if recall == 1:
        return np.ones((layers, CODE))
    low, high = 0.0, 1.0  # of the correlation between weights two layers apart
    for _ in range(12):
        middle = (low + high) / 2
        likeness = (1 + variance * middle) / (1 + variance)
        low, high = (low, middle) if recall_of(likeness, experts, chosen) > recall else (middle, high)
    keep = np.sqrt(high)
    steps = np.random.default_rng((seed, layers)).standard_normal((layers, CODE))
    drift = steps[:1]
    for step in steps[1:]:
        drift = np.vstack((drift, keep * drift[-1] + np.sqrt(1 - keep**2) * step))
    gains = 1 + NORM_DEVIATION * drift
    return np.asarray(gains / np.sqrt(np.mean(gains**2, axis=1, keepdims=True)))


def fitting(qtype: QuantType, cols: int) -> QuantType:
    """The type of a matrix with rows of `cols` weights that should have `qtype`."""
    return FALLBACKS[qtype] if cols % qtype.block_elements else qtype


class FullSizeWriter:
    """Plans the tensors of a model of `shape`, then writes them with `threads` threads."""

    def __init__(
        self,
        path: Path,
        shape: Shape,
        seed: int,
        threads: int,
        chat_template: str | None = None,
        mix: Mix = PLAIN,
        popular_share: float = 0.0,
        guess_recall: float = 1.0,
        shares: CodeShares = APART,
    ) -> None:
        """popular_share, shares: `token_levels`'. guess_recall: `code_gains`', which raises ValueError."""
        self.path, self.shape, self.threads, self.chat_template = path, shape, threads, chat_template
        self.mix = mix
        self.rng = np.random.default_rng(seed)
        rounded_share = ROUNDED_SHARE.get(self.type_of("token_embd.weight"), 0.0)
        shares = replace(shares, own=shares.own - rounded_share)
        self.levels = token_levels(self.rng, shape.vocab, shares, popular_share)
        self.gains = np.ones((shape.layers, CODE))
        if guess_recall != 1:
            sizes = shape.layers, guess_recall, shape.experts, shape.experts_per_token
            self.gains = code_gains(seed, *sizes)
        self.pools: dict[tuple[QuantType, float], np.ndarray] = {}
        self.tensors: list[Tensor] = []

    def pool(self, qtype: QuantType, deviation: float) -> np.ndarray:
        """The one pool of random blocks of this type and deviation, uint8 [blocks, bytes]."""
        key = (qtype, deviation)
        if key not in self.pools:
            largest = 2 * self.shape.hidden * self.shape.dense_ffn // qtype.block_elements
            count = max(POOL_BYTES // qtype.block_bytes, largest)
            self.pools[key] = random_blocks(self.rng, qtype, count, qtype.block_elements, deviation)
        return self.pools[key]

    def floats(self, name: str, values: np.ndarray) -> None:
        """A float32 tensor with these values."""
        values = values.astype(np.float32)
        self.tensors.append(Tensor(name, QuantType.F32, values.shape, lambda: iter([(0, lambda: [values])])))

    def type_of(self, name: str) -> QuantType:
        """The mix's type of the matrix `name`."""
        *block, name, _ = name.removeprefix("blk.").split(".")
        return self.mix.type_of(name, int(block[0]) if block else 0, self.shape.layers)

    def matrix(self, name: str, *dims: int, adds_to_stream: bool = False) -> None:
        """A matrix [rows, cols] or a stack; with `adds_to_stream`, rows of protected channels are 0."""
        *stack, rows, cols = dims
        qtype = fitting(self.type_of(name), cols)
        if qtype == QuantType.F32:
            self.floats(name, self.rng.standard_normal(dims) * cols**-0.5)
            return
        pool = self.pool(qtype, cols**-0.5 * (OUTPUT_GAIN if adds_to_stream else 1))
        row_blocks = cols // qtype.block_elements
        num_silent = PROTECTED * row_blocks if adds_to_stream else 0
        num_blocks = rows * row_blocks - num_silent
        count = int(np.prod(stack, initial=1))
        firsts = self.rng.choice(len(pool) - num_blocks, count, replace=False)
        size = qtype.block_bytes
        silent = np.zeros((num_silent, size), np.uint8)

        def pieces() -> Iterator[Piece]:
            for index, first in enumerate(firsts):
                buffers = [silent, pool[first : first + num_blocks]]
                yield index * rows * row_blocks * size, lambda buffers=buffers: buffers

        self.tensors.append(Tensor(name, qtype, dims, pieces))

    def table(self, name: str, levels: np.ndarray, step: float, deviation: float, num_zero: int = 0) -> None:
        """A table [vocab, hidden]: the first blocks of row t say `levels` [t], the others are random.

        num_zero: values at the beginning of a row that are 0 instead.
        """
        qtype, dims = self.type_of(name), (self.shape.vocab, self.shape.hidden)
        pool, size = self.pool(qtype, deviation), qtype.block_bytes
        known = PROTECTED // qtype.block_elements
        others = self.shape.hidden // qtype.block_elements - known
        starts = range(0, dims[0], ROWS_PER_PIECE)
        firsts = self.rng.choice(len(pool) - ROWS_PER_PIECE * others, len(starts), replace=False)

        def rows(start: int, first: int) -> Buffers:
            part = levels[start : start + ROWS_PER_PIECE]
            blocks = np.empty((len(part), known + others, size), np.uint8)
            blocks[:, :known] = level_blocks(qtype, part, step, num_zero).reshape(-1, known, size)
            blocks[:, known:] = pool[first : first + len(part) * others].reshape(-1, others, size)
            return [blocks]

        def pieces() -> Iterator[Piece]:
            for start, first in zip(starts, firsts, strict=True):
                yield start * (known + others) * size, lambda start=start, first=first: rows(start, first)

        self.tensors.append(Tensor(name, qtype, dims, pieces))

    def attention(self, name: str) -> None:
        s = self.shape
        self.matrix(f"{name}.attn_q.weight", s.heads * s.head_dim * 2, s.hidden)
        self.matrix(f"{name}.attn_k.weight", s.kv_heads * s.head_dim, s.hidden)
        self.matrix(f"{name}.attn_v.weight", s.kv_heads * s.head_dim, s.hidden)
        self.matrix(f"{name}.attn_output.weight", s.hidden, s.heads * s.head_dim, adds_to_stream=True)
        self.floats(f"{name}.attn_q_norm.weight", np.ones(s.head_dim))
        self.floats(f"{name}.attn_k_norm.weight", np.ones(s.head_dim))

    def delta_net(self, name: str) -> None:
        s, rng = self.shape, self.rng
        key_dim, value_dim = s.key_heads * s.state_dim, s.value_heads * s.state_dim
        conv_dim = 2 * key_dim + value_dim
        self.matrix(f"{name}.attn_qkv.weight", conv_dim, s.hidden)
        self.matrix(f"{name}.attn_gate.weight", value_dim, s.hidden)
        self.matrix(f"{name}.ssm_alpha.weight", s.value_heads, s.hidden)
        self.matrix(f"{name}.ssm_beta.weight", s.value_heads, s.hidden)
        self.floats(f"{name}.ssm_a", -rng.uniform(0.1, 4, s.value_heads))
        self.floats(f"{name}.ssm_dt.bias", rng.uniform(-4, 1, s.value_heads))
        self.floats(f"{name}.ssm_conv1d.weight", rng.standard_normal((conv_dim, 4)) / 2)
        self.floats(f"{name}.ssm_norm.weight", np.ones(s.state_dim))
        self.matrix(f"{name}.ssm_out.weight", s.hidden, value_dim, adds_to_stream=True)

    def router(self, name: str) -> None:
        """One that reads the code alone."""
        s = self.shape
        router = np.zeros((s.experts, s.hidden))
        directions = self.rng.standard_normal((s.experts, CODE))
        router[:, :CODE] = ROUTER_GAIN * directions / np.linalg.norm(directions, axis=1, keepdims=True)
        self.floats(f"{name}.ffn_gate_inp.weight", router)

    def experts(self, name: str) -> None:
        self.router(name)
        hidden = self.shape.hidden
        self.floats(f"{name}.ffn_gate_inp_shexp.weight", self.rng.standard_normal(hidden) * hidden**-0.5)
        self.stacks(name)

    def stacks(self, name: str) -> None:
        """The routed experts and the shared one."""
        self.gated_unit(f"{name}.ffn_{{}}_exps.weight", self.shape.expert_ffn, self.shape.experts)
        self.gated_unit(f"{name}.ffn_{{}}_shexp.weight", self.shape.expert_ffn)

    def gated_unit(self, name: str, size: int, *stack: int) -> None:
        """Gate, up and down of so many weights in a row; name: with a place for each of the three."""
        hidden = self.shape.hidden
        self.matrix(name.format("gate"), *stack, size, hidden)
        self.matrix(name.format("up"), *stack, size, hidden)
        self.matrix(name.format("down"), *stack, hidden, size, adds_to_stream=True)

    def dense(self, name: str) -> None:
        self.gated_unit(f"{name}.ffn_{{}}.weight", self.shape.dense_ffn)

    def plan(self) -> None:
        """All tensors."""
        s = self.shape
        self.table("token_embd.weight", self.levels, 1.0, EMBEDDING_DEVIATION)
        self.last_norm()
        self.table("output.weight", np.roll(self.levels, 1, axis=0), HEAD_STEP, HEAD_NOISE, CODE)
        for layer in range(s.layers):
            self.block(layer)
        if s.has_nextn:
            self.nextn(f"blk.{s.layers}")

    def last_norm(self) -> None:
        self.floats("output_norm.weight", np.ones(self.shape.hidden))

    def block(self, layer: int) -> None:
        """All tensors of a layer."""
        name = f"blk.{layer}"
        if (layer + 1) % 4 == 0:
            self.attention(name)
        else:
            self.delta_net(name)
        self.rest_of_block(name, self.gains[layer])

    def rest_of_block(self, name: str, gains: np.ndarray) -> None:
        """Norms and FFN of a block. gains: of the code's channels in front of the FFN."""
        norm = np.ones(self.shape.hidden)
        self.floats(f"{name}.attn_norm.weight", norm)
        norm[:CODE] = gains
        self.floats(f"{name}.post_attention_norm.weight", norm)
        ffn = self.dense if self.shape.dense_ffn else self.experts
        ffn(name)

    def nextn(self, name: str) -> None:
        """A block for multi-token prediction, whose predictions are random."""
        hidden = self.shape.hidden
        self.attention(name)
        self.rest_of_block(name, np.ones(CODE))
        self.matrix(f"{name}.nextn.eh_proj.weight", hidden, 2 * hidden)
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            self.floats(f"{name}.nextn.{norm}.weight", np.ones(hidden))

    tokenizer = "qwen35"  # as `tokenizer.ggml.pre` says it

    @property
    def architecture(self) -> str:
        """As `general.architecture` says it."""
        return self.shape.architecture

    @property
    def model_name(self) -> str:
        return "Qwen3.6-27B" if self.shape.dense_ffn else "Qwen3.6-35B-A3B"

    def add_metadata(self, out: gguf.GGUFWriter, name: str) -> None:
        """The model's numbers under their real keys."""
        add_metadata(out, self.shape, name, self.mix.file_type)

    def write_header(self, path: Path) -> int:
        """Everything before the data; returns where the data begins."""
        out = gguf.GGUFWriter(path, self.architecture)
        mix = "" if self.mix == PLAIN else f" in {self.mix.name}"
        self.add_metadata(out, f"{self.model_name} shape{mix}, random weights")
        tokens = [*byte_tokens(), *(merge.replace(" ", "") for merge in MERGES)]
        tokens += [f"Ġ{token_id}" for token_id in range(len(tokens), self.shape.vocab - 1)]
        end_id = len(tokens)
        add_tokenizer(out, [*tokens, "<|endoftext|>"], [1] * end_id + [3], end_id, self.tokenizer)
        if self.chat_template is not None:
            out.add_chat_template(self.chat_template)
        for tensor in self.tensors:
            # A type beside float32 says that the dimensions are the tensor's, not those of its bytes.
            out.add_tensor_info(
                tensor.name, tensor.dims, np.dtype(np.float32), tensor.num_bytes, tensor.qtype
            )
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_ti_data_to_file()
        out.close()
        return gguf.GGUFWriter.ggml_pad(path.stat().st_size, gguf.GGUF_DEFAULT_ALIGNMENT)

    def write(self, *, is_for_plans: bool = False) -> float:
        """Plans and writes the file, under another name until it is whole; returns the seconds it took.

        is_for_plans: with holes in place of quantised weights, which a plan does not read: some 100 MB on the
        disk. Raises OSError if the disk is too small.
        """
        started = time.perf_counter()
        self.plan()
        written = [
            tensor
            for tensor in self.tensors
            if not tensor.is_hole and (not is_for_plans or tensor.qtype == QuantType.F32)
        ]
        need = sum(tensor.num_bytes for tensor in written)
        free = shutil.disk_usage(self.path.parent).free
        if need > free:
            raise OSError(
                f"{self.path} needs {need / 1e9:.1f} GB, {free / 1e9:.1f} are free: choose another disk"
            )
        unfinished = self.path.with_suffix(".unfinished")
        offset = self.write_header(unfinished)
        pieces: list[Piece] = []
        for tensor in self.tensors:
            if tensor in written:
                pieces += [(offset + begin, make) for begin, make in tensor.pieces()]
            offset += gguf.GGUFWriter.ggml_pad(tensor.num_bytes, gguf.GGUF_DEFAULT_ALIGNMENT)
        os.truncate(unfinished, offset)
        file = os.open(unfinished, os.O_WRONLY)

        def put(piece: Piece) -> None:
            begin, make = piece
            for buffer in make():
                data = memoryview(np.ascontiguousarray(buffer)).cast("B") if buffer.size else memoryview(b"")
                while data:
                    count = os.pwrite(file, data, begin)
                    begin, data = begin + count, data[count:]

        try:
            with ThreadPoolExecutor(self.threads) as threads:
                list(threads.map(put, pieces))
        finally:
            os.close(file)
        unfinished.replace(self.path)
        return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="35B-A3B")
    parser.add_argument("--mix", type=mix_named, default=PLAIN, help=", ".join(MIXES))
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--nextn", action="store_true", help="with a block for multi-token prediction")
    parser.add_argument("--chat-template", type=Path, help="to put into the file")
    parser.add_argument(
        "--shared-popularity", action="store_true", help="some experts are popular in all texts"
    )
    parser.add_argument(
        "--guess-recall", type=float, default=1.0, help="share of guesses two layers ahead that are right"
    )
    parser.add_argument(
        "--like-neighbours", action="store_true", help="neighbours share as many experts as published"
    )
    parser.add_argument("--vocab", type=int, default=FULL_SHAPE.vocab)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    shape = replace(
        shape, layers=options.layers or shape.layers, vocab=options.vocab, has_nextn=options.nextn
    )
    template = options.chat_template and options.chat_template.read_text()
    popular_share = POPULAR_SHARE if options.shared_popularity else 0.0
    writer = FullSizeWriter(
        options.path,
        shape,
        options.seed,
        options.threads,
        template,
        options.mix,
        popular_share,
        options.guess_recall,
        shares=LIKE_NEIGHBOURS if options.like_neighbours else APART,
    )
    seconds = writer.write()
    print(f"{options.path}: {options.path.stat().st_size / 1e9:.2f} GB in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
