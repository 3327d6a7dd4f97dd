"""One tiny model around a hash for the tests of this room."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coldstream.engine import LLM
from hash_runner import HashRunner, open_hash_model


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM.from_opened(open_hash_model(tmp_path / "tiny.gguf")) as llm:
        yield llm


@pytest.fixture
def runner(llm: LLM) -> HashRunner:
    assert isinstance(llm.opened.runner, HashRunner)
    return llm.opened.runner
