"""How long a context is under a budget of RAM: weights come first, and what was asked for is kept."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.assets import demo_model_path
from coldstream.engine import EngineConfig
from coldstream.engine.config import cache_bytes_per_token
from coldstream.engine.opened_model import resolved
from coldstream.gguf import GGUFFile
from coldstream.models import ModelSpec
from coldstream.models.footprint import dense_bytes

CONFIG = EngineConfig(str(demo_model_path()), device="cpu", ram=1)
SHARE = 0.25  # of what the weights leave


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[GGUFFile, ModelSpec]]:
    with GGUFFile.open(demo_model_path()) as file:
        yield file, ModelSpec.from_gguf(file.metadata, file.tensors)


@given(left=st.integers(1, 20 << 20))
def test_a_default_context_takes_a_share_of_what_the_weights_leave(
    demo: tuple[GGUFFile, ModelSpec], left: int
) -> None:
    file, spec = demo
    ram = dense_bytes(spec, file.tensors) + left
    ctx_size = resolved(replace(CONFIG, ram=ram), file, spec, None).ctx_size
    affordable = int(left * SHARE) // cache_bytes_per_token(CONFIG, spec)
    assert ctx_size == max(1, min(affordable, spec.context_length))


@pytest.mark.parametrize("ctx_size", [1, 64, 512])
@pytest.mark.parametrize("ram", [1, 1 << 20, 1 << 30])
def test_a_context_that_was_asked_for_is_the_runners_to_refuse(
    demo: tuple[GGUFFile, ModelSpec], ctx_size: int, ram: int
) -> None:
    config = replace(CONFIG, ram=ram, ctx_size=ctx_size)
    assert resolved(config, *demo, None).ctx_size == ctx_size
    assert resolved(replace(config, ctx_size=None), *demo, None).ctx_size
