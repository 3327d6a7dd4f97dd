"""The block on benchmarks: every module that can be run, and what it measures."""

import ast

from bench.report.tables import table
from bench.results import ROOT

FOLDERS = ("bench", "bench/kernels", "bench/engine", "bench/serving", "bench/peers", "tests/audits")
MAIN = '\nif __name__ == "__main__":\n'


def programs() -> str:
    """A table of all modules with a command line, by folder."""
    rows = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            source = path.read_text()
            if MAIN in source:
                words = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split()
                module = ".".join((*folder.split("/"), path.stem))
                rows.append([f"`python -m {module}`", " ".join(words)])
    return table(["command", "what it measures"], rows)
