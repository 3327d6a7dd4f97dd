"""Drafters of safetensors are converted once, to files that say and propose the same."""

import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_dflash_spec import APRIL, DFLASH_2, FOR_27B, FOR_GPT_OSS_20B, FOR_GPT_OSS_120B, JULY, PREVIEW

from coldstream.errors import (
    ConfigError,
    InconsistentError,
    ModelChangedError,
    ModelNotFoundError,
    StorageError,
)
from coldstream.gguf.metadata import Metadata
from coldstream.gguf.reader import GGUFFile
from coldstream.models.dflash import convert as converting
from coldstream.models.dflash.convert import convert, converted, default_cache, folder_of
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.metadata import metadata_of, spec_of_metadata
from coldstream.models.dflash.spec import DflashSpec, check_target
from dflash_cases import CASES, config, load_cpu, random_tensors, spec_of, write_folder
from dflash_reference import read_tensors
from dflash_trees import DRAFTERS, RECORD, proposed, write_drafter

TREES = json.loads(RECORD.read_text())
PUBLISHED = {
    "preview": PREVIEW,
    "April": APRIL,
    "July": JULY,
    "DFlash 2": DFLASH_2,
    "27B": FOR_27B,
    "gpt-oss-20b": FOR_GPT_OSS_20B,
    "gpt-oss-120b": FOR_GPT_OSS_120B,
}


def as_stored(spec: DflashSpec) -> dict[str, Any]:
    """The fields of a spec, with the epsilon of single precision."""
    return vars(spec) | {"rms_norm_eps": float(np.float32(spec.rms_norm_eps))}


@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_are_those_that_the_folder_was_recorded_with(tmp_path: Path, name: str) -> None:
    """By the drafter in PyTorch, from the safetensors themselves."""
    folder = write_drafter(tmp_path / "drafter", name)
    convert(folder, tmp_path / "drafter.gguf")
    with DflashFile.open(tmp_path / "drafter.gguf") as file:
        assert as_stored(file.spec) == as_stored(spec_of(DRAFTERS[name][0]))
        found = proposed(load_cpu(file).new_sequence())
    for tree, expected in zip(found, TREES[name], strict=True):
        assert tree["token_ids"] == expected["token_ids"]
        assert tree["parents"] == expected["parents"]
        assert tree["log_probs"] == pytest.approx(expected["log_probs"], abs=3e-4)


def test_every_revision_and_type_is_recorded() -> None:
    assert TREES.keys() == DRAFTERS.keys()
    assert len({json.dumps(trees) for trees in TREES.values()}) == len(TREES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_metadata_of_published_drafters_say_what_their_configurations_say(name: str) -> None:
    spec = spec_of(PUBLISHED[name])
    values = {
        key: np.array(value) if isinstance(value, list) else value for key, value in metadata_of(spec).items()
    }
    found = spec_of_metadata(Metadata(values, {}))
    # Which tensors there are says whether attention has biases.
    assert as_stored(replace(found, has_attention_bias=spec.has_attention_bias)) == as_stored(spec)


def test_what_the_target_has_to_be_is_kept(tmp_path: Path) -> None:
    """A file of others does not say how many layers the target has."""
    convert(write_folder(tmp_path / "d", config(), random_tensors(spec_of(config()))), tmp_path / "d.gguf")
    target = type("Target", (), {"vocab_size": 50, "hidden_size": 64, "num_layers": 9})()
    with DflashFile.open(tmp_path / "d.gguf") as file, pytest.raises(ConfigError, match="8 layers"):
        check_target(file.spec, target)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "drafter", "35B, July")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "drafters"


class Progress:
    """What a conversion says of itself."""

    def __init__(self) -> None:
        self.observed: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.observed.append((done, total))


def test_a_folder_is_converted_once_with_progress(folder: Path, cache: Path) -> None:
    progress, again = Progress(), Progress()
    path = converted(folder, progress, cache)
    done, total = progress.observed[-1]
    assert done == total == sum(values.nbytes for values in random_tensors(_spec(path)).values()) // 2
    assert [each for each, _ in progress.observed] == sorted({each for each, _ in progress.observed})
    before = path.stat()
    assert converted(folder, again, cache) == path
    assert again.observed == []
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert oct(cache.stat().st_mode & 0o777) == "0o700"


def _spec(path: Path) -> DflashSpec:
    with DflashFile.open(path) as file:
        return file.spec


def test_the_same_folder_by_another_name_is_the_same(folder: Path, cache: Path, tmp_path: Path) -> None:
    path = converted(folder, None, cache)
    (tmp_path / "link").symlink_to(folder)
    assert converted(tmp_path / "link", None, cache) == path
    other = write_drafter(tmp_path / "other", "35B, July")
    assert converted(other, None, cache) != path


def _flip_a_bit(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def _flip_a_bit_and_restore_its_time(path: Path) -> None:
    before = path.stat()
    _flip_a_bit(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _copy(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").replace(path)


def _of_record(text: str) -> Callable[[Path], None]:
    return lambda path: path.with_suffix(".json").write_text(text) and None


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit": _flip_a_bit,
    "a bit, at the same time": _flip_a_bit_and_restore_its_time,
    "half": _halve,
    "empty": lambda path: os.truncate(path, 0),
    "gone": Path.unlink,
    "another file": _copy,
    "no record": lambda path: path.with_suffix(".json").unlink(),
    "half a record": lambda path: _halve(path.with_suffix(".json")),
    "another record": _of_record("[]"),
    "a deep record": _of_record("[" * 100_000),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(folder: Path, cache: Path, damage: str) -> None:
    path = converted(folder, None, cache)
    content = path.read_bytes()
    DAMAGES[damage](path)
    progress = Progress()
    assert converted(folder, progress, cache) == path
    assert progress.observed
    assert path.read_bytes() == content
    again = Progress()
    converted(folder, again, cache)
    assert again.observed == []


def _touch(folder: Path) -> None:
    os.utime(folder / "config.json", ns=(0, 0))


def _other_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


@pytest.mark.parametrize("change", [_touch, _other_weights])
def test_a_folder_that_has_changed_is_converted_anew(
    folder: Path, cache: Path, change: Callable[[Path], None]
) -> None:
    path = converted(folder, None, cache)
    change(folder)
    progress = Progress()
    assert converted(folder, progress, cache) == path
    assert progress.observed


def test_a_file_of_another_version_is_made_anew(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = converted(folder, None, cache)
    monkeypatch.setattr(converting, "VERSION", 2)
    progress = Progress()
    assert converted(folder, progress, cache) == path
    assert progress.observed


def test_of_two_at_once_one_waits_for_the_other(folder: Path, cache: Path) -> None:
    waiting = Progress()
    second = threading.Thread(target=converted, args=(folder, waiting, cache))

    def begin_the_second(done: int, total: int) -> None:
        if not second.ident:
            second.start()

    path = converted(folder, begin_the_second, cache)
    second.join()
    assert waiting.observed == []
    assert [each.suffix for each in sorted(cache.iterdir())] == [".gguf", ".json", ".lock"]
    assert path.exists()


def test_an_interrupted_conversion_leaves_nothing_behind(folder: Path, cache: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converted(folder, interrupt, cache)
    assert [each.suffix for each in cache.iterdir()] == [".lock"]


def test_a_folder_that_changes_meanwhile_is_an_error(folder: Path, cache: Path) -> None:
    with pytest.raises(ModelChangedError, match="changed while it was converted"):
        converted(folder, lambda done, total: _touch(folder), cache)
    progress = Progress()
    converted(folder, progress, cache)
    assert progress.observed


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process may become larger, as if the disk was full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_that_says_how_to_do_without_the_cache(folder: Path, cache: Path) -> None:
    with (
        largest_file(10_000),
        pytest.raises(StorageError, match=r"cannot be written: .* bytes are needed") as caught,
    ):
        converted(folder, None, cache)
    assert "coldstream convert-drafter FOLDER FILE" in str(caught.value)
    assert [each.suffix for each in cache.iterdir()] == [".lock"]


def test_a_place_that_cannot_be_written_to_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file", tmp_path / "file" / "drafters"):
        with pytest.raises(StorageError, match=r"the drafter cannot be kept: .* convert-drafter FOLDER FILE"):
            converted(folder, None, cache)

    def refuse(path: object, flags: int, *arguments: object, **options: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(converting.os, "open", refuse)
        with pytest.raises(StorageError, match="Permission denied; choose a place that you may write to"):
            converted(folder, None, tmp_path / "closed")
    with pytest.raises(StorageError, match="cannot be written"):
        convert(folder, tmp_path / "absent" / "drafter.gguf")


def test_what_was_converted_before_needs_no_place_to_write_to(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = converted(folder, None, cache)

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(converting.fcntl, "flock", refuse)
    assert converted(folder, None, cache) == path


def test_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert default_cache() == tmp_path / ".cache" / "coldstream" / "drafters"

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(StorageError, match=r"no home directory .* convert-drafter FOLDER FILE"):
        default_cache()


def test_folders_and_their_files_are_distinguished_from_others(folder: Path, tmp_path: Path) -> None:
    assert folder_of(folder) == folder
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        assert folder_of(folder / name) == folder
    assert folder_of(tmp_path / "drafter.gguf") is None
    with pytest.raises(ModelNotFoundError):
        converted(tmp_path / "absent", None, tmp_path / "cache")


def test_what_is_not_valid_is_not_kept(folder: Path, cache: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)
    with pytest.raises(InconsistentError, match=r"model\.safetensors"):
        converted(folder, None, cache)
    assert [each.suffix for each in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(spec_of(CASES[name]))
    convert(write_folder(tmp_path / "d", CASES[name], tensors, num_files=3), tmp_path / "d.gguf")
    with DflashFile.open(tmp_path / "d.gguf") as file:
        found = read_tensors(file)
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[each], tensors[each]) for each in tensors)
    with GGUFFile.open(tmp_path / "d.gguf") as gguf:
        assert all(info.offset % 32 == 0 for info in gguf.tensors.values())
