"""A copy of the sources in which a fault may stand, with an interpreter that imports that copy.

Unit of work: one fault, one run of pytest.
"""

import compileall
import importlib
import json
import os
import py_compile
import select
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.checkouts import make_environment
from tools.planted_faults import ROOT, Fault
from tools.planted_faults.extension import build_with
from tools.planted_faults.sources import Sources

BY_CONTENT = ("src", "tools")  # where faults are, in Python
TEST_TIMEOUT_S = 120
RUN_TIMEOUT_S = 600


class SourceCopy:
    """The copy in `folder`, which must not exist yet. sources: its texts without faults."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "sources"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        # Compiled once, and again where a file has other contents, which is found by them: its size and time
        # may be the same.
        by_content = py_compile.PycInvalidationMode.CHECKED_HASH
        for room in BY_CONTENT:
            compileall.compile_dir(self.root / room, quiet=2, invalidation_mode=by_content)
        extension = importlib.import_module("coldstream.kernels._csrc").__file__
        assert extension is not None
        self._extension = self.root / "src/coldstream/kernels" / Path(extension).name
        shutil.copy2(extension, self._extension)
        self.sources = Sources(self.root)
        self._build = folder / "build"
        self._python = make_environment(folder / "venv", self.root / "src")
        self._report, self._output = folder / "report.xml", folder / "output.txt"
        self._server: subprocess.Popen[str] | None = None

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The fault stands in the copy, and in its extension if it is compiled, until the block is left."""
        file = self.root / fault.file
        planted = self.sources.planted(fault)
        extension = self._extension.read_bytes()
        try:
            file.write_text(planted)
            if fault.is_compiled:
                built = build_with(fault.file, self.root, self._build, ROOT, self._extension.name)
                self._extension.unlink()
                shutil.copy2(built, self._extension)
            yield
        finally:
            file.write_text(self.sources.text(fault.file))
            # A new file: the old one may be mapped by a process that has not ended.
            self._extension.unlink()
            self._extension.write_bytes(extension)

    def failing(self, tests: Iterable[str]) -> set[str]:
        """Which of `tests` fail, be it for some of their parameters only; all if the process dies or hangs.

        Raises ValueError if one does not exist, or does not run on this machine.
        """
        tests = list(tests)
        if not tests:
            return set()
        self._report.unlink(missing_ok=True)
        # A test that was merely interrupted might be tried again for ever, as hypothesis does.
        limit = [f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=thread"]
        options = ["-q", "-p", "no:cacheprovider", "--assert=plain", *limit, f"--junitxml={self._report}"]
        status = self._run([*options, *tests])
        output = self._output.read_text()
        if status in (int(pytest.ExitCode.USAGE_ERROR), int(pytest.ExitCode.NO_TESTS_COLLECTED)):
            raise ValueError(output)
        if not self._report.exists():
            return set(tests)
        return _failing_of(self._report, tests, output)

    def _run(self, arguments: list[str]) -> int | None:
        """Pytest's exit status; None if it had to be stopped."""
        if self._server is None:
            self._server = subprocess.Popen(
                [self._python, ROOT / "tools/planted_faults/pytest_server.py", self._output],
                cwd=self.root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(arguments), file=self._server.stdin, flush=True)
        if select.select([self._server.stdout], [], [], RUN_TIMEOUT_S)[0]:
            return int(self._server.stdout.readline())
        self.close()
        return None

    def close(self) -> None:
        """Ends the process that runs the tests; the next run would start one."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None


def _failing_of(report: Path, tests: list[str], output: str) -> set[str]:
    failing, ran = set(), set()
    broken = False
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}".partition("[")[0]
        has_failed = any(case.find(kind) is not None for kind in ("failure", "error"))
        broken |= has_failed and not case.get("classname")  # the file itself could not be read
        for test in tests:
            if name == test.replace(".py::", ".").replace("::", ".").replace("/", "."):
                failing |= {test} if has_failed else set()
                ran |= {test} if case.find("skipped") is None else set()
    if broken:
        return set(tests)
    if missing := set(tests) - ran:
        raise ValueError(f"did not run: {', '.join(sorted(missing))}\n{output}")
    return failing
