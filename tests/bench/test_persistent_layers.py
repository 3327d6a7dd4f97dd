"""The prototype of layers in one launch: what can be seen of it without a GPU."""

import re
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

import persistent_layers
from coldstream.kernels.cuda.compiler import compile_instance
from persistent_layers import PHASES_KIB, PROGRAM, Phase


@pytest.mark.parametrize("kernel", PROGRAM.instances)
def test_it_compiles(kernel: str, tmp_path: Path) -> None:
    assert compile_instance(PROGRAM.source, kernel, "sm_90a", tmp_path).cubin


def test_numbers_are_those_of_the_kernel() -> None:
    source = PROGRAM.source.read_text()
    found = re.search(r"threads = (\d+), stages = (\d+), inputs = (\d+)", source)
    assert found is not None
    numbers = (persistent_layers.THREADS, persistent_layers.STAGES, persistent_layers.INPUTS)
    assert tuple(map(int, found.groups())) == numbers
    assert [name for name, _ in Phase._fields_] == ["weights", "count"]


def test_forty_layers_read_what_a_token_of_the_model_does() -> None:
    assert 40 * sum(PHASES_KIB) * 1024 == pytest.approx(1.978e9, rel=0.03)
