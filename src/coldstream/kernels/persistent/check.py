"""Proves of lists for one launch a token that they end, and that every step reads what was written before.

`faults_of` simulates the blocks' consumers and producers over some layers, for either way in which blocks
wait for each other. It must know what each step of `token.cu` reads and writes.
"""

from coldstream.kernels.persistent.shapes import (
    HEAD_SIZE,
    LOADS,
    MAX_RINGS,
    NO_COUNTER,
    OPS,
    STATE_COLUMNS,
    BlockProgram,
    Part,
    Piece,
    Step,
    TokenLists,
)
from coldstream.kernels.persistent.simulator import Memory, Queue, Simulator, Stream

ROLES = ["consumers", *(f"producer of ring {ring}" for ring in range(MAX_RINGS))]
PRODUCTS, ADD, MIX, GATE_UP, DOWN = (
    OPS.index(f"op_{op}") for op in ("products", "add", "mix", "gate_up", "down")
)
NORM, MIXED, ROW, HIDDEN = (LOADS.index(f"load_{load}") for load in ("norm", "mixed", "row", "hidden"))
PIECES_OF_A_HEAD = HEAD_SIZE // STATE_COLUMNS


class Check:
    """One run of all streams. by_words: blocks wait for words that say so by themselves, not for counters."""

    def __init__(self, lists: TokenLists, layers: int, *, by_words: bool) -> None:
        self.lists, self.layers, self.by_words = lists, layers, by_words
        parts = [kind.part for kind in lists.kinds]
        blocks, self.sizes = lists.num_blocks, lists.kinds[0].sizes
        self.names = [f"block {block}'s {role}" for block in range(blocks) for role in ROLES]
        counters = [
            f"counter {name!r} of layer {layer}" for layer in range(layers) for name in lists.counters
        ]
        self.sim = Simulator(self.names, counters)
        count, words = len(self.names), lists.buffers.num_words
        self.words = Memory((layers + 1) * words, count, 64)
        self.states = Memory(layers * self.sizes.values // STATE_COLUMNS, count, 1)
        self.keys = Memory(layers * self.sizes.key_heads, count, 1)  # inputs before the token, of key heads
        self.choices = Memory(blocks, count, 1)  # of experts, in each block's shared memory
        self.full, self.empty = ([[Queue() for _ in range(MAX_RINGS)] for _ in range(blocks)] for _ in "fe")
        self.words.is_there_from_the_begin(lists.buffers.stream, self.sizes.hidden)
        if parts[0] is Part.BEHIND_ATTENTION:
            self.words.is_there_from_the_begin(lists.buffers.mixed, self.sizes.attention_width)
        for memory in (self.states, self.keys):
            memory.is_there_from_the_begin(0, memory.size)

    def run(self) -> list[str]:
        """The faults."""
        per_block = len(ROLES)
        streams = []
        for block in range(self.lists.num_blocks):
            streams.append((block * per_block, self._consume(block, block * per_block)))
            for ring in range(MAX_RINGS):
                number = block * per_block + 1 + ring
                streams.append((number, self._produce(block, ring, number)))
        return self.sim.run(streams)

    def _lists(self, layer: int, block: int) -> BlockProgram:
        return self.lists.blocks[layer % len(self.lists.blocks)][block]

    def _at(self, layer: int, word: int) -> int:
        return layer * self.lists.buffers.num_words + word

    def _await(self, stream: int, layer: int, item: Step | Piece) -> Stream:
        number = layer * len(self.lists.counters) + item.wait
        if not self.by_words and item.wait != NO_COUNTER and number >= 0:
            yield from self.sim.await_counter(stream, number, item.target)

    def _take(self, stream: int, layer: int, word: int, count: int, what: str) -> Stream:
        """Words that other blocks write."""
        begin = self._at(layer, word)
        if self.by_words:
            yield from self.sim.await_words(stream, self.words, begin, count, what)
        else:
            self.sim.read(stream, self.words, begin, count, what)

    def _put(self, stream: int, layer: int, word: int, count: int, what: str) -> None:
        begin = self._at(layer, word)
        if self.by_words and (self.words.writers[begin : begin + count] >= 0).any():
            self.sim.fault(f"{self.names[stream]} writes {what} twice, which was taken to be there")
        self.sim.write(stream, self.words, begin, count, what)

    # ---- producers

    def _produce(self, block: int, ring: int, stream: int) -> Stream:
        issued, stages = 0, self.lists.rings[ring].stages
        for layer in range(self.layers):
            has_chosen = False
            for piece in self._lists(layer, block).pieces[ring]:
                yield from self._await(stream, layer, piece)
                if piece.rank >= 0 and not has_chosen:
                    logits = self.lists.buffers.logits
                    yield from self._take(stream, layer, logits, self.sizes.experts, "the router's logits")
                    self.sim.write(stream, self.choices, block, 1, "the choice of experts")
                    has_chosen = True
                if issued >= stages:
                    what = f"a free stage of ring {ring}"
                    yield from self.sim.await_queue(stream, self.empty[block][ring], issued - stages, what)
                self.sim.give(stream, self.full[block][ring], piece)
                issued += 1

    # ---- consumers

    def _consume(self, block: int, stream: int) -> Stream:
        taken = [0] * MAX_RINGS
        for layer in range(self.layers):
            lists = self._lists(layer, block)
            for name, step in zip(lists.names, lists.steps, strict=True):
                yield from self._await(stream, layer, step)
                yield from self._load(stream, layer, step, name)
                if step.op == MIX and step.num_rows:
                    yield from self._mix(stream, layer, step)
                pieces = lists.pieces[step.ring][step.first_piece : step.first_piece + step.num_pieces]
                at_once = 2 if step.op == GATE_UP else 1  # stages that are held together
                for first in range(0, len(pieces), at_once):
                    for piece in pieces[first : first + at_once]:
                        yield from self._piece(block, stream, step, piece, taken[step.ring], name)
                        taken[step.ring] += 1
                    for _ in pieces[first : first + at_once]:
                        self.sim.give(stream, self.empty[block][step.ring])
                    # Of gate and up the rows are the same.
                    self._finish_piece(stream, layer, step, pieces[first], name)
                if step.op == DOWN:
                    yield from self._down(block, stream, layer, step)
                if (counter := getattr(step, "raise")) != NO_COUNTER and not self.by_words:
                    self.sim.raise_counter(stream, layer * len(self.lists.counters) + counter)

    def _piece(self, block: int, stream: int, step: Step, piece: Piece, number: int, name: str) -> Stream:
        queue = self.full[block][step.ring]
        yield from self.sim.await_queue(stream, queue, number, f"bytes of ring {step.ring}")
        if bytes(queue.items[number]) != bytes(piece):
            self.sim.fault(f"{self.names[stream]}: {name} takes another piece than ring {step.ring} has")

    def _load(self, stream: int, layer: int, step: Step, name: str) -> Stream:
        sizes, what = self.sizes, f"inputs of {name}"
        if step.load == NORM:
            yield from self._take(stream, layer, step.source, sizes.hidden, what)
        elif step.load == MIXED:
            yield from self._take(stream, layer, step.source, sizes.values, what)
            z = self.lists.buffers.projected + sizes.channels
            yield from self._take(stream, layer, z, sizes.values, what)
            if step.keeps_key:
                place = layer * sizes.key_heads + step.key_head
                self.sim.write(stream, self.keys, place, 1, "a key head's inputs")
        elif step.load == ROW:
            yield from self._take(stream, layer, step.source, sizes.attention_width, what)
            yield from self._take(stream, layer, self.lists.buffers.stream, sizes.hidden, "the stream")
        elif step.load == HIDDEN:
            yield from self._take(stream, layer, step.source, (sizes.chosen + 1) * sizes.ffn, what)

    def _finish_piece(self, stream: int, layer: int, step: Step, piece: Piece, name: str) -> None:
        """What the rows of a piece become."""
        outputs = f"outputs of {name}"
        if step.op in (PRODUCTS, ADD):
            self._put(stream, layer, step.out + piece.first_row, piece.rows, outputs)
        elif step.op == GATE_UP:
            word = step.out + piece.slot * self.sizes.ffn + piece.first_row
            self._put(stream, layer, word, piece.rows, outputs)

    def _mix(self, stream: int, layer: int, step: Step) -> Stream:
        sizes, projected = self.sizes, self.lists.buffers.projected
        head, key = step.first_row // HEAD_SIZE, step.key_head * HEAD_SIZE
        places = [(key, HEAD_SIZE), (sizes.key_heads * HEAD_SIZE + key, HEAD_SIZE)]
        places.append((2 * sizes.key_heads * HEAD_SIZE + step.first_row, STATE_COLUMNS))
        gates = sizes.channels + sizes.values + head
        places += [(gates, 1), (gates + sizes.value_heads, 1)]
        for word, count in places:
            yield from self._take(stream, layer, projected + word, count, "inputs of the mixer")
        place = layer * sizes.key_heads + step.key_head
        if self.keys.writes[place] >= 0:
            self.sim.fault(f"{self.names[stream]} reads a key head's inputs after they were replaced")
        self.sim.read(stream, self.keys, place, 1, "a key head's inputs")
        piece = layer * sizes.values // STATE_COLUMNS + step.first_row // STATE_COLUMNS
        self.sim.read(stream, self.states, piece, 1, "a state")
        self.sim.write(stream, self.states, piece, 1, "a state")
        self._put(stream, layer, step.out + step.first_row, STATE_COLUMNS, "outputs of the mixer")

    def _down(self, block: int, stream: int, layer: int, step: Step) -> Stream:
        if not step.num_rows:
            return
        gate = self.lists.buffers.logits + self.sizes.experts
        yield from self._take(stream, layer, gate, 1, "the shared expert's gate")
        self.sim.read(stream, self.choices, block, 1, "the chosen experts' weights")
        self._put(stream, layer + 1, step.out + step.first_row, step.num_rows, "the stream")


def faults_of(lists: TokenLists, layers: int = 2, *, by_words: bool) -> list[str]:
    """What is wrong with lists over so many layers; an empty list if nothing is."""
    check = Check(lists, layers, by_words=by_words)
    found = check.run()
    expected = check._at(layers, lists.buffers.stream)
    ends = lists.kinds[(layers - 1) % len(lists.kinds)].part is not Part.BEFORE_ATTENTION
    if not found and ends and (check.words.writers[expected : expected + check.sizes.hidden] < 0).any():
        found.append("rows of the stream behind the last layer are written by nobody")
    return found
