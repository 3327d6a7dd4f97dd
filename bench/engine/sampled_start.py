"""Runs a command line of coldstream and samples its main thread's time, for `first_token.py`.

    python -m bench.engine.sampled_start phases.json run model.gguf -p ... -n 1

A thread looks every few milliseconds at what the main thread is doing. Imports nothing else, so that little
but the command line is timed. The file gets seconds by phase, and for each of the functions of coldstream,
and of the modules whose import was asked for, the seconds that they or what they called took.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

SAMPLE_S = 0.002
NUM_FUNCTIONS = 120  # that are written
# Where a sample counts: the first of these (module, function) that is on its stack.
PHASES: dict[str, tuple[tuple[str, str], ...]] = {
    "import": (("importlib", "_find_and_load"),),
    "compile or load kernels": (("kernels.cuda.kernel_loading", "KernelLoading.wait_for_first"),),
    "copy weights to the GPU": (("kernels.cuda.loader", "CudaLoader.finish_loading"),),
    "page-lock the file": (("kernels.cuda.host_memory", "RegisteredMemory.register"),),
    "map the file": (("experts.host", "HostExperts.map_weight"),),
    "fill the experts' slots": (("experts.partial_experts", "PartialExperts.fill"),),
    "dry runs: kernels and memory": (
        ("models.cuda.memory_plan", "kernels_of"),
        ("models.cuda.memory_plan", "count_memory"),
    ),
    "measure the machine": (("planning.machine", "hardware_of"), ("planning.machine", "with_rates")),
    "plan": (("planning.gather", "plan_model"),),
    "tokenizer": (("gguf.tokenizer", "Tokenizer.from_metadata"),),
    "read the header": (("gguf.reader", "GGUFFile.open"), ("models.read_spec", "read_spec")),
    "first steps of each kind": (("models.cuda.runner", "CudaRunner._run_first_steps"),),
    "look for a GPU": (("kernels.cuda.device", "find_gpu"),),
    "load, other": (("engine.opened_model", "open_model"),),
    "prompt and first token": (("cli.answer", "show_answer"),),
}


class Sampler(threading.Thread):
    """Adds up, every SAMPLE_S, the seconds of the phase that the main thread is in."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.wall_s: Counter[str] = Counter()
        self.function_s: Counter[str] = Counter()
        self._main = threading.main_thread().ident
        self.ends = threading.Event()

    def run(self) -> None:
        last = time.perf_counter()
        while not self.ends.wait(SAMPLE_S):
            frame = sys._current_frames().get(self._main or 0)
            now = time.perf_counter()
            self.wall_s[phase_of(frame)] += now - last
            for name in set(functions_on(frame)):
                self.function_s[name] += now - last
            last = now


def phase_of(frame: FrameType | None) -> str:
    """The phase of a stack."""
    on_stack = set()
    while frame is not None:
        on_stack.add(_name(frame.f_code))
        frame = frame.f_back
    return next(
        (phase for phase, names in PHASES.items() if any(name in on_stack for name in names)), "other"
    )


def functions_on(frame: FrameType | None) -> Iterator[str]:
    """The functions of coldstream on a stack, and the modules that are being imported."""
    while frame is not None:
        module, function = _name(frame.f_code)
        if module == "importlib":
            if function == "_find_and_load":
                yield f"import {frame.f_locals.get('name')}"
        elif module:
            yield f"{module}.{function}"
        frame = frame.f_back


def _name(code: CodeType) -> tuple[str, str]:
    path = Path(code.co_filename)
    if "coldstream" in path.parts:
        inside = path.parts[len(path.parts) - path.parts[::-1].index("coldstream") :]
        return ".".join(inside).removesuffix(".py"), code.co_qualname
    return ("importlib", code.co_qualname) if "importlib" in code.co_filename else ("", "")


def profile(argv: list[str], out: Path) -> None:
    """Runs the command line in this process under a `Sampler`; seconds by phase go to `out`."""
    sampler = Sampler()
    begin = time.perf_counter()
    sampler.start()
    from coldstream.cli.main import main as coldstream

    sys.argv = ["coldstream", *argv]
    try:
        coldstream()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        total = time.perf_counter() - begin
        sampler.ends.set()
        sampler.join()
    seconds = dict(sampler.wall_s)
    seconds["other"] = max(0.0, total - sum(s for phase, s in seconds.items() if phase != "other"))
    functions = dict(sampler.function_s.most_common(NUM_FUNCTIONS))
    out.write_text(json.dumps({"phases_s": seconds, "functions_s": functions}))


if __name__ == "__main__":
    profile(sys.argv[2:], Path(sys.argv[1]))
