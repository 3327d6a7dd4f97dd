"""The report on other projects' cases: counts by file, and a reason for each failure."""

from bench.peers.foreign_cases import VLLM, summary


def outcome(name: str, outcome: str, error: str = "") -> dict[str, str]:
    return {"case": f"tests/tool_parsers/{name}", "outcome": outcome, "error": error}


def test_counts_and_reasons() -> None:
    found = summary(
        VLLM,
        [
            outcome("test_a.py::test_x[1]", "passed"),
            outcome("test_a.py::test_x[2]", "skipped"),
            outcome("test_a.py::test_structural_tag", "failed", "TypeError: no"),
            outcome("test_b.py::test_y", "failed", "assert 1\n  == 2"),
        ],
    )
    assert found["files"] == {
        "test_a.py": {"passed": 1, "skipped": 1, "failed": 1},
        "test_b.py": {"failed": 1},
    }
    assert [each["case"] for each in found["failures"]] == ["test_structural_tag", "test_y"]
    assert "structural tags" in found["failures"][0]["reason"]
    assert found["failures"][1]["reason"] == "unexplained: assert 1 == 2"
