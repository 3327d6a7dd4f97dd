"""What a recorded run of GPU tests counts, and how a page tells that sources are newer than it."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.cuda_sources import digests, unseen
from bench.report import tests as report_tests
from tests.audits.gpu_tests import count_tests, in_all, processes, with_others

REPORT = """<testsuites><testsuite>
<testcase classname="tests.kernels.test_a"/><testcase classname="tests.kernels.test_b"><skipped/></testcase>
<testcase classname="tests.models.test_c"><failure/></testcase>
<testcase classname="tests.models.test_c"><error/></testcase>
<testcase classname="tests.test_docs"/>
</testsuite></testsuites>"""


def test_outcomes_are_counted_by_folder() -> None:
    counts = count_tests(REPORT)
    assert {folder: dict(outcomes) for folder, outcomes in counts.items()} == {
        "kernels": {"passed": 1, "skipped": 1},
        "models": {"failed": 2},
        "tests": {"passed": 1},
    }
    assert in_all(counts.values()) == {"passed": 2, "skipped": 1, "failed": 2}


SEES = """
import os
import pytest

@pytest.mark.parametrize("i", range(40))
def test_sees(i, record_property):
    record_property("gpu", os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.mark.sharded(of="measurements")
def test_each_process_sees_one_of_the_gpus(tmp_path: Path) -> None:
    (tmp_path / "test_sees.py").write_text(SEES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--junit-xml=report.xml"]
    command += ["--rootdir=.", *processes(1, 3), "test_sees.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    report = ElementTree.parse(tmp_path / "report.xml")
    seen = Counter(found.get("value") for found in report.iter("property"))
    assert set(seen) == {"0", "1", "2"}
    assert seen.total() == 40


def test_one_process_needs_no_others() -> None:
    assert processes(1, 1) == []
    assert processes(6, 1) == ["--tx=6*popen", "--dist=worksteal"]


def of(folder: str, passed: int, commit: str = "abc") -> dict[str, Any]:
    counts = {"passed": passed, "skipped": 0, "failed": 1}
    rest = {"machine": {}, "cuda_sources": {}, "command": folder, "wall_s": 1.5}
    return {"commit": commit, "tests": counts, "folders": {folder: counts}, **rest}


def test_folders_that_ran_before_stay_if_they_are_of_the_same_sources() -> None:
    both = with_others(of("models", 2), with_others(of("kernels", 3), of("models", 7)))
    assert {folder: counts["passed"] for folder, counts in both["folders"].items()} == {
        "models": 2,
        "kernels": 3,
    }
    assert both["tests"] == {"passed": 5, "skipped": 0, "failed": 2}
    assert (both["command"], both["wall_s"]) == ("models; kernels; models", 4.5)
    with pytest.raises(ValueError, match="another commit"):
        with_others(of("models", 2), of("kernels", 3, commit="abd"))


def test_a_source_that_changed_or_is_new_was_not_seen(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "kernels"
    folder.mkdir(parents=True)
    for name in ("same.cu", "changed.cuh", "gone.cu", "notes.md", "cuda.py"):
        (folder / name).write_text(name)
    recorded = digests(tmp_path)
    assert list(recorded) == [f"src/kernels/{name}" for name in ("changed.cuh", "gone.cu", "same.cu")]
    (folder / "changed.cuh").write_text("other")
    (folder / "gone.cu").unlink()
    (folder / "new.cu").write_text("")
    assert unseen(recorded, digests(tmp_path)) == ["src/kernels/changed.cuh", "src/kernels/new.cu"]


@pytest.mark.parametrize("block", [report_tests.gpu_tests, report_tests.gpu_sanitizer])
def test_a_block_says_how_many_sources_are_newer_than_its_run(block, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {"passed": 1, "failed": 0, "skipped": 0}
    machine = {"gpu": "a GPU", "driver": "1", "torch": "2"}
    result = {
        "commit": "abc",
        "command": "python bench/x.py",
        "machine": machine,
        "tests": outcomes,
        "folders": {"kernels": outcomes},
        "sanitizer": "2025",
        "tools": {"memcheck": {"tests": outcomes, "errors": 0}},
        "cuda_sources": digests(),
    }
    monkeypatch.setattr(report_tests, "has", lambda name: True)
    monkeypatch.setattr(report_tests, "load", lambda name: result)
    assert "No CUDA source has changed since." in block()
    path = next(iter(digests()))
    result["cuda_sources"] = {**digests(), path: "0"}
    room = Path(path).parent.name
    assert f"Of {len(digests())} CUDA sources 1 are newer than this run, in `{room}`." in block()


@pytest.mark.parametrize("block", [report_tests.gpu_tests, report_tests.gpu_sanitizer])
def test_a_page_says_where_no_run_is_recorded(
    block: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_tests, "has", lambda name: False)
    assert block() == report_tests.NOT_RUN
