"""The table of planted faults: each can still be planted, and the tests that must fail are there."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench.report import tests as report_tests
from tools.planted_faults import ROOT, Fault, load_faults, load_rows
from tools.planted_faults.__main__ import chosen, missing, write_rows

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


def row_of(fault: Fault, *, caught: bool = True) -> dict[str, object]:
    return {"name": fault.name, "digest": fault.digest, "caught": caught}


def test_results_are_merged_in_the_order_of_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    first, second = FAULTS[:2]
    assert load_rows(path) == []
    write_rows([row_of(second, caught=False), {"name": "gone"}], path)
    assert load_rows(path) == [row_of(second, caught=False)]
    write_rows([row_of(first)], path)
    assert load_rows(path) == [row_of(first), row_of(second, caught=False)]
    write_rows([row_of(second)], path)
    assert load_rows(path) == [row_of(first), row_of(second)]


@pytest.mark.parametrize("field", ["file", "text", "planted", "tests"])
def test_a_fault_that_has_changed_since_its_result_is_missing(field: str) -> None:
    first, second, third = FAULTS[:3]
    rows = [row_of(first), row_of(second)]
    assert missing([first, second, third], rows) == [third]
    value = (*first.tests, "one") if field == "tests" else f"{getattr(first, field)} "
    changed = dataclasses.replace(first, **{field: value})
    assert missing([changed, second], rows) == [changed]
    assert missing([first], [{"name": first.name, "caught": True}]) == [first]


def test_the_page_counts_all_faults_and_says_what_has_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [
        Fault(f"{room}-{number}", f"src/coldstream/{room}/{number}.py", "text", "planted", ("test",))
        for room, number in [("gguf", 1), ("gguf", 2), ("gguf", 3), ("engine", 1), ("engine", 2)]
    ]
    rows = [{**row_of(fault), "commit": "c0ffee"} for fault in faults[:4]]
    rows[1]["caught"] = False
    rows[3] |= {"digest": "older", "commit": "0ld"}
    (tmp_path / "planted_faults.json").write_text(json.dumps({"faults": rows}))
    monkeypatch.setattr(report_tests, "RESULTS", tmp_path)
    monkeypatch.setattr(report_tests, "load_faults", lambda: faults)
    header, _, *lines = report_tests.planted_faults().splitlines()
    assert header == (
        "| room | files | faults | caught | not caught | changed since their result | without a result |"
    )
    assert lines == [
        "| `gguf` | 3 | 3 | 2 | 1 | 0 | 0 |",
        "| `engine` | 2 | 2 | 0 | 0 | 1 | 1 |",
        "| all | 5 | 5 | 2 | 1 | 1 | 1 |",
        "- `gguf-2`: not caught",
        "",
        "`python -m tools.planted_faults`, commit c0ffee",
    ]
