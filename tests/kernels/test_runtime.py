"""The thread pool, graph capture and the guard around mapped files, seen from Python."""

import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coldstream.errors import GenerationFault, ModelChangedError
from coldstream.kernels import _csrc
from tools.wheel_trial import TIERS, cpu_flags

MIB = 1 << 20
CHOICE: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 0.9, "min_p": 0.0, "seed": 1, "position": 1,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "recent": (), "biased": (), "biases": (), "allowed": None, "logprobs": None,
}  # fmt: skip


@pytest.fixture(params=[1, 2, 3])
def runtime(request: pytest.FixtureRequest) -> _csrc.Runtime:
    return _csrc.Runtime(request.param)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(4 * MIB))
    return path


def map_file(path: Path) -> _csrc.MappedFile:
    with path.open("rb") as file:
        return _csrc.MappedFile(file.fileno(), path.stat().st_size, path.name)


def capture_sum(
    runtime: _csrc.Runtime, capacity: int, num_ops: int
) -> tuple[_csrc.Graph, torch.Tensor, torch.Tensor]:
    """A graph that adds `x` to `out` `num_ops` times; (graph, x, out). The caller keeps x and out alive."""
    x, out = torch.ones(capacity, 3), torch.zeros(capacity, 3)
    runtime.begin_capture(capacity)
    for _ in range(num_ops):
        _csrc.add(runtime, out, x, out)
    return runtime.end_capture(), x, out


def test_runtime_reports_its_tier_and_threads() -> None:
    for name in _csrc.supported_tiers():
        runtime = _csrc.Runtime(2, name)
        assert (runtime.tier, runtime.threads) == (name, 2)
    assert _csrc.Runtime(1).tier == _csrc.supported_tiers()[-1]


def test_tiers_are_those_of_the_processor() -> None:
    """By the kernel's own list. AMX also takes a permission, so it is left out."""
    flags = cpu_flags()
    expected = {"generic"} | {tier for tier, wanted in TIERS.items() if wanted <= flags}
    assert set(_csrc.supported_tiers()) - {"amx"} == expected


def test_runtime_refuses_unknown_tier_and_thread_counts() -> None:
    with pytest.raises(ValueError, match="unknown tier 'sse9': use generic"):
        _csrc.Runtime(1, "sse9")
    for threads in (0, -1, 1025):
        with pytest.raises(ValueError, match=f"not {threads}"):
            _csrc.Runtime(threads)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_may_be_active_at_any_time(threads: int) -> None:
    """Also between two runs that follow each other at once."""
    runtime = _csrc.Runtime(threads)
    graph, _x, out = capture_sum(runtime, capacity=4000, num_ops=3)
    assert runtime.active_threads == threads
    for number in range(300):
        runtime.active_threads = 1 + number * 5 % threads
        assert runtime.active_threads == 1 + number * 5 % threads
        out.zero_()
        graph.run(4000)
        assert torch.equal(out, torch.full((4000, 3), 3.0))
    for count in (0, -1, threads + 1):
        with pytest.raises(ValueError, match=f"{count} active threads of {threads}"):
            runtime.active_threads = count
    runtime.active_threads = 1
    del runtime, graph  # which wakes those that sleep


def seconds_of(threads: set[str]) -> list[str]:
    """Each one's time on a CPU, and what it waits for."""
    tasks = [Path("/proc/self/task", number) for number in sorted(threads)]
    return [f"{task.joinpath('schedstat').read_text().split()[0]} {_state(task)}" for task in tasks]


def _state(task: Path) -> str:
    return task.joinpath("stat").read_text().rpartition(")")[2].split()[0]


def test_threads_that_are_not_active_sleep_while_others_work() -> None:
    before = set(os.listdir("/proc/self/task"))
    runtime = _csrc.Runtime(4)
    helpers = set(os.listdir("/proc/self/task")) - before
    assert len(helpers) == 3
    graph, _x, _out = capture_sum(runtime, capacity=4000, num_ops=9)
    runtime.active_threads = 1
    graph.run(4000)
    until = time.monotonic() + 60
    while any(not each.endswith("S") for each in seconds_of(helpers)) and time.monotonic() < until:
        os.sched_yield()
    asleep = seconds_of(helpers)
    for _ in range(20):
        graph.run(4000)
    assert seconds_of(helpers) == asleep
    runtime.active_threads = 4
    until = time.monotonic() + 60
    while seconds_of(helpers) == asleep and time.monotonic() < until:
        graph.run(4000)
    assert seconds_of(helpers) != asleep


def test_graph_runs_its_ops_in_order_on_the_given_rows(runtime: _csrc.Runtime) -> None:
    graph, x, out = capture_sum(runtime, capacity=5, num_ops=4)
    assert graph.num_ops == 4
    assert graph.capacity == 5
    assert not out.any(), "capture must not run anything"
    graph.run(3)
    assert torch.equal(out, 4 * torch.tensor([1.0, 1, 1, 0, 0])[:, None].expand(5, 3))
    x.fill_(2)
    graph.run(5)
    assert torch.equal(out, torch.tensor([12.0, 12, 12, 8, 8])[:, None].expand(5, 3))


def test_graph_refuses_rows_outside_its_capacity(runtime: _csrc.Runtime) -> None:
    graph, _x, out = capture_sum(runtime, capacity=2, num_ops=1)
    for rows in (0, -1, 3):
        with pytest.raises(ValueError, match=f"captured for 2 rows cannot run {rows}"):
            graph.run(rows)
    assert not out.any()


def test_pr05_empty_graph_runs(runtime: _csrc.Runtime) -> None:
    runtime.begin_capture(1)
    runtime.end_capture().run(1)


def test_capture_calls_must_match(runtime: _csrc.Runtime) -> None:
    with pytest.raises(ValueError, match="no capture is under way"):
        runtime.end_capture()
    runtime.begin_capture(2)
    assert runtime.capturing
    with pytest.raises(ValueError, match="already under way"):
        runtime.begin_capture(2)
    with pytest.raises(ValueError, match="2 rows and the arrays of this call have 3"):
        _csrc.add(runtime, torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(3, 1))
    assert runtime.end_capture().num_ops == 0
    assert not runtime.capturing
    with pytest.raises(ValueError, match="at least 1 row"):
        runtime.begin_capture(0)


def test_graph_keeps_its_pool_alive() -> None:
    runtime = _csrc.Runtime(2)
    graph, _x, out = capture_sum(runtime, capacity=1000, num_ops=2)
    del runtime
    graph.run(1000)
    assert torch.equal(out, torch.full((1000, 3), 2.0))


def test_profile_names_every_op_and_runs_it(runtime: _csrc.Runtime) -> None:
    graph, _x, out = capture_sum(runtime, capacity=2, num_ops=3)
    profile = graph.profile(2)
    assert [name for name, _ in profile] == ["add"] * 3
    assert all(seconds > 0 for _, seconds in profile)
    assert out.eq(3).all()


def test_pr05_a_million_tiny_jobs_with_more_threads_than_cores() -> None:
    runtime = _csrc.Runtime(2 * (os.cpu_count() or 1) + 1)
    graph, _x, out = capture_sum(runtime, capacity=2, num_ops=250)
    for _ in range(4000):
        graph.run(2)
    assert out.eq(1_000_000).all()


def test_pr05_concurrent_callers_are_serialised() -> None:
    runtime = _csrc.Runtime(2)
    graphs = [capture_sum(runtime, capacity=4, num_ops=3) for _ in range(8)]

    def call(graph: _csrc.Graph) -> None:
        for _ in range(50):
            graph.run(4)

    callers = [threading.Thread(target=call, args=(graph,)) for graph, _, _ in graphs]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(out.eq(150).all() for _, _, out in graphs)


def test_pr05_failing_op_raises_and_leaves_the_pool_usable(runtime: _csrc.Runtime) -> None:
    positions = torch.tensor([7], dtype=torch.int32)
    angles, one, out = torch.zeros(1, 4, 2), torch.ones(1, 1), torch.zeros(1, 1)
    runtime.begin_capture(1)
    _csrc.rope_angles(runtime, positions, 1e4, angles)
    _csrc.add(runtime, out, one, out)
    graph = runtime.end_capture()
    graph.run(1)
    positions[0] = -1
    with pytest.raises(ValueError, match="negative position"):
        graph.run(1)
    assert out.item() == 1, "ops after the failed one must not run"
    positions[0] = 8
    graph.run(1)
    assert out.item() == 2


def test_pr05_of_concurrent_callers_those_alone_get_an_error_whose_op_fails() -> None:
    runtime = _csrc.Runtime(3)
    sums = [capture_sum(runtime, capacity=2, num_ops=3) for _ in range(4)]
    negative, angles = torch.tensor([-1], dtype=torch.int32), torch.zeros(1, 4, 2)
    runtime.begin_capture(1)
    _csrc.rope_angles(runtime, negative, 1e4, angles)
    failing = runtime.end_capture()
    errors: list[int] = []

    def fail() -> None:
        for _ in range(50):
            try:
                failing.run(1)
            except ValueError:
                errors.append(1)

    def add(graph: _csrc.Graph) -> None:
        for _ in range(50):
            graph.run(2)

    callers = [threading.Thread(target=fail) for _ in range(4)]
    callers += [threading.Thread(target=add, args=(graph,)) for graph, _, _ in sums]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(errors) == 200
    assert all(out.eq(150).all() for _, _, out in sums)


def test_pr05_a_pool_that_is_let_go_while_callers_queue_serves_them_and_ends() -> None:
    num_before = len(os.listdir("/proc/self/task"))
    runtime = _csrc.Runtime(4)
    graphs = [capture_sum(runtime, capacity=4, num_ops=20) for _ in range(8)]
    sums = [(x, out) for _, x, out in graphs]
    all_wait = threading.Barrier(9)

    def call(graph: _csrc.Graph) -> None:
        all_wait.wait()
        for _ in range(20):
            graph.run(4)

    callers = [threading.Thread(target=call, args=(graphs.pop()[0],)) for _ in range(8)]
    for caller in callers:
        caller.start()
    all_wait.wait()
    del runtime  # who calls holds what is left of it
    for caller in callers:
        caller.join()
    callers.clear()
    assert all(out.eq(400).all() for _, out in sums)
    limit = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) > num_before:  # the callers' own may take a moment to end
        assert time.monotonic() < limit


def long_call(
    kind: str, mapped: _csrc.MappedFile
) -> tuple[Callable[[], object], tuple[torch.Tensor, torch.Tensor]]:
    """A call that does nothing in Python by which a thread would give way, and the memory that it needs."""
    runtime = _csrc.Runtime(2)
    graph, x, out = capture_sum(runtime, capacity=4000, num_ops=20)
    row = _csrc.TokenChoice(np.zeros(100_000, np.float32), None, **CHOICE)
    calls: dict[str, Callable[[], object]] = {
        "run": partial(graph.run, 4000),
        "profile": partial(graph.profile, 4000),
        "op": partial(_csrc.add, runtime, x, out, out),
        "pages": partial(_csrc.touch_pages, runtime, mapped, 0, mapped.size),
        "choice": partial(_csrc.choose_tokens, [row]),
    }
    return calls[kind], (x, out)


@pytest.mark.parametrize("kind", ["run", "profile", "op", "pages", "choice"])
def test_pr06_python_goes_on_while_the_extension_computes(kind: str, model_path: Path) -> None:
    """No thread has to give way here, so that others go on only when the extension lets them."""
    compute, _memory = long_call(kind, map_file(model_path))
    others: list[int] = []
    seen: list[int] = []

    def call() -> None:
        for _ in range(2000):
            compute()
            if others:
                break
        seen.extend(others)

    interval, caller = sys.getswitchinterval(), threading.Thread(target=call)
    sys.setswitchinterval(1e6)
    try:
        caller.start()
        others.append(1)
        caller.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == [1]


def test_touch_pages_reads_the_whole_file_and_refuses_more(runtime: _csrc.Runtime, model_path: Path) -> None:
    mapped = map_file(model_path)
    assert mapped.size == 4 * MIB
    _csrc.touch_pages(runtime, mapped, 0, mapped.size)
    _csrc.touch_pages(runtime, mapped, 4 * MIB - 1, 1)
    _csrc.touch_pages(runtime, mapped, 4 * MIB, 0)
    for offset, num_bytes in [(0, 4 * MIB + 1), (4 * MIB + 1, 0), (1, 2**64 - 1), (2**64 - 1, 2)]:
        with pytest.raises(ValueError, match="outside a mapping of 4194304 bytes"):
            _csrc.touch_pages(runtime, mapped, offset, num_bytes)


def test_shrunk_file_raises_and_the_pool_stays_usable(runtime: _csrc.Runtime, model_path: Path) -> None:
    mapped = map_file(model_path)
    os.truncate(model_path, MIB)
    for _ in range(3):
        with pytest.raises(
            ModelChangedError, match=r"model\.gguf changed while in use: byte \d+ can no longer be read"
        ):
            _csrc.touch_pages(runtime, mapped, 0, mapped.size)
    _csrc.touch_pages(runtime, mapped, 0, MIB)
    os.truncate(model_path, 4 * MIB)
    _csrc.touch_pages(runtime, mapped, 0, mapped.size)


def test_fl06_advice_about_bytes_that_are_gone_succeeds_and_proves_nothing(
    runtime: _csrc.Runtime, model_path: Path
) -> None:
    mapped = map_file(model_path)
    with model_path.open("rb") as file:
        same = mmap.mmap(file.fileno(), 4 * MIB, access=mmap.ACCESS_READ)
    os.truncate(model_path, MIB)
    same.madvise(mmap.MADV_WILLNEED, 2 * MIB, MIB)  # the system reports success
    same.close()
    mapped.read_ahead(0, mapped.size)
    mapped.read_ahead(2 * MIB, MIB)
    for offset in (0, 2 * MIB):
        with pytest.raises(ModelChangedError, match=r"model\.gguf changed while in use: byte \d+"):
            _csrc.touch_pages(runtime, mapped, offset, MIB + 1)
    _csrc.touch_pages(runtime, mapped, 0, MIB)


def test_read_ahead_takes_any_range_of_the_file_and_refuses_more(
    runtime: _csrc.Runtime, model_path: Path
) -> None:
    mapped = map_file(model_path)
    for offset, num_bytes in [(0, 4 * MIB), (1, 1), (mmap.PAGESIZE - 1, 2), (4 * MIB - 1, 1), (4 * MIB, 0)]:
        mapped.read_ahead(offset, num_bytes)
        _csrc.touch_pages(runtime, mapped, offset, num_bytes)
    for offset, num_bytes in [(0, 4 * MIB + 1), (4 * MIB + 1, 0), (1, 2**64 - 1), (2**64 - 1, 2)]:
        with pytest.raises(ValueError, match="outside a mapping of 4194304 bytes"):
            mapped.read_ahead(offset, num_bytes)


def test_fault_names_the_file_it_happened_in(
    runtime: _csrc.Runtime, model_path: Path, tmp_path: Path
) -> None:
    other_path = tmp_path / "other.gguf"
    other_path.write_bytes(bytes(MIB))
    whole, other = map_file(model_path), map_file(other_path)
    os.truncate(other_path, 0)
    with pytest.raises(ModelChangedError, match=r"other\.gguf changed while in use: byte \d+"):
        _csrc.touch_pages(runtime, other, 0, MIB)
    _csrc.touch_pages(runtime, whole, 0, whole.size)


def test_file_shorter_than_asked_is_refused(model_path: Path) -> None:
    with (
        model_path.open("rb") as file,
        pytest.raises(ModelChangedError, match="has 4194304 bytes and had 4194305"),
    ):
        _csrc.MappedFile(file.fileno(), 4 * MIB + 1)
    with pytest.raises(OSError, match=r"cannot read lost\.gguf") as caught:
        _csrc.MappedFile(-1, 10, "lost.gguf")
    assert caught.value.errno == errno.EBADF
    with model_path.open("rb") as file, pytest.raises(ValueError, match="no bytes to map"):
        _csrc.MappedFile(file.fileno(), 0)


def test_pr04_forked_child_gets_an_error_and_can_make_its_own_runtime(model_path: Path) -> None:
    runtime, mapped = _csrc.Runtime(2), map_file(model_path)
    graph, *_buffers = capture_sum(runtime, capacity=1, num_ops=1)
    graph.run(1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            graph.run(1)
        except GenerationFault as error:
            if "before fork()" in str(error):
                del runtime, graph
                _csrc.touch_pages(_csrc.Runtime(2), mapped, 0, mapped.size)
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    graph.run(1)


BUS_ERROR_OUTSIDE_THE_GUARD = """
import mmap, tempfile
from coldstream.kernels import _csrc
file = tempfile.TemporaryFile()
file.truncate(8192)
guarded = _csrc.MappedFile(file.fileno(), 8192)
ours = mmap.mmap(file.fileno(), 8192)
file.truncate(0)
ours[0]
print("survived")
"""


@pytest.mark.parametrize("options", [[], ["-X", "faulthandler"]])
def test_bus_error_elsewhere_still_ends_the_process(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *options, "-c", BUS_ERROR_OUTSIDE_THE_GUARD],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "survived" not in done.stdout
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(options)
