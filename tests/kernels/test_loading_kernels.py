"""Kernels that are compiled beside other work; simulated, so that no GPU is needed."""

import os
import threading
from pathlib import Path

import pytest

from coldstream.kernels.cuda import program as program_module
from coldstream.kernels.cuda.compiler import CompileError
from coldstream.kernels.cuda.program import CudaProgram, NotedKernel, loading_kernels
from coldstream.kernels.cuda.runtime import calls

WAIT_S = 20.0


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> CudaProgram:
    monkeypatch.setattr(calls, "attach", lambda: None)
    return CudaProgram(Path("some.cu"), ("one<1>", "two<1>"))


def test_what_is_within_runs_beside_them(program: CudaProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels wait for what only happens within, and the end for the kernels."""
    goes_on, loaded, seen = threading.Event(), set(), []

    def kernel(self: CudaProgram, instance: str) -> NotedKernel:
        assert goes_on.wait(WAIT_S)
        loaded.add(instance)
        return NotedKernel()

    monkeypatch.setattr(CudaProgram, "kernel", kernel)
    noted = {(program, "one<1>"), (program, "two<1>")}
    with loading_kernels(noted, lambda *done: seen.append(done)):
        assert not loaded
        goes_on.set()
    assert loaded == {"one<1>", "two<1>"}
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
    slow = CudaProgram(Path("other.cu"), ("long<1>", "longer<1>"), is_slow=True)
    with loading_kernels([(program, "one<1>"), (slow, "long<1>"), (program, "two<1>"), (slow, "longer<1>")]):
        pass
    assert begun == ["long<1>", "longer<1>", "one<1>", "two<1>"]


def test_an_error_of_a_kernel_comes_at_the_end(program: CudaProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(self: CudaProgram, instance: str) -> NotedKernel:
        raise CompileError(instance)

    monkeypatch.setattr(CudaProgram, "kernel", kernel)
    within = []
    with pytest.raises(CompileError, match="one"), loading_kernels({(program, "one<1>")}):
        within.append(True)
    assert within


def test_an_error_within_goes_on_as_it_is(program: CudaProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the kernels."""

    def kernel(self: CudaProgram, instance: str) -> NotedKernel:
        raise CompileError(instance)

    monkeypatch.setattr(CudaProgram, "kernel", kernel)
    with pytest.raises(KeyError, match="within"), loading_kernels({(program, "one<1>")}):
        raise KeyError("within")


@pytest.mark.parametrize(
    ("instances", "compiled"),
    [
        (("scan<3>", "draw", "bins"), [("scan<3>", "draw", "bins")]),
        (("scan<3>", "scan<4>"), [("scan<3>",), ("scan<4>",)]),
    ],
)
def test_functions_that_are_no_templates_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch, instances: tuple[str, ...], compiled: list[tuple[str, ...]]
) -> None:
    """With all listed kernels of their file, however many threads ask."""
    asked: list[tuple[str, ...]] = []

    def load(source: Path, together: tuple[str, ...]) -> dict[str, NotedKernel]:
        asked.append(together)
        return {instance: NotedKernel() for instance in together}

    monkeypatch.setattr(calls, "attach", lambda: None)
    monkeypatch.setattr(program_module, "_load", load)
    program = CudaProgram(Path("some.cu"), instances)
    with loading_kernels([(program, instance) for instance in instances]):
        pass
    assert sorted(asked) == sorted(compiled)
    kernels = [program.kernel(instance) for instance in instances]
    assert len(set(map(id, kernels))) == len(instances)
    assert sorted(asked) == sorted(compiled)
