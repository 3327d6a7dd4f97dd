"""Which tests run under the sanitizer, and what its log and the tests' report say."""

import pytest

from gpu_sanitizer import choose, count_errors, count_tests


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


def test_outcomes_are_counted() -> None:
    report = (
        "<testsuites><testsuite><testcase/><testcase/><testcase><skipped/></testcase>"
        "<testcase><failure/></testcase><testcase><error/></testcase></testsuite></testsuites>"
    )
    assert count_tests(report) == {"passed": 2, "skipped": 1, "failed": 2}


def test_errors_of_all_processes_are_added_up() -> None:
    log = "========= ERROR SUMMARY: 3 errors\n========= ERROR SUMMARY: 1 error\n"
    assert count_errors(log) == 4
    with pytest.raises(ValueError, match="no summary: killed"):
        count_errors("killed")
