"""What two cards take to work on one token together: round trips, copies, buses, and a layer's questions.

    python -m bench.kernels.two_cards --out docs/results/gpu/two_cards.json

Card 0 sends a row with a flag behind it, and card 1 sends one back. Rows lie in the memory of the card that
waits for them (*peer*), or all in page-locked memory of the host (*pinned*), which needs no peer access. An
answer is known by its flag, or by its floats, which differ from a mark until they are written. Every float
that arrives is checked. A token's layers are two captured graphs: card 0 computes, asks, computes and waits
for the answer, and card 1 waits for each question, computes and answers. What the questions cost is the time
beside the same graph of card 0 without them.
"""

import argparse
import ctypes
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from bench.results import add_result_options, write_result
from coldstream.kernels.cuda.compiler import compile_together
from coldstream.kernels.cuda.features import architecture_of
from coldstream.kernels.cuda.runtime.calls import checked

SOURCE = Path(__file__).with_suffix(".cu")
KERNELS = ("ask", "answer", "send_row", "await_row", "await_answer", "compute", "read_all")
THREADS = 256
QUESTIONS, FIRST_TIMED = 4000, 1000
ROW_BYTES = (2048, 8192)
FLAG_BYTES = 256  # before a row, so that it has lines of its own
UNWRITTEN = 0xFFFFFFFF
COPY_BYTES, COPIES = 2**28, 6
BUSY = 3  # times as many copies, which take longer than the questions beside them
LAYERS, REPLAYS, WARM_UPS = 40, 30, 5
MIXER_NS, OWN_EXPERTS_NS = 20_000, 6_000
OTHER_EXPERTS_NS = (0, 4_000, 8_000, 16_000)
EVENT = int(driver.CUevent_flags.CU_EVENT_DEFAULT)


class Way(ctypes.Structure):
    """As in two_cards.cu."""

    _fields_ = (("flag", ctypes.c_void_p), ("row", ctypes.c_void_p), ("quads", ctypes.c_int))

    @classmethod
    def at(cls, address: int, num_bytes: int) -> "Way":
        return cls(address, address + FLAG_BYTES, num_bytes // 16)


class Counts(ctypes.Structure):
    """As in two_cards.cu."""

    _fields_ = (
        ("begins", ctypes.c_uint64),
        ("ends", ctypes.c_uint64),
        ("wrong", ctypes.c_uint32),
        ("late", ctypes.c_uint32),
    )


class Card:
    """A device, its context, and the kernels there."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = checked(driver.cuDeviceGet(index))
        self.context = checked(driver.cuDevicePrimaryCtxRetain(self.device))
        self.name = checked(driver.cuDeviceGetName(128, self.device)).split(b"\0")[0].decode()
        self.processors = self._attribute("MULTIPROCESSOR_COUNT")
        capability = tuple(self._attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        codes = compile_together(SOURCE, KERNELS, architecture_of(capability))  # type: ignore[arg-type]
        with self.current():
            module = checked(driver.cuModuleLoadData(codes[0].cubin))
            self._functions = {
                name: checked(driver.cuModuleGetFunction(module, code.symbol.encode()))
                for name, code in zip(KERNELS, codes, strict=True)
            }
            self.stream, self.other_stream = self.new_stream(), self.new_stream()
            self.counts = self.zeros(ctypes.sizeof(Counts))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside, calls are about this card."""
        checked(driver.cuCtxPushCurrent(self.context))
        try:
            yield
        finally:
            checked(driver.cuCtxPopCurrent())

    def new_stream(self) -> Any:
        return checked(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def zeros(self, num_bytes: int) -> int:
        """Memory of the card, for the rest of the process."""
        with self.current():
            address = int(checked(driver.cuMemAlloc(num_bytes)))
            checked(driver.cuMemsetD8(address, 0, num_bytes))
            return address

    def launch(self, name: str, blocks: int, *args: Any) -> None:
        """Queues a kernel. args: ctypes values."""
        pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        sizes = blocks, 1, 1, THREADS, 1, 1, 0
        checked(
            driver.cuLaunchKernel(self._functions[name], *sizes, self.stream, ctypes.addressof(pointers), 0)
        )

    def wait(self) -> None:
        with self.current():
            checked(driver.cuCtxSynchronize())

    def clear_counts(self) -> None:
        with self.current():
            checked(driver.cuMemsetD8(self.counts, 0, ctypes.sizeof(Counts)))

    def read_counts(self) -> Counts:
        counts = Counts()
        with self.current():
            checked(driver.cuMemcpyDtoH(ctypes.addressof(counts), self.counts, ctypes.sizeof(counts)))
        return counts

    def _attribute(self, name: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked(driver.cuDeviceGetAttribute(key, self.device)))


def peer_facts(cards: Sequence[Card]) -> dict[str, int | bool]:
    """Whether they reach each other's memory, which is switched on, and what the driver says of the link."""
    attributes = driver.CUdevice_P2PAttribute
    names = ("PERFORMANCE_RANK", "ACCESS_SUPPORTED", "NATIVE_ATOMIC_SUPPORTED")
    facts: dict[str, int | bool] = {}
    for name in names:
        key = getattr(attributes, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
        facts[name.lower()] = int(
            checked(driver.cuDeviceGetP2PAttribute(key, cards[0].device, cards[1].device))
        )
    facts["has_peer_access"] = bool(facts["access_supported"])
    if facts["has_peer_access"]:
        for card, other in (cards, cards[::-1]):
            with card.current():
                checked(driver.cuCtxEnablePeerAccess(other.context, 0))
    return facts


def pinned(num_bytes: int) -> int:
    """Zeros in memory of the host, which both cards reach at the same address."""
    flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
    address = int(checked(driver.cuMemHostAlloc(num_bytes, flags)))
    ctypes.memset(address, 0, num_bytes)
    return address


def addressed(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


@dataclass(frozen=True)
class Ways:
    """The memory of questions and answers."""

    name: str
    question: int
    answer: int

    @classmethod
    def all_of(cls, cards: Sequence[Card], has_peer_access: bool) -> "list[Ways]":
        size = FLAG_BYTES + max(ROW_BYTES)
        with cards[0].current():
            found = [cls("pinned", pinned(size), pinned(size))]
        if has_peer_access:
            on = [[card.zeros(size) for _ in range(2)] for card in cards]
            found += [
                cls("peer", on[1][0], on[0][0]),
                cls("all on card 0", on[0][1], on[0][0]),
                cls("all on card 1", on[1][0], on[1][1]),
                cls("question pinned, answer on card 0", found[0].question, on[0][0]),
            ]
        return found

    def prepare(self, cards: Sequence[Card], num_bytes: int) -> tuple[Way, Way]:
        """Both ways, for a row of so many bytes, which the answer has marks in."""
        with cards[0].current():
            for address in (self.question, self.answer):
                checked(driver.cuMemcpy(address, self._zeros(), FLAG_BYTES))
            marks = (ctypes.c_uint32 * (num_bytes // 4))(*[UNWRITTEN] * (num_bytes // 4))
            checked(driver.cuMemcpy(self.answer + FLAG_BYTES, ctypes.addressof(marks), num_bytes))
        return Way.at(self.question, num_bytes), Way.at(self.answer, num_bytes)

    @staticmethod
    def _zeros() -> int:
        return ctypes.addressof(_ZEROS)


_ZEROS = (ctypes.c_uint8 * FLAG_BYTES)()


def failures(cards: Sequence[Card]) -> dict[str, int]:
    """Floats that were wrong, and waits that were given up."""
    counts = [card.read_counts() for card in cards]
    return {"wrong": sum(c.wrong for c in counts), "late": sum(c.late for c in counts)}


def round_trip(cards: Sequence[Card], ways: Ways, num_bytes: int, is_marked: bool) -> dict[str, Any]:
    """Microseconds from a question to its answer, of many in turn."""
    question, answer = ways.prepare(cards, num_bytes)
    for card in cards:
        card.clear_counts()
    questions, first = ctypes.c_uint32(QUESTIONS), ctypes.c_uint32(FIRST_TIMED)
    with cards[1].current():
        cards[1].launch("answer", 1, question, answer, questions, addressed(cards[1].counts))
    with cards[0].current():
        marked = ctypes.c_int(is_marked)
        cards[0].launch("ask", 1, question, answer, questions, first, marked, addressed(cards[0].counts))
    for card in cards:
        card.wait()
    counts = cards[0].read_counts()
    taken = (counts.ends - counts.begins) / (QUESTIONS - FIRST_TIMED + 1) / 1e3
    return {
        "ways": ways.name, "row_bytes": num_bytes, "answer_by": "marks" if is_marked else "flag",
        "us": round(taken, 2), **failures(cards),
    }  # fmt: skip


def seconds_of(cards: Sequence[Card], queue: Callable[[Card], None]) -> float:
    """Until what `queue` queues to each card has ended; the second of two times."""
    taken = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        for card in cards:
            with card.current():
                queue(card)
        for card in cards:
            card.wait()
        taken = time.perf_counter() - begin
    return taken


@dataclass(frozen=True)
class Blocks:
    """Memory between which is copied, by card."""

    host: list[int]
    first: list[int]
    second: list[int]

    @classmethod
    def of(cls, cards: Sequence[Card]) -> "Blocks":
        with cards[0].current():
            host = [pinned(COPY_BYTES) for _ in cards]
        return cls(host, *([card.zeros(COPY_BYTES) for card in cards] for _ in range(2)))

    def from_host(self, card: Card) -> None:
        for _ in range(COPIES):
            checked(
                driver.cuMemcpyHtoDAsync(
                    self.first[card.index], self.host[card.index], COPY_BYTES, card.other_stream
                )
            )

    def to_host(self, card: Card) -> None:
        for _ in range(COPIES):
            checked(
                driver.cuMemcpyDtoHAsync(
                    self.host[card.index], self.first[card.index], COPY_BYTES, card.other_stream
                )
            )

    def to_other(self, card: Card) -> None:
        for _ in range(COPIES):
            checked(
                driver.cuMemcpyAsync(
                    self.second[1 - card.index], self.first[card.index], COPY_BYTES, card.other_stream
                )
            )


def copy_rates(cards: Sequence[Card], blocks: Blocks) -> list[dict[str, Any]]:
    """GB/s of each card alone and of both together: over their buses, and to the other card."""
    found = []
    kinds = (
        ("host to card", blocks.from_host),
        ("card to host", blocks.to_host),
        ("card to other card", blocks.to_other),
    )
    for name, queue in kinds:
        for which in ((0,), (1,), (0, 1)):
            chosen = [cards[index] for index in which]
            seconds = seconds_of(chosen, queue)
            rate = len(which) * COPIES * COPY_BYTES / seconds / 1e9
            found.append({"copy": name, "cards": list(which), "gb_per_s": round(rate, 1)})
    return found


def read_rates(cards: Sequence[Card], blocks: Blocks, has_peer_access: bool) -> list[dict[str, Any]]:
    """GB/s at which a kernel of card 0 reads its own memory, the other card's, and the host's."""
    places = {"own memory": blocks.first[0], "host": blocks.host[0]}
    if has_peer_access:
        places["other card"] = blocks.first[1]
    quads, sink = ctypes.c_uint64(COPY_BYTES // 16), addressed(cards[0].counts)
    found = []
    for name, address in places.items():
        for blocks_per_processor in (2, 8):

            def queue(card: Card, address: int = address, number: int = blocks_per_processor) -> None:
                for _ in range(COPIES):
                    card.launch("read_all", number * card.processors, addressed(address), quads, sink)

            seconds = seconds_of(cards[:1], queue)
            rate = COPIES * COPY_BYTES / seconds / 1e9
            found.append(
                {"reads": name, "blocks_per_processor": blocks_per_processor, "gb_per_s": round(rate, 1)}
            )
    return found


def graph_of(card: Card, queue: Callable[[], None]) -> Any:
    """What `queue` queues to the card's stream, to be launched."""
    with card.current():
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(card.stream, mode))
        queue()
        graph = checked(driver.cuStreamEndCapture(card.stream))
        return checked(driver.cuGraphInstantiate(graph, 0))


@dataclass(frozen=True)
class Layers:
    """A token's layers. waits_by: of card 1, a kernel that polls, or an operation of the stream."""

    cards: Sequence[Card]
    question: Way
    answer: Way
    other_ns: int
    waits_by: str

    def asking(self) -> None:
        card = self.cards[0]
        for layer in range(1, LAYERS + 1):
            card.launch("compute", card.processors, ctypes.c_int(MIXER_NS))
            card.launch("send_row", 1, self.question, ctypes.c_uint32(layer), ctypes.c_int(0))
            card.launch("compute", card.processors, ctypes.c_int(OWN_EXPERTS_NS))
            card.launch("await_answer", 1, self.answer, ctypes.c_uint32(layer), addressed(card.counts))

    def alone(self) -> None:
        card = self.cards[0]
        for _ in range(LAYERS):
            card.launch("compute", card.processors, ctypes.c_int(MIXER_NS))
            card.launch("compute", card.processors, ctypes.c_int(OWN_EXPERTS_NS))

    def answering(self) -> None:
        card = self.cards[1]
        for layer in range(1, LAYERS + 1):
            if self.waits_by == "stream":
                equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
                checked(driver.cuStreamWaitValue32(card.stream, self.question.flag, layer, equal))
            else:
                card.launch("await_row", 1, self.question, ctypes.c_uint32(layer), addressed(card.counts))
            card.launch("compute", card.processors, ctypes.c_int(self.other_ns))
            card.launch("send_row", 1, self.answer, ctypes.c_uint32(layer), ctypes.c_int(1))


def replay_us(cards: Sequence[Card], graphs: Sequence[Any]) -> float:
    """Median microseconds on card 0 of one launch of each graph, the other card's first."""
    times = []
    with cards[0].current():
        begin, end = (checked(driver.cuEventCreate(EVENT)) for _ in range(2))
    for _ in range(WARM_UPS + REPLAYS):
        for card, graph in reversed(list(zip(cards, graphs, strict=False))):
            with card.current():
                if card.index == 0:
                    checked(driver.cuEventRecord(begin, card.stream))
                checked(driver.cuGraphLaunch(graph, card.stream))
                if card.index == 0:
                    checked(driver.cuEventRecord(end, card.stream))
        for card in cards:
            card.wait()
        times.append(checked(driver.cuEventElapsedTime(begin, end)) * 1e3)
    return float(statistics.median(times[WARM_UPS:]))


def layer_costs(cards: Sequence[Card], ways: Ways, num_bytes: int) -> list[dict[str, Any]]:
    """What questions add to a layer of card 0, by the time that the other card computes."""
    found: list[dict[str, Any]] = []
    question, answer = ways.prepare(cards, num_bytes)
    alone = replay_us(cards, [graph_of(cards[0], Layers(cards, question, answer, 0, "").alone)])
    for waits_by in ("kernel", "stream"):
        for other_ns in OTHER_EXPERTS_NS:
            question, answer = ways.prepare(cards, num_bytes)
            for card in cards:
                card.clear_counts()
            layers = Layers(cards, question, answer, other_ns, waits_by)
            try:
                graphs = [graph_of(cards[0], layers.asking), graph_of(cards[1], layers.answering)]
            except Exception as error:  # the driver may capture no such operation
                found.append({"ways": ways.name, "waits_by": waits_by, "refused": str(error)})
                break
            taken = replay_us(cards, graphs)
            found.append(
                {
                    "ways": ways.name,
                    "row_bytes": num_bytes,
                    "waits_by": waits_by,
                    "other_card_us": other_ns / 1e3,
                    "alone_us": round(alone / LAYERS, 2),
                    "added_us": round((taken - alone) / LAYERS, 2),
                    **failures(cards),
                }
            )
    return found


def measure(cards: Sequence[Card]) -> dict[str, Any]:
    facts = peer_facts(cards)
    has_peer_access = bool(facts["has_peer_access"])
    blocks = Blocks.of(cards)
    every = Ways.all_of(cards, has_peer_access)
    trips = [
        round_trip(cards, ways, size, is_marked)
        for ways in every
        for size in ROW_BYTES
        for is_marked in (False, True)
    ]
    busy = []
    for ways in every[:2]:
        for card in cards:
            with card.current():
                for _ in range(BUSY):
                    blocks.from_host(card)
        busy.append(round_trip(cards, ways, max(ROW_BYTES), True) | {"buses": "busy"})
    layers = [cost for ways in every[:2] for cost in layer_costs(cards, ways, max(ROW_BYTES))]
    return {
        "machine": {"gpus": [card.name for card in cards], **facts},
        "round_trips": [*trips, *busy],
        "copies": copy_rates(cards, blocks),
        "reads": read_rates(cards, blocks, has_peer_access),
        "layers": layers,
    }


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """What a reader wants first, a line for each kind of measurement."""
    for trip in result["round_trips"]:
        yield " ".join(f"{name} {value}" for name, value in trip.items())
    for kind in ("copies", "reads"):
        yield "; ".join(" ".join(map(str, each.values())) for each in result[kind])
    for layer in result["layers"]:
        yield " ".join(f"{name} {value}" for name, value in layer.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_result_options(parser)
    options = parser.parse_args()
    checked(driver.cuInit(0))
    count = int(checked(driver.cuDeviceGetCount()))
    if count < 2:
        sys.exit(f"this needs two cards, and the driver shows {count}")
    result = measure([Card(index) for index in (0, 1)])
    for line in lines_of(result):
        print(line, file=sys.stderr)
    command = f"python -m bench.kernels.two_cards {shlex.join(sys.argv[1:])}".rstrip()
    write_result({"command": command, **result}, options.out, options.commit)


if __name__ == "__main__":
    main()
