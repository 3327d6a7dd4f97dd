"""The tables of weight types, from a result as the benchmark writes it."""

from typing import Any

import pytest

from bench.report import weight_types as report

RESULT: dict[str, Any] = {
    "commit": "c0ffee",
    "command": "python -m bench.peers.weight_types --threads 2",
    "machine": {"cpu_name": "a CPU"},
    "threads": 2,
    "tier": "avx2",
    "peers": {"llama.cpp": {"version": "1.2"}, "ik_llama.cpp": {"version": "of May"}},
    "models": {
        "cut": {
            "Q2_K": {
                "share_of_bandwidth": {"ours": 0.5, "llama.cpp": 0.25, "ik_llama.cpp": 0.333},
                "cases": {
                    "decode": {
                        "tok_s": {"ours": 1500.4, "llama.cpp": 100.0, "ik_llama.cpp": 120.0},
                        "ratios": {
                            "llama.cpp": {"median": 15.0, "interval": [14.0, 16.0]},
                            "ik_llama.cpp": {"median": 12.5, "interval": [12.0, 13.25]},
                        },
                        "better_peer": "ik_llama.cpp",
                    }
                },
            },
            "Q2_0": {
                "share_of_bandwidth": {"ours": 0.5, "llama.cpp": 0.25},
                "cases": {
                    "decode": {
                        "tok_s": {"ours": 90.0, "llama.cpp": 100.0},
                        "ratios": {"llama.cpp": {"median": 0.9, "interval": [0.8, 1.0]}},
                        "better_peer": "llama.cpp",
                    }
                },
            },
        },
        "small": {},
    },
}


def test_rows_have_all_programs_and_the_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "load", {"x": RESULT}.__getitem__)
    text = report.weight_types(["x"])
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| Q")]
    assert rows == [
        ["Q2_K", "1,500 / 100 / 120", "12.50× (12.00–13.25)", "50% / 25% / 33%"],
        ["Q2_0", "90 / 100 / –", "0.90× (0.80–1.00)", "50% / 25% / –"],
    ]
    assert text.count("experts in") == 1
    assert "small model" not in text
    assert "a CPU, 2 threads, tier avx2, commit c0ffee, llama.cpp 1.2, ik_llama.cpp of May: `python" in text
