"""What a machine refused to page-lock is kept for its plans, until it locks more."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.errors import StorageError
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.limits import Limits
from coldstream.placement.lock_file import LockRefusal, last_refusal, note_lock, refusal_warning

GIB = 2**30
CPU = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33)
HERE = replace(CPU, gpu=GpuHardware("a GPU", "1.0", 2**35, 2**34))
NOTE = st.tuples(st.integers(1, 30), st.integers(0, 30)).map(lambda two: (max(two), two[1]))


@given(st.lists(NOTE, max_size=8))
def test_the_last_refusal_stays_until_more_is_locked(notes: list[tuple[int, int]]) -> None:
    with TemporaryDirectory() as folder:
        path, expected = Path(folder) / "cache" / "lock.json", None
        for wanted, locked in notes:
            note_lock(HERE, wanted, locked, path)
            if locked < wanted:
                expected = (wanted, locked)
            elif expected is not None and locked > expected[1]:
                expected = None
            found = last_refusal(HERE, path)
            assert (None if found is None else (found.wanted_bytes, found.locked_bytes)) == expected


def test_another_machine_and_one_without_a_gpu_refused_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    note_lock(CPU, 20, 8, path)
    assert not path.exists()
    note_lock(HERE, 20, 8, path)
    assert last_refusal(HERE, path) is not None
    assert last_refusal(CPU, path) is None
    assert HERE.gpu is not None
    assert last_refusal(replace(HERE, gpu=replace(HERE.gpu, driver="2.0")), path) is None
    assert last_refusal(HERE, None) is None


@pytest.mark.parametrize(
    "change",
    [
        {"wanted_bytes": 8},
        {"locked_bytes": -1},
        {"locked_bytes": 7.5},
        {"wanted_bytes": True, "locked_bytes": False},
        {"refused_at": "yesterday"},
        {"another": 1},
    ],
    ids=str,
)
def test_what_is_damaged_counts_as_absent(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "lock.json"
    note_lock(HERE, 20, 8, path)
    document = json.loads(path.read_text())
    document["refusal"] |= change
    path.write_text(json.dumps(document))
    assert last_refusal(HERE, path) is None
    for text in ("", "[]", "{" * 9999, json.dumps(document | {"version": 0})):
        path.write_text(text)
        assert last_refusal(HERE, path) is None
    note_lock(HERE, 20, 8, path)
    assert last_refusal(HERE, path) is not None, "it is written anew"


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/lock\.json: no folder for it"):
        note_lock(HERE, 20, 8, tmp_path / "file" / "lock.json")


def test_a_warning_says_what_was_refused_when_what_follows_and_what_helps() -> None:
    limits = replace(Limits.read(), wsl=None, locked_bytes=None)
    part = LockRefusal("2026-01-02 03:04 UTC", 20 * GIB, 8 * GIB)
    text = refusal_warning(part, 16 * GIB, limits)
    assert "at 2026-01-02 03:04 UTC this system page-locked 8.0 of 20.0 GiB" in text
    assert "which wants 16.0 GiB" in text
    assert "the experts in 50% of the file" in text
    assert "close programs" in text
    assert ".wslconfig" in refusal_warning(replace(part, locked_bytes=0), GIB, replace(limits, wsl=2))
    assert "no expert" in refusal_warning(replace(part, locked_bytes=0), GIB, limits)
