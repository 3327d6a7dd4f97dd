"""What `one_token.cu` is given: structs and numbers, shapes of a layer, designs, places of numbers."""

import ctypes
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bench.full_size_mixes import PLAIN, Mix
from bench.random_model import Shape
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.compiler import KERNELS
from coldstream.kernels.cuda.structs import declared_in

SOURCE = Path(__file__).with_name("one_token.cu")
STREAMS = KERNELS / "persistent" / "streams.cuh"
KIB = 1024
VECTOR_BYTES = 16  # of weights, and what copies are multiples of
KINDS = 2


def _numbers() -> dict[str, int]:
    """Constants and enumerators of the sources, by name."""
    text = re.sub(r"//[^\n]*", "", STREAMS.read_text() + SOURCE.read_text())
    found: dict[str, int] = {}
    for names in re.findall(r"^constexpr int ([^;]+);", text, re.MULTILINE):
        for name, value in re.findall(r"(\w+) = (-?\d+)\b", names):
            found[name] = int(value)
    for names in re.findall(r"^enum \w+ \{([^}]+)\};", text, re.MULTILINE):
        found |= {name.strip(): number for number, name in enumerate(names.split(","))}
    return found


NUMBERS = _numbers()
NO_COUNTER, MAX_RINGS, MAX_STAGES = (NUMBERS[name] for name in ("no_counter", "max_rings", "max_stages"))
HEAD_SIZE, STATE_COLUMNS, MAX_SUMS = (NUMBERS[name] for name in ("head_size", "state_columns", "max_sums"))
STATE_PIECE_BYTES = HEAD_SIZE * STATE_COLUMNS * 4


@declared_in(str(SOURCE))
class Step(ctypes.Structure):
    """One phase of a block."""


@declared_in(str(SOURCE))
class Piece(ctypes.Structure):
    """What a stage of a ring holds."""


@declared_in(str(SOURCE))
class BlockLists(ctypes.Structure):
    """Where a block's lists for a kind of layer begin."""


@declared_in(str(SOURCE))
class Program(ctypes.Structure):
    """A launch."""


@dataclass(frozen=True)
class Matrix:
    """Rows of a layer's weights; `count` of them for experts, the shared one last."""

    name: str
    rows: int
    cols: int
    row_bytes: int
    count: int = 1
    offset: int = 0  # from the layer's weights

    @property
    def expert_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def num_bytes(self) -> int:
        return self.expert_bytes * self.count


@dataclass(frozen=True)
class LayerShape:
    """A DeltaNet layer with routed experts: the sizes and bytes that its phases have."""

    hidden: int
    key_heads: int
    value_heads: int
    experts: int
    chosen: int
    expert_ffn: int
    stored: int  # routed experts that have weights; fewer than all for less memory, see `place_of`
    matrices: tuple[Matrix, ...]

    @classmethod
    def of(cls, shape: Shape, mix: Mix = PLAIN, layer: int = 0, stored: int | None = None) -> "LayerShape":
        """Of a layer of the full-size file. Rows are whole vectors, so that Q6_K's are longer."""

        def row_bytes(name: str, cols: int) -> int:
            is_router = name == "ffn_gate_inp"
            qtype = QuantType.F32 if is_router else mix.type_of(name, layer, shape.layers)
            exact = qtype.row_bytes(cols)
            return -(-exact // VECTOR_BYTES) * VECTOR_BYTES

        hidden, ffn, values = shape.hidden, shape.expert_ffn, shape.value_heads * shape.state_dim
        assert shape.state_dim == HEAD_SIZE
        stored = shape.experts if stored is None else stored
        assert stored == shape.experts or stored % shape.experts_per_token == 0
        experts = stored + 1
        parts = (
            ("attn_qkv", 2 * shape.key_heads * shape.state_dim + values, hidden, 1),
            ("attn_gate", values, hidden, 1),
            ("ssm_alpha", 2 * shape.value_heads, hidden, 1),  # and ssm_beta
            ("ssm_out", hidden, values, 1),
            ("ffn_gate_inp", shape.experts, hidden, 1),
            ("ffn_gate_exps", 2 * ffn, hidden, experts),  # rows of gate and up in turn
            ("ffn_down_exps", hidden, ffn, experts),
        )
        matrices, offset = [], 0
        for name, rows, cols, count in parts:
            matrices.append(Matrix(name, rows, cols, row_bytes(name, cols), count, offset))
            offset += -(-matrices[-1].num_bytes // 256) * 256
        sizes = (hidden, shape.key_heads, shape.value_heads, shape.experts, shape.experts_per_token, ffn)
        return cls(*sizes, stored, tuple(matrices))

    def matrix(self, name: str) -> Matrix:
        return next(matrix for matrix in self.matrices if matrix.name == name)

    @property
    def stored_a_rank(self) -> int:
        """Where not all experts are stored: those that only one rank of the chosen ones takes; 0 for all."""
        return 0 if self.stored == self.experts else self.stored // self.chosen

    def place_of(self, rank: int, expert: int) -> int:
        """Which stored expert stands for the one that is chosen in this rank; the shared one is the last."""
        if rank == self.chosen:
            return self.stored
        own = self.stored_a_rank
        return rank * own + expert % own if own else expert

    @property
    def ranks(self) -> int:
        """Experts of a token, the shared one last."""
        return self.chosen + 1

    @property
    def layer_bytes(self) -> int:
        return -(-sum(matrix.num_bytes + 256 for matrix in self.matrices) // 256) * 256

    @property
    def state_bytes(self) -> int:
        return self.value_heads * HEAD_SIZE * HEAD_SIZE * 4

    @property
    def state_pieces(self) -> int:
        return self.state_bytes // STATE_PIECE_BYTES

    @property
    def read_bytes(self) -> int:
        """Weights that a token reads of a layer."""
        used = (m.expert_bytes * (self.ranks if m.count > 1 else 1) for m in self.matrices)
        return sum(used)

    @property
    def moved_bytes(self) -> int:
        """The same, and the states read and written."""
        return self.read_bytes + 2 * self.state_bytes

    def floor_us(self, bandwidth: float) -> float:
        """Microseconds that these take at so many bytes per second."""
        return self.moved_bytes / bandwidth * 1e6

    @property
    def projected(self) -> tuple[Matrix, ...]:
        """The matrices of the input projection, whose outputs lie one behind the other."""
        return self.matrices[:3]


@dataclass(frozen=True)
class Ring:
    """Stages in shared memory that one producer fills in order."""

    stages: int
    stage_bytes: int


@dataclass(frozen=True)
class Design:
    """A version of the token: what joins what, who waits how, and which ring holds which weights."""

    name: str
    why: str
    rings: tuple[Ring, ...] = (Ring(5, 22 * KIB), Ring(4, 18 * KIB))
    ring_of: tuple[int, int, int] = (0, 1, 1)  # input projection; static weights behind it; routed experts
    norm: Literal["reader", "phase"] = "reader"
    choice: Literal["reader", "last block"] = "reader"
    combine: Literal["rows", "phase", "reader"] = "rows"
    shared_first: bool = False
    keeps_inputs: bool = False  # of the router for gate and up, which then wait for no counter
    state: Literal["late", "early", "ring"] = "early"
    near: tuple[str, ...] = ()  # asked into L2: "static" weights, "down" once experts are known
    router_blocks: int = 0  # 0: all that there are rows for
    only_with_work: bool = False  # blocks without work in a phase take no part in it
    poll: Literal["thread", "warp", "cluster"] = "thread"
    fetch: Literal["loads", "copy"] = "loads"
    backoff_ns: int = 0
    counter_stride: int = 1  # words from counter to counter
    counter_splits: int = 1  # words that a counter is spread over
    cluster: int = 1
    tokens: int = 1

    def changed(self, name: str, why: str, **changes: object) -> "Design":
        return replace(self, name=name, why=why, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Buffers:
    """Places of a token's numbers, in words of one array."""

    streams: tuple[int, int]  # of a layer's beginning, by its kind
    middle: int  # the stream behind the mixer
    projected: int
    mixed: int
    logits: int
    choice: int
    units: int
    rows: int
    codes: int  # bytes of a norm that is a phase of its own
    num_words: int

    @classmethod
    def of(cls, shape: LayerShape) -> "Buffers":
        sizes = (
            *(shape.hidden,) * 3,
            sum(matrix.rows for matrix in shape.projected),
            shape.value_heads * HEAD_SIZE,
            shape.experts,
            2 * shape.ranks,
            shape.ranks * shape.expert_ffn,
            shape.ranks * shape.hidden,
            shape.hidden // 4,
        )
        places, end = [], 0
        for size in sizes:
            places.append(end)
            end += -(-size // 64) * 64
        return cls((places[0], places[1]), *places[2:], end)
