"""Kernels that are compiled beside other work; simulated, so that no GPU is needed."""

import os
import threading
from pathlib import Path

import pytest

from coldstream.kernels.cuda.compiler import CompileError
from coldstream.kernels.cuda.program import CudaProgram, NotedKernel, loading_kernels
from coldstream.kernels.cuda.runtime import calls

WAIT_S = 20.0


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> CudaProgram:
    monkeypatch.setattr(calls, "attach", lambda: None)
    return CudaProgram(Path("some.cu"), ("one", "two"))


def test_what_is_within_runs_beside_them(program: CudaProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels wait for what only happens within, and the end for the kernels."""
    goes_on, loaded, seen = threading.Event(), set(), []

    def kernel(self: CudaProgram, instance: str) -> NotedKernel:
        assert goes_on.wait(WAIT_S)
        loaded.add(instance)
        return NotedKernel()

    monkeypatch.setattr(CudaProgram, "kernel", kernel)
    noted = {(program, "one"), (program, "two")}
    with loading_kernels(noted, lambda *done: seen.append(done)):
        assert not loaded
        goes_on.set()
    assert loaded == {"one", "two"}
    assert seen == [(1, 2), (2, 2)]


def test_what_takes_long_to_compile_is_begun_first(
    program: CudaProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def kernel(self: CudaProgram, instance: str) -> NotedKernel:
        begun.append(instance)
        return NotedKernel()

    monkeypatch.setattr(CudaProgram, "kernel", kernel)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    slow = CudaProgram(Path("other.cu"), ("long", "longer"), is_slow=True)
    with loading_kernels([(program, "one"), (slow, "long"), (program, "two"), (slow, "longer")]):
        pass
    assert begun == ["long", "longer", "one", "two"]


def test_an_error_of_a_kernel_comes_at_the_end(program: CudaProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(self: CudaProgram, instance: str) -> NotedKernel:
        raise CompileError(instance)

    monkeypatch.setattr(CudaProgram, "kernel", kernel)
    within = []
    with pytest.raises(CompileError, match="one"), loading_kernels({(program, "one")}):
        within.append(True)
    assert within


def test_an_error_within_goes_on_as_it_is(program: CudaProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the kernels."""

    def kernel(self: CudaProgram, instance: str) -> NotedKernel:
        raise CompileError(instance)

    monkeypatch.setattr(CudaProgram, "kernel", kernel)
    with pytest.raises(KeyError, match="within"), loading_kernels({(program, "one")}):
        raise KeyError("within")
