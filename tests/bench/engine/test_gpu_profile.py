"""The profile of a decode step, from a made-up trace."""

import json
from pathlib import Path

import pytest

from bench.engine import gpu_profile
from bench.engine.gpu_profile import Launch, read_trace, split_steps, summarise, table
from bench.report import gpu as report_gpu
from bench.report import tables as report_tables


def step(start: float, slower: float = 0.0) -> list[Launch]:
    """Two layers of three kernels each and a copy; the third kernel overlaps the second."""
    launches = []
    for layer in range(2):
        at = start + 20 * layer
        launches += [
            Launch("void few<q4_k, 1>(Rows<int>, float*)", at, 4 + slower),
            Launch("void (anonymous namespace)::few<q6_k, 2>(float*)", at + 6, 4),
            Launch("attention", at + 9, 8),
        ]
    return [*launches, Launch("Memcpy DtoH (Device -> Pinned)", start + 40, 5)]


def test_kinds_gaps_and_sums() -> None:
    steps = [step(0), step(100, slower=1), step(200)]
    result = summarise(split_steps([launch for each in steps for launch in each], 3), num_layers=2)
    assert result["launches_per_step"] == 7
    assert result["launches_per_layer"] == 3.5
    assert result["step_us"] == 45
    assert result["busy_us"] == 37
    assert result["between_steps_us"] == 55
    assert result["kinds"] == [
        {"kind": "few", "launches": 4, "us": 16},
        {"kind": "attention", "launches": 2, "us": 16},
        {"kind": "Memcpy DtoH", "launches": 1, "us": 5},
    ]
    largest = result["largest_gaps"]
    assert [(gap["after"], gap["before"]) for gap in largest] == [
        ("few", "few"),
        ("attention", "few"),
        ("attention", "Memcpy DtoH"),
    ]
    assert largest[1]["median_us"] == 3
    assert largest[0]["us"] == pytest.approx(2 * (2 + 1 + 2) / 3)


def test_launches_that_overlap_add_what_they_take_longer() -> None:
    by_kind = {shape["kind"]: shape for shape in summarise([step(0), step(100)], num_layers=2)["shapes"]}
    product, attention, copy = by_kind.values()
    assert (product["launches"], product["us"], product["step_us"]) == (4, 4, 4 + 6 + 7 + 6)
    assert (attention["us"], attention["adds_us"]) == (8, 7)
    assert (copy["adds_us"], copy["grid"]) == (8, [])
    wide = Launch("attention", 0, 3, (2, 1, 1))
    shapes = summarise([[wide, Launch("attention", 3, 9)]] * 2, 1)["shapes"]
    assert [shape["grid"] for shape in shapes] == [[], [2, 1, 1]]


def test_steps_must_be_alike() -> None:
    one, other = step(0), step(100)
    with pytest.raises(RuntimeError, match="13 launches in 2 steps"):
        split_steps(one + other[1:], 2)
    with pytest.raises(RuntimeError, match="not alike"):
        split_steps([*one, Launch("stray", 90, 1), *other[1:]], 2)
    with pytest.raises(RuntimeError, match="0 launches"):
        split_steps([], 2)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    events = [
        {
            "cat": "kernel",
            "name": "second",
            "ts": 5,
            "dur": 2,
            "args": {"grid": [7, 2, 1], "block": [32, 1, 1]},
        },
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 9},
        {"cat": "gpu_memcpy", "name": "first", "ts": 1, "dur": 1},
        {"name": "process_name", "ph": "M"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_trace(path) == [Launch("first", 1, 1), Launch("second", 5, 2, (7, 2, 1))]


def test_the_pages_table_is_made_of_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = summarise([step(0), step(100)], 2) | {"share_of_bandwidth": 0.5, "bandwidth_bytes_s": 4.3e12}
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "profile.json").write_text(json.dumps(result))
    monkeypatch.setattr(report_tables, "RESULTS", tmp_path)
    page = report_gpu.gpu_profile()
    assert "| `attention` | 2 | 16.0 | 35.6% |" in page
    assert "7 launches a token, 3.5 a layer, in 45 µs" in page
    assert page.count("\n- `") == gpu_profile.NUM_GAPS
    assert "7 launches, 3.5 a layer" in table(result)
