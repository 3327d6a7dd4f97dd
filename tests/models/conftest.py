from collections.abc import Callable
from pathlib import Path

import pytest

from builders import TinyModel, write_model
from coldstream.gguf import GGUFFile
from coldstream.models import ModelSpec

LoadSpec = Callable[[TinyModel], ModelSpec]


@pytest.fixture
def load_spec(tmp_path: Path) -> LoadSpec:
    """Writes a tiny model to a file and reads its spec from there."""

    def load(model: TinyModel) -> ModelSpec:
        with GGUFFile.open(write_model(tmp_path / "tiny.gguf", model)[0]) as file:
            return ModelSpec.from_gguf(file.metadata, file.tensors)

    return load
