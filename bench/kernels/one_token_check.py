"""Proves of a `TokenProgram` without a GPU that it ends, and that every step reads what was written before.

The simulator of the package runs the streams of a block: its consumers, its poller and its producers.
"""

from collections.abc import Iterator

from bench.kernels.one_token_program import TokenProgram
from bench.kernels.one_token_shapes import (
    HEAD_SIZE,
    MAX_RINGS,
    NO_COUNTER,
    NUMBERS,
    STATE_COLUMNS,
    Piece,
    Step,
)
from coldstream.kernels.persistent.simulator import Memory, Queue, Simulator, Stream

ROLES = ["consumers", "poller", *(f"producer of ring {ring}" for ring in range(MAX_RINGS))]


class Check:
    """One run of all streams over some layers."""

    def __init__(self, program: TokenProgram, layers: int = 4, layers_of_token: int = 2) -> None:
        self.program, self.layers, self.of_token = program, layers, layers_of_token
        blocks, self.per_block = program.num_blocks, len(ROLES)
        self.names = [f"block {block}'s {role}" for block in range(blocks) for role in ROLES]
        counters = [
            f"counter {name!r} of layer {layer}" for layer in range(layers) for name in program.counters
        ]
        self.sim = Simulator(self.names, counters)
        count = len(self.names)
        self.words = Memory(program.buffers.num_words, count, 64)
        self.states = Memory(layers_of_token * program.shape.state_pieces, count, 1)
        self.full, self.empty = ([[Queue() for _ in range(MAX_RINGS)] for _ in range(blocks)] for _ in "fe")
        self.go, self.idle, self.signal = ([Queue() for _ in range(blocks)] for _ in range(3))
        self.seen: list[list[int]] = [[] for _ in range(blocks)]  # when pollers saw signals
        self.has_poller = program.design.poll != "thread"
        self._begin()

    def run(self) -> list[str]:
        """The faults."""
        blocks = range(self.program.num_blocks)
        return self.sim.run(stream for block in blocks for stream in self._streams(block))

    def _begin(self) -> None:
        """What is there before the launch: the states, and the stream, or what its reader sums."""
        buffers, shape = self.program.buffers, self.program.shape
        self.states.is_there_from_the_begin(0, self.states.size)
        begins = {buffers.streams[0]: shape.hidden}
        if self.program.design.combine == "reader":
            begins = {buffers.rows: shape.ranks * shape.hidden, buffers.middle: shape.hidden}
            begins |= {buffers.logits: shape.experts, buffers.choice: 2 * shape.ranks}
        for begin, count in begins.items():
            self.words.is_there_from_the_begin(begin, count)

    def _read(self, stream: int, begin: int, count: int, what: str, memory: Memory | None = None) -> None:
        self.sim.read(stream, memory or self.words, begin, count, what)

    def _write(self, stream: int, begin: int, count: int, what: str, memory: Memory | None = None) -> None:
        self.sim.write(stream, memory or self.words, begin, count, what)

    def _await_counter(self, stream: int, layer: int, item: Step | Piece) -> Stream:
        number = layer * len(self.program.counters) + item.wait
        if item.wait != NO_COUNTER and number >= 0:
            yield from self.sim.await_counter(stream, number, item.target)

    def _raise(self, stream: int, layer: int, counter: int) -> None:
        self.sim.raise_counter(stream, layer * len(self.program.counters) + counter)

    # ---- streams

    def _streams(self, block: int) -> Iterator[tuple[int, Stream]]:
        first = block * self.per_block
        yield first, self._consume(block, first)
        if self.has_poller:
            yield first + 1, self._poll(block, first + 1)
        for ring in range(MAX_RINGS):
            yield first + 2 + ring, self._produce(block, ring, first + 2 + ring)

    def _poll(self, block: int, stream: int) -> Stream:
        cluster, number, signals = self.program.design.cluster, 0, 0
        leader = block // cluster * cluster
        is_leader = self.program.design.poll != "cluster" or block == leader
        by_copy = self.program.design.fetch == "copy"
        for layer in range(self.layers):
            for step in self.program.blocks[layer % len(self.program.blocks)][block].steps:
                if is_leader:
                    yield from self._await_counter(stream, layer, step)
                    if self.program.design.poll == "cluster" and step.wait != NO_COUNTER:
                        self._signal_peers(stream, range(block + 1, leader + cluster))
                elif step.wait != NO_COUNTER:
                    yield from self.sim.await_queue(
                        stream, self.signal[block], signals, "its cluster's signal"
                    )
                    signals += 1
                    self.seen[block].append(self.sim.tick(stream))
                if number:
                    yield from self.sim.await_queue(stream, self.idle[block], number - 1, "its consumers")
                if by_copy and step.load == NUMBERS["load_quantised"]:
                    self._read(stream, step.source, step.groups * step.group_words, "inputs")
                self.sim.give(stream, self.go[block])
                number += 1

    def _signal_peers(self, stream: int, peers: range) -> None:
        """A signal that a peer has not seen is lost if the next one comes."""
        for peer in peers:
            queue, poller = self.signal[peer], peer * self.per_block + 1
            known = sum(time <= self.sim.clocks[stream, poller] for time in self.seen[peer])
            if len(queue.clocks) > known:
                self.sim.fault(f"{self.names[stream]} signals again before {self.names[poller]} has seen it")
            self.sim.give(stream, queue)

    def _produce(self, block: int, ring: int, stream: int) -> Stream:
        program, issued = self.program, 0
        for layer in range(self.layers):
            for piece in program.blocks[layer % len(program.blocks)][block].pieces[ring]:
                yield from self._await_counter(stream, layer, piece)
                if piece.rank >= 0:
                    self._read_choice(stream, "the router's answer")
                if piece.only_near:
                    continue
                if issued >= (stages := program.design.rings[ring].stages):
                    what = f"a free stage of ring {ring}"
                    yield from self.sim.await_queue(stream, self.empty[block][ring], issued - stages, what)
                if piece.is_state:
                    number = self._state(layer, piece.offset // (HEAD_SIZE * STATE_COLUMNS * 4))
                    self._read(stream, number, 1, "a state", self.states)
                self.sim.give(stream, self.full[block][ring], piece)
                issued += 1

    def _read_choice(self, stream: int, what: str) -> None:
        buffers, shape = self.program.buffers, self.program.shape
        if self.program.design.choice == "reader":
            self._read(stream, buffers.logits, shape.experts, what)
        else:
            self._read(stream, buffers.choice, 2 * shape.ranks, what)

    def _state(self, layer: int, piece: int) -> int:
        return layer % self.of_token * self.program.shape.state_pieces + piece

    def _consume(self, block: int, stream: int) -> Stream:
        program, number, taken = self.program, 0, [0] * MAX_RINGS
        for layer in range(self.layers):
            lists = program.blocks[layer % len(program.blocks)][block]
            for name, step in zip(lists.names, lists.steps, strict=True):
                if self.has_poller:
                    yield from self.sim.await_queue(stream, self.go[block], number, "its poller")
                else:
                    yield from self._await_counter(stream, layer, step)
                number += 1
                self._load(stream, step, name)
                if self.has_poller:
                    self.sim.give(stream, self.idle[block])
                pieces = lists.pieces[step.ring][step.first_piece : step.first_piece + step.num_pieces]
                for piece in pieces:
                    queue = self.full[block][step.ring]
                    at, taken[step.ring] = taken[step.ring], taken[step.ring] + 1
                    yield from self.sim.await_queue(stream, queue, at, f"bytes of ring {step.ring}")
                    if bytes(queue.items[at]) != bytes(piece):
                        self.sim.fault(
                            f"{self.names[stream]}: {name} takes another piece than ring {step.ring} has"
                        )
                    self.sim.give(stream, self.empty[block][step.ring])
                    self._multiply(stream, step, piece, name)
                self._finish(stream, layer, step, name)
                self._raise_of(stream, layer, step)

    def _load(self, stream: int, step: Step, name: str) -> None:
        what = f"inputs of {name}"
        if step.needs_choice:
            self._read_choice(stream, f"weights of experts for {name}")
        if step.load == NUMBERS["load_sums"]:
            shape = self.program.shape
            self._read(stream, step.source, shape.ranks * step.group_words, what)
            self._read(stream, step.residual, step.group_words, what)
            self._write(stream, step.stream_out + step.first_row, step.num_rows, "its part of the stream")
        elif step.load == NUMBERS["load_bytes"]:
            self._read(stream, step.source, step.groups * step.group_words // 4, what)
        elif step.load == NUMBERS["load_quantised"]:
            self._read(stream, step.source, step.groups * step.group_words, what)

    def _multiply(self, stream: int, step: Step, piece: Piece, name: str) -> None:
        """What the rows of a piece become, where no other piece adds to it."""
        for copy in range(piece.copies):
            out = step.out + (piece.slot + copy) * step.out_stride
            if step.epilogue == NUMBERS["store_sums"]:
                self._write(stream, out + piece.first_row, piece.rows, f"outputs of {name}")
            elif step.epilogue == NUMBERS["multiply_pairs"]:
                self._write(stream, out + piece.first_row // 2, piece.rows // 2, f"outputs of {name}")
            elif step.epilogue == NUMBERS["add_residual"] and not piece.is_state:
                self._read(stream, step.residual + piece.first_row, piece.rows, f"the stream for {name}")
                self._write(stream, out + piece.first_row, piece.rows, f"outputs of {name}")

    def _finish(self, stream: int, layer: int, step: Step, name: str) -> None:
        """What a whole step writes."""
        outputs = f"outputs of {name}"
        if step.op == NUMBERS["op_norm"]:
            self._write(stream, step.out, step.group_words // 4, outputs)
        elif step.op == NUMBERS["op_combine"]:
            for rank in range(self.program.shape.ranks):
                begin = step.source + rank * step.group_words + step.first_row
                self._read(stream, begin, step.num_rows, f"rows of experts for {name}")
            self._read(stream, step.residual + step.first_row, step.num_rows, f"the stream for {name}")
            self._write(stream, step.out + step.first_row, step.num_rows, outputs)
        elif step.op == NUMBERS["op_mixer"] and step.num_rows:
            self._mix(stream, layer, step)
        elif step.op == NUMBERS["op_matrix"] and step.epilogue == NUMBERS["sum_ranks"]:
            self._read(stream, step.residual + step.first_row, step.num_rows, f"the stream for {name}")
            self._write(stream, step.out + step.first_row, step.num_rows, outputs)
        elif step.op == NUMBERS["op_matrix"] and step.epilogue == NUMBERS["store_joint_sums"]:
            self._write(stream, step.out + step.first_row, step.num_rows, outputs)

    def _mix(self, stream: int, layer: int, step: Step) -> None:
        shape, buffers = self.program.shape, self.program.buffers
        projected = sum(matrix.rows for matrix in shape.projected)
        self._read(stream, buffers.projected, projected, "inputs of the mixer")
        number = self._state(layer, step.first_row)
        if self.program.design.state != "ring":
            self._read(stream, number, 1, "a state", self.states)
        self._write(stream, number, 1, "a state", self.states)
        head, part = divmod(step.first_row, HEAD_SIZE // STATE_COLUMNS)
        self._write(
            stream, step.out + head * HEAD_SIZE + part * STATE_COLUMNS, STATE_COLUMNS, "outputs of the mixer"
        )

    def _raise_of(self, stream: int, layer: int, step: Step) -> None:
        counter = getattr(step, "raise")
        if counter == NO_COUNTER:
            return
        self._raise(stream, layer, counter)
        number = layer * len(self.program.counters) + counter
        if step.chooses != NO_COUNTER and self.sim.raised[number] == step.num_raisers:
            self.sim.join_counter(stream, number)
            buffers, shape = self.program.buffers, self.program.shape
            self._read(stream, buffers.logits, shape.experts, "the router's logits")
            self._write(stream, buffers.choice, 2 * shape.ranks, "the choice of experts")
            self._raise(stream, layer, step.chooses)


def faults_of(program: TokenProgram, layers: int = 4, layers_of_token: int = 2) -> list[str]:
    """What is wrong with a program over so many layers; an empty list if nothing is."""
    return Check(program, layers, layers_of_token).run()
