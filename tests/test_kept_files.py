"""PR09: what may be read of kept files, what may not, and what is in the way of writing."""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.kept_files import MACHINE_CODE, MAX_BYTES, MEMORY_COUNTS, Kept, KeptFiles, directory_of

LOSSES = {
    MACHINE_CODE: "compiled kernels are not kept, and will be compiled again at every start: ",
    MEMORY_COUNTS: "counts of a GPU's memory are not kept, and will be made again at every start: ",
}
NAME, CODE = "add-1234.cubin", b"symbol\n" + bytes(range(256)) * 40


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def directory(home: Path) -> Path:
    return home / ".cache" / "coldstream" / "cuda"


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_pr09_what_is_made_is_the_users_alone(home: Path, directory: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        cache = KeptFiles(MACHINE_CODE, directory)
        assert cache.get(NAME) is None
        cache.put(NAME, CODE)
    finally:
        os.umask(before)
    assert cache.get(NAME) == KeptFiles(MACHINE_CODE, directory).get(NAME) == CODE
    assert cache.get("other.cubin") is None
    assert cache.problem is None
    assert [mode(directory), mode(directory.parent), mode(directory / NAME)] == [0o700, 0o700, 0o600]
    assert entries(directory) == [NAME]


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


UNSAFE: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (replace_by_link, "is a link"),
    "group": (lambda path: path.chmod(0o770), "others may write to"),
    "world": (lambda path: path.chmod(0o707), "others may write to"),
    "file": (lambda path: path.rename(path.with_name("real")) and path.touch(), "Not a directory"),
}


@pytest.mark.parametrize("kept", [MACHINE_CODE, MEMORY_COUNTS], ids=lambda kept: kept.folder)
@pytest.mark.parametrize("which", ["directory", "above"])
@pytest.mark.parametrize("what", UNSAFE)
def test_pr09_a_directory_that_others_may_write_to_is_neither_read_nor_written(
    directory: Path, what: str, which: str, kept: Kept
) -> None:
    KeptFiles(kept, directory).put(NAME, CODE)
    path = directory if which == "directory" else directory.parent
    spoil, reason = UNSAFE[what]
    spoil(path)
    cache = KeptFiles(kept, directory)
    assert cache.get(NAME) is None
    assert reason in str(cache.problem)
    assert str(cache.problem).startswith(LOSSES[kept])
    assert str(path) in str(cache.problem)
    cache.put("other.cubin", CODE)
    assert not (directory / "other.cubin").exists()


def test_pr09_a_directory_of_another_user_is_not_used(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KeptFiles(MACHINE_CODE, directory).put(NAME, CODE)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    cache = KeptFiles(MACHINE_CODE, directory)
    assert cache.get(NAME) is None
    cache.put("other.cubin", CODE)
    assert f"{directory.parent} belongs to another user; remove it" in str(cache.problem)
    assert entries(directory) == [NAME]


def test_a_cache_directory_that_is_a_link_is_the_users_choice(home: Path, directory: Path) -> None:
    (home / "scratch").mkdir(parents=True)
    (home / ".cache").symlink_to("scratch")
    KeptFiles(MACHINE_CODE, directory).put(NAME, CODE)
    assert KeptFiles(MACHINE_CODE, directory).get(NAME) == CODE


@pytest.mark.parametrize("kept", [MACHINE_CODE, MEMORY_COUNTS], ids=lambda kept: kept.folder)
def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, kept: Kept) -> None:
    def none() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", none)
    files = KeptFiles(kept, directory_of(kept))
    files.put(NAME, CODE)
    assert files.get(NAME) is None
    assert files.problem == f"{LOSSES[kept]}this user has no home directory"


def test_each_kind_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An entry of the one is none of the other."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    KeptFiles(MACHINE_CODE, directory_of(MACHINE_CODE)).put(NAME, CODE)
    assert KeptFiles(MEMORY_COUNTS, directory_of(MEMORY_COUNTS)).get(NAME) is None
    assert KeptFiles(MACHINE_CODE, directory_of(MACHINE_CODE)).get(NAME) == CODE


SUSPECT: dict[str, Callable[[Path], object]] = {
    "link": replace_by_link,
    "group may write": lambda path: path.chmod(0o660),
    "world may write": lambda path: path.chmod(0o602),
    "directory": lambda path: path.unlink() or path.mkdir(),
    "FIFO": lambda path: path.unlink() or os.mkfifo(path),
    "huge": lambda path: os.truncate(path, MAX_BYTES + 1),
    "empty": lambda path: os.truncate(path, 0),
    "another's": lambda path: os.chown(path, os.geteuid() + 1, -1),
}


@pytest.mark.parametrize("what", SUSPECT)
def test_pr09_an_entry_that_others_may_have_written_is_not_read_and_is_replaced(
    directory: Path, what: str
) -> None:
    if what == "another's" and os.geteuid() != 0:
        pytest.skip("only root may give files away")
    cache = KeptFiles(MACHINE_CODE, directory)
    cache.put(NAME, CODE)
    SUSPECT[what](directory / NAME)
    assert cache.get(NAME) is None
    cache.put(NAME, CODE)
    assert cache.get(NAME) == (None if what == "directory" else CODE)
    assert ("Is a directory" in str(cache.problem)) == (what == "directory")
    assert not [name for name in entries(directory) if name.endswith(".tmp")]


@pytest.mark.parametrize("what", SUSPECT)
def test_entries_that_are_not_read_are_listed(directory: Path, what: str) -> None:
    if what == "another's" and os.geteuid() != 0:
        pytest.skip("only root may give files away")
    cache = KeptFiles(MACHINE_CODE, directory)
    assert cache.damaged() == ()
    assert not directory.exists(), "looking makes nothing"
    cache.put(NAME, CODE)
    cache.put("other.cubin", CODE)
    assert cache.damaged() == ()
    SUSPECT[what](directory / NAME)
    assert NAME in cache.damaged()
    assert "other.cubin" not in cache.damaged()
    assert KeptFiles(MACHINE_CODE, None).damaged() == ()


@given(st.data())
def test_a_damaged_entry_is_none(tmp_path: Path, data: st.DataObject) -> None:
    """Shortened, lengthened, with other bits, or under the name of another one."""
    cache = KeptFiles(MACHINE_CODE, tmp_path / "cache")
    payload = data.draw(st.binary(max_size=200))
    cache.put(NAME, payload)
    path = tmp_path / "cache" / NAME
    good = path.read_bytes()
    position = data.draw(st.integers(0, len(good) - 1))
    shorter, longer = good[:position], good + data.draw(st.binary(min_size=1, max_size=9))
    flipped = (
        good[:position] + bytes([good[position] ^ data.draw(st.integers(1, 255))]) + good[position + 1 :]
    )
    for damaged in (shorter, longer, flipped, data.draw(st.binary(max_size=300))):
        path.write_bytes(damaged)
        assert cache.get(NAME) is None
        (tmp_path / "cache" / "other").write_bytes(good)
        assert cache.get("other") is None
        cache.put(NAME, payload)
        assert cache.get(NAME) == payload
    assert cache.problem is None


WRITER = """
import os, sys
from pathlib import Path
from coldstream.kept_files import MACHINE_CODE, KeptFiles
cache, payload = KeptFiles(MACHINE_CODE, Path(sys.argv[1])), b"x" * 100_000
"""


def writer(directory: Path, script: str) -> "subprocess.Popen[str]":
    """A process that runs `script` with a cache and a payload."""
    command = [sys.executable, "-c", WRITER + script, str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_what_a_killed_writer_leaves_is_removed_and_a_living_ones_is_not(directory: Path) -> None:
    stopped = """
os.replace = lambda *names, **options: (print("written", flush=True), sys.stdin.read())
cache.put("add.cubin", payload)
"""
    with writer(directory, stopped) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        (name,) = entries(directory)
        assert (name.startswith("."), name.endswith(".tmp")) == (True, True)
        assert (directory / name).stat().st_size > 100_000
        assert KeptFiles(MACHINE_CODE, directory).get("add.cubin") is None
        assert entries(directory) == [name]
        process.kill()
    assert KeptFiles(MACHINE_CODE, directory).get("add.cubin") is None
    assert entries(directory) == []


def test_a_full_disk_is_said_and_leaves_nothing(directory: Path) -> None:
    """A limit on the size of files fails a write in its middle, as a full disk does."""
    KeptFiles(MACHINE_CODE, directory).put(NAME, CODE)
    script = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, {resource.RLIM_INFINITY}))
cache.put("add.cubin", payload)
print(cache.problem)
print(cache.get("add.cubin"), len(cache.get("{NAME}")))
"""
    with writer(directory, script) as process:
        problem, got, *_ = process.communicate()[0].splitlines()
    assert f"not kept, and will be compiled again at every start: {directory}: File too large" in problem
    assert got == f"None {len(CODE)}"
    assert entries(directory) == [NAME]


def test_threads_and_processes_write_and_read_at_once(directory: Path) -> None:
    script = """
for i in range(200):
    name = f"{i % 3}.cubin"
    assert cache.get(name) in (None, payload)
    cache.put(name, payload)
assert cache.get("0.cubin") == payload
"""
    processes = [writer(directory, script) for _ in range(3)]
    cache, wrong = KeptFiles(MACHINE_CODE, directory), []

    def work() -> None:
        for i in range(200):
            if cache.get(f"{i % 3}.cubin") not in (None, b"x" * 100_000):
                wrong.append(i)
            cache.put(f"{i % 3}.cubin", b"x" * 100_000)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert wrong == []
    assert entries(directory) == ["0.cubin", "1.cubin", "2.cubin"]
