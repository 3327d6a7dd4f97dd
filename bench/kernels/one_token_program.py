"""Instruction lists for `one_token.cu`: what each block of one launch reads, waits for, computes and raises.

`plan` is a pure function of a model's shapes, a design and a number of blocks. Lists are data: `describe`
prints a block's, `one_token_check.py` proves that they end and read what has been written, and the kernel
runs from them. A layer's list serves all layers of its kind. Kinds differ in which of two buffers holds the
stream.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.kernels.one_token_shapes import (
    HEAD_SIZE,
    KIB,
    KINDS,
    MAX_RINGS,
    MAX_STAGES,
    MAX_SUMS,
    NO_COUNTER,
    NUMBERS,
    STATE_PIECE_BYTES,
    VECTOR_BYTES,
    BlockLists,
    Buffers,
    Design,
    LayerShape,
    Matrix,
    Piece,
    Ring,
    Step,
)

MOST_DYNAMIC_BYTES = 223 * KIB  # of a block on sm_90, beside what the kernel declares itself
CONSUMER_THREADS, WIDE = 256, 256


class DesignError(ValueError):
    """A design that does not fit the shapes, the blocks or the device."""


@dataclass
class BlockProgram:
    """A block's lists for one kind of layer; pieces by ring."""

    steps: list[Step] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    pieces: list[list[Piece]] = field(default_factory=lambda: [[] for _ in range(MAX_RINGS)])


@dataclass(frozen=True)
class TokenProgram:
    """Lists of all blocks. blocks: [kinds][blocks]; counters: names of a layer's."""

    shape: LayerShape
    design: Design
    buffers: Buffers
    blocks: tuple[tuple[BlockProgram, ...], ...]
    counters: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.blocks[0])

    @property
    def raw_bytes(self) -> int:
        """Room for inputs that are copied near as they are."""
        if self.design.fetch == "loads":
            return 0
        loads = (s for kind in self.blocks for b in kind for s in b.steps)
        return max(4 * s.groups * s.group_words for s in loads if s.load == NUMBERS["load_quantised"])

    @property
    def x_bytes(self) -> int:
        return -(-max(s.groups * s.group_words for k in self.blocks for b in k for s in b.steps) // 128) * 128

    @property
    def list_bytes(self) -> int:
        """The most that a block's lists take."""

        def of(block: int) -> int:
            lists = [kind[block] for kind in self.blocks]
            steps = sum(len(each.steps) for each in lists)
            pieces = sum(len(ring) for each in lists for ring in each.pieces)
            heads = len(lists) * ctypes.sizeof(BlockLists)
            return heads + steps * ctypes.sizeof(Step) + pieces * ctypes.sizeof(Piece)

        return max(map(of, range(self.num_blocks)))

    @property
    def shared_bytes(self) -> int:
        rings = sum(ring.stages * ring.stage_bytes for ring in self.design.rings)
        return rings + self.raw_bytes + self.x_bytes + self.list_bytes

    @property
    def num_slots(self) -> int:
        """Stamps of a block in a layer: of each step, and of its producers."""
        return 1 + max(len(block.steps) for kind in self.blocks for block in kind)


def share(total: int, parts: int, index: int) -> range:
    """The index-th of `parts` adjacent shares of `total` that differ by one at most."""
    return range(total * index // parts, total * (index + 1) // parts)


def lanes_for(pairs: int, row_bytes: int) -> int:
    """How many lanes share a row, of a piece of so many pairs of rows: the fewest passes of the block."""
    vectors = row_bytes // VECTOR_BYTES

    def passes(lanes: int) -> int:
        return -(-pairs // (CONSUMER_THREADS // lanes)) * -(-vectors // lanes)

    return min((32, 16, 8), key=passes)


class _Planner:
    """Makes the lists of one kind of layer, phase by phase, for all blocks."""

    def __init__(self, shape: LayerShape, design: Design, num_blocks: int, kind: int) -> None:
        self.shape, self.design, self.num_blocks = shape, design, num_blocks
        self.buffers = Buffers.of(shape)
        self.stream, self.next_stream = (self.buffers.streams[(kind + i) % 2] for i in range(2))
        self.blocks = tuple(BlockProgram() for _ in range(num_blocks))
        self.raisers: dict[str, list[int]] = {}
        self.order: list[str] = []
        self.last: str | None = None  # the counter that readers of the stream wait for

    def ring(self, group: int) -> tuple[int, Ring]:
        index = self.design.ring_of[group]
        return index, self.design.rings[index]

    def step(self, block: int, name: str, op: str, **fields: int) -> Step:
        """A block's next step. Raised counters are numbers of `self.order` until `resolve`."""
        given = {"wait": NO_COUNTER, "raise": NO_COUNTER, "chooses": NO_COUNTER, **fields}
        made = Step(op=NUMBERS[op], **given)
        self.blocks[block].steps.append(made)
        self.blocks[block].names.append(name)
        return made

    def counter(self, name: str, blocks: Sequence[int]) -> int:
        """A counter of the layer that these blocks raise."""
        self.order.append(name)
        self.raisers[name] = list(blocks)
        return len(self.order) - 1

    def taking_part(self, work: Sequence[int]) -> list[int]:
        """Of blocks with so much work each, those that have the phase in their lists."""
        if not self.design.only_with_work:
            return list(range(self.num_blocks))
        return [block for block, amount in enumerate(work) if amount]

    def rows_of(self, matrix: Matrix, rows: range, group: int, **fields: int) -> list[Piece]:
        """Pieces of adjacent rows of one matrix, in pairs."""
        _, ring = self.ring(group)
        most = ring.stage_bytes // matrix.row_bytes // 2 * 2
        if not most:
            raise DesignError(f"{matrix.name}: two rows of {matrix.row_bytes} bytes exceed {ring}")
        if most > 16:
            most = most // 16 * 16
        pieces = []
        for begin in range(rows.start, rows.stop, most):
            count = min(most, rows.stop - begin)
            made = {
                "wait": NO_COUNTER,
                "offset": matrix.offset + begin * matrix.row_bytes,
                "copies": 1,
                "copy_bytes": count * matrix.row_bytes,
                "rank": -1,
                "rows": count,
                "row_bytes": matrix.row_bytes,
                "lanes": lanes_for(count // 2, matrix.row_bytes),
                "first_row": begin,
            }
            pieces.append(Piece(**made | fields))
        return pieces

    def add_pieces(self, block: int, step: Step, group: int, pieces: Sequence[Piece]) -> None:
        """Pieces of a step, in its ring. `first_piece` is an index in that ring until `resolve`."""
        index, _ = self.ring(group)
        listed = self.blocks[block].pieces[index]
        step.ring, step.first_piece, step.num_pieces = index, len(listed), len(pieces)
        listed.extend(pieces)

    def add_near(self, block: int, group: int, pieces: Sequence[Piece]) -> None:
        """The same bytes, only asked into the second-level cache."""
        for piece in pieces:
            copied = Piece.from_buffer_copy(piece)
            copied.only_near = 1
            self.blocks[block].pieces[self.ring(group)[0]].append(copied)

    # ---- the phases

    def inputs_of_stream(self, source: int, wait: int, name: str) -> dict[str, int]:
        """How readers of the stream get its norm: by themselves, or of a phase that block 0 has."""
        hidden = self.shape.hidden
        quantised = {"load": NUMBERS["load_quantised"], "groups": 1, "group_words": hidden, "source": source}
        if self.design.norm == "reader":
            return {**quantised, "wait": wait}
        raised = self.counter(name, [0])
        self.step(0, name, "op_norm", **quantised, wait=wait, out=self.buffers.codes, **{"raise": raised})
        as_bytes = {"load": NUMBERS["load_bytes"], "source": self.buffers.codes}
        return {**quantised, **as_bytes, "wait": raised}

    def project(self) -> int:
        """The input projection: three matrices, each divided among all blocks."""
        shape, buffers = self.shape, self.buffers
        if self.design.combine == "reader":
            inputs = {"load": NUMBERS["load_sums"], "groups": 1, "group_words": shape.hidden, "wait": -1}
            inputs |= {"source": buffers.rows, "residual": buffers.middle, "needs_choice": 1}
        else:
            inputs = self.inputs_of_stream(self.stream, -1, "norm of the stream")
        raised = self.counter("in", range(self.num_blocks))
        for block in range(self.num_blocks):
            own = share(shape.hidden, self.num_blocks, block)
            sums = {"stream_out": self.stream, "first_row": own.start, "num_rows": len(own)}
            extra = sums if self.design.combine == "reader" else {}
            out = {"epilogue": NUMBERS["store_sums"], "out": buffers.projected, "raise": raised}
            step = self.step(block, "in", "op_matrix", **inputs, **out, **extra)
            pieces, first = [], 0
            for matrix in shape.projected:
                pairs = share(matrix.rows // 2, self.num_blocks, block)
                for piece in self.rows_of(matrix, range(2 * pairs.start, 2 * pairs.stop), 0):
                    piece.first_row += first
                    pieces.append(piece)
                first += matrix.rows
            self.add_pieces(block, step, 0, pieces)
            if "static" in self.design.near:
                self.add_near(block, 0, self.out_pieces(block) + self.router_pieces(block))
        return raised

    def mix(self, wait: int) -> int:
        """The recurrence: pieces of the state in turn for the blocks, each a step."""
        owned = [range(block, self.shape.state_pieces, self.num_blocks) for block in range(self.num_blocks)]
        taking_part = self.taking_part([len(pieces) for pieces in owned])
        raised = self.counter("mix", taking_part)
        for block in taking_part:
            for number, piece in enumerate(owned[block] or (-1,)):
                fields = {"wait": NO_COUNTER if number else wait, "out": self.buffers.mixed}
                step = self.step(
                    block, "mix", "op_mixer", **fields, first_row=piece, num_rows=int(piece >= 0)
                )
                if piece >= 0 and self.design.state == "ring":
                    offset = piece * STATE_PIECE_BYTES
                    made = {
                        "wait": NO_COUNTER,
                        "offset": offset,
                        "copies": 1,
                        "copy_bytes": STATE_PIECE_BYTES,
                    }
                    self.add_pieces(block, step, 1, [Piece(**made, rank=-1, is_state=1)])
            setattr(step, "raise", raised)
        return raised

    def out_pieces(self, block: int) -> list[Piece]:
        matrix = self.shape.matrix("ssm_out")
        pairs = share(matrix.rows // 2, self.num_blocks, block)
        return self.rows_of(matrix, range(2 * pairs.start, 2 * pairs.stop), 1)

    def add_mixed(self, wait: int) -> int:
        """The output projection of the mixer, added to the stream."""
        raised = self.counter("out", range(self.num_blocks))
        words = self.shape.value_heads * HEAD_SIZE
        fields = {
            "wait": wait,
            "raise": raised,
            "source": self.buffers.mixed,
            "groups": 1,
            "group_words": words,
        }
        fields |= {"load": NUMBERS["load_quantised"], "epilogue": NUMBERS["add_residual"]}
        for block in range(self.num_blocks):
            places = {"out": self.buffers.middle, "residual": self.stream}
            step = self.step(block, "out", "op_matrix", **fields, **places)
            self.add_pieces(block, step, 1, self.out_pieces(block))
        return raised

    def router_rows(self, block: int) -> range:
        """Of the last blocks, as the first ones have more of other phases."""
        wanted = self.design.router_blocks or self.num_blocks
        count = min(wanted, self.num_blocks, self.shape.experts // 2)
        index = block - (self.num_blocks - count)
        pairs = share(self.shape.experts // 2, count, index) if index >= 0 else range(0)
        return range(2 * pairs.start, 2 * pairs.stop)

    def router_pieces(self, block: int) -> list[Piece]:
        return self.rows_of(self.shape.matrix("ffn_gate_inp"), self.router_rows(block), 1, lanes=WIDE)

    def route(self, inputs: dict[str, int]) -> int:
        """The router. Returns the counter behind which the choice can be read, or made."""
        work = [len(self.router_rows(block)) for block in range(self.num_blocks)]
        taking_part = self.taking_part(work)
        raised = self.counter("router", taking_part)
        by_last = self.design.choice == "last block"
        chosen = self.counter("choice", [taking_part[-1]]) if by_last else NO_COUNTER
        for block in taking_part:
            rows = self.router_rows(block)
            fields = {"epilogue": NUMBERS["store_joint_sums"], "out": self.buffers.logits, "raise": raised}
            places = {"first_row": rows.start, "num_rows": len(rows), "chooses": chosen}
            step = self.step(block, "router", "op_matrix", **inputs, **fields, **places)
            if len(rows) > MAX_SUMS:
                raise DesignError(f"{len(rows)} rows of the router for a block: {MAX_SUMS} at most")
            step.num_raisers = len(taking_part)
            self.add_pieces(block, step, 1, self.router_pieces(block))
        return chosen if by_last else raised

    def unit_pieces(self, pairs: range, wait: int) -> list[Piece]:
        """Gate and up of routed experts, whose pairs of rows are numbered by rank."""
        matrix, pieces = self.shape.matrix("ffn_gate_exps"), []
        each = matrix.rows // 2
        for rank in range(self.shape.chosen):
            begin, end = max(pairs.start, rank * each), min(pairs.stop, (rank + 1) * each)
            if begin < end:
                rows = range(2 * (begin - rank * each), 2 * (end - rank * each))
                routed = {"rank": rank, "slot": rank, "expert_bytes": matrix.expert_bytes, "wait": wait}
                pieces += self.rows_of(matrix, rows, 2, **routed)
        return pieces

    def shared_pieces(self, block: int) -> list[Piece]:
        matrix = self.shape.matrix("ffn_gate_exps")
        pairs = share(matrix.rows // 2, self.num_blocks, block)
        rows = range(2 * pairs.start, 2 * pairs.stop)
        pieces = self.rows_of(matrix, rows, 1 if self.design.shared_first else 2, slot=self.shape.chosen)
        for piece in pieces:
            piece.offset += self.shape.stored * matrix.expert_bytes
        return pieces

    def activate(self, inputs: dict[str, int], answer: int) -> int:
        """Gate and up of the chosen experts and the shared one, which may come before the router's answer."""
        raised = self.counter("gate and up", range(self.num_blocks))
        out = {"out": self.buffers.units, "out_stride": self.shape.expert_ffn}
        out |= {"epilogue": NUMBERS["multiply_pairs"]}
        routed = self.shape.chosen * self.shape.expert_ffn
        kept = {"load": NUMBERS["load_none"], "groups": 1, "group_words": self.shape.hidden}
        for block in range(self.num_blocks):
            has_inputs = self.design.keeps_inputs and self.blocks[block].names[-1] == "router"
            own = kept if has_inputs else inputs
            if self.design.shared_first:
                step = self.step(block, "shared", "op_matrix", **own, **out)
                self.add_pieces(block, step, 1, self.shared_pieces(block))
            if not self.design.keeps_inputs:
                own = {**inputs, "wait": answer}
            elif self.design.shared_first:
                own = kept
            pieces = self.unit_pieces(share(routed, self.num_blocks, block), answer)
            if not self.design.shared_first:
                pieces += self.shared_pieces(block)
            step = self.step(block, "gate and up", "op_matrix", **own, **out, **{"raise": raised})
            if "down" in self.design.near:
                self.add_near(block, 2, self.down_pieces(block, answer))
            self.add_pieces(block, step, 2, pieces)
        return raised

    def down_rows(self, block: int) -> range:
        pairs = share(self.shape.hidden // 2, self.num_blocks, block)
        return range(2 * pairs.start, 2 * pairs.stop)

    def down_pieces(self, block: int, answer: int) -> list[Piece]:
        """The block's rows of all experts, of as many in a stage as fit."""
        matrix, rows = self.shape.matrix("ffn_down_exps"), self.down_rows(block)
        _, ring = self.ring(2)
        copy_bytes = len(rows) * matrix.row_bytes
        if len(rows) > MAX_SUMS or copy_bytes > ring.stage_bytes:
            limits = f"{MAX_SUMS} at most, in a stage of {ring.stage_bytes} bytes"
            raise DesignError(f"{len(rows)} rows of each expert for a block: {limits}")
        most, pieces = ring.stage_bytes // copy_bytes, []
        # The shared expert first, whose bytes wait for nobody.
        groups = [(self.shape.chosen, 1)]
        parts = -(-self.shape.chosen // most)
        ranks = (share(self.shape.chosen, parts, part) for part in range(parts))
        groups += [(each.start, len(each)) for each in ranks]
        for rank, copies in groups:
            is_shared = rank == self.shape.chosen
            offset = matrix.offset + rows.start * matrix.row_bytes
            made = {
                "wait": NO_COUNTER if is_shared else answer,
                "offset": offset + is_shared * self.shape.stored * matrix.expert_bytes,
                "copies": copies,
                "copy_bytes": copy_bytes,
                "expert_bytes": matrix.expert_bytes,
                "rank": -1 if is_shared else rank,
                "rows": len(rows),
                "row_bytes": matrix.row_bytes,
                "lanes": lanes_for(copies * len(rows) // 2, matrix.row_bytes),
                "first_row": rows.start,
                "slot": rank,
            }
            pieces.append(Piece(**made))
        return pieces

    def add_experts(self, wait: int, answer: int) -> int:
        """Down, and the sum of the experts' rows: by who has the rows, or kept apart."""
        joins = self.design.combine == "rows"
        raised = self.counter("down", range(self.num_blocks))
        fields = {
            "wait": wait,
            "raise": raised,
            "load": NUMBERS["load_quantised"],
            "source": self.buffers.units,
        }
        fields |= {"groups": self.shape.ranks, "group_words": self.shape.expert_ffn}
        fields |= {"out": self.next_stream if joins else self.buffers.rows, "residual": self.buffers.middle}
        fields |= {"out_stride": 0 if joins else self.shape.hidden, "needs_choice": int(joins)}
        fields |= {"epilogue": NUMBERS["sum_ranks" if joins else "store_sums"]}
        for block in range(self.num_blocks):
            rows = self.down_rows(block)
            step = self.step(block, "down", "op_matrix", **fields, first_row=rows.start, num_rows=len(rows))
            self.add_pieces(block, step, 2, self.down_pieces(block, answer))
        return raised

    def combine(self, wait: int) -> None:
        """The sum of the experts' rows as a phase of its own."""
        count = min(self.num_blocks, -(-self.shape.hidden // 128))
        taking_part = self.taking_part([int(block < count) for block in range(self.num_blocks)])
        raised = self.counter("combine", taking_part)
        fields = {"wait": wait, "raise": raised, "needs_choice": 1, "group_words": self.shape.hidden}
        fields |= {"source": self.buffers.rows, "residual": self.buffers.middle, "out": self.next_stream}
        for block in taking_part:
            own = share(self.shape.hidden, count, block) if block < count else range(0)
            self.step(block, "combine", "op_combine", **fields, first_row=own.start, num_rows=len(own))

    def run(self) -> None:
        """All phases of a layer, in order."""
        mixed = self.mix(self.project())
        middle = self.add_mixed(mixed)
        inputs = self.inputs_of_stream(self.buffers.middle, middle, "norm of the middle")
        answer = self.route(inputs)
        units = self.activate(inputs, answer)
        down = self.add_experts(units, answer)
        if self.design.combine == "phase":
            self.combine(down)
        for block in self.blocks:
            for step in block.steps:
                self.resolve(step)
            for pieces in block.pieces:
                for piece in pieces:
                    self.resolve(piece)

    def resolve(self, item: Step | Piece) -> None:
        """How often a counter is raised that is waited for. −1 is the last one of the layer before."""
        if isinstance(item, Piece) and item.lanes:
            item.lane_bits = min(item.lanes, 32).bit_length() - 1
            item.per_pair = -(-(1 << 16) // (item.rows // 2))
        if item.wait != NO_COUNTER:
            item.target = len(self.raisers[self.order[item.wait]])


def plan(shape: LayerShape, design: Design, num_blocks: int) -> TokenProgram:
    """The lists of `num_blocks` blocks. DesignError for what does not fit."""
    if any(matrix.cols // 32 & (matrix.cols // 32 - 1) or matrix.rows % 2 for matrix in shape.matrices):
        raise DesignError("the kernel takes rows in pairs, of a power of two of weights")
    rings = design.rings
    if len(rings) > MAX_RINGS or any(r.stages > MAX_STAGES or r.stage_bytes % 128 for r in rings):
        raise DesignError(
            f"{len(rings)} rings: {MAX_RINGS} at most, of {MAX_STAGES} stages of whole 128 bytes"
        )
    if num_blocks % design.cluster or (design.cluster > 1 and design.only_with_work):
        raise DesignError(
            f"{num_blocks} blocks in clusters of {design.cluster}, all of which do the same waits"
        )
    if design.counter_splits > 1 and (design.poll == "thread" or design.choice == "last block"):
        raise DesignError(
            "only a warp looks at the parts of a counter, and a last block is known by one word"
        )
    if design.norm == "phase" and design.combine == "reader":
        raise DesignError("a norm that is a phase reads the stream, which readers would have to sum first")
    planners = [_Planner(shape, design, num_blocks, kind) for kind in range(KINDS)]
    for each in planners:
        each.run()
    blocks = tuple(each.blocks for each in planners)
    made = TokenProgram(shape, design, Buffers.of(shape), blocks, tuple(planners[0].order))
    if made.shared_bytes > MOST_DYNAMIC_BYTES:
        raise DesignError(f"{made.shared_bytes} bytes of shared memory: {MOST_DYNAMIC_BYTES} at most")
    return made


def describe(program: TokenProgram, block: int, kind: int = 0) -> Iterator[str]:
    """A block's list of one kind of layer, a step a line."""
    lists = program.blocks[kind][block]

    def counter(number: int) -> str:
        return "–" if number == NO_COUNTER else program.counters[number]

    for name, step in zip(lists.names, lists.steps, strict=True):
        pieces = lists.pieces[step.ring][step.first_piece : step.first_piece + step.num_pieces]
        size = sum(piece.copies * piece.copy_bytes for piece in pieces)
        late = {counter(piece.wait) for piece in pieces if piece.wait != NO_COUNTER}
        yield (
            f"{name}: waits for {counter(step.wait)} = {step.target}, {len(pieces)} pieces of ring "
            f"{step.ring} with {size} bytes{''.join(f', some behind {each}' for each in late)}, "
            f"raises {counter(getattr(step, 'raise'))}"
        )
