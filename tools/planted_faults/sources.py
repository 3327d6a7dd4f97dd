"""The sources below a folder, and what faults make of them."""

import hashlib
from functools import cache
from pathlib import Path

from tools.planted_faults import Fault, Row, python_changes, token_changes
from tools.planted_faults.changes import Change, Edit, edited
from tools.planted_faults.python_pieces import PythonSource


class Sources:
    """Files below `root` as they were when they were first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.text = cache(self._read)
        self.python = cache(lambda file: PythonSource(self.text(file)))

    def _read(self, file: str) -> str:
        return (self._root / file).read_text()

    def planted(self, fault: Fault) -> str:
        """The text of its file with the fault.

        Raises ValueError if a change is not of the file as it is now, or changes nothing, and SyntaxError if
        the text would no longer be Python.
        """
        source, edits = self.text(fault.file).encode(), self._edits(fault)
        planted = edited(source, edits).decode()
        if fault.file.endswith(".py"):
            is_same = python_changes.means_the_same(self.python(fault.file), edits)
        else:
            words = [
                [token.text for token in token_changes.tokens_of(text)] for text in (planted, source.decode())
            ]
            is_same = words[0] == words[1]
        if is_same:
            raise ValueError(f"{fault.name}: changes nothing")
        return planted

    def digest(self, fault: Fault) -> str:
        """Changes with what is changed, how, and which tests must fail: a result holds for one digest.

        The names of the file and of the tests' files do not count, as both may be moved. Raises ValueError
        if a change is not of the file as it is now.
        """
        old = [edit.old for edit in self._edits(fault)]
        tests = [test.partition("::")[2] for test in fault.tests]
        words = repr([fault.function, fault.changes, old, tests])
        return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()

    def is_of(self, fault: Fault, row: Row) -> bool:
        """Whether a result holds for the fault as it is now; not if it cannot be planted any more."""
        try:
            return row.get("digest") == self.digest(fault)
        except ValueError:
            return False

    def _edits(self, fault: Fault) -> list[Edit]:
        try:
            return [self._edit(fault, change) for change in fault.changes]
        except ValueError as error:
            raise ValueError(f"{fault.name}: {fault.file}, {fault.function}: {error}") from error

    def _edit(self, fault: Fault, change: Change) -> Edit:
        if not fault.file.endswith(".py"):
            return token_changes.find_edit(self.text(fault.file), fault.function, change)
        source = self.python(fault.file)
        return python_changes.find_edit(source, source.scope(fault.function), change)
