"""Which tests run under the sanitizer, and what its log says."""

import re
from pathlib import Path

import pytest

from tests.audits.gpu_sanitizer import TOOLS, choose, command_of, count_errors, kinds_of_reports


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


def test_only_racecheck_and_initcheck_change_what_is_tested() -> None:
    plain, *_ = own = [
        re.sub(r"--tool \w+ .*--error-exitcode", "", " ".join(command_of("sanitizer", tool, Path("log"))))
        for tool in ("memcheck", "synccheck", "racecheck", "initcheck")
    ]
    assert {*TOOLS} == {"memcheck", "synccheck", "racecheck", "initcheck"}
    assert own == [plain, plain, f"{plain} --every-lane-arrives", f"{plain} --unpoisoned"]


def report(*lines: str) -> str:
    return "".join(f"========= {line}\n" for line in (*lines, ""))


def test_each_kind_of_report_is_shown_once_with_its_test() -> None:
    def write(place: str, address: int) -> str:
        return report(
            "Invalid __global__ write of size 4 bytes",
            f"    at {place}",
            f"    Access to {address:#x} is out of bounds",
            "        Host Frame: PyObject_Vectorcall [0x1499b4] in python",
            "        Host Frame: test_a in test_b.py:49",
        )

    def race(hazards: int) -> str:
        return report(
            "Error: Race reported between Write access at f+0x10", f"    and Read access [{hazards} hazards]"
        )

    log = "========= COMPUTE-SANITIZER\n" + "".join(
        write("f+0x10", 0x7F14E9875600 + 4 * i) for i in range(99)
    )
    log += write("f+0x20", 0x7F14E9875600) + race(16) + race(180) + "========= ERROR SUMMARY: 102 errors\n"
    first, second, third = kinds_of_reports(log)
    assert first.startswith("99 x Invalid __global__ write of size 4 bytes\n    at f+0x10\n")
    assert second.startswith("1 x Invalid __global__ write of size 4 bytes\n    at f+0x20\n")
    assert all("test_a in test_b.py:49" in each and "python" not in each for each in (first, second))
    assert third.startswith("2 x Error: Race reported")
    assert third.endswith("[16 hazards]")
    assert kinds_of_reports("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == []
