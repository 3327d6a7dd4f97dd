"""What is seen: of this machine, of made-up trees, and of folders that are in a bad state."""

import importlib.metadata
import os
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coldstream.kept_files import MACHINE_CODE, MEMORY_COUNTS, Kept, KeptFiles, directory_of
from coldstream.placement.hardware import Hardware
from coldstream.placement.hardware_file import default_path
from coldstream.placement.lock_file import note_lock
from coldstream.planning.diagnosis import gather as room
from coldstream.planning.diagnosis.gather import (
    cards,
    commands,
    folders,
    gather_facts,
    installed,
    libraries,
    rates_of,
    refused_lock,
    with_card,
)
from coldstream.planning.diagnosis.machine_facts import Card, Folder
from coldstream.planning.machine import measured_hardware
from machine_facts import NO_GPU, SOUND


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of its own."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def of(name: str) -> Folder:
    (folder,) = (each for each in folders() if each.name == name)
    return folder


def texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts(each)]
    if isinstance(value, list | tuple):
        return [text for each in value for text in texts(each)]
    return [value] if isinstance(value, str) else []


def test_this_machine_is_seen_as_it_is_and_left_as_it_was(home: Path) -> None:
    facts = gather_facts("1.2.3")
    assert not list(home.iterdir()), "nothing is made"
    assert facts.cpu.num_cores == Hardware.measure().num_physical_cores
    assert facts.program.version == "1.2.3"
    assert facts.cpu.tiers[0] == "generic"
    assert facts.rates.state == "absent"
    shown = texts(asdict(facts))
    assert not [text for text in shown if str(home) in text or str(Path.home()) in text]
    assert "~/.cache/coldstream" in shown


def test_cards_are_seen_without_a_driver(tmp_path: Path) -> None:
    devices = {
        "0000:01:00.0": {
            "vendor": "0x10de",
            "class": "0x030000",
            "current_link_width": "4",
            "max_link_width": "16",
        },
        "0000:02:00.0": {"vendor": "0x10de", "class": "0x030200"},
        "0000:03:00.0": {
            "vendor": "0x10de",
            "class": "0x030200",
            "current_link_width": "0",
            "max_link_width": "255",
        },
        "0000:01:00.1": {"vendor": "0x10de", "class": "0x040300"},
        "0000:04:00.0": {"vendor": "0x1002", "class": "0x030000"},
    }
    for address, files in devices.items():
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
    assert list(cards(tmp_path)) == [
        Card("0000:01:00.0", 4, 16),
        Card("0000:02:00.0", None, None),
        Card("0000:03:00.0", None, 255),
    ]


def test_libraries_are_those_of_the_packages_own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = [
        "numpy>=2.4.1",
        "absent-library<6,>=5.23",
        "fastapi >= 0.165",
        'uvicorn>=0.5; extra == "serve"',
        "cuda-bindings; extra == 'cuda'",
        'pytest>=9; extra == "test"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    found = {each.name: (each.extra, each.least) for each in libraries()}
    assert found == {
        "numpy": (None, "2.4.1"),
        "absent-library": (None, "5.23"),
        "fastapi": (None, "0.165"),
        "cuda-bindings": ("cuda", None),
    }
    versions = {each.name: each.version for each in libraries()}
    assert versions["numpy"] == importlib.metadata.version("numpy")
    assert versions["absent-library"] is None


def test_a_package_that_is_only_imported_has_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_PACKAGE", "no-such-package")
    assert list(libraries()) == []


def test_versions_of_this_package_in_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("9.1", "9.2"):
        metadata = tmp_path / version / f"example_package-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: example-package\nVersion: {version}\n")
    (tmp_path / "link").symlink_to(tmp_path / "9.1")
    monkeypatch.setattr(room, "_PACKAGE", "example-package")
    monkeypatch.setattr("sys.path", [str(tmp_path / name) for name in ("9.1", "link", "9.2")])
    assert list(installed()) == ["9.1", "9.2"]


def test_commands_on_the_path(tmp_path: Path) -> None:
    paths = [tmp_path / name / "coldstream" for name in ("none", "text", "link", "one", "two", "folder")]
    for path in paths:
        path.parent.mkdir()
    _, text, link, one, two, folder = paths
    for path in (text, one, two):
        path.write_text("#!/bin/sh\n")
        path.chmod(0o644 if path is text else 0o755)
    link.symlink_to(one)
    folder.mkdir()
    search_path = os.pathsep.join(["", *(str(path.parent) for path in paths), str(tmp_path / "absent")])
    assert list(commands(search_path)) == [str(link), str(two)], "the first of those that are one file"
    assert list(commands("")) == []


KEPT = {"kernels": MACHINE_CODE, "counts": MEMORY_COUNTS}


def kept_in(kept: Kept) -> tuple[Path, KeptFiles]:
    """The user's folder, and what is kept there."""
    directory = directory_of(kept)
    assert directory is not None
    return directory, KeptFiles(kept, directory)


@pytest.mark.parametrize("name", KEPT)
def test_folders_that_are_not_made_yet(home: Path, name: str) -> None:
    folder = of(name)
    assert folder.path == str(directory_of(KEPT[name]))
    assert (folder.exists, folder.is_writable, folder.problem, folder.damaged) == (False, True, None, ())
    assert folder.free_bytes is not None


@pytest.mark.parametrize("name", KEPT)
def test_kept_files_that_were_damaged_or_forged(home: Path, name: str) -> None:
    directory, files = kept_in(KEPT[name])
    for entry in ("whole", "cut", "open", "other"):
        files.put(entry, b"content" * 100)
    os.truncate(directory / "cut", 50)
    (directory / "open").chmod(0o666)
    os.replace(directory / "other", directory / "renamed")
    assert {each: of(each).damaged for each in KEPT} == {
        **dict.fromkeys(KEPT, ()),
        name: ("cut", "open", "renamed"),
    }


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("above", [False, True])
def test_a_folder_of_kept_files_that_others_may_write_to(home: Path, name: str, above: bool) -> None:
    directory, files = kept_in(KEPT[name])
    files.put("a", b"content")
    spoilt = directory.parent if above else directory
    spoilt.chmod(0o777)
    folder = of(name)
    assert folder.problem is not None
    assert f"others may write to {spoilt}; remove it" in folder.problem
    assert folder.damaged == ()


def test_a_folder_that_may_not_be_written_to(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/self")
    assert not of("rates").is_writable


def test_a_file_where_the_folder_would_be(home: Path) -> None:
    (home / ".cache").write_text("")
    assert f"{home / '.cache'} is no folder; remove it" == of("drafters").problem


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", none)
    for name in ("rates", *KEPT, "drafters"):
        folder = of(name)
        assert (folder.path, folder.exists, folder.is_writable) == (None, False, False)


def test_rates_have_an_age_and_belong_to_a_machine(home: Path) -> None:
    here = Hardware.measure()
    now = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)
    assert rates_of(with_card(here, NO_GPU), now).state == "absent"
    path = default_path()
    assert path is not None
    measured_hardware(None, path=path)
    path.write_text(path.read_text().replace(_date_in(path), "2026-01-02 03:04 UTC"))
    rates = rates_of(with_card(here, NO_GPU), now)
    (measured,) = rates.measured
    assert (rates.state, measured.measured_at, rates.age_days) == ("current", "2026-01-02 03:04 UTC", 61)
    other = replace(here, cpu_name="another CPU")
    assert rates_of(with_card(other, NO_GPU), now).state == "of another machine"
    assert rates_of(with_card(here, SOUND.gpu), now).state == "incomplete", "this machine has a GPU now"
    assert (
        rates_of(with_card(here, replace(SOUND.gpu, missing_packages=("cuda-bindings",))), now).state
        == "current"
    )
    path.write_text(path.read_text().replace("2026-01-02", "tomorrow"))
    assert rates_of(with_card(here, NO_GPU), now).state == "damaged"


def _date_in(path: Path) -> str:
    import json

    return str(json.loads(path.read_text())["cpu"]["measured_at"])


def test_a_refused_lock_is_found_on_the_machine_that_refused_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "lock_path", lambda: tmp_path / "lock.json")
    here, now = with_card(Hardware.measure(), SOUND.gpu), datetime.now(UTC)
    assert refused_lock(here, now) is None
    note_lock(here, 20, 8, tmp_path / "lock.json")
    found = refused_lock(here, now)
    assert found is not None
    assert (found.age_days, found.wanted_bytes, found.locked_bytes) == (0, 20, 8)
    assert refused_lock(with_card(Hardware.measure(), NO_GPU), now) is None
