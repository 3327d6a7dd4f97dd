"""The committed type stub says what the extension has."""

from pathlib import Path

from nanobind.stubgen import StubGen

import coldstream.kernels
from coldstream.kernels import _csrc


def test_the_stub_is_the_one_nanobind_writes() -> None:
    generator = StubGen(_csrc)
    generator.put(_csrc)
    assert generator.get() == Path(str(coldstream.kernels.__file__)).with_name("_csrc.pyi").read_text(), (
        "run: python -m nanobind.stubgen -m coldstream.kernels._csrc -O src/coldstream/kernels"
    )
