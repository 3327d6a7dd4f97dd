"""Which tests run under the sanitizer, and what its log says."""

import pytest

from tests.audits.gpu_sanitizer import choose, count_errors


def test_a_few_parameter_sets_of_every_test_and_no_captures() -> None:
    ids = [f"a.py::test_rows[{count}]" for count in range(1, 8)]
    ids += ["a.py::test_alone", "a.py::test_one_graph", "graph.py::test_alone"]
    assert choose(ids, 3) == [
        "a.py::test_rows[2]",
        "a.py::test_rows[4]",
        "a.py::test_rows[6]",
        "a.py::test_alone",
        "graph.py::test_alone",
    ]


def test_errors_of_all_processes_are_added_up() -> None:
    log = "========= ERROR SUMMARY: 3 errors\n========= ERROR SUMMARY: 1 error\n"
    assert count_errors(log) == 4
    with pytest.raises(ValueError, match="no summary: killed"):
        count_errors("killed")
    assert count_errors("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n") == 2
