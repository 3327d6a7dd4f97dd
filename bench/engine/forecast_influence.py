"""How much forecasts depend on what is in the cost model's code: each constant a fifth larger, and smaller.

    python -m bench.engine.forecast_influence docs/results/gpu/streaming_*.json docs/results/gpu/hybrid_*.json

Each is changed by itself, and the forecasts of recorded runs are made again. The result has the mean change
of decoding and of prompts, on GPUs and on CPUs, and the largest one. A constant of little influence needs no
measurement; one of much has to be measured, counted or named.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

from bench.engine.forecast_again import DECODE, Headers, again, arguments
from bench.results import write_result
from coldstream.placement import cost, kernel_shares, prompt_cost

CHANGE: Final = 0.2
CONSTANTS: Final[tuple[tuple[ModuleType, str], ...]] = (
    (cost, "LAYER_LAUNCHES"),
    (cost, "JOIN_LAUNCHES"),
    (cost, "KV_SHARE"),
    (cost, "ROW_BUS_BYTES"),
    (cost, "GUESSED"),
    (cost, "GUESS_LAUNCHES"),
    (cost, "CPU_LAYER_OPS"),
    (prompt_cost, "CPU_ROW_OPS"),
    (prompt_cost, "PROMPT_LAUNCHES"),
    (prompt_cost, "RECORDED_LAUNCHES"),
    (prompt_cost, "RECORDED_GROUP_LAUNCHES"),
    (prompt_cost, "COPY_LAUNCHES"),
    (prompt_cost, "COPIES_LAUNCHES"),
    (prompt_cost, "UNPACK_SHARE"),
    (prompt_cost, "ATTENTION_SHARE"),
    (kernel_shares, "PROMPT_OF_PRODUCT"),
    (kernel_shares, "QUEUED_OF_MEASURED"),
)
Forecasts = dict[tuple[str, ...], float]


@contextmanager
def changed(module: ModuleType, name: str, factor: float) -> Iterator[None]:
    """Inside, a constant is so many times what it is."""
    before = getattr(module, name)
    setattr(module, name, before * factor)
    forget()
    try:
        yield
    finally:
        setattr(module, name, before)
        forget()


@contextmanager
def changed_novelty(factor: float) -> Iterator[None]:
    """The same of how alike tokens choose, which a model's sizes have."""
    before = prompt_cost.expected_touched

    def touched(rows: Any, count: int, novelty: float) -> Any:
        return before(rows, count, factor * novelty)

    with patch.object(prompt_cost, "expected_touched", touched):
        yield


def forget() -> None:
    """What functions kept of other constants."""
    for module in (cost, prompt_cost):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def forecasts(results: Sequence[tuple[str, dict[str, Any]]], headers: Headers) -> Forecasts:
    """Tokens a second by kind (of which the first part is), result, row and figure."""
    found = {}
    for name, result in results:
        device = "gpu" if "gpu" in result["machine"] else "cpu"
        for number, row in enumerate(again(result, headers)):
            for figure, both in row["figures"].items():
                kind = "decode" if figure.startswith(DECODE) else "prompts"
                found[f"{device} {kind}", name, str(number), figure] = both["forecast_tok_s"]
    return found


def influence(before: Forecasts, after: Sequence[Forecasts]) -> dict[str, dict[str, float]]:
    """By kind, the mean and the largest change of a figure, of the larger of both ways."""
    changes: dict[str, list[float]] = {}
    for key, value in before.items():
        changes.setdefault(key[0], []).append(max(abs(each[key] / value - 1) for each in after))
    return {kind: {"mean": sum(found) / len(found), "largest": max(found)} for kind, found in changes.items()}


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(words)
    results = [(path.name, json.loads(path.read_text())) for path in options.results]
    found = {}
    with ExitStack() as stack:
        headers = Headers(options.keep or Path(stack.enter_context(TemporaryDirectory())))
        headers.folder.mkdir(parents=True, exist_ok=True)
        before = forecasts(results, headers)
        ways = {name: partial(changed, module, name) for module, name in CONSTANTS}
        for name, way in (ways | {"NOVELTY": changed_novelty}).items():
            after = []
            for factor in (1 + CHANGE, 1 - CHANGE):
                with way(factor):
                    after.append(forecasts(results, headers))
            found[name] = influence(before, after)
            kinds = ", ".join(f"{kind} {of['mean']:.1%}" for kind, of in found[name].items() if of["mean"])
            print(f"{name}: {kinds or 'none'}", file=sys.stderr, flush=True)
    names = [name for name, _ in results]
    command = ["python", "-m", "bench.engine.forecast_influence", *map(str, options.results)]
    about = {"command": shlex.join(command), "machine": {"cpu": "none is measured"}}
    result = about | {"change": CHANGE, "results": names, "influence": found}
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
