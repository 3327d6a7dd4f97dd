"""Tables of what roundings cost, and the targets beneath them, from made-up figures."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bench.report import accuracy as report_accuracy
from bench.report import tables as report_tables
from bench.report.accuracy import activation_scales, kv_targets, kv_types, target


def kv_result() -> dict[str, Any]:
    """Figures that meet all targets."""
    distances = {"f32": 0.0, "f16": 0.002, "i16": 0.0001, "i8": 0.011}
    rest = {"bits_per_value": 16, "perplexity": 4.7, "loss_standard_error": 2e-5, "same_top1": 1.0}
    return {
        "command": "made up",
        "window_tokens": 2048,
        "scored_tokens": 12345,
        "head_dim": 64,
        "types": {
            name: {"loss": distance / 1000, "logit_distance": distance} | rest
            for name, distance in distances.items()
        },
        "seeds": 8,
        "heads": [
            {"head_dim": 128, "outliers": factor}
            | {"error": {name: distance * factor for name, distance in distances.items()}}
            for factor in (1, 100)
        ],
    }


def write(folder: Path, name: str, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.json").write_text(json.dumps(result))
    monkeypatch.setattr(report_tables, "RESULTS", folder)


def test_a_target_names_what_misses_it() -> None:
    assert target("at most 1", []) == "Target: at most 1: met."
    assert target("at most 1", ["a", "b"]) == "Target: at most 1: missed by a, b."


def test_targets_of_types_are_met() -> None:
    assert [line.rpartition(": ")[2] for line in kv_targets(kv_result())] == ["met."] * 3


@pytest.mark.parametrize("sign", [-1, 1])
def test_perplexity_may_be_off_on_neither_side(sign: int) -> None:
    result = kv_result()
    result["types"]["i16"]["loss"] = sign * 1.1e-5
    assert [line.rpartition(": ")[2] for line in kv_targets(result)] == [
        "missed by perplexity.",
        "met.",
        "met.",
    ]


def test_targets_of_types_are_missed() -> None:
    result = kv_result()
    result["types"]["i16"]["logit_distance"] = 0.0031
    for case in result["heads"]:
        case["error"]["i16"] = 1.1 * case["error"]["f16"]
    missed = [line.partition(": missed by ")[2] for line in kv_targets(result)]
    assert missed == ["distance.", "text, heads of 128, plain, heads of 128 × 100.", ""]
    result["types"]["i8"]["logit_distance"] = 0.0144
    assert kv_targets(result)[-1].endswith(": missed by distance.")


def test_tables_of_types_have_text_and_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "kv_types", kv_result(), monkeypatch)
    text = kv_types()
    assert "| i8 | 16 | 4.7000 | +0.0011 % ± 0.0020 | 0.01100 | 100.00 % |" in text
    assert "12,345 tokens" in text
    assert "| keys and values | 128, plain | 128 × 100 |" in text
    assert "| f16 | 2.0e-03 | 2.0e-01 |" in text
    assert text.count("Target: ") == 3
    assert text.endswith("met.\n")


def scale_row(quant_type: str, outliers: int, ratio: float) -> dict[str, Any]:
    figures = {"ours": ratio * 1e-4, "llama_cpp": 1e-4, "ratio": ratio}
    intervals = {f"{name}{end}": ratio + by for name in ("ratio", "passage_ratio")
                 for end, by in (("_low", -0.1), ("_high", 0.1))}  # fmt: skip
    case = {"type": quant_type, "outliers": outliers, "scale_inputs": 256, "passages": 90 // outliers}
    return case | figures | intervals


def test_ratios_to_llama_cpp_have_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [scale_row(name, factor, 1.0) for factor in (1, 30) for name in ("Q4_K", "Q5_K")]
    result = {"rows": rows, "channels": 3, "positions": 512, "command": "made up"}
    write(tmp_path, "activation_scales", result, monkeypatch)
    text = activation_scales()
    assert (
        "| Q5_K | 256 | 1.0e-04 / 1.0e-04 = 1.00 (0.90–1.10) | 1.0e-04 / 1.0e-04 = 1.00 (0.90–1.10) |" in text
    )
    assert "90 passages of 512 tokens, with outliers 3" in text
    assert text.endswith(f"at most {report_accuracy.MOST_OF_LLAMA_CPP} times llama.cpp's: met.\n")
    missing = copy.deepcopy(result)
    missing["rows"][-1] = scale_row("Q5_K", 30, 1.11)
    write(tmp_path, "activation_scales", missing, monkeypatch)
    assert activation_scales().endswith("missed by Q5_K × 30.\n")
    alone = copy.deepcopy(result)
    for factor in (1, 30):
        row = scale_row("Q2_0", factor, 9.0) | {"ours": 2e-3}
        alone["rows"].append(
            {name: row[name] for name in ("type", "outliers", "scale_inputs", "passages", "ours")}
        )
    write(tmp_path, "activation_scales", alone, monkeypatch)
    text = activation_scales()
    assert "| Q2_0 | 256 | 2.0e-03 / – | 2.0e-03 / – |" in text
    assert text.endswith(": met.\n"), "nothing to compare a type with that llama.cpp lacks"
