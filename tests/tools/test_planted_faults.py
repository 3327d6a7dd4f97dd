"""The table of planted faults: each can still be planted, and the tests that must fail are there."""

import json
from pathlib import Path

import pytest
from tools.planted_faults import ROOT, Fault, load_faults
from tools.planted_faults.__main__ import chosen, updated

FAULTS = load_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_a_fault_occurs_once_and_its_tests_exist(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.text) == 1
    assert fault.planted != fault.text
    assert fault.tests
    for test in fault.tests:
        file, *names = test.split("::")
        content = (ROOT / file).read_text()
        assert f"def {names[-1]}(" in content or f"{names[0]} = " in content, test


def test_every_room_has_faults() -> None:
    rooms = {path.name for path in (ROOT / "src" / "coldstream").iterdir() if (path / "__init__.py").exists()}
    assert rooms - {"assets"} <= {fault.room for fault in FAULTS}


def test_faults_are_chosen_by_name_or_pattern() -> None:
    assert chosen(FAULTS, []) == FAULTS
    assert [fault.name for fault in chosen(FAULTS, [FAULTS[3].name])] == [FAULTS[3].name]
    assert {fault.room for fault in chosen(FAULTS, ["gguf-*", "layers-*"])} == {"gguf", "layers"}
    with pytest.raises(ValueError, match=r"no fault is named nothing-\*"):
        chosen(FAULTS, ["gguf-*", "nothing-*"])


def test_a_result_keeps_what_is_known_of_other_faults(tmp_path: Path) -> None:
    first, second = ({"name": fault.name, "caught": True} for fault in FAULTS[:2])
    path = tmp_path / "result.json"
    assert updated([second], path) == [second]
    path.write_text(json.dumps({"faults": [{"name": "gone"}, {**second, "caught": False}]}))
    assert updated([first], path) == [first, {**second, "caught": False}]
