"""An LLM around a hash, and the command line run in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldstream.cli.main import main
from coldstream.engine import LLM
from hash_runner import open_hash_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM.from_opened(open_hash_model(tmp_path / "tiny.gguf")) as llm:
        yield llm


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line; gives exit code, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
