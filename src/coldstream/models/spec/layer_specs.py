"""The definition of a layer as numbers and choices: a record for the mixer, and one for the FFN.

The records can express more than any kernel computes. `kernel_support.py` compares them with the kernels
once, when a model is opened, so that running a layer needs no further check.
"""

from dataclasses import dataclass
from typing import Literal

from coldstream.kernels.ops import (
    PLAIN_RULE,
    SWIGLU,
    Activation,
    DeltaNetGate,
    NgramHash,
    OutputGate,
    RopeSpec,
    RouterSpec,
)

LayerKind = Literal["attention", "delta_net"]
QkNorm = Literal["none", "head", "projection"]
ProjectionBias = Literal["none", "qkv", "all"]  # of queries, keys and values, or of all four projections
# parallel: a dense network that reads a norm of its own of the residual stream. Outputs are normed apart.
SharedExpert = Literal["none", "plain", "gated", "parallel"]


@dataclass(frozen=True)
class IndexerSpec:
    """Attention of a row to the blocks of positions that score best, and to the positions behind them."""

    num_heads: int
    head_dim: int
    top_k: int  # positions of whole blocks that a row sees at most
    block_size: int  # positions of a block; 0 if the file does not say

    @property
    def dense_positions(self) -> int:
        """Positions of a text in which every row still sees all that come before it."""
        return self.top_k + max(self.block_size, 1) - 1


@dataclass(frozen=True)
class HyperConnectionSpec:
    """Residual streams in place of one with norms: each part of a block reads a mixture of them."""

    num_streams: int
    rank: int  # of the product that gates the mixture


@dataclass(frozen=True)
class NgramSpec:
    """What hashes of the last tokens add to the residual streams before a layer, from rows of a table."""

    hashing: NgramHash
    columns: int  # of a row of the table
    row_bytes: int  # of these in the file; 0 if that has no table
    num_taps: int  # of the convolution over rows, as many rows apart as the longest n-gram has tokens

    @property
    def width(self) -> int:
        """Of all rows of a token side by side."""
        return len(self.hashing.sizes) * self.columns

    @property
    def least_rows(self) -> int:
        """Of the table."""
        return max(map(sum, zip(self.hashing.offsets, self.hashing.sizes, strict=True)))

    @property
    def dilation(self) -> int:
        return len(self.hashing.multipliers)


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of `num_heads` query heads over `num_kv_heads` heads of keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    rope_factors: bool = False  # a tensor of the file divides the frequencies
    output_gate: OutputGate = "none"
    qk_norm: QkNorm = "none"  # RMS norm of queries and keys: of each head, or of the whole projection
    v_norm: bool = False  # RMS norm of each head of the values, without a weight
    values_are_keys: bool = False  # no projection of values: they are the keys before norm and rotation
    bias: ProjectionBias = "none"
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    causal: bool = True  # a token sees only those before it and itself
    window: int | None = None  # positions that a token sees, its own included; None: all
    sinks: bool = False  # whether each head has a logit in the softmax without a value
    indexer: IndexerSpec | None = None

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def query_rows(self) -> int:
        """Of the query projection, which holds per head its query, then a gate of kind "query"."""
        return (2 if self.output_gate == "query" else 1) * self.query_dim

    @property
    def gate_rows(self) -> int:
        """Of a projection of its own for gates; 0 without one."""
        return {"head": self.num_heads, "element": self.query_dim}.get(self.output_gate, 0)

    @property
    def kv_dim(self) -> int:
        """Width of all keys (or values) together."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class DeltaNetSpec:
    """A gated DeltaNet: causal convolution, gated delta rule, gated norm."""

    conv_kernel: int  # taps
    state_size: int  # head size of keys and of values
    num_key_heads: int
    num_value_heads: int
    value_heads_grouped: bool
    output_gate: DeltaNetGate = "silu"

    @property
    def key_dim(self) -> int:
        """Width of all keys (or queries) together."""
        return self.num_key_heads * self.state_size

    @property
    def value_dim(self) -> int:
        """Width of all values together."""
        return self.num_value_heads * self.state_size

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def value_heads_per_key_head(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def key_head_ids(self) -> tuple[int, ...]:
        """Which key head each value head reads, [num_value_heads].

        Grouped (head h reads key head h div the number of value heads per key head), as the checkpoints have
        them, or tiled (h mod num_key_heads), as most GGUF writers of `qwen35` reorder them.
        """
        heads = range(self.num_value_heads)
        if self.value_heads_grouped:
            return tuple(head // self.value_heads_per_key_head for head in heads)
        return tuple(head % self.num_key_heads for head in heads)


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts of one size, and at most one shared expert that every token takes."""

    num_experts: int
    num_experts_per_tok: int
    ffn_size: int
    router: RouterSpec = PLAIN_RULE.spec
    activation: Activation = SWIGLU
    bias: bool = False  # of the experts' matrices
    shared: SharedExpert = "none"  # added as it is, times the sigmoid of a gate, or normed
    shared_ffn_size: int = 0


@dataclass(frozen=True)
class DenseFfnSpec:
    """A feed-forward network that every token takes whole."""

    size: int
    activation: Activation = SWIGLU


@dataclass(frozen=True)
class LayerSpec:
    """x + mixer(norm(x)), then + ffn(norm(x)); with hyper-connections mixtures stand for the norms.

    With `post_norms`, both outputs are normed before they are added.
    """

    mixer: AttentionSpec | DeltaNetSpec
    ffn: MoeSpec | DenseFfnSpec
    post_norms: bool = False
    output_scale: bool = False  # a number of the layer multiplies the residual stream behind it
    hyper_connections: HyperConnectionSpec | None = None
    ngram: NgramSpec | None = None

    @property
    def kind(self) -> LayerKind:
        return "attention" if isinstance(self.mixer, AttentionSpec) else "delta_net"


# Stand for kinds of layers that a model does not have.
NO_DELTA_NET = DeltaNetSpec(
    conv_kernel=0, state_size=0, num_key_heads=0, num_value_heads=0, value_heads_grouped=False
)
NO_EXPERTS = MoeSpec(num_experts=0, num_experts_per_tok=0, ffn_size=0)
