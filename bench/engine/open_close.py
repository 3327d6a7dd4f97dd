"""A GPU's model opened and closed many times in one process: what stays of memory, threads and descriptors.

    python -m bench.engine.open_close --out docs/results/gpu/open_close.json

Each cycle opens the bundled model, computes a short and a long prompt, and closes it: with all experts on the
device or with a part of them, without drafts or with a drafter. All cycles must give the same tokens. Between
them the model is opened where memory does not suffice: with too small a budget, with too long a context, and
where another program has taken the device's memory in the midst of opening. What the process holds is read
after each of them. It must be what it was after a warm-up; of the device's memory, in which the driver has
caches of its own, not a byte more. The exit status is 1 if anything stays.
"""

import argparse
import ctypes
import gc
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from cuda.bindings import driver

from bench.device import describe, no_memory_left
from bench.results import add_result_options, write_result
from coldstream.assets import demo_drafter_path, demo_model_path
from coldstream.decoding import SamplingParams
from coldstream.engine import LLM, EngineConfig, open_model
from coldstream.engine.opened_model import OpenedModel
from coldstream.errors import OutOfMemoryError
from coldstream.experts import partial_experts
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.runtime import calls, streams
from coldstream.kernels.cuda.runtime.allocations import Allocation
from coldstream.kernels.cuda.runtime.calls import checked
from coldstream.kernels.cuda.runtime.graphs import Graph
from coldstream.models.cuda import runner as cuda_runner
from coldstream.models.read_spec import read_spec

MIB: Final = 2**20
# Of fragments of the host's allocator, and of what the driver keeps there: less than any weights.
RSS_BYTES_PER_CYCLE: Final = 2**18
MOST_QUARTERS: Final = 64  # of the experts' bytes, for steps of a small model and some experts
SETTLING_S: Final = 5.0  # within which the system takes a thread that has ended off its list
HOST_STEP: Final = 10  # cycles between two figures of the host's memory, which garbage is taken from before

Answers = tuple[tuple[int, ...], ...]
Taken = Callable[[], AbstractContextManager[None]]  # inside, the device has no free memory


@dataclass(frozen=True)
class Work:
    """What a model does before it is closed. lengths: of its prompts, in tokens."""

    lengths: tuple[int, ...] = (5, 600)
    num_tokens: int = 12  # behind each prompt

    def answers(self, opened: OpenedModel) -> Answers:
        """The tokens behind each prompt. Closes the model."""
        sampling = SamplingParams(seed=3, max_tokens=self.num_tokens, ignore_eos=True)
        vocab_size = opened.runner.spec.vocab_size
        with LLM.from_opened(opened) as llm:
            if opened.has_chat_template:
                opened.chat_template.check()  # in a process of its own
            prompts = [[(7 * i + 11) % vocab_size for i in range(length)] for length in self.lengths]
            return tuple(llm.generate(prompt, sampling)[0].token_ids for prompt in prompts)


@dataclass(frozen=True)
class Refusal:
    """An opening for which memory does not suffice.

    changed: the configuration's fields. takes_at: at which word of progress another program takes the
    device's memory, given its amount done and the whole amount. at_call: or else at which of CALLS.
    """

    kind: str
    changed: Mapping[str, Any] = field(default_factory=dict)
    takes_at: Callable[[str, int, int], bool] | None = None
    at_call: str | None = None

    @property
    def is_refused_by_device(self) -> bool:
        return self.at_call is not None or self.takes_at is not None


# Modules, the names they call, and whether the memory is taken before such a call or behind it.
CALLS: Final = {
    "planning": (cuda_runner, "find_gpu", False),  # the runner has read how much is free
    # The pool is trimmed then. Before that, freed scratch may leave it enough for the slots of a small model.
    "slots": (partial_experts, "SlotSegments", True),
}


def refusals_of(kinds: Mapping[str, EngineConfig]) -> dict[str, Refusal]:
    """By name, those of the kinds that there are."""
    found = {"no memory for weights": Refusal("resident", at_call="planning")}
    if "partial" in kinds:
        least = _least_budget(kinds["partial"])
        with GGUFFile.open(Path(kinds["partial"].model)) as file:
            longest = read_spec(file.metadata, file.tensors).context_length
        found |= {
            "a budget below the least": Refusal("partial", {"vram": 1}),
            "a context beyond the budget": Refusal("partial", {"ctx_size": longest, "vram": least}),
            "no memory for slots": Refusal("partial", at_call="slots"),
        }
    if "partial, dflash" in kinds:
        found |= {
            "no memory for a drafter": Refusal(
                "partial, dflash", takes_at=lambda task, done, total: task == "preparing drafts"
            )
        }
    return found


class Cycles:
    """Openings of one model. kinds: configurations by name. memory_taken: see `Taken`."""

    def __init__(self, kinds: Mapping[str, EngineConfig], work: Work, memory_taken: Taken) -> None:
        self._kinds, self._work, self._memory_taken = kinds, work, memory_taken
        self._expected: Answers | None = None
        self.seen: dict[str, dict[str, Any]] = {}  # of each kind that was opened: how it ran
        self.messages: dict[str, str] = {}  # by refusal

    def run(self, kind: str) -> None:
        """Opens, computes and closes. Raises RuntimeError for other tokens than before."""
        opened = open_model(self._kinds[kind])
        placement = opened.plan.placement
        self.seen[kind] = {
            "vram_bytes": placement.budget_bytes,
            "resident_experts": placement.num_resident,
            "experts": placement.num_all,
            "prefetched": opened.plan.prefetch,
            "drafter": opened.plan.spec_type,
        }
        answers = self._work.answers(opened)
        self._expected = self._expected or answers
        if answers != self._expected:
            raise RuntimeError(f"{kind}: other tokens than the first cycle's")

    def refuse(self, name: str, refusal: Refusal) -> None:
        """Opens a model that must be refused. Raises RuntimeError if it is not, or by somebody else."""
        config = replace(self._kinds[refusal.kind], **refusal.changed)
        try:
            with ExitStack() as stack:

                def take() -> None:
                    stack.enter_context(self._memory_taken())

                def progress(task: str, done: int, total: int) -> None:
                    if refusal.takes_at is not None and refusal.takes_at(task, done, total):
                        take()

                if refusal.at_call is not None:
                    stack.enter_context(_at_call(refusal.at_call, take))
                open_model(config, progress).close()
        except OutOfMemoryError as error:
            self.messages[name] = str(error)
            first = str(_first_of(error))
        else:
            raise RuntimeError(f"{name}: the model was opened")
        if refusal.is_refused_by_device != first.startswith("the GPU's memory ran out"):
            raise RuntimeError(f"{name}: refused by another part: {first}")


def _first_of(error: BaseException) -> BaseException:
    """The error that this one was made of."""
    return error if error.__cause__ is None else _first_of(error.__cause__)


@contextmanager
def _at_call(name: str, take: Callable[[], None]) -> Iterator[None]:
    """Inside, `take` is called before or behind one of CALLS."""
    module, attribute, is_before = CALLS[name]
    called = getattr(module, attribute)

    def call(*arguments: Any, **named: Any) -> Any:
        if is_before:
            take()
        result = called(*arguments, **named)
        if not is_before:
            take()
        return result

    with patch.object(module, attribute, call):
        yield


def in_use() -> dict[str, int]:
    """What there is of this process: bytes, and numbers of the rest. Garbage counts too."""
    free, total = calls.free_memory()
    pool = checked(driver.cuDeviceGetMemPool(calls.DEVICE))
    attributes = driver.CUmemPool_attribute
    used, reserved = (
        int(checked(driver.cuMemPoolGetAttribute(pool, each)))
        for each in (
            attributes.CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            attributes.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
        )
    )
    objects = gc.get_objects()
    counts = Counter(map(type, objects))
    allocated: Counter[bool] = Counter()  # by whether it is the host's
    for each in objects:
        if type(each) is Allocation:
            allocated[_is_on_host(each.address)] += each.num_bytes
    return {
        "device_bytes": total - free,  # all programs, as the driver counts them
        "allocated_bytes": allocated[False],
        "pool_used_bytes": used,
        "pool_reserved_bytes": reserved,
        "page_locked_bytes": allocated[True],
        "locked_bytes": sum(_status(name) for name in ("VmLck", "VmPin")),
        "mapped_model_files": Path("/proc/self/maps").read_text().count(".gguf\n"),
        "streams": counts[streams.Stream],
        "events": counts[streams.Event],
        "graphs": counts[Graph],
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def _is_on_host(address: int) -> bool:
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    found = int(checked(driver.cuPointerGetAttribute(kind, address)))
    return found == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)


def _status(name: str) -> int:
    """Bytes that the system counts for this process; 0 where it does not count them."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


class _MallocInfo(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in "abcd"]
    _fields_ += [("mapped", ctypes.c_size_t), ("e", ctypes.c_size_t), ("f", ctypes.c_size_t)]
    _fields_ += [("used", ctypes.c_size_t), ("g", ctypes.c_size_t), ("h", ctypes.c_size_t)]


def host_memory() -> dict[str, int]:
    """Bytes in memory and bytes that `malloc` has given out; Python's own blocks of small objects."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return {
        "rss_bytes": _status("VmRSS"),
        "malloc_bytes": info.used + info.mapped,
        "python_blocks": sys.getallocatedblocks(),
    }


def settled(num_threads: int) -> dict[str, int]:
    """`in_use`, once there are no more than so many threads, or after SETTLING_S."""
    deadline = time.monotonic() + SETTLING_S
    while len(os.listdir("/proc/self/task")) > num_threads and time.monotonic() < deadline:
        time.sleep(1e-3)
    return in_use()


class Records:
    """What was in use after each kind of cycle at the end of the warm-up, and after all of them since."""

    def __init__(self) -> None:
        self.first: dict[str, dict[str, int]] = {}  # by kind, at the end of the warm-up
        self.after: list[str] = []  # kinds of cycles, and names of refusals
        self.values: dict[str, list[int]] = {}
        self.host: dict[str, list[int]] = {name: [] for name in host_memory()}  # after HOST_STEP cycles
        self.num_cycles = 0

    def note_first(self, kind: str) -> None:
        self.first[kind] = in_use()

    def note(self, what: str) -> None:
        self.after.append(what)
        most_threads = max(first["threads"] for first in self.first.values())
        for name, value in settled(most_threads).items():
            self.values.setdefault(name, []).append(value)

    def note_cycle(self, kind: str) -> None:
        self.note(kind)
        self.num_cycles += 1
        if self.num_cycles % HOST_STEP == 0:
            gc.collect()
            for name, value in host_memory().items():
                self.host[name].append(value)

    @property
    def changed(self) -> list[str]:
        """What was not the same all the time."""
        firsts = {name: {first[name] for first in self.first.values()} for name in self.values}
        return [name for name, values in self.values.items() if len(firsts[name].union(values)) > 1]

    @property
    def grown(self) -> list[str]:
        """What was ever more than after the first cycle of its kind; after a refusal, than after any kind."""
        return [name for name, values in self.values.items() if self._has_grown(name, values)]

    def _has_grown(self, name: str, values: Sequence[int]) -> bool:
        first = {kind: found[name] for kind, found in self.first.items()}
        most = max(first.values())
        return any(value > first.get(what, most) for what, value in zip(self.after, values, strict=True))

    @property
    def is_flat(self) -> bool:
        """Whether nothing has grown, and nothing but the driver's own memory has changed."""
        others = {*self.changed} - {"device_bytes"}
        return not others and not self.grown and self.growth["rss_bytes"] <= RSS_BYTES_PER_CYCLE

    @property
    def growth(self) -> dict[str, float]:
        """Of the host's memory, per cycle: the straight line through the later half; 0 of one value.

        The allocator and the driver take dozens of cycles until they hold all that they ever need.
        """
        later = {name: values[len(values) // 2 :] for name, values in self.host.items()}
        return {
            name: float(np.polyfit(range(len(values)), values, 1)[0]) / HOST_STEP if values[1:] else 0.0
            for name, values in later.items()
        }

    def result(self) -> dict[str, Any]:
        """For the file."""
        changed = self.changed
        return {
            "is_flat": self.is_flat,
            "grown": self.grown,
            "after_warm_up": self.first,
            "changed": {name: self.values[name] for name in changed},
            "after": self.after if changed else [],
            "host_growth_per_cycle": self.growth,
            "host": self.host,
        }


def with_partial_budgets(kinds: Mapping[str, EngineConfig]) -> dict[str, EngineConfig]:
    """The partial ones with a budget for some of the experts. Raises RuntimeError if none is found."""
    opened = open_model(kinds["resident"])
    expert_bytes = opened.plan.placement.resident_bytes
    opened.close()
    return {
        name: _with_some_experts(name, config, expert_bytes) if name.startswith("partial") else config
        for name, config in kinds.items()
    }


def _with_some_experts(name: str, config: EngineConfig, expert_bytes: int) -> EngineConfig:
    """The least budget that is advised, and quarters of the experts' bytes until some of them fit.

    What is beyond the least goes to longer steps first.
    """
    least = _least_budget(config)
    for quarters in range(1, MOST_QUARTERS + 1):
        config = replace(config, vram=least + quarters * expert_bytes // 4)
        opened = open_model(config)
        placement = opened.plan.placement
        opened.close()
        if placement.num_resident:
            return config
    raise RuntimeError(f"{name}: no experts fit into {config.vram} bytes")


def _least_budget(config: EngineConfig) -> int:
    """Bytes of the device's memory that are advised to whom has one. RuntimeError if none are."""
    try:
        open_model(replace(config, vram=1)).close()
    except OutOfMemoryError as error:
        advised = re.search(r"try --vram (\d+)M", str(error))
        if advised is None:
            raise RuntimeError(f"no budget is advised: {error}") from error
        return int(advised[1]) * MIB
    raise RuntimeError("a budget of one byte was accepted")


def measure(
    kinds: Mapping[str, EngineConfig],
    num_cycles: int,
    num_refusals: int,
    work: Work | None = None,
    memory_taken: Taken = no_memory_left,
) -> dict[str, Any]:
    """All cycles; see the module docstring. kinds: by name, "resident" and some of "partial…".

    Raises RuntimeError for other tokens, a model that is not placed as its kind says, and a refusal that was
    none.
    """
    kinds = with_partial_budgets(kinds)
    cycles = Cycles(kinds, work or Work(), memory_taken)
    refusals = refusals_of(kinds)
    for kind in kinds:
        cycles.run(kind)
    for name, refusal in refusals.items():
        cycles.refuse(name, refusal)
    gc.collect()
    records = Records()
    for _ in range(2):  # the driver gives its own memory back where there is none, and takes it again
        for kind in kinds:
            cycles.run(kind)
            records.note_first(kind)
    for kind, ran in cycles.seen.items():
        if (0 < ran["resident_experts"] < ran["experts"]) != kind.startswith("partial"):
            raise RuntimeError(f"{kind}: {ran}")
    names = list(islice(cycle(refusals), num_refusals))
    started = time.perf_counter()
    for number, kind in enumerate(islice(cycle(kinds), num_cycles)):
        # As many before each cycle as keep pace with it.
        for name in names[num_refusals * number // num_cycles : num_refusals * (number + 1) // num_cycles]:
            cycles.refuse(name, refusals[name])
            records.note(name)
        cycles.run(kind)
        records.note_cycle(kind)
    return {
        **records.result(),
        "cycles": num_cycles,
        "seconds_per_cycle": (time.perf_counter() - started) / num_cycles,
        "kinds": cycles.seen,
        "refusals": {
            name: {"count": names.count(name), "message": message}
            for name, message in cycles.messages.items()
        },
    }


def demo_kinds() -> dict[str, EngineConfig]:
    """Of the bundled model and its drafter."""
    resident = EngineConfig(str(demo_model_path()), device="cuda", ctx_size=1024, spec_type="none")
    drafts = {"spec_type": "dflash", "model_draft": str(demo_drafter_path()), "tree_budget": 5}
    return {
        "resident": resident,
        "partial": replace(resident, prefetch=2),
        "resident, mtp": replace(resident, spec_type="mtp", tree_budget=3),
        "partial, dflash": replace(resident, prefetch=2, **drafts),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--refusals", type=int, default=20)
    add_result_options(parser)
    options = parser.parse_args(arguments)
    found = measure(demo_kinds(), options.cycles, options.refusals)
    words = ["python", "-m", "bench.engine.open_close", "--cycles", str(options.cycles)]
    result = {
        "command": shlex.join([*words, "--refusals", str(options.refusals)]),
        "machine": describe("cuda"),
        "model": demo_model_path().name,
        **found,
    }
    write_result(result, options.out, options.commit)
    return int(not found["is_flat"])


if __name__ == "__main__":
    sys.exit(main())
