"""Messages between the server's processes: the codec beside that of another commit, interleaved in one run.

    python -m bench.serving.messages --old DIR --old-commit COMMIT --out docs/results/messages.json

DIR holds the other commit's sources. A time is that of writing a message and reading it again.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Final

import msgspec

from bench.results import write_result
from coldstream import LLM, SamplingParams
from coldstream.assets import demo_model_path
from coldstream.engine.answer import Request
from coldstream.engine.engine_statistics import EngineStatistics, LiveState
from coldstream.engine.events import Delta
from coldstream.engine.request import Piece, Statistics
from coldstream.engine.submission import Submission
from coldstream.server import codec
from coldstream.server.messages import Counted, FromEngine, Texts, ToEngine

PROMPT_TOKENS: Final = 32_768
REPEATS: Final = 15
MEASURED_S: Final = 0.05  # of one way in one repeat


def messages() -> dict[str, tuple[Any, Any]]:
    """Messages by what they are, each with its direction."""
    deltas = [Delta(1000 + i, 0, Piece(" token", (151_000 + i,))) for i in range(64)]
    request = Request(
        None,
        tuple(range(100_000, 100_000 + PROMPT_TOKENS)),
        SamplingParams(temperature=0.7, max_tokens=256),
        1,
        256,
        frozenset((151_645,)),
        frozenset((151_645,)),
        "avx512",
        2,
    )
    submission = Submission(1, request, (4096, PROMPT_TOKENS))
    return {
        "a token": (Texts.of(deltas[:1]), FromEngine),
        "tokens of 8 answers": (Texts.of(deltas[:8]), FromEngine),
        "tokens of 64 answers": (Texts.of(deltas), FromEngine),
        "the end of an answer": (
            Delta(
                1, 0, Piece("", (), finish_reason="stop", statistics=Statistics(9, 0, 9, 0.1, 0.1, "t", 1, 0))
            ),
            FromEngine,
        ),
        f"a submission of {PROMPT_TOKENS:,} tokens": (submission, ToEngine),
        "statistics": (Counted(1, LiveState(engine_statistics(), None)), FromEngine),
    }


def engine_statistics() -> EngineStatistics:
    """Those of an engine of the bundled model after one answer."""
    with LLM(demo_model_path()) as llm:
        llm.generate("def", SamplingParams(max_tokens=4))
        with llm._engine.exclusively() as engine:
            return engine.statistics()


def other_codec(folder: Path) -> ModuleType:
    """`server/codec.py` of the sources in `folder`."""
    path = folder / "src" / "coldstream" / "server" / "codec.py"
    spec = importlib.util.spec_from_file_location("other_codec", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ways(message: Any, direction: Any, old: ModuleType) -> dict[str, Callable[[], Any]]:
    """By each way to write and read: a call that does both."""

    def both(module: Any) -> Callable[[], Any]:
        assert module.decode(module.encode(message, direction), direction) == message
        return lambda: module.decode(module.encode(message, direction), direction)

    return {"old": both(old), "new": both(codec)}


def seconds(call: Callable[[], Any]) -> float:
    """The mean of calls for MEASURED_S."""
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < MEASURED_S:
        call()
        count += 1
    return elapsed / count


def compared(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Microseconds of each way, and the medians of its ratios to the old one."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(REPEATS):
        for name in sorted(calls, reverse=bool(number % 2)):
            found[name].append(1e6 * seconds(calls[name]))
    ratios = {
        name: median(us / own for us, own in zip(each, found["old"], strict=True))
        for name, each in found.items()
    }
    return {
        name: {"us": round(median(each), 1), "ratio": round(ratios[name], 3)} for name, each in found.items()
    }


def import_ms() -> float:
    """Milliseconds of importing msgspec in a new interpreter, the median of eleven."""
    code = "import time; start = time.perf_counter(); import msgspec; print(time.perf_counter() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(11)]
    return round(1e3 * median(float(run.stdout) for run in runs), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", type=Path, required=True, metavar="DIR")
    parser.add_argument("--old-commit", required=True, metavar="COMMIT")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    old = other_codec(options.old)
    rows = {}
    for name, (message, direction) in messages().items():
        rows[name] = compared(ways(message, direction, old))
        print(name, rows[name], flush=True)
    command = f"python -m bench.serving.messages --old DIR --old-commit {options.old_commit}"
    figures = {"command": command, "msgspec": msgspec.__version__, "import_ms": import_ms(), "messages": rows}
    write_result(figures, options.out)


if __name__ == "__main__":
    main()
