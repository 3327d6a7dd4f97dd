from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from builders import TinyModel, write_model
from coldstream.gguf.reader import GGUFFile
from coldstream.models import ModelSpec, read_spec


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small cost more to share out than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[[TinyModel], ModelSpec]:
    def read(model: TinyModel) -> ModelSpec:
        with GGUFFile.open(write_model(tmp_path / "tiny.gguf", model)[0]) as file:
            return read_spec(file.metadata, file.tensors)

    return read
