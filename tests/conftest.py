"""Settings for every test: reproducible properties, and no memory that happens to hold the right answer."""

import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from coldstream.kernels.cuda import compiler
from coldstream.placement import hardware_file
from host_device import EVERY_LANE_ARRIVES, HostDevice, turing_device
from short_rates import SHORT

# The definitions that kernels are compared with are many small operations of PyTorch, between which its
# second thread spins: with several test processes this would take most of the time.
torch.set_num_threads(1)


def keep_freed_memory() -> None:
    """Have this process use freed memory again, which the C library would give back to the system.

    Fresh pages must be cleared. That was a tenth of the time of tests that open many small models. The
    programs that tests start keep the usual settings, so what they show of memory is that of a user.
    AddressSanitizer's allocator ignores the call.
    """
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3  # of <malloc.h>
    libc = ctypes.CDLL(None)
    for option, value in ((m_mmap_threshold, 32 << 20), (m_trim_threshold, 1 << 30), (m_top_pad, 16 << 20)):
        libc.mallopt(option, value)


keep_freed_memory()

settings.register_profile(
    "repeatable",
    derandomize=True,
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
settings.register_profile("shard", settings.get_profile("repeatable"), max_examples=25)
settings.load_profile("repeatable")

HALVED_ABOVE = 25  # numbers of examples that tests give; with less, an example is long
SHARDS = 3  # of the cases of a test marked `sharded`, unless it says how many: `sharded(9)`
OF_SHARDS = 9  # of tests that are cases of one: `sharded(of="processes")`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--unpoisoned",
        action="store_true",
        help="leave torch.empty unwritten, for tools that see reads of it",
    )
    parser.addoption(
        "--every-lane-arrives",
        action="store_true",
        help="compile kernels so that racecheck can follow them, see gemm_copies.cuh",
    )
    parser.addoption(
        "--shard",
        type=lambda word: int(word, 16),
        help="a hash, which chooses one of the shards of tests marked `sharded`; half of random examples",
    )
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="with --shard: of all cases that are left one in N, others from hash to hash",
    )
    parser.addoption(
        "--cpu-only",
        action="store_true",
        help="leave out tests of a GPU, and of its kernels on the host",
    )
    parser.addoption(
        "--turing",
        action="store_true",
        help="kernels on the host are those of Turing cards, with their shared memory",
    )
    parser.addoption(
        "--gpu-on-host",
        action="store_true",
        help="run models of a GPU with its kernels on the host, for tests of tests/models",
    )


def halve_given_numbers(config: pytest.Config) -> None:
    """Until its end, settings of more than HALVED_ABOVE, in a decorator or a test, mean half of them."""
    complete = settings.__init__

    def halved(own: settings, *arguments: Any, **given: Any) -> None:
        if given.get("max_examples", 0) > HALVED_ABOVE:
            given["max_examples"] //= 2
        complete(own, *arguments, **given)

    settings.__init__ = halved
    config.add_cleanup(lambda: setattr(settings, "__init__", complete))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--shard") is not None:
        settings.load_profile("shard")
        halve_given_numbers(config)
    if config.getoption("--every-lane-arrives"):
        patch = pytest.MonkeyPatch()
        patch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, EVERY_LANE_ARRIVES))
        config.add_cleanup(patch.undo)
    if config.getoption("--gpu-on-host"):
        from host_gpu import gpu_on  # only here, as it imports the runner of a GPU

        directory = tempfile.TemporaryDirectory()
        config.add_cleanup(directory.cleanup)
        running = gpu_on(HostDevice(Path(directory.name)))
        running.__enter__()
        config.add_cleanup(lambda: running.__exit__(None, None, None))


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    """In this process; `short_rates.py` is for others. Plans of a GPU follow its machine's rates."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            for owner, name, value in SHORT:
                patch.setattr(owner, name, value)
        yield


@pytest.fixture(scope="session", autouse=True)
def rates_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rates of this process go to a folder that all test processes share, and not to the developer's own.

    A test that sets HOME has a file there.
    """
    own, folder = Path.home(), tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    class OtherHome(Path):
        @classmethod
        def home(cls) -> Path:
            found = Path.home()
            return shared if found == own else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware_file, "Path", OtherHome)
        yield


@pytest.fixture(autouse=True)
def poisoned_empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reveals reads of unwritten memory: `torch.empty`, and `np.empty` in this package, return NaN.

    Without `monkeypatch`, which would then begin before a test's other fixtures, and end behind them: what a
    test patches within another patch, such as a kernel on the host, would be undone in the wrong order.
    """
    if request.config.getoption("--unpoisoned"):
        yield
        return
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        for name in ("empty", "empty_like"):
            patch.setattr(np, name, _poisoned_for_the_package(getattr(np, name)))
        yield


def _poisoned_for_the_package(make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def poisoned(*arguments: Any, **options: Any) -> np.ndarray:
        array = make(*arguments, **options)
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.split(".")[0] == "coldstream":
            poison(array)
        return array

    return poisoned


def poison(array: np.ndarray) -> None:
    """Fill with NaN or the largest integer. Bytes of that make NaN of floats that are laid over them."""
    array.fill(np.nan if array.dtype.kind in "fc" else np.iinfo(array.dtype).max)


@pytest.fixture(autouse=True)
def nothing_left_of_other_tests(request: pytest.FixtureRequest) -> None:
    """Tests marked `alone` compare what is free of the device's memory. What earlier tests left in cycles
    (errors hold frames, which hold runners) must not be freed in the middle of one."""
    if "alone" in request.keywords:
        gc.unfreeze()  # commands that ran in this process froze what there was
        gc.collect()
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports and tests stay until the end: looking for garbage among them took a quarter of collecting, and
    every later look would go through them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped, visibly, where there is none."""
    if config.getoption("--cpu-only"):
        leave_out(config, items, [item for item in items if is_of_gpu(item)])
    if (shard := config.getoption("--shard")) is not None:
        leave_out_other_shards(config, items, shard)
        leave_out_other_places(config, items, shard // SHARDS)
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    on_host = config.getoption("--gpu-on-host")
    for item in items:
        if "gpu" in item.keywords and ("alone" in item.keywords or not on_host):
            item.add_marker(no_gpu)


def leave_out_other_shards(config: pytest.Config, items: list[pytest.Item], shard: int) -> None:
    """Of tests marked `sharded` that have as many cases as shards, or more, only one shard stays.

    Tests that are marked with the same `of` are cases of one: each is long, and has few or one. Those of one
    file with the same `fixture`, which takes most of their time, are one case together. Which shard
    stays shifts from one row of so many cases to the next, so that a shard has every value of a parameter
    that has as many values as there are shards.
    """
    cases: dict[tuple[str, int], dict[str, list[pytest.Item]]] = {}
    for item in items:
        if marker := item.get_closest_marker("sharded"):
            shards = shards_of(marker)
            name = marker.kwargs.get("of") or item.nodeid.partition("[")[0]
            own, shared = item.nodeid, marker.kwargs.get("fixture")
            case = own if shared is None else f"{own.partition('::')[0]} {shared}"
            cases.setdefault((name, shards), {}).setdefault(case, []).append(item)
    left_out = [
        item
        for (_, shards), those in cases.items()
        for number, case in enumerate(those.values())
        if len(those) >= shards and not is_of_shard(number, shards, shard)
        for item in case
    ]
    leave_out(config, items, left_out)
    # The longest begin first, so that no process has one left when the others are done.
    items.sort(key=lambda item: not is_long(item))


def shards_of(marker: pytest.Mark) -> int:
    """How many shards the cases of a test have that is marked `sharded`."""
    (shards,) = marker.args or (OF_SHARDS if "of" in marker.kwargs else SHARDS,)
    return int(shards)


def leave_out_other_places(config: pytest.Config, items: list[pytest.Item], shard: int) -> None:
    """Of all items one in as many as `--one-in` says stays."""
    parts = config.getoption("--one-in")
    leave_out(
        config, items, [item for number, item in enumerate(items) if not is_of_shard(number, parts, shard)]
    )


def leave_out(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=left_out)
    gone = {*map(id, left_out)}
    items[:] = [item for item in items if id(item) not in gone]


def is_of_gpu(item: pytest.Item) -> bool:
    return "gpu" in item.keywords or "compiled_for_the_host" in getattr(item, "fixturenames", ())


def is_of_shard(number: int, shards: int, shard: int) -> bool:
    """Shifted from one row of `shards` numbers to the next, see `leave_out_other_shards`."""
    return (number + number // shards) % shards == shard % shards


def is_long(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("sharded")
    return marker is not None and "of" in marker.kwargs


@pytest.fixture
def part_of_examples(request: pytest.FixtureRequest) -> slice:
    """Which of a test's own random examples it tries: all of them, or one in SHARDS with `--shard`."""
    shard = request.config.getoption("--shard")
    return slice(None) if shard is None else examples_of(request.node.get_closest_marker("sharded"), shard)


def examples_of(marker: pytest.Mark | None, shard: int) -> slice:
    """Chosen by a part of the hash that chooses no cases: else a case would have the same ones always."""
    return slice(shard // (shards_of(marker) if marker else 1) % SHARDS, None, SHARDS)


@pytest.fixture(scope="session")
def compiled_for_the_host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> HostDevice:
    """Kernels that processes of one run compile once for all of them."""
    root = tmp_path_factory.getbasetemp()
    directory = (root.parent if root.name.startswith("popen-") else root) / "host-kernels"
    directory.mkdir(exist_ok=True)
    return turing_device(directory) if request.config.getoption("--turing") else HostDevice(directory)


@pytest.fixture
def host(compiled_for_the_host: HostDevice) -> Iterator[HostDevice]:
    """Inside a test, the GPU's kernels are launched on the host."""
    with compiled_for_the_host.installed():
        yield compiled_for_the_host


@pytest.fixture
def gpu(compiled_for_the_host: HostDevice) -> Iterator[None]:
    """Inside a test, the host is a GPU; see `host_gpu.py`."""
    # Imported here because it needs packages that a machine without a GPU need not have.
    from host_gpu import gpu_on

    with gpu_on(compiled_for_the_host):
        yield
