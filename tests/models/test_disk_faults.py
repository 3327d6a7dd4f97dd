"""Disks that fail, stall and read less than they were asked: one retry, then an error, never a wrong bit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runner_cases import MIX

from builders import Dims, write_gguf
from ram_budgets import least_ram

HERE = Path(__file__).parent
COMPILER = shutil.which("cc")
EVER = 1_000_000


@pytest.fixture(scope="module")
def faulty_pread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None or sys.platform != "linux":
        pytest.skip("faults are injected by a preloaded C library, which takes a compiler and Linux")
    library = tmp_path_factory.mktemp("faults") / "faulty_pread.so"
    source = HERE / "faulty_pread.c"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """A model, a budget for a third of its experts, and what a request answers."""
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    write_gguf(path, types=MIX, dims=Dims(experts=24))
    budget = least_ram(path, context_length=64) + (4 << 20)
    (answer,) = run(path, 1 << 32, 1)
    return path, budget, answer


def run(path: Path, ram_bytes: int, requests: int, library: Path | None = None, fault: str = "") -> list[str]:
    """The lines of disk_faults_worker.py."""
    faults = {"LD_PRELOAD": str(library), "FAULT": fault} if library else {}
    command = [sys.executable, str(HERE / "disk_faults_worker.py"), str(path), str(ram_bytes), str(requests)]
    result = subprocess.run(
        command, env=os.environ | faults, capture_output=True, text=True, check=True, timeout=120
    )
    return result.stdout.splitlines()


@pytest.mark.sharded
@pytest.mark.parametrize("first", [0, 1, 2, 7, 40])
def test_fl04_a_read_that_fails_once_is_tried_again(
    model: tuple[Path, int, str], faulty_pread: Path, first: int
) -> None:
    path, budget, answer = model
    *answers, statistics = run(path, budget, 2, faulty_pread, f"eio {first} 1")
    assert answers == [answer] * 2
    assert statistics.split()[0] == "1"


def test_fl04_a_disk_that_stays_broken_fails_the_request(
    model: tuple[Path, int, str], faulty_pread: Path
) -> None:
    path, budget, _ = model
    assert run(path, budget, 3, faulty_pread, f"eio 0 {EVER}")[:3] == ["ModelChangedError"] * 3


@pytest.mark.sharded(of="models on the CPU")
def test_ex01_a_disk_that_recovers_answers_as_before(
    model: tuple[Path, int, str], faulty_pread: Path
) -> None:
    path, budget, answer = model
    *answers, _ = run(path, budget, 60, faulty_pread, "eio 5 200")
    assert answers[0] == "ModelChangedError"
    assert answers[-1] == answer
    assert set(answers) == {"ModelChangedError", answer}


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("fault", ["eintr 3 200", f"short 0 {EVER}", "short 10 5", "stall 4 2"])
def test_fl04_interrupted_short_and_slow_reads_are_read_on(
    model: tuple[Path, int, str], faulty_pread: Path, fault: str
) -> None:
    path, budget, answer = model
    *answers, statistics = run(path, budget, 2, faulty_pread, fault)
    assert answers == [answer] * 2
    assert statistics.split()[0] == "0"


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(
    model: tuple[Path, int, str], faulty_pread: Path
) -> None:
    path, budget, answer = model
    assert run(path, budget, 2, faulty_pread, f"direct 0 {EVER}") == [answer, answer, "0 False"]


@pytest.fixture(scope="module")
def direct(model: tuple[Path, int, str]) -> None:
    """Skips where no file can be read past the page cache."""
    path, budget, _ = model
    if run(path, budget, 1)[-1] != "0 True":
        pytest.skip("NOT SHOWN: the file system of temporary files has no direct reads")


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("fault", [f"short 0 {EVER}", f"page 0 {EVER}"])
def test_after_a_short_read_direct_reads_go_on(
    model: tuple[Path, int, str], faulty_pread: Path, fault: str
) -> None:
    """A read that ends inside a page is completed by a plain one, and direct reads go on.

    One that ends with a page is continued directly.
    """
    path, budget, answer = model
    assert run(path, budget, 2, faulty_pread, fault) == [answer, answer, "0 True"]


@pytest.mark.parametrize("first", [0, 3, 20])
def test_ex01_a_read_of_a_failed_request_that_comes_late_spoils_no_other(
    model: tuple[Path, int, str], faulty_pread: Path, first: int
) -> None:
    """Its slot is not given away before it has been read. Requests go on for longer than it takes."""
    path, budget, answer = model
    *answers, _ = run(path, budget, 80, faulty_pread, f"late {first} 21")
    assert answers[0] == "ModelChangedError"
    assert answers[-1] == answer
    assert set(answers) == {"ModelChangedError", answer}
