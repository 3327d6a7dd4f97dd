from collections.abc import Callable
from pathlib import Path

import pytest
from runner_cases import MIX

from builders import TinyModel, write_gguf, write_model
from coldstream.gguf import GGUFFile
from coldstream.models import ModelSpec, read_spec

LoadSpec = Callable[[TinyModel], ModelSpec]


@pytest.fixture
def load_spec(tmp_path: Path) -> LoadSpec:
    """Writes a tiny model to a file and reads its spec from there."""

    def load(model: TinyModel) -> ModelSpec:
        with GGUFFile.open(write_model(tmp_path / "tiny.gguf", model)[0]) as file:
            return read_spec(file.metadata, file.tensors)

    return load


@pytest.fixture(scope="session")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts with weights of several types."""
    (path,) = write_gguf(tmp_path_factory.mktemp("models") / "moe.gguf", types=MIX)
    return path
