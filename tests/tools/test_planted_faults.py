"""The tables of planted faults: each can be planted, its tests are there, and results hold."""

import ast
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.report import tests as report_tests
from tools.planted_faults import ROOT, Fault, fault_of, load_faults, load_rows
from tools.planted_faults.__main__ import chosen, missing, sample, samples, write_rows
from tools.planted_faults.changes import Change
from tools.planted_faults.source_copy import BY_CONTENT
from tools.planted_faults.sources import Sources

FAULTS = load_faults()
SOURCES = Sources(ROOT)


def test_every_fault_can_be_planted_and_its_tests_exist() -> None:
    wrong = [line for fault in FAULTS for line in complaints(fault)]
    assert not wrong, "\n".join(wrong)


def complaints(fault: Fault) -> Iterator[str]:
    """What is wrong with an entry of a table."""
    try:
        SOURCES.planted(fault)
    except (ValueError, SyntaxError, OSError) as error:
        yield f"{fault.name}: {error}"
    if not fault.tests:
        yield f"{fault.name}: no tests"
    for test in fault.tests:
        file, *names = test.split("::")
        content = SOURCES.text(file)
        if f"def {names[-1]}(" not in content and f"{names[0]} = " not in content:
            yield f"{fault.name}: there is no {test}"


def test_files_with_faults_of_python_are_compiled_by_their_contents() -> None:
    """A fault may have the size of what it replaces, and stand there for less than a second."""
    python = {Path(fault.file).parts[0] for fault in FAULTS if fault.file.endswith(".py")}
    assert python == set(BY_CONTENT)


def test_every_room_has_faults() -> None:
    rooms = {path.name for path in (ROOT / "src" / "coldstream").iterdir() if (path / "__init__.py").exists()}
    assert rooms - {"assets"} <= {fault.room for fault in FAULTS}


def test_another_layout_leaves_faults_of_python_as_they_are(tmp_path: Path) -> None:
    """Every twentieth, in sources that were printed anew."""
    for fault in [fault for fault in FAULTS if fault.file.endswith(".py")][::20]:
        other = tmp_path / fault.file
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text(ast.unparse(ast.parse(SOURCES.text(fault.file))))
        reprinted = Sources(tmp_path)
        expected, actual = SOURCES.planted(fault), reprinted.planted(fault)
        assert ast.dump(ast.parse(actual)) == ast.dump(ast.parse(expected)), fault.name
        assert reprinted.digest(fault) == SOURCES.digest(fault), fault.name


def test_faults_are_chosen_by_name_or_pattern() -> None:
    assert chosen(FAULTS, []) == FAULTS
    assert [fault.name for fault in chosen(FAULTS, [FAULTS[3].name])] == [FAULTS[3].name]
    assert {fault.room for fault in chosen(FAULTS, ["gguf-*", "layers-*"])} == {"gguf", "layers"}
    with pytest.raises(ValueError, match=r"no fault is named nothing-\*"):
        chosen(FAULTS, ["gguf-*", "nothing-*"])


def test_samples_have_all_faults_once_and_every_commit_has_one_of_them() -> None:
    parts = samples(FAULTS)
    assert sorted(fault.name for part in parts for fault in part) == sorted(fault.name for fault in FAULTS)
    assert all(len({fault.is_compiled for fault in part}) == 1 for part in parts)
    met = [sample(FAULTS, f"{number:012x}") for number in range(len(parts))]
    assert met == parts
    assert sample(FAULTS, "00000000000a-changed") == parts[10]
    assert sample(FAULTS, "unknown") in parts


def row_of(fault: Fault, *, caught: bool = True, sources: Sources = SOURCES) -> dict[str, object]:
    return {"name": fault.name, "digest": sources.digest(fault), "caught": caught}


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


MODULE = """class Pool:
    def take(self, count):
        if count > self.free:
            return None
        self.free -= count
        return count
"""


def fault_in(root: Path, source: str = MODULE, **fields: object) -> tuple[Fault, Sources]:
    """A fault of a module that is written below `root`."""
    file = root / "src" / "coldstream" / "kvcache" / "pool.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    given = {"function": "Pool.take", "at": "operator >", "to": ">=", "tests": ["tests/a.py::test_a"]}
    entry = {"name": "one", "file": str(file.relative_to(root)), **given, **fields}
    return fault_of(entry), Sources(root)


def test_a_fault_that_changes_nothing_or_is_not_python_is_refused(tmp_path: Path) -> None:
    for fields, error in (
        ({"to": ">"}, "changes nothing"),
        ({"at": "condition", "to": "(@)"}, "changes nothing"),
        ({"at": "condition", "to": "not"}, "invalid syntax"),
        ({"function": "Pool.give"}, "one: src/coldstream/kvcache/pool.py, Pool.give: there is no Pool.give"),
        ({"nth": 2}, "of operator > there are 1, not 2"),
    ):
        fault, sources = fault_in(tmp_path, **fields)
        with pytest.raises((ValueError, SyntaxError), match=error):
            sources.planted(fault)
    with pytest.raises(TypeError, match="unexpected keyword argument 'planted'"):
        fault_in(tmp_path, planted="a")


def test_a_fault_is_missing_once_it_or_what_it_changes_is_another(tmp_path: Path) -> None:
    first, sources = fault_in(tmp_path)
    rows = [row_of(first, sources=sources)]
    assert missing([first], rows, sources) == []
    assert missing([first], [{"name": "one", "caught": True}], sources) == [first]
    for fields in ({"at": "condition", "to": "True"}, {"to": "=="}, {"tests": ["tests/a.py::test_b"]}):
        changed, _ = fault_in(tmp_path, **fields)
        assert missing([changed], rows, sources) == [changed]
    other, sources = fault_in(tmp_path, MODULE.replace("self.free:", "self.kept:"))
    assert missing([other], rows, sources) == [other]


def test_a_result_holds_when_code_around_the_piece_changes_and_files_are_moved(tmp_path: Path) -> None:
    first, sources = fault_in(tmp_path)
    rows = [row_of(first, sources=sources)]
    same = MODULE.replace("        if count", "        self.asked += 1  # of all\n        if count")
    again, sources = fault_in(tmp_path, same.replace("count > self.free", "(count\n > self.free)"))
    assert missing([again], rows, sources) == []
    moved = dataclasses.replace(again, tests=("tests/kvcache/b.py::test_a",))
    assert missing([moved], rows, sources) == []


def test_the_page_counts_all_faults_and_says_what_has_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code.py").write_text("def code():\n    return 1\n")
    faults = [
        Fault(f"{room}-{number}", f"src/coldstream/{room}/{number}.py", "code", (change,), ("a.py::test",))
        for room, number in [("gguf", 1), ("gguf", 2), ("gguf", 3), ("engine", 1), ("engine", 2)]
        for change in [Change("constant 1", to="2")]
    ]
    for fault in faults:
        (tmp_path / fault.file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / fault.file).write_text("def code():\n    return 1\n")
    rows = [
        {**row_of(fault, sources=Sources(tmp_path)), "commit": "c0ffee", "date": "2026-11-28"}
        for fault in faults[:4]
    ]
    rows[1]["caught"] = False
    del rows[2]["date"]
    rows[3] |= {"digest": "older", "commit": "0ld"}
    (tmp_path / "planted_faults.json").write_text(json.dumps({"faults": rows}))
    monkeypatch.setattr(report_tests, "RESULTS", tmp_path)
    monkeypatch.setattr(report_tests, "ROOT", tmp_path)
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
        "`python -m tools.planted_faults`: 2 on 2026-11-28 at c0ffee, 1 before dates were kept",
    ]
