"""Instruction lists of one launch a token: what each block reads, waits for, computes and raises.

`plan` is a pure function of the layers' shapes, a number of blocks and the rings in their shared memory.
Lists are data: `describe` prints a block's, `check.py` proves that they end and read what has been written,
and the kernel runs from them. Layers of a kind share their lists.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coldstream.errors import ColdstreamError
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.skinny_shapes import (
    BANK_BYTES,
    COPY_BYTES,
    PASS_COLS,
    ROW_SHIFT,
    ROW_SHIFTS,
    WARP_SIZE,
    MatrixShape,
    matrix_shape,
)
from coldstream.kernels.cuda.structs import declared_in

NO_COUNTER, MAX_RINGS, MAX_STAGES = -1000000, 3, 16  # as in streams.cuh
OPS = ("op_products", "op_add", "op_mix", "op_gate_up", "op_down")  # as the enumerations of token.cuh
LOADS = ("load_nothing", "load_norm", "load_mixed", "load_hidden")
VECTORS = ("attn_norm", "ffn_norm", "conv_taps", "ssm_a", "ssm_dt_bias", "ssm_norm")
TYPES = frozenset({QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.F32})
GROUP, ROW_BYTES_OF_GROUP = 256, 288
MOST_DOWN_ROWS, MOST_HIDDEN, MOST_FFN, MOST_CHOSEN, MOST_EXPERTS = 64, 4096, 1024, 8, 256
ROUTER, SHARED_GATE = "ffn_gate_inp", "ffn_gate_inp_shexp"
ROUTED = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
PROJECTED, DELTA_OUT = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"), "ssm_out"
MATRICES = (*PROJECTED, DELTA_OUT, ROUTER, SHARED_GATE, *ROUTED, *SHARED)  # as in `LayerWeights`
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
    """Of a layer. Without value heads it has no mixer."""

    hidden: int
    ffn: int
    experts: int
    chosen: int
    key_heads: int = 0
    value_heads: int = 0

    @property
    def values(self) -> int:
        return self.value_heads * HEAD_SIZE

    @property
    def channels(self) -> int:
        """Of queries, keys and values."""
        return 2 * self.key_heads * HEAD_SIZE + self.values


@dataclass(frozen=True)
class LayerShape:
    """A mixture of experts with a shared one, behind a gated DeltaNet. matrices: by the names of `MATRICES`.

    key_head_ids: of each value head.
    """

    sizes: Sizes
    matrices: Mapping[str, Matrix]
    key_head_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, sizes: Sizes, types: Mapping[str, QuantType], key_head_ids: tuple[int, ...] = ()
    ) -> "LayerShape":
        """types: of all matrices but the router's."""
        hidden, ffn = sizes.hidden, sizes.ffn
        shapes = {ROUTER: (sizes.experts, hidden), SHARED_GATE: (1, hidden)}
        for names in (ROUTED, SHARED):
            shapes |= dict(zip(names, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True))
        if sizes.value_heads:
            rows = (sizes.channels, sizes.values, sizes.value_heads, sizes.value_heads)
            shapes |= {name: (count, hidden) for name, count in zip(PROJECTED, rows, strict=True)}
            shapes[DELTA_OUT] = (hidden, sizes.values)
        f32 = QuantType.F32
        made = {name: Matrix(types.get(name, f32), *shape) for name, shape in shapes.items()}
        return cls(sizes, made, key_head_ids)

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
        projected = sizes.channels + sizes.values + 2 * sizes.value_heads
        counts = {
            "stream": sizes.hidden,
            "projected": projected,
            "mixed": sizes.values,
            "middle": sizes.hidden if sizes.value_heads else 0,
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
            max(shape.hidden, shape.values) // GROUP * ROW_BYTES_OF_GROUP,
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


def share(total: int, parts: int, index: int) -> range:
    """The index-th of `parts` adjacent shares of `total` that differ by one at most."""
    return range(total * index // parts, total * (index + 1) // parts)


def staged_shape(matrix: Matrix) -> MatrixShape:
    """How whole rows lie in a stage: one behind the other, or apart, so that lanes read different banks."""
    shape = matrix_shape(matrix.quant_type, matrix.rows, matrix.cols)
    shift = ROW_SHIFTS.get(matrix.quant_type, ROW_SHIFT)
    is_apart = shape.spread == 0 and matrix.quant_type not in PASS_COLS and shape.row_bytes % COPY_BYTES == 0
    shape.stage_stride = shape.row_bytes + ((shift - shape.row_bytes) % BANK_BYTES if is_apart else 0)
    return shape


class _Shapes:
    """Shapes that pieces refer to by number, each once."""

    def __init__(self) -> None:
        self.all: list[MatrixShape] = []
        self._numbers: dict[Matrix, int] = {}

    def number_of(self, matrix: Matrix) -> int:
        if matrix not in self._numbers:
            self._numbers[matrix] = len(self.all)
            self.all.append(staged_shape(matrix))
        return self._numbers[matrix]


class _Planner:
    """Makes the lists of one kind of layer, phase by phase, for all blocks."""

    def __init__(self, shape: LayerShape, rings: Sequence[Ring], num_blocks: int, shapes: _Shapes) -> None:
        self.shape, self.rings, self.num_blocks, self.shapes = shape, rings, num_blocks, shapes
        self.sizes, self.buffers = shape.sizes, Buffers.of(shape.sizes)
        self.stream = self.buffers.stream
        self.blocks = tuple(BlockProgram() for _ in range(num_blocks))
        self.counters: list[str] = []
        self.last = -1  # the counter behind which the stream can be read

    def step(self, block: int, name: str, **fields: int) -> Step:
        """A block's next step."""
        made = Step(
            **{"wait": NO_COUNTER, "raise": NO_COUNTER, "groups": self.sizes.hidden // GROUP, **fields}
        )
        self.blocks[block].steps.append(made)
        self.blocks[block].names.append(name)
        return made

    def counter(self, name: str) -> int:
        """A counter of the layer, which every block raises."""
        self.counters.append(name)
        return len(self.counters) - 1

    def behind(self, counter: int) -> dict[str, int]:
        """Fields of what waits for a counter. −1 is the last one of the layer before."""
        return {"wait": counter, "target": self.num_blocks}

    def unit_rows(self, name: str) -> int:
        return int(self.shapes.all[self.shapes.number_of(self.shape.matrices[name])].unit_rows)

    def rows_of(self, name: str, rows: range, ring: int, **fields: int) -> list[Piece]:
        """Pieces of adjacent rows of one matrix, in whole units."""
        matrix = self.shape.matrices[name]
        number = self.shapes.number_of(matrix)
        shape = self.shapes.all[number]
        is_apart = shape.stage_stride != shape.row_bytes
        most = self.rings[ring].stage_bytes // int(shape.stage_stride)
        most = min(most, WARP_SIZE if is_apart else most) // int(shape.unit_rows) * int(shape.unit_rows)
        if not most:
            raise ProgramError(
                f"{name}: {shape.unit_rows} rows of {shape.stage_stride} bytes exceed {self.rings[ring]}"
            )
        pieces = []
        for begin in range(rows.start, rows.stop, most):
            count = min(most, rows.stop - begin)
            parts, copied = (count, 1) if is_apart else (1, count)
            piece = Piece(
                **{
                    "wait": NO_COUNTER,
                    "matrix": MATRICES.index(name),
                    "offset": begin * matrix.row_bytes,
                    "copies": parts,
                    "copy_bytes": copied * matrix.row_bytes,
                    "from_stride": matrix.row_bytes if is_apart else 0,
                    "to_stride": shape.stage_stride,
                    "rank": -1,
                    "shape": number,
                    "first_row": begin,
                    "rows": count,
                    "expert_bytes": matrix.rows * matrix.row_bytes,
                    **fields,
                }
            )
            _check_copies(name, piece)
            pieces.append(piece)
        return pieces

    def add_pieces(self, block: int, step: Step, ring: int, pieces: Sequence[Piece]) -> None:
        """Pieces of a step, in its ring."""
        listed = self.blocks[block].pieces[ring]
        step.ring, step.first_piece, step.num_pieces = ring, len(listed), len(pieces)
        listed.extend(pieces)

    # ---- the phases

    def project(self) -> int:
        """The mixer's inputs: four matrices, each divided among all blocks."""
        raised = self.counter("in")
        for block in range(self.num_blocks):
            step = self.step(
                block, "in", op=OPS.index("op_products"), load=LOADS.index("load_norm"), source=self.stream,
                vector=VECTORS.index("attn_norm"), out=self.buffers.projected,
                **self.behind(-1), **{"raise": raised},
            )  # fmt: skip
            pieces, first = [], 0
            for name in PROJECTED:
                for piece in self.rows_of(name, self.own_rows(name, block), 0):
                    piece.first_row += first
                    pieces.append(piece)
                first += self.shape.matrices[name].rows
            self.add_pieces(block, step, 0, pieces)
        return raised

    def mix(self, wait: int) -> int:
        """The recurrence: pieces of the state in turn for the blocks, each a step."""
        raised, owned = self.counter("mix"), range(0, self.sizes.values, STATE_COLUMNS)
        for block in range(self.num_blocks):
            pieces = owned[block :: self.num_blocks]
            for number, column in enumerate(pieces or [0]):
                head = column // HEAD_SIZE
                step = self.step(
                    block, "mix", op=OPS.index("op_mix"), out=self.buffers.mixed, first_row=column,
                    num_rows=STATE_COLUMNS if pieces else 0, key_head=self.shape.key_head_ids[head],
                    keeps_key=int(bool(pieces) and self.keeps_key(column)),
                    **({} if number else self.behind(wait)),
                )  # fmt: skip
            setattr(step, "raise", raised)
        return raised

    def keeps_key(self, column: int) -> bool:
        """Whether who has this piece of the state also keeps the inputs of its key head."""
        head, ids = column // HEAD_SIZE, self.shape.key_head_ids
        return column % HEAD_SIZE == 0 and ids.index(ids[head]) == head

    def add_mixed(self, wait: int) -> None:
        """The output projection of the mixer, added to the stream."""
        raised = self.counter("out")
        for block in range(self.num_blocks):
            kept = [step for step in self.blocks[block].steps if step.keeps_key]
            if len(kept) > 1:
                raise ProgramError(f"block {block} would keep the inputs of {len(kept)} key heads: 1 at most")
            step = self.step(
                block, "out", op=OPS.index("op_add"), load=LOADS.index("load_mixed"),
                source=self.buffers.mixed, groups=self.sizes.values // GROUP, out=self.buffers.middle,
                keeps_key=len(kept), key_head=kept[0].key_head if kept else 0,
                **self.behind(wait), **{"raise": raised},
            )  # fmt: skip
            self.add_pieces(block, step, 1, self.rows_of(DELTA_OUT, self.own_rows(DELTA_OUT, block), 1))
        self.stream, self.last = self.buffers.middle, raised

    def own_rows(self, name: str, block: int) -> range:
        """A block's share of a matrix, in whole units."""
        rows, count = self.unit_rows(name), self.shape.matrices[name].rows
        if count % rows:
            raise ProgramError(f"{name}: {count} rows are no multiple of {rows}, which a warp takes at once")
        units = share(count // rows, self.num_blocks, block)
        return range(units.start * rows, units.stop * rows)

    def route(self) -> int:
        """Logits of the experts and the shared one's gate, behind the norm of the stream."""
        raised, sizes = self.counter("route"), self.sizes
        for block in range(self.num_blocks):
            step = self.step(
                block, "route", op=OPS.index("op_products"), load=LOADS.index("load_norm"),
                source=self.stream, vector=VECTORS.index("ffn_norm"), out=self.buffers.logits,
                **self.behind(self.last), **{"raise": raised},
            )  # fmt: skip
            rows = share(sizes.experts + 1, self.num_blocks, block)
            pieces = self.rows_of(ROUTER, range(rows.start, min(rows.stop, sizes.experts)), 1)
            if sizes.experts in rows:
                pieces += self.rows_of(SHARED_GATE, range(1), 1, first_row=sizes.experts)
            self.add_pieces(block, step, 1, pieces)
        return raised

    def gate_up_pieces(self, names: Sequence[str], rows: range, ring: int, **fields: int) -> list[Piece]:
        """Of gate and of up in turn, of the same rows each."""
        both = [self.rows_of(name, rows, ring, **fields) for name in names[:2]]
        if [piece.rows for piece in both[0]] != [piece.rows for piece in both[1]]:
            both = [
                [
                    piece
                    for begin in range(rows.start, rows.stop, self.unit_rows(name))
                    for piece in self.rows_of(
                        name, range(begin, begin + self.unit_rows(name)), ring, **fields
                    )
                ]
                for name in names[:2]
            ]
        return [piece for pair in zip(*both, strict=True) for piece in pair]

    def activate(self, answer: int) -> int:
        """Gate and up: of the shared expert, which waits for nobody, and of the chosen ones."""
        raised, shape = self.counter("gate and up"), self.sizes
        rows = self.unit_rows(ROUTED[0])
        each = shape.ffn // rows
        fields = {
            "op": OPS.index("op_gate_up"),
            "load": LOADS.index("load_nothing"),
            "out": self.buffers.units,
        }
        for block in range(self.num_blocks):
            own = self.own_rows(SHARED[0], block)
            step = self.step(block, "shared", **fields)
            self.add_pieces(block, step, 1, self.gate_up_pieces(SHARED, own, 1, slot=shape.chosen))
            step = self.step(block, "gate and up", **fields, **{"raise": raised})
            units = share(shape.chosen * each, self.num_blocks, block)
            pieces = []
            for rank in range(shape.chosen):
                begin, end = max(units.start, rank * each), min(units.stop, (rank + 1) * each)
                own = range((begin - rank * each) * rows, (end - rank * each) * rows)
                routed = {"rank": rank, "slot": rank, **self.behind(answer)}
                pieces += self.gate_up_pieces(ROUTED, own, 2, **routed)
            self.add_pieces(block, step, 2, pieces)
        return raised

    def down_pieces(self, rows: range, answer: int) -> list[Piece]:
        """The same rows of all experts, of as many in a stage as fit. The shared one waits for nobody."""
        shape, pieces = self.sizes, self.rows_of(SHARED[2], rows, 2, slot=self.sizes.chosen)
        matrix = self.shape.matrices[ROUTED[2]]
        copy_bytes = len(rows) * matrix.row_bytes
        most = min(self.rings[2].stage_bytes // copy_bytes, shape.chosen)
        if not most or len(pieces) > 1:
            raise ProgramError(f"{len(rows)} rows of down exceed a stage of {self.rings[2]}")
        parts = -(-shape.chosen // most)
        for part in range(parts):
            ranks = share(shape.chosen, parts, part)
            (piece,) = self.rows_of(ROUTED[2], rows, 2, rank=ranks.start, slot=ranks.start)
            piece.wait, piece.target = answer, self.num_blocks
            if piece.copies > 1:
                raise ProgramError("rows of down that lie apart in a stage")
            piece.copies, piece.to_stride = len(ranks), copy_bytes
            pieces.append(piece)
        return pieces

    def add_experts(self, wait: int, answer: int) -> None:
        """Down, and the sum of the experts' rows by who has them."""
        raised, shape = self.counter("down"), self.sizes
        rows = max(self.unit_rows(ROUTED[2]), self.unit_rows(SHARED[2]))
        most = MOST_DOWN_ROWS // rows
        fields = {"op": OPS.index("op_down"), "out": self.buffers.stream}
        for block in range(self.num_blocks):
            units = share(shape.hidden // rows, self.num_blocks, block)
            parts = [range(b, min(b + most, units.stop)) for b in range(units.start, units.stop, most)]
            for number, part in enumerate(parts or [range(0)]):
                own = range(part.start * rows, part.stop * rows)
                load = {"load": LOADS.index("load_nothing" if number else "load_hidden")}
                load |= {} if number else self.behind(wait)
                step = self.step(
                    block,
                    "down",
                    **fields,
                    **load,
                    source=self.buffers.units,
                    first_row=own.start,
                    num_rows=len(own),
                )
                if own:
                    self.add_pieces(block, step, 2, self.down_pieces(own, answer))
            setattr(step, "raise", raised)


def _check_copies(name: str, piece: Piece) -> None:
    sizes = (piece.offset, piece.copy_bytes, piece.from_stride, piece.to_stride if piece.copies > 1 else 0)
    if any(size % COPY_BYTES for size in sizes):
        raise ProgramError(f"{name}: pieces of {sizes} bytes are no whole {COPY_BYTES}")


def plan(
    kinds: Sequence[LayerShape], num_blocks: int, rings: Sequence[Ring] = RINGS, warps: int = CONSUMER_WARPS
) -> TokenLists:
    """The lists of `num_blocks` blocks for kinds of layers that agree in their sizes.

    ProgramError for what does not fit.
    """
    if len(rings) != MAX_RINGS or any(r.stages > MAX_STAGES or r.stage_bytes % 128 for r in rings):
        raise ProgramError(f"{len(rings)} rings: {MAX_RINGS}, of {MAX_STAGES} stages of whole 128 bytes")
    if any(ring.stages < 2 for ring in rings):
        raise ProgramError("a ring of one stage: gate and up are in two at once")
    shapes, planners = _Shapes(), []
    for kind in kinds:
        kind.check()
        planner = _Planner(kind, rings, num_blocks, shapes)
        if kind.sizes.value_heads:
            planner.add_mixed(planner.mix(planner.project()))
        answer = planner.route()
        planner.add_experts(planner.activate(answer), answer)
        planners.append(planner)
    if len({(kind.sizes, kind.key_head_ids) for kind in kinds}) > 1:
        raise ProgramError("layers of different sizes")
    blocks = tuple(planner.blocks for planner in planners)
    return TokenLists(
        tuple(kinds),
        tuple(rings),
        planners[0].buffers,
        blocks,
        tuple(shapes.all),
        tuple(planners[0].counters),
        warps,
    )


def describe(lists: TokenLists, block: int, kind: int = 0) -> Iterator[str]:
    """A block's list of one kind of layer, a step a line."""
    own = lists.blocks[kind][block]

    def counter(number: int) -> str:
        return "–" if number == NO_COUNTER else lists.counters[number]

    for name, step in zip(own.names, own.steps, strict=True):
        pieces = own.pieces[step.ring][step.first_piece : step.first_piece + step.num_pieces]
        size = sum(piece.copies * piece.copy_bytes for piece in pieces)
        late = {counter(piece.wait) for piece in pieces if piece.wait != NO_COUNTER}
        yield (
            f"{name}: waits for {counter(step.wait)} = {step.target}, {len(pieces)} pieces of ring "
            f"{step.ring} with {size} bytes{''.join(f', some behind {each}' for each in late)}, "
            f"raises {counter(getattr(step, 'raise'))}"
        )
