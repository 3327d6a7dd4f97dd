"""A `TokenProgram` on a device: its lists and memory there, its launches, and what its stamps say."""

import ctypes
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch

from bench.kernels.one_token_program import TokenProgram
from bench.kernels.one_token_reference import SHARED_WEIGHT, TokenState, states_of_pieces, wrapped
from bench.kernels.one_token_shapes import (
    HEAD_SIZE,
    KINDS,
    MAX_RINGS,
    NO_COUNTER,
    NUMBERS,
    SOURCE,
    BlockLists,
    Design,
    LayerShape,
    Piece,
    Program,
    Step,
)
from coldstream.errors import ColdstreamError
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in

THREADS = 32 * 12
LIMIT_NS = 500_000_000  # of a launch, after which every wait fails
NOTHING_FAILED, STAMP_WORDS = (0, -1), NUMBERS["stamp_words"]
ALL = NUMBERS["has_waits"] | NUMBERS["has_copies"] | NUMBERS["has_products"]
Row = dict[str, float | str]
# What runs of a version leave out; `all` alone is right.
PARTS = {
    "all": ALL,
    "no products": ALL - NUMBERS["has_products"],
    "dependencies alone": NUMBERS["has_waits"],
    "memory alone": NUMBERS["has_copies"],
    "memory and products": NUMBERS["has_copies"] | NUMBERS["has_products"],
}
STAMPED = ("all", "dependencies alone")  # with stamps too: what a signal takes with memory busy, and idle


@declared_in(str(SOURCE))
class TokenMemory(ctypes.Structure):
    """Addresses of a launch's memory."""


@declared_in(str(SOURCE))
class FilledWords(ctypes.Structure):
    """How many words are filled."""


FILL = "fill_weights"
PROGRAM = CudaProgram(SOURCE, ("one_token<7, 0, 0, false>",))
FILL_PROGRAM = CudaProgram(SOURCE, (FILL,))


class StuckError(ColdstreamError, RuntimeError):
    """A wait within a launch came to no end; the message says which."""


def instance(design: Design, parts: int = ALL, has_stamps: bool = False) -> str:
    """The kernel that is compiled for a design."""
    poll, fetch = NUMBERS[f"poll_by_{design.poll}"], NUMBERS[f"fetch_by_{design.fetch}"]
    return f"one_token<{parts}, {poll}, {fetch}, {str(has_stamps).lower()}>"


def instances(designs: Iterable[Design]) -> list[str]:
    """All that the designs may run."""
    listed = list(designs)
    of_parts = {instance(design, parts) for design in listed for parts in PARTS.values()}
    return sorted(of_parts | {instance(design, PARTS[name], True) for design in listed for name in STAMPED})


def filled_weights(layer_bytes: int, num_layers: int, device: str) -> torch.Tensor:
    """Weights of so many layers, uint8, for all programs of a shape."""
    memory = torch.empty(layer_bytes * num_layers, dtype=torch.uint8, device=device)
    grid = 2048 if device == "cuda" else 4
    FILL_PROGRAM.kernel(FILL).launch((grid, 1, 1), 256, (memory, FilledWords(memory.numel() // 4)))
    return memory


class Launch:
    """One program with memory of its own but for the weights. Unit of work: one launch of all its tokens."""

    def __init__(
        self,
        planned: TokenProgram,
        weights: torch.Tensor,
        num_layers: int,
        limit_ns: int = LIMIT_NS,
    ) -> None:
        """weights: `filled_weights` of the program's shape."""
        self.planned, self.weights, self.num_layers = planned, weights, num_layers
        self.device, self.limit_ns, self.is_cooperative = weights.device, limit_ns, True
        shape, design = planned.shape, planned.design
        layers = num_layers * design.tokens
        counters = layers * len(planned.counters) * design.counter_splits * design.counter_stride
        stamps = layers * planned.num_slots * planned.num_blocks * STAMP_WORDS

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=self.device)

        self.activations = zeros(planned.buffers.num_words)
        self.states = zeros(num_layers * shape.state_bytes // 4)
        self.counters = zeros(counters)
        self.report = torch.tensor(NOTHING_FAILED, dtype=torch.int32, device=self.device)
        self.stamps, self.clocks = zeros(stamps), zeros(4 * planned.num_blocks, torch.int64)
        self.program = self._program()

    def begin(self, state: TokenState) -> None:
        """Before the first token of a text."""
        buffers, hidden = self.planned.buffers, self.planned.shape.hidden
        pieces = state.states.view(len(state.states), -1, HEAD_SIZE, 4, HEAD_SIZE // 4).transpose(2, 3)
        self.states.copy_(pieces.reshape(-1).to(torch.int32))
        self.activations.zero_()
        stream = state.stream
        if self.planned.design.combine == "reader":  # which halves what it finds, and adds the experts' rows
            self.activations[buffers.middle : buffers.middle + hidden] = (2 * stream).to(self.activations)
        else:
            begin = buffers.streams[0]
            self.activations[begin : begin + hidden] = stream.to(self.activations)

    def run(self, parts: int = ALL, has_stamps: bool = False) -> None:
        """Queues the launch, with counters set back before it."""
        self.counters.zero_()
        self.queue(parts, has_stamps)

    def queue(self, parts: int = ALL, has_stamps: bool = False) -> None:
        """The launch alone."""
        design, planned = self.planned.design, self.planned
        kernel = PROGRAM.kernel(instance(design, parts, has_stamps))
        options = {"cluster": design.cluster} if design.cluster > 1 else {}
        kernel.launch(
            (planned.num_blocks, 1, 1),
            THREADS,
            (self.program, self._memory),
            shared_bytes=planned.shared_bytes,
            together=self.is_cooperative,
            **options,
        )

    def check(self) -> None:
        """StuckError if a wait of a launch since the last check came to no end."""
        failed, number = self.report.tolist()
        self.report.copy_(torch.tensor(NOTHING_FAILED))
        if failed:
            layer, counter = divmod(number, len(self.planned.counters))
            waits_for = f"counter {self.planned.counters[counter]!r} of layer {layer}"
            first = waits_for if number >= 0 else "bytes, or for its own block"
            raise StuckError(
                f"{self.planned.design.name}: {failed} threads waited without end, first for {first}"
            )

    def result(self) -> TokenState:
        """What the launch left."""
        planned, values = self.planned, self.activations.long()
        buffers, shape = planned.buffers, planned.shape
        states = states_of_pieces(self.states.long().view(self.num_layers, -1), shape)
        if planned.design.combine == "reader":
            rows = values[buffers.rows : buffers.rows + shape.ranks * shape.hidden].view(shape.ranks, -1)
            logits = values[buffers.logits : buffers.logits + shape.experts]
            chosen = torch.sort(logits, descending=True, stable=True).values[: shape.chosen]
            weights = torch.cat([1 + (chosen >> 8 & 7), torch.full_like(chosen[:1], SHARED_WEIGHT)])
            total = (weights.unsqueeze(1) * (rows >> 6)).sum(dim=0)
            middle = values[buffers.middle : buffers.middle + shape.hidden]
            return TokenState(wrapped((middle >> 1) + (total >> 5)), states)
        begin = buffers.streams[self.num_layers * planned.design.tokens % KINDS]
        return TokenState(values[begin : begin + shape.hidden], states)

    # ---- lists

    @cached_property
    def _lists(self) -> tuple[torch.Tensor, ...]:
        """Steps, pieces and where each block's begin, on the device."""
        steps, pieces, heads = list[Step](), list[Piece](), list[BlockLists]()
        for block in range(self.planned.num_blocks):
            for kind in self.planned.blocks:
                lists, head = kind[block], BlockLists(first_step=len(steps), num_steps=len(kind[block].steps))
                for ring in range(MAX_RINGS):
                    head.first_piece[ring], head.num_pieces[ring] = len(pieces), len(lists.pieces[ring])
                    pieces += lists.pieces[ring]
                for step in lists.steps:
                    copied = Step.from_buffer_copy(step)
                    copied.first_piece += head.first_piece[step.ring]
                    steps.append(copied)
                heads.append(head)
        return tuple(self._on_device(each) for each in (steps, pieces, heads))

    def _on_device(self, items: list[Any]) -> torch.Tensor:
        data = bytearray(b"".join(map(bytes, items)))
        return torch.frombuffer(data, dtype=torch.int32).to(self.device)

    def _program(self) -> Program:
        planned, design, shape = self.planned, self.planned.design, self.planned.shape
        buffers, keys = planned.buffers, shape.key_heads * HEAD_SIZE
        values = shape.value_heads * HEAD_SIZE
        steps, pieces, lists = (each.data_ptr() for each in self._lists)
        program = Program(
            steps=steps,
            pieces=pieces,
            lists=lists,
            num_layers=self.num_layers,
            num_tokens=design.tokens,
            num_kinds=KINDS,
            num_counters=len(planned.counters),
            num_slots=planned.num_slots,
            counter_stride=design.counter_stride,
            counter_splits=design.counter_splits,
            cluster=design.cluster,
            backoff_ns=design.backoff_ns,
            num_experts=shape.experts,
            stored_experts=shape.stored,
            stored_a_rank=shape.stored_a_rank,
            ranks=shape.ranks,
            logits=buffers.logits,
            choice=buffers.choice if design.choice == "last block" else -1,
            state_from={
                "late": NUMBERS["state_late"],
                "early": NUMBERS["state_early"],
                "ring": NUMBERS["state_by_ring"],
            }[design.state],
            state_bytes=shape.state_bytes,
            head_ratio=shape.value_heads // shape.key_heads,
            proj=buffers.projected,
            keys=keys,
            values=2 * keys,
            gates=2 * keys + values,
            alphas=2 * keys + 2 * values,
            betas=2 * keys + 2 * values + shape.value_heads,
            raw_bytes=planned.raw_bytes,
            x_bytes=planned.x_bytes,
            list_bytes=planned.list_bytes,
            layer_bytes=shape.layer_bytes,
            limit_ns=self.limit_ns,
        )
        for number, ring in enumerate(design.rings):
            program.stages[number], program.stage_bytes[number] = ring.stages, ring.stage_bytes
        return program

    @property
    def _memory(self) -> TokenMemory:
        memory = (self.weights, self.activations, self.states, self.counters, self.report)
        return TokenMemory(*(each.data_ptr() for each in (*memory, self.stamps, self.clocks)))


def same(left: TokenState, right: TokenState) -> bool:
    """Whether all numbers are equal."""
    return torch.equal(left.stream, right.stream) and torch.equal(left.states, right.states)


def random_state(shape: LayerShape, num_layers: int, device: str, seed: int = 0) -> TokenState:
    """Before a text: numbers of the size that layers leave."""
    random = torch.Generator(device).manual_seed(seed)
    sizes = num_layers, shape.value_heads, HEAD_SIZE, HEAD_SIZE
    stream = torch.randint(-(2**18), 2**18, (shape.hidden,), generator=random, device=device)
    return TokenState(stream, torch.randint(-(2**12), 2**12, sizes, generator=random, device=device))


# ---- stamps


def nanoseconds(stamps: np.ndarray, clocks: np.ndarray) -> np.ndarray:
    """Cycles [..., blocks] as times of the device's clock, by each block's two notes of both."""
    begin_ns, begin_cycles, end_ns, end_cycles = clocks.astype(np.int64).reshape(-1, 4).T
    cycles = (end_cycles - begin_cycles) & 0xFFFFFFFF
    since = (stamps.astype(np.int64) - begin_cycles) & 0xFFFFFFFF
    return begin_ns - begin_ns.min() + since * ((end_ns - begin_ns) / cycles)


def phases(launch: Launch, skipped: int = 2) -> list[Row]:
    """Where a layer's time goes, in ns by phase, means over layers but the first `skipped`.

    Times of the first and the last block, then means over blocks: of waiting, of inputs, of waiting for the
    first bytes and for all, of computing and of raising; the same of the block that raises last.
    """
    planned = launch.planned
    layers, blocks = launch.num_layers * planned.design.tokens, planned.num_blocks
    raw = launch.stamps.cpu().numpy().reshape(layers, planned.num_slots, blocks, STAMP_WORDS)
    clocks = launch.clocks.cpu().numpy()
    times = nanoseconds(raw[..., :6].transpose(0, 1, 3, 2), clocks)  # [layers, slots, stamps, blocks]
    rate = _cycles_per_ns(clocks)
    found: list[Row] = []
    names = list(dict.fromkeys(chain.from_iterable(b.names for b in planned.blocks[0])))
    for name in names:
        those = [
            (b, lists.names.index(name)) for b, lists in enumerate(planned.blocks[0]) if name in lists.names
        ]
        own_blocks = np.array([b for b, _ in those])
        slots = np.array([slot for _, slot in those])
        rows = []
        for layer in range(skipped, layers):
            own = times[layer, slots, :, own_blocks]  # [blocks, stamps]
            waited = raw[layer, slots, own_blocks, 6] / rate
            rows.append(_phase_row(own, waited))
        means = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
        means["period_ns"] = float(np.diff([row["raised_last"] for row in rows]).mean())
        found.append({"phase": name, "blocks": len(those), **{k: round(v, 1) for k, v in means.items()}})
    return found


def _cycles_per_ns(clocks: np.ndarray) -> float:
    begin_ns, begin_cycles, end_ns, end_cycles = clocks.astype(np.int64).reshape(-1, 4).T
    return float(np.median(((end_cycles - begin_cycles) & 0xFFFFFFFF) / (end_ns - begin_ns)))


def _phase_row(own: np.ndarray, waited: np.ndarray) -> dict[str, float]:
    """One layer's phase: own, [blocks, stamps] in ns; waited: for bytes, of each block."""
    begins, goes, loaded, first, computed, raised = own.T
    last = int(np.argmax(raised))
    return {
        "begins_first": begins.min(),
        "begins_last": begins.max(),
        "goes_first": goes.min(),
        "goes_last": goes.max(),
        "raised_first": raised.min(),
        "raised_last": raised.max(),
        "wait": (goes - begins).mean(),
        "load": (loaded - goes).mean(),
        "first_bytes": (first - loaded).mean(),
        "bytes": waited.mean(),
        "bytes_most": waited.max(),
        "compute": (computed - loaded - waited).mean(),
        "raise": (raised - computed).mean(),
        "last_load": loaded[last] - goes[last],
        "last_bytes": waited[last],
        "last_compute": computed[last] - loaded[last] - waited[last],
        "last_raise": raised[last] - computed[last],
    }


def answers(launch: Launch, skipped: int = 2) -> dict[str, float]:
    """The router's answer at the producers of experts, in ns behind its counter's last raise.

    Means over layers: when the first and the last block knew the experts, and had asked for bytes of them.
    """
    planned, ring = launch.planned, launch.planned.design.ring_of[2]
    layers, blocks = launch.num_layers * planned.design.tokens, planned.num_blocks
    raw = launch.stamps.cpu().numpy().reshape(layers, planned.num_slots, blocks, STAMP_WORDS)[skipped:]
    clocks = launch.clocks.cpu().numpy()
    named = [(block, lists.names) for block, lists in enumerate(planned.blocks[0]) if "router" in lists.names]
    every = nanoseconds(raw[..., :6].transpose(0, 1, 3, 2), clocks)
    raised = np.max([every[:, names.index("router"), 5, block] for block, names in named], axis=0)
    seen, asked = (every[:, -1, 2 * ring + each] - raised[:, None] for each in range(2))
    ends = {"known_first": seen.min(1), "known_last": seen.max(1), "asked_first": asked.min(1)}
    ends["asked_last"] = asked.max(1)
    return {name: round(float(values.mean()), 1) for name, values in ends.items()}


def with_signals(rows: list[Row], program: TokenProgram) -> list[Row]:
    """Adds to each phase how long after the last raise of what it waits for its first and last block went on.

    phase_ns: from that raise to the last one of the phase itself.
    """
    by_name, found = {str(row["phase"]): row for row in rows}, list[Row]()
    for row in rows:
        added: Row = {}
        lists = next(lists for lists in program.blocks[0] if row["phase"] in lists.names)
        wait = lists.steps[lists.names.index(str(row["phase"]))].wait
        if wait != NO_COUNTER:
            # The last block to come to the router raises the counter of the choice.
            name = {"choice": "router"}.get(program.counters[wait], program.counters[wait])
            before = by_name[name]
            of_layer_before = float(before["period_ns"]) if wait < 0 else 0.0
            end = float(before["raised_last"]) - of_layer_before
            ends = ("goes_first", "goes_last", "raised_last")
            names = ("signal_first", "signal_last", "phase_ns")
            added = {key: round(float(row[end_of]) - end, 1) for key, end_of in zip(names, ends, strict=True)}
        found.append({**row, **added})
    return found
