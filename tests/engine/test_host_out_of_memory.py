"""Allocations of the host's memory that fail one after the other: errors of ours, and the process goes on."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from builders import Dims, write_gguf
from coldstream.errors import OutOfMemoryError, host_memory_errors, out_of_resources
from ram_budgets import least_ram

HERE = Path(__file__).parent
COMPILER = shutil.which("cc")
MOST_REPEATS = {"mapped": 110, "from the disk": 60}  # the latter take three times as long each
ERROR = OutOfMemoryError.__name__


@pytest.fixture(scope="module")
def failing_allocations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None or sys.platform != "linux":
        pytest.skip("allocations fail by a preloaded C library, which takes a compiler and Linux")
    library = tmp_path_factory.mktemp("faults") / "failing_allocations.so"
    source = HERE / "failing_allocations.c"
    made = subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"NOT SHOWN: allocations can be made to fail with glibc only ({made.stderr!r})")
    return library


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    types = {"*_exps.weight": "Q4_K", "*.ffn_down_exps.weight": "Q6_K", "token_embd.weight": "Q4_0"}
    write_gguf(path, types=types, dims=Dims(experts=24))
    return path


def small_budget(path: Path) -> int:
    """With which most experts stay on the disk."""
    return least_ram(path, context_length=512) + (1 << 20)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.parametrize("where", MOST_REPEATS)
def test_mm02_whichever_allocation_fails_only_its_load_or_request_does(
    model: Path, failing_allocations: Path, where: str, part_of_examples: slice
) -> None:
    ram, most_repeats = 1 << 32 if where == "mapped" else small_budget(model), MOST_REPEATS[where]
    first, step = part_of_examples.start or 0, part_of_examples.step or 1
    numbers = [str(each) for each in (ram, most_repeats, first, step)]
    command = [sys.executable, str(HERE / "host_memory_worker.py"), str(model), *numbers]
    done = subprocess.run(
        command,
        env=os.environ | {"LD_PRELOAD": str(failing_allocations)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (_, *expected, files, threads), *repeats = [line.split() for line in done.stdout.splitlines()]
    assert expected[0] == "loaded"
    assert len(expected) == 4
    assert ERROR not in expected
    failed_loads = failed_requests = 0
    for number, *results, files_then, threads_then in repeats:
        assert (files_then, threads_then) == (files, threads), f"allocation {number} left something behind"
        if number == "0" or results == expected:  # a retry, or an allocation that could be done without
            assert results == expected
        elif results == [ERROR]:
            failed_loads += 1
        else:
            others = [(is_, was) for is_, was in zip(results, expected, strict=True) if is_ != was]
            assert [is_ for is_, _ in others] == [ERROR], number
            failed_requests += 1
    assert failed_loads > 20 // step
    assert failed_requests > 2 // step


def test_a_refused_mapping_is_about_memory_and_other_refusals_are_not() -> None:
    with (
        pytest.raises(OutOfMemoryError, match=r"ran out: cannot map model\.gguf.*--ram"),
        host_memory_errors(),
    ):
        raise OSError(errno.ENOMEM, "cannot map model.gguf")
    with pytest.raises(PermissionError), host_memory_errors():
        raise OSError(errno.EACCES, "cannot map model.gguf")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("8 GiB"), "memory ran out: 8 GiB"),
        (OSError(errno.ENOMEM, "x"), "memory ran out: x"),
        (BlockingIOError(errno.EAGAIN, "x"), "ulimit -u"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (OSError(errno.EMFILE, "x"), "ulimit -n"),
        (OSError(errno.ENFILE, "x"), "ulimit -n"),
        (OSError(errno.ENOENT, "x"), None),
        (RuntimeError("x"), None),
    ],
)
def test_what_is_used_up_is_named_with_its_limit(error: Exception, said: str | None) -> None:
    found = out_of_resources(error)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)
    with pytest.raises(type(error) if said is None else OutOfMemoryError), host_memory_errors():
        raise error
