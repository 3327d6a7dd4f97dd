"""Structs of one launch a token, parts of layers, and the places of a token's numbers."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from coldstream.errors import ColdstreamError
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.skinny_shapes import MatrixShape
from coldstream.kernels.cuda.structs import declared_in

NO_COUNTER, MAX_RINGS, MAX_STAGES = -1000000, 3, 16  # as in streams.cuh
OPS = ("op_products", "op_add", "op_mix", "op_gate_up", "op_down")  # as the enumerations of token.cuh
LOADS = ("load_nothing", "load_norm", "load_mixed", "load_row", "load_hidden")
VECTORS = ("attn_norm", "ffn_norm", "conv_taps", "ssm_a", "ssm_dt_bias", "ssm_norm")
TYPES = frozenset({QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.F32})
GROUP, ROW_BYTES_OF_GROUP = 256, 288
MOST_DOWN_ROWS, MOST_HIDDEN, MOST_FFN, MOST_CHOSEN, MOST_EXPERTS = 64, 4096, 1024, 8, 256
ROUTER, SHARED_GATE = "ffn_gate_inp", "ffn_gate_inp_shexp"
ROUTED = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
PROJECTED, DELTA_OUT = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"), "ssm_out"
ATTENTION, ATTENTION_OUT = ("attn_q", "attn_k", "attn_v"), "attn_output"
COUNTERS = ("in", "mix", "out", "route", "gate and up", "down")  # of a layer, of which a part has some
MATRICES = (*PROJECTED, DELTA_OUT, ROUTER, SHARED_GATE, *ROUTED, *SHARED)  # as in `LayerWeights`
# Those of attention have the places of a gated DeltaNet's.
PLACES = {name: place for place, name in enumerate(MATRICES)}
PLACES |= {ATTENTION_OUT: PLACES[DELTA_OUT]} | {name: place for place, name in enumerate(ATTENTION)}
HEAD_SIZE, CONV_KERNEL, STATE_COLUMNS = 128, 4, 32
CONSUMER_WARPS = 8  # of a block, unless a plan says otherwise


class ProgramError(ColdstreamError, ValueError):
    """Layers, blocks or rings that the kernel of one launch a token does not take."""


@declared_in("persistent/token.cuh")
class RowPlaces(ctypes.Structure):
    """What a block keeps behind its rings."""


@declared_in("persistent/token.cuh")
class Step(ctypes.Structure):
    """One phase of a block."""


@declared_in("persistent/token.cuh")
class Piece(ctypes.Structure):
    """What a stage of a ring holds."""


@declared_in("persistent/token.cuh")
class BlockLists(ctypes.Structure):
    """Where a block's lists for a kind of layer begin."""


@dataclass(frozen=True)
class Ring:
    """Stages in shared memory that one producer fills in order."""

    stages: int
    stage_bytes: int


# Of weights that are known long before, of static ones behind them, and of chosen experts.
RINGS = (Ring(4, 17 * 1024), Ring(2, 18 * 1024), Ring(4, 18 * 1024))


@dataclass(frozen=True)
class Matrix:
    """Rows of weights; of an expert's, where there are several."""

    quant_type: QuantType
    rows: int
    cols: int

    @property
    def row_bytes(self) -> int:
        """Of weights in the file's own layout."""
        return self.quant_type.row_bytes(self.cols)


@dataclass(frozen=True)
class Sizes:
    """Of all layers. Those of gated DeltaNets are 0 where there are none, and those of attention likewise."""

    hidden: int
    ffn: int
    experts: int
    chosen: int
    key_heads: int = 0
    value_heads: int = 0
    attention: tuple[int, int, int] = (0, 0, 0)  # outputs of its projections
    attention_width: int = 0  # of all heads

    @property
    def has_mixer(self) -> bool:
        """Whether layers add something to the stream before their experts."""
        return self.value_heads > 0 or self.attention_width > 0

    @property
    def mixed(self) -> int:
        """The most that a mixer gives."""
        return max(self.values, self.attention_width)

    @property
    def values(self) -> int:
        return self.value_heads * HEAD_SIZE

    @property
    def channels(self) -> int:
        """Of queries, keys and values."""
        return 2 * self.key_heads * HEAD_SIZE + self.values


class Part(Enum):
    """What of a layer a launch computes. Attention itself has launches of its own, between two others."""

    EXPERTS = auto()  # of a layer without a mixer
    DELTA_NET = auto()  # all of it
    BEFORE_ATTENTION = auto()  # the projections that attention reads
    BEHIND_ATTENTION = auto()  # its output projection, and the experts


@dataclass(frozen=True)
class LayerShape:
    """A part of a layer: a mixer or the ends of one, and a mixture of experts with a shared one behind it.

    matrices: by their names in the file. key_head_ids: of each value head of a gated DeltaNet.
    """

    sizes: Sizes
    matrices: Mapping[str, Matrix]
    part: Part
    key_head_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, sizes: Sizes, types: Mapping[str, QuantType], part: Part, key_head_ids: tuple[int, ...] = ()
    ) -> "LayerShape":
        """types: of all matrices but those in float32."""
        hidden, ffn = sizes.hidden, sizes.ffn
        shapes: dict[str, tuple[int, int]] = {}
        if part is Part.DELTA_NET:
            rows = (sizes.channels, sizes.values, sizes.value_heads, sizes.value_heads)
            shapes |= {name: (count, hidden) for name, count in zip(PROJECTED, rows, strict=True)}
            shapes[DELTA_OUT] = (hidden, sizes.values)
        if part is Part.BEFORE_ATTENTION:
            shapes |= {name: (count, hidden) for name, count in zip(ATTENTION, sizes.attention, strict=True)}
        if part is Part.BEHIND_ATTENTION:
            shapes[ATTENTION_OUT] = (hidden, sizes.attention_width)
        if part is not Part.BEFORE_ATTENTION:
            shapes |= {ROUTER: (sizes.experts, hidden), SHARED_GATE: (1, hidden)}
            for names in (ROUTED, SHARED):
                shapes |= dict(zip(names, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True))
        f32 = QuantType.F32
        made = {name: Matrix(types.get(name, f32), *shape) for name, shape in shapes.items()}
        return cls(sizes, made, part, key_head_ids)

    def check(self) -> None:
        """ProgramError for what the kernel does not take."""
        limits = (
            ("hidden size", self.sizes.hidden, MOST_HIDDEN, GROUP),
            ("experts' width", self.sizes.ffn, MOST_FFN, GROUP),
            ("experts", self.sizes.experts, MOST_EXPERTS, 1),
            ("chosen experts", self.sizes.chosen, MOST_CHOSEN, 1),
        )
        for what, size, most, of in limits:
            if not 0 < size <= most or size % of:
                raise ProgramError(f"{what}: {size}, where one launch a token takes at most {most} in {of}s")
        for name, matrix in self.matrices.items():
            if matrix.quant_type not in TYPES:
                taken = ", ".join(sorted(each.name for each in TYPES))
                raise ProgramError(f"{name} in {matrix.quant_type.name}: one launch a token takes {taken}")


@dataclass
class BlockProgram:
    """A block's lists for one kind of layer; pieces by ring."""

    steps: list[Step] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    pieces: list[list[Piece]] = field(default_factory=lambda: [[] for _ in range(MAX_RINGS)])


@dataclass(frozen=True)
class Buffers:
    """Places of a token's numbers, in words of one array."""

    stream: int
    projected: int  # queries, keys, values, z, alpha, beta
    mixed: int
    middle: int  # the stream behind the mixer
    logits: int  # of all experts, and the shared one's gate
    units: int
    num_words: int

    @classmethod
    def of(cls, sizes: Sizes) -> "Buffers":
        projected = max(sizes.channels + sizes.values + 2 * sizes.value_heads, sum(sizes.attention))
        counts = {
            "stream": sizes.hidden,
            "projected": projected,
            "mixed": sizes.mixed,
            "middle": sizes.hidden if sizes.has_mixer else 0,
            "logits": sizes.experts + 1,
            "units": (sizes.chosen + 1) * sizes.ffn,
        }
        places, end = dict[str, int](), 0
        for name, count in counts.items():
            places[name] = end
            end += -(-count // 64) * 64
        return cls(**places, num_words=end)


@dataclass(frozen=True)
class TokenLists:
    """Lists of all blocks. blocks: [kinds][blocks]; shapes: that pieces refer to; counters: a layer's."""

    kinds: tuple[LayerShape, ...]
    rings: tuple[Ring, ...]
    buffers: Buffers
    blocks: tuple[tuple[BlockProgram, ...], ...]
    shapes: tuple[MatrixShape, ...]
    counters: tuple[str, ...]
    warps: int  # that compute

    @property
    def num_blocks(self) -> int:
        return len(self.blocks[0])

    @property
    def list_bytes(self) -> int:
        """The most that a block's lists take."""

        def of(block: int) -> int:
            lists = [kind[block] for kind in self.blocks]
            steps = sum(len(each.steps) for each in lists)
            pieces = sum(len(ring) for each in lists for ring in each.pieces)
            heads = len(lists) * ctypes.sizeof(BlockLists) + len(self.shapes) * ctypes.sizeof(MatrixShape)
            return heads + steps * ctypes.sizeof(Step) + pieces * ctypes.sizeof(Piece)

        return max(map(of, range(self.num_blocks)))

    @property
    def num_slots(self) -> int:
        """The most steps of a block in a layer."""
        return max(len(block.steps) for kind in self.blocks for block in kind)

    @property
    def rows(self) -> RowPlaces:
        """What a block keeps behind its rings."""
        shape = self.kinds[0].sizes
        rows = shape.chosen + 1
        normed, hidden = 4 * shape.hidden, rows * (shape.ffn // GROUP) * ROW_BYTES_OF_GROUP
        # Each warp has room for a group of floats from the normed row on, while nothing else is there.
        outputs = max(4 * rows * MOST_DOWN_ROWS, 4 * GROUP * self.warps - normed - hidden)
        counts = (
            4 * shape.hidden,
            normed,
            hidden,
            outputs,
            max(shape.hidden, shape.mixed) // GROUP * ROW_BYTES_OF_GROUP,
            4 * 2 * HEAD_SIZE * (CONV_KERNEL - 1) if shape.value_heads else 0,
        )
        places = [0]
        for size in counts:
            places.append(places[-1] + size)
        return RowPlaces(*places)

    @property
    def block_bytes(self) -> int:
        """Shared memory of a block without its layers."""
        rings = sum(ring.stages * ring.stage_bytes for ring in self.rings)
        return rings + int(self.rows.lists) + self.list_bytes
