"""Instruction lists of one launch a token: what each block reads, waits for, computes and raises.

`plan` is a pure function of the layers' shapes, a number of blocks and the rings in their shared memory.
Lists are data: `describe` prints a block's, `check.py` proves that they end and read what has been written,
and the kernel runs from them. Layers of a kind share their lists.
"""

from collections.abc import Iterator, Sequence

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
from coldstream.kernels.persistent.shapes import (
    ATTENTION,
    ATTENTION_OUT,
    CONSUMER_WARPS,
    COUNTERS,
    DELTA_OUT,
    GROUP,
    HEAD_SIZE,
    LOADS,
    MAX_RINGS,
    MAX_STAGES,
    MOST_DOWN_ROWS,
    NO_COUNTER,
    OPS,
    PLACES,
    PROJECTED,
    RINGS,
    ROUTED,
    ROUTER,
    SHARED,
    SHARED_GATE,
    STATE_COLUMNS,
    VECTORS,
    BlockProgram,
    Buffers,
    LayerShape,
    Matrix,
    Part,
    Piece,
    ProgramError,
    Ring,
    Step,
    TokenLists,
)


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
        self.last = -1  # the counter behind which the stream can be read

    def step(self, block: int, name: str, **fields: int) -> Step:
        """A block's next step."""
        made = Step(
            **{"wait": NO_COUNTER, "raise": NO_COUNTER, "groups": self.sizes.hidden // GROUP, **fields}
        )
        self.blocks[block].steps.append(made)
        self.blocks[block].names.append(name)
        return made

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
                    "matrix": PLACES[name],
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

    def project(self, names: Sequence[str]) -> int:
        """The mixer's inputs: some matrices, each divided among all blocks."""
        raised = COUNTERS.index("in")
        for block in range(self.num_blocks):
            step = self.step(
                block, "in", op=OPS.index("op_products"), load=LOADS.index("load_norm"), source=self.stream,
                vector=VECTORS.index("attn_norm"), out=self.buffers.projected,
                **self.behind(-1), **{"raise": raised},
            )  # fmt: skip
            pieces, first = [], 0
            for name in names:
                for piece in self.rows_of(name, self.own_rows(name, block), 0):
                    piece.first_row += first
                    pieces.append(piece)
                first += self.shape.matrices[name].rows
            self.add_pieces(block, step, 0, pieces)
        return raised

    def mix(self, wait: int) -> int:
        """The recurrence: pieces of the state in turn for the blocks, each a step."""
        raised, owned = COUNTERS.index("mix"), range(0, self.sizes.values, STATE_COLUMNS)
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

    def add_mixed(self, wait: int, name: str, load: str, width: int) -> None:
        """The output projection of a mixer, added to the stream."""
        raised = COUNTERS.index("out")
        for block in range(self.num_blocks):
            kept = [step for step in self.blocks[block].steps if step.keeps_key]
            if len(kept) > 1:
                raise ProgramError(f"block {block} would keep the inputs of {len(kept)} key heads: 1 at most")
            step = self.step(
                block, "out", op=OPS.index("op_add"), load=LOADS.index(load), source=self.buffers.mixed,
                groups=width // GROUP, out=self.buffers.middle, keeps_key=len(kept),
                key_head=kept[0].key_head if kept else 0, **self.behind(wait), **{"raise": raised},
            )  # fmt: skip
            self.add_pieces(block, step, 1, self.rows_of(name, self.own_rows(name, block), 1))
        self.stream, self.last = self.buffers.middle, raised

    def run(self) -> None:
        """All phases of the part, in order."""
        part, sizes = self.shape.part, self.sizes
        if part is Part.DELTA_NET:
            self.add_mixed(self.mix(self.project(PROJECTED)), DELTA_OUT, "load_mixed", sizes.values)
        if part is Part.BEFORE_ATTENTION:
            self.project(ATTENTION)
            return
        if part is Part.BEHIND_ATTENTION:
            self.add_mixed(NO_COUNTER, ATTENTION_OUT, "load_row", sizes.attention_width)
        answer = self.route()
        self.add_experts(self.activate(answer), answer)

    def own_rows(self, name: str, block: int) -> range:
        """A block's share of a matrix, in whole units."""
        rows, count = self.unit_rows(name), self.shape.matrices[name].rows
        if count % rows:
            raise ProgramError(f"{name}: {count} rows are no multiple of {rows}, which a warp takes at once")
        units = share(count // rows, self.num_blocks, block)
        return range(units.start * rows, units.stop * rows)

    def route(self) -> int:
        """Logits of the experts and the shared one's gate, behind the norm of the stream."""
        raised, sizes = COUNTERS.index("route"), self.sizes
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
        raised, shape = COUNTERS.index("gate and up"), self.sizes
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
        raised, shape = COUNTERS.index("down"), self.sizes
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
        planner.run()
        planners.append(planner)
    if len({kind.sizes for kind in kinds}) > 1:
        raise ProgramError("layers of different sizes")
    blocks = tuple(planner.blocks for planner in planners)
    return TokenLists(
        tuple(kinds),
        tuple(rings),
        planners[0].buffers,
        blocks,
        tuple(shapes.all),
        COUNTERS,
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
