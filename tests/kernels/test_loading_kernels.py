"""Kernels that are compiled beside other work; simulated, so that no GPU is needed."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from coldstream.kernels.cuda import program as program_module
from coldstream.kernels.cuda.compiler import CompileError, MachineCode
from coldstream.kernels.cuda.kernel_loading import KernelLoading
from coldstream.kernels.cuda.program import CudaProgram, Kernel, NotedKernel
from coldstream.kernels.cuda.runtime import calls

WAIT_S = 20.0


class Compiler:
    """Compiles what is not kept, each once `goes_on` has its name."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.broken: set[str] = set()
        self.goes_on: dict[str, threading.Event] = {}
        self.begun: dict[str, threading.Event] = {}
        self.compiled: list[tuple[str, ...]] = []
        self.threads: dict[str, threading.Thread] = {}  # that have loaded a kernel

    def held(self, instance: str) -> threading.Event:
        """Compiling this kernel begins, and ends only after the event."""
        self.begun[instance] = threading.Event()
        return self.goes_on.setdefault(instance, threading.Event())

    def find(self, source: Path, instances: Sequence[str], arch: str) -> tuple[MachineCode, ...] | None:
        return _codes(instances) if self.kept.issuperset(instances) else None

    def compile(self, source: Path, instances: Sequence[str], arch: str) -> tuple[MachineCode, ...]:
        self.compiled.append(tuple(instances))
        if instances[0] in self.goes_on:
            self.begun[instances[0]].set()
            assert self.goes_on[instances[0]].wait(WAIT_S)
        if self.broken.intersection(instances):
            raise CompileError(instances[0])
        return _codes(instances)

    def load(self, instances: Sequence[str], codes: Sequence[MachineCode]) -> dict[str, Kernel]:
        self.threads |= dict.fromkeys(instances, threading.current_thread())
        return {instance: NotedKernel() for instance in instances}


def _codes(instances: Sequence[str]) -> tuple[MachineCode, ...]:
    return tuple(MachineCode(b"", instance) for instance in instances)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(program_module, "kept_together", made.find)
    monkeypatch.setattr(program_module, "compile_together", made.compile)
    monkeypatch.setattr(program_module, "_loaded", made.load)
    monkeypatch.setattr(program_module, "_architecture", lambda: "sm_90")
    return made


@pytest.fixture
def program() -> CudaProgram:
    return CudaProgram(Path("some.cu"), ("one<1>", "two<1>", "three<1>"))


def test_steps_begin_before_later_kernels_are_compiled(compiler: Compiler, program: CudaProgram) -> None:
    goes_on, seen = compiler.held("two<1>"), []
    loading = KernelLoading({(program, "one<1>")}, {(program, "two<1>")})
    loading.wait_for_first(lambda *done: seen.append(done))
    assert seen == [(1, 1)]
    assert set(compiler.threads) == {"one<1>"}
    goes_on.set()
    loading.wait()
    assert set(compiler.threads) == {"one<1>", "two<1>"}
    assert threading.main_thread() not in compiler.threads.values()
    loading.close()


def test_what_was_compiled_before_is_loaded_by_one_thread(compiler: Compiler, program: CudaProgram) -> None:
    compiler.kept = {"one<1>", "three<1>"}
    with KernelLoading.beside([(program, instance) for instance in program.instances]):
        pass
    assert compiler.compiled == [("two<1>",)]
    assert compiler.threads["one<1>"] is compiler.threads["three<1>"]
    assert compiler.threads["two<1>"] is not compiler.threads["one<1>"]
    kernels = {program.kernel(instance) for instance in program.instances}
    assert len(kernels) == 3
    assert len(compiler.compiled) == 1


def test_what_takes_long_to_compile_is_begun_first(
    compiler: Compiler, program: CudaProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    slow = CudaProgram(Path("other.cu"), ("long<1>", "longer<1>"), is_slow=True)
    first = [(program, "one<1>"), (slow, "long<1>")]
    loading = KernelLoading(first, [(program, "two<1>"), (slow, "longer<1>")])
    loading.wait()
    loading.close()
    assert compiler.compiled == [("long<1>",), ("one<1>",), ("longer<1>",), ("two<1>",)]


def test_who_asks_waits_for_what_has_begun(compiler: Compiler, program: CudaProgram) -> None:
    goes_on = compiler.held("one<1>")
    loading = KernelLoading({(program, "one<1>")})
    assert compiler.begun["one<1>"].wait(WAIT_S)
    threading.Timer(0.01, goes_on.set).start()
    kernel = program.kernel("one<1>")
    assert compiler.compiled == [("one<1>",)]
    assert program.kernel("one<1>") is kernel
    loading.close()


def test_who_asks_for_what_nobody_loads_compiles_it(compiler: Compiler, program: CudaProgram) -> None:
    kernel = program.kernel("two<1>")
    assert compiler.threads == {"two<1>": threading.main_thread()}
    assert program.kernel("two<1>") is kernel
    loading = KernelLoading([(program, "two<1>")])
    loading.wait()
    loading.close()
    assert compiler.compiled == [("two<1>",)]


def test_nothing_is_loaded_or_waited_for_within_a_capture(compiler: Compiler, program: CudaProgram) -> None:
    """Which may take seconds, and which a capture may not do. What is there is launched in it."""
    kernel = program.kernel("one<1>")
    calls.begin_deferring()
    try:
        assert program.kernel("one<1>") is kernel
        with pytest.raises(AssertionError, match="two<1> is launched before"):
            program.kernel("two<1>")
    finally:
        calls.end_deferring()
    assert compiler.compiled == [("one<1>",)]


def test_groups_are_compiled_one_after_the_other(
    compiler: Compiler, program: CudaProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    loading = KernelLoading(*([(program, each)] for each in ("two<1>", "three<1>", "one<1>")))
    loading.wait()
    loading.close()
    assert compiler.compiled == [("two<1>",), ("three<1>",), ("one<1>",)]


def test_closing_gives_up_what_has_not_begun(
    compiler: Compiler, program: CudaProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for who asks later."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    goes_on = compiler.held("one<1>")
    loading = KernelLoading([(program, "one<1>")], [(program, "two<1>")])
    assert compiler.begun["one<1>"].wait(WAIT_S)
    threading.Timer(0.01, goes_on.set).start()
    loading.close()
    assert compiler.compiled == [("one<1>",)]
    assert set(compiler.threads) == {"one<1>"}
    with KernelLoading.beside({(program, "two<1>")}):
        pass
    assert set(compiler.threads) == {"one<1>", "two<1>"}


def test_an_error_of_a_later_kernel_comes_when_all_are_waited_for(
    compiler: Compiler, program: CudaProgram
) -> None:
    """And to who asks for the kernel, each time."""
    compiler.broken = {"two<1>"}
    loading = KernelLoading({(program, "one<1>")}, {(program, "two<1>")})
    loading.wait_for_first()
    with pytest.raises(CompileError, match="two"):
        loading.wait()
    for _ in range(2):
        with pytest.raises(CompileError, match="two"):
            program.kernel("two<1>")
    loading.close()


def test_an_error_within_goes_on_as_it_is(compiler: Compiler, program: CudaProgram) -> None:
    """Whatever becomes of the kernels."""
    compiler.broken = {"one<1>"}
    with pytest.raises(KeyError, match="within"), KernelLoading.beside({(program, "one<1>")}):
        raise KeyError("within")


def test_where_no_thread_can_be_started_who_asks_compiles(
    compiler: Compiler, program: CudaProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = KernelLoading(())

    def refuse(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(loading._compilers, "submit", refuse)
    pending = program.pending("one<1>")
    assert pending is not None
    loading._first = [pending]
    loading._load_kept()
    loading.wait_for_first()
    program.kernel("one<1>")
    assert compiler.threads == {"one<1>": threading.main_thread()}
    loading.close()


@pytest.mark.parametrize(
    ("instances", "compiled"),
    [
        (("scan<3>", "draw", "bins"), [("scan<3>", "draw", "bins")]),
        (("scan<3>", "scan<4>"), [("scan<3>",), ("scan<4>",)]),
    ],
)
def test_functions_that_are_no_templates_are_compiled_once(
    compiler: Compiler, instances: tuple[str, ...], compiled: list[tuple[str, ...]]
) -> None:
    """With all listed kernels of their file, however many ask."""
    program = CudaProgram(Path("some.cu"), instances)
    with KernelLoading.beside([(program, instance) for instance in instances]):
        pass
    assert sorted(compiler.compiled) == sorted(compiled)
    kernels = {program.kernel(instance) for instance in instances}
    assert len(kernels) == len(instances)
    assert sorted(compiler.compiled) == sorted(compiled)
