"""The settings of the tests themselves: memory is poisoned, and what hangs is ended."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings

from coldstream.kernels.cuda import compiler
from coldstream.kernels.linear.cuda_gemm import PROGRAM
from host_device import EVERY_LANE_ARRIVES

ROOT = Path(__file__).parent.parent
TEST_THAT_HANGS = """
import ctypes

def test_that_hangs_in_c():
    ctypes.{loader}({library!r}).hang()
"""
# In one process, which imports what is tested once.
COLLECTS = """
import pytest
for words in {options}:
    print("next:", flush=True)
    assert pytest.main(["-o", "addopts=", "--collect-only", "-q", *words, "{file}"]) == 0
"""


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "uint8", "int64", "uint16"])
@pytest.mark.parametrize("call", ["np.empty((2, 3), dtype)", "np.empty_like(np.zeros(3, dtype))"])
def test_arrays_that_the_package_leaves_empty_are_poisoned(dtype: str, call: str) -> None:
    array = eval(call, {"np": np, "dtype": dtype, "__name__": "coldstream.somewhere"})
    assert array.dtype == dtype
    if array.dtype.kind == "f":
        assert np.isnan(array).all()
    else:
        assert (array == np.iinfo(array.dtype).max).all()


def test_floats_over_empty_bytes_are_not_numbers() -> None:
    array = eval("np.empty(8, np.uint8)", {"np": np, "__name__": "coldstream.somewhere"})
    for dtype in ("float16", "float32", "float64"):
        assert np.isnan(array.view(dtype)).all()


@pytest.mark.parametrize("loader", ["PyDLL", "CDLL"])  # holding Python's lock, and without it
def test_a_test_that_hangs_in_compiled_code_is_named_and_ended(loader: str, tmp_path: Path) -> None:
    source, library = tmp_path / "hang.c", tmp_path / "hang.so"
    source.write_text("#include <unistd.h>\nvoid hang(void) { for (;;) pause(); }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    test = tmp_path / "test_hang.py"
    test.write_text(TEST_THAT_HANGS.format(loader=loader, library=str(library)))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    command += ["-o", "timeout=1", "-o", "faulthandler_timeout=2", str(test)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr
    assert "in test_that_hangs_in_c" in done.stderr
    assert "passed" not in done.stdout


def test_kernels_for_racecheck_are_compiled_and_kept_apart(request: pytest.FixtureRequest) -> None:
    own = request.config.pluginmanager.getplugin(str(Path(__file__).with_name("conftest.py")))
    ends: list[Callable[[], None]] = []
    given = {"--shard": None, "--every-lane-arrives": True, "--gpu-on-host": False}
    entry = partial(compiler._entry, PROGRAM.source, PROGRAM.instances[:1], "sm_90a")
    product = entry(), compiler.OPTIONS
    own.pytest_configure(SimpleNamespace(getoption=given.get, add_cleanup=ends.append))
    try:
        assert (*product[1], EVERY_LANE_ARRIVES) == compiler.OPTIONS
        assert entry() != product[0]
    finally:
        ends[0]()
    assert (entry(), compiler.OPTIONS) == product


def test_a_shard_halves_large_numbers_of_examples_that_a_test_gives(request: pytest.FixtureRequest) -> None:
    own = request.config.pluginmanager.getplugin(str(Path(__file__).with_name("conftest.py")))
    numbers, ends = (300, 20), []
    before = [settings(max_examples=number).max_examples for number in numbers]
    own.halve_given_numbers(SimpleNamespace(add_cleanup=ends.append))
    halved = [settings(max_examples=number).max_examples for number in numbers]
    ends[0]()
    assert halved == [before[0] // 2, before[1]]
    assert [settings(max_examples=number).max_examples for number in numbers] == before


class Case:
    """What sharding reads of a test."""

    def __init__(self, nodeid: str, of: str | None, fixture: str | None = None) -> None:
        self.nodeid, self._of, self._fixture = nodeid, of, fixture

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        assert name == "sharded"
        return None if self._of is None else pytest.mark.sharded(2, of=self._of, fixture=self._fixture).mark


def test_tests_of_one_name_are_cases_of_one(request: pytest.FixtureRequest) -> None:
    own = request.config.pluginmanager.getplugin(str(Path(__file__).with_name("conftest.py")))
    names = {"a::whole": None, "a::one": "long", "b::two[x]": "long", "b::two[y]": "long", "c::alone": "rest"}
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    shards = []
    for number in range(2):
        items = [Case(nodeid, of) for nodeid, of in names.items()]
        own.leave_out_other_shards(config, items, number)
        assert items[-1].nodeid == "a::whole", "which is not long"
        shards.append({item.nodeid for item in items})
    assert shards[0] & shards[1] == {"a::whole", "c::alone"}
    assert shards[0] | shards[1] == {*names}
    assert min(map(len, shards)) > 2


def test_tests_with_one_fixture_are_one_case(request: pytest.FixtureRequest) -> None:
    own = request.config.pluginmanager.getplugin(str(Path(__file__).with_name("conftest.py")))
    names = {"a::x": "made", "a::y": None, "a::z": "made", "b::x": "made", "b::y[1]": None, "b::y[2]": None}
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    shards = []
    for number in range(2):
        items = [Case(nodeid, "long", fixture) for nodeid, fixture in names.items()]
        own.leave_out_other_shards(config, items, number)
        shards.append({item.nodeid for item in items})
    assert shards[0] | shards[1] == {*names}
    assert not shards[0] & shards[1]
    assert sum({"a::x", "a::z"} <= shard for shard in shards) == 1
    assert not any({"a::x", "b::x"} <= shard for shard in shards), "which are of two files"


@pytest.mark.parametrize(
    ("keywords", "fixtures", "is_left_out"),
    [
        ((), (), False),
        ((), ("runtimes",), False),
        (("gpu",), (), True),
        ((), ("host", "compiled_for_the_host"), True),
    ],
)
def test_tests_of_a_gpu_and_of_its_kernels_on_the_host_are_known(
    request: pytest.FixtureRequest, keywords: tuple[str, ...], fixtures: tuple[str, ...], *, is_left_out: bool
) -> None:
    own = request.config.pluginmanager.getplugin(str(Path(__file__).with_name("conftest.py")))
    assert own.is_of_gpu(SimpleNamespace(keywords=keywords, fixturenames=fixtures)) == is_left_out


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_one_case_in_several_stays(request: pytest.FixtureRequest, parts: int) -> None:
    own = request.config.pluginmanager.getplugin(str(Path(__file__).with_name("conftest.py")))
    left_out: list[int] = []
    config = SimpleNamespace(
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
        getoption={"--one-in": parts}.__getitem__,
    )
    every, kept = [*range(12)], []
    for shard in range(parts):
        items, left_out[:] = [*every], []
        own.leave_out_other_places(config, items, shard)
        assert sorted(items + left_out) == every
        assert all(len({*items} & {*row}) == 1 for row in np.reshape(every, (-1, parts)).tolist())
        kept += items
    assert sorted(kept) == every


@pytest.mark.parametrize(
    ("file", "test", "count"),
    [
        ("tests/kernels/test_cuda_attention.py", "test_kernels_compile_without_a_gpu", 6),
        ("tests/kernels/test_cuda_linear_gemm.py", "test_compiles", 9),
    ],
)
def test_shards_together_have_all_cases_of_a_sharded_test(file: str, test: str, count: int) -> None:
    options = [[], *(["--shard", f"{number:x}"] for number in range(10, 10 + count))]
    done = subprocess.run(
        [sys.executable, "-c", COLLECTS.format(file=file, options=options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    every, *shards = (
        [line for line in part.splitlines() if line.startswith(file)]
        for part in done.stdout.split("next:")[1:]
    )
    assert len(shards) == count
    sharded = [case for case in every if f"::{test}[" in case]
    assert len(sharded) >= count
    for case in every:
        assert sum(case in shard for shard in shards) == (1 if case in sharded else count), case


@pytest.mark.parametrize(
    "marker", [None, pytest.mark.sharded, pytest.mark.sharded(6), pytest.mark.sharded(of="x")]
)
def test_every_case_meets_every_part_of_its_examples(
    marker: pytest.MarkDecorator | None, request: pytest.FixtureRequest
) -> None:
    own = request.config.pluginmanager.getplugin(str(Path(__file__).with_name("conftest.py")))
    mark = None if marker is None else marker.mark
    shards = 1 if mark is None else own.shards_of(mark)
    for case in range(2 * shards):
        seeds = [seed for seed in range(shards * own.SHARDS) if own.is_of_shard(case, shards, seed)]
        assert {own.examples_of(mark, seed).start for seed in seeds} == set(range(own.SHARDS))
