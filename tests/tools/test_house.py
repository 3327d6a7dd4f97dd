"""Counting what rooms have."""

from pathlib import Path

from tools.house import room_sizes


def test_a_room_has_its_files_lines_and_ideas(tmp_path: Path) -> None:
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "one.py").write_text("class A: ...\n\n\ndef f(): ...\ndef _g(): ...\n")
    two = "class P(Protocol):\n    def m(self): ...\nclass B(A): ...\n"
    (tmp_path / "a" / "deep" / "two.py").write_text(two)
    (tmp_path / "a" / "deep" / "x.cuh").write_text("int a;\nint b;\n")
    (tmp_path / "a" / "_csrc.pyi").write_text("def made(): ...\n")
    (tmp_path / "a" / "notes.txt").write_text("no source\n")
    (tmp_path / "errors.py").write_text("x = 1\n")
    root = {"files": 1, "python_lines": 1, "native_lines": 0, "classes": 0, "protocols": 0, "functions": 0}
    room = {"files": 3, "python_lines": 8, "native_lines": 2, "classes": 2, "protocols": 1, "functions": 1}
    assert room_sizes(tmp_path) == {"(root)": root, "a": room}
