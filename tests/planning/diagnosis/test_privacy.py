"""No home directory and no user's name in what may be published."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.planning.diagnosis import privacy
from coldstream.planning.diagnosis.machine_facts import Folder
from coldstream.planning.diagnosis.privacy import hide, without_names
from machine_facts import SOUND


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("/home/ann", "~"),
        ("/home/ann/hub", "~/hub"),
        ("others may write to /home/ann/.cache; remove it", "others may write to ~/.cache; remove it"),
        ("/home/ann; /home/ann.", "~; ~."),
        ("/home/anna/hub", "/home/anna/hub"),
        ("/data/ann/hub", "/data/USER/hub"),
        ("/data/ann", "/data/USER"),
        ("/data/anna/hub-of-ann", "/data/anna/hub-of-ann"),
        ("an ann of a CPU", "an ann of a CPU"),
    ],
)
def test_names_go_where_they_are_parts_of_a_path(text: str, hidden: str) -> None:
    assert hide(text, ("/home/ann",), "ann") == hidden


def test_a_folder_called_as_the_home_is_none() -> None:
    for text in ("/data/root/hub", "/data-1/root/hub", "/a./root/hub", "/root/root/hub"):
        assert hide(text, ("/root",), "root").endswith("/USER/hub")


def test_a_home_within_another_goes_first() -> None:
    assert hide("/home/ann/deep/x", ("/home/ann", "/home/ann/deep"), None) == "~/x"


@given(st.lists(st.sampled_from(["/home/ann", "/", "ann", "x", " ", ";", "hub", "."])).map("".join))
def test_no_path_of_the_home_directory_is_left(text: str) -> None:
    assert not re.search(r"/home/ann(?![\w])", hide(text, ("/home/ann",), "ann"))


def test_the_root_is_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: Path("/")))
    folder = Folder("models", "/data/hub", True, True, None)
    assert without_names(folder) == folder


def test_a_home_that_is_a_link_goes_by_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    monkeypatch.setenv("HOME", str(link))
    for path in (real, link):
        folder = without_names(Folder("models", f"{path}/hub", True, True, None, f"{path} is a link"))
        assert (folder.path, folder.problem) == ("~/hub", "~ is a link")


def test_what_has_no_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "_user", lambda: "Example")
    assert asdict(without_names(SOUND)) == asdict(SOUND)
    renamed = replace(SOUND, folders=(replace(SOUND.folders[3], path="/data/Example/hub"),))
    assert without_names(renamed).folders[0].path == "/data/USER/hub"
