"""Two commits in turns: which figures are compared, and whose sources a turn runs."""

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest

from bench.engine import gpu_turns
from bench.engine.gpu_turns import compared, turn


def cells(*tok_s: float, cpu_us: float | None = None) -> list[dict[str, object]]:
    whats = [("decode", 0.0), (168, math.inf)]
    return [
        {"what": what, "gib": gib, "tok_s": speed, **({"cpu_us_a_pair": cpu_us} if what == "decode" else {})}
        for (what, gib), speed in zip(whats, tok_s, strict=True)
    ]


def test_the_ratio_is_that_of_the_medians_of_a_cell() -> None:
    turns = {
        "old": [cells(100, 10, cpu_us=20.0), cells(102, 30, cpu_us=21.0), cells(500, 20, cpu_us=22.0)],
        "new": [cells(51, 40, cpu_us=40.0), cells(51, 41, cpu_us=41.0), cells(50, 1, cpu_us=42.0)],
    }
    decode, prompt = compared(turns)
    assert decode == {
        "what": "decode",
        "gib": 0.0,
        "old_tok_s": [100, 102, 500],
        "old_cpu_us_a_pair": [20.0, 21.0, 22.0],
        "new_tok_s": [51, 51, 50],
        "new_cpu_us_a_pair": [40.0, 41.0, 42.0],
        "ratio": 0.5,
    }
    assert (prompt["what"], prompt["gib"], prompt["ratio"]) == (168, None, 2.0)
    assert "old_cpu_us_a_pair" not in prompt


def test_sides_with_different_cells_are_not_compared() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        compared({"old": [cells(1, 2, cpu_us=1.0)], "new": [cells(1, 2, cpu_us=1.0)[:1]]})


def test_a_turn_runs_the_sources_of_its_side(tmp_path: Path) -> None:
    """The older sources' benchmarks, though this checkout has modules of the same names beside the script."""
    for name in ("src", "bench/engine"):
        (tmp_path / name).mkdir(parents=True)
    modules = {
        "device": "describe = None",
        "full_size_model": "FULL_SHAPE = None",
        "engine/gpu": "write_model = None\nnumbers = lambda text: [*map(int, filter(None, text.split(',')))]",
        "results": "ROOT = write_result = None",
        "engine/gpu_streaming": "",
        "engine/gpu_hybrid": """
from contextlib import nullcontext
from types import SimpleNamespace as Anything

GIB, SHORT_PROMPT = 2**30, 16
find_gpu = lambda: None
measured_hardware = lambda gpu: None
EngineConfig = lambda *arguments, **settings: None
GGUFFile = Anything(open=lambda path: nullcontext(Anything(metadata=None, tensors=None)))
read_spec = lambda *arguments: Anything(vocab_size=8)
plan_model = lambda *arguments: Anything(known=Anything(model=None))
Machine = lambda *arguments: None

def measure(machine, gib, depths, prefetch):
    assert (WARM_TOKENS, TIMED_TOKENS, TEXTS, depths, prefetch) == (384, 192, 2, [0], 0)
    return [{"tok_s": 10 * gib, "texts": [{"cpu_pairs": 4, "cpu_seconds": 8e-6 * gib}] * 2}]
""",
    }
    for name, text in modules.items():
        (tmp_path / "bench" / f"{name}.py").write_text(text)
    options = Namespace(model=tmp_path / "m.gguf", decode=[1.0, 2.0], prefill=[], prompts=[])
    assert turn(tmp_path, options) == [
        {"what": "decode", "gib": 1.0, "tok_s": 10.0, "cpu_us_a_pair": pytest.approx(2.0)},
        {"what": "decode", "gib": 2.0, "tok_s": 20.0, "cpu_us_a_pair": pytest.approx(4.0)},
    ]


def test_words_are_read_as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    seen: list[Namespace] = []
    monkeypatch.setattr(gpu_turns, "run", lambda options: seen.append(options) or {})
    monkeypatch.setattr(
        "sys.argv",
        [
            "gpu_turns.py",
            "m.gguf",
            "--decode",
            "--prefill",
            "all",
            "3",
            "--prompts",
            "168",
            "--out",
            str(out),
        ],
    )
    assert gpu_turns.main() == 0
    assert (seen[0].decode, seen[0].prefill, seen[0].prompts) == ([], [math.inf, 3.0], [168])
    assert json.loads(out.read_text())["commit"]
