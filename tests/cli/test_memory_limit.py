"""Generation inside a memory cgroup that is smaller than the model file: slower, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.engine.disk_tier import forget_pages
from bench.engine.gpu import FIRST_ID
from bench.full_size_model import FullSizeWriter
from bench.memory_limit import MemoryLimit, memory_limit
from bench.random_model import Shape

MIB = 2**20
SHAPE = Shape(
    hidden=1024,
    layers=8,
    experts=32,
    expert_ffn=512,
    heads=8,
    kv_heads=2,
    head_dim=64,
    key_heads=4,
    value_heads=8,
    state_dim=64,
    vocab=FIRST_ID + 200,
    context=1024,
)
RAM = 96 * MIB
# Beyond --ram: the interpreter, its packages, and pages of files that the system keeps while it has room.
HEADROOM = 152 * MIB
# So hot that this model's text, which else walks through its vocabulary, is any of very many.
HOT = ("--temp", "12", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "7")
REQUEST = ("-p", "the cat", "-n", "64", "--ignore-eos", "--ctx-size", "256", *HOT)


@pytest.fixture(scope="module", autouse=True)
def cgroups() -> None:
    """Skips what cannot be shown: nothing else counts and bounds the pages of mapped files."""
    try:
        with memory_limit("probe", 2**30) as limit:
            assert (limit.num_kills, limit.peak_bytes) >= (0, 0)
    except (OSError, KeyError) as error:
        pytest.skip(f"NOT SHOWN: memory cgroups cannot be made here ({error})")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 250 MiB, most of them experts."""
    path = tmp_path_factory.mktemp("model") / "large.gguf"
    FullSizeWriter(path, SHAPE, seed=3, threads=2).write()
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> bytes:
    """What is answered without a limit."""
    done = subprocess.run(command(model), capture_output=True, check=True, timeout=300)
    return done.stdout


def command(model: Path, *options: str) -> list[str]:
    run = [sys.executable, "-m", "coldstream", "run", str(model), "--device", "cpu", "--quiet"]
    return [*run, *REQUEST, *options]


def answer(model: Path, num_bytes: int, *options: str) -> tuple[bytes, int]:
    """The text generated inside a limit, and the most memory that this took."""
    with memory_limit("test", num_bytes) as limit:
        done = run_within(limit, model, *options)
        assert (done.returncode, done.stderr, limit.num_kills) == (0, b"", 0)
        return done.stdout, limit.peak_bytes


def run_within(limit: MemoryLimit, model: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    forget_pages(model)  # or they would be on the account of whoever wrote them
    return subprocess.run(
        limit.command(*command(model, *options)), capture_output=True, check=False, timeout=300
    )


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("limit", [160 * MIB, 200 * MIB])
@pytest.mark.parametrize("ram", [str(RAM), "auto"])
def test_fl05_mm04_a_file_larger_than_the_memory_there_is_answers_as_without_a_limit(
    model: Path, expected: bytes, limit: int, ram: str
) -> None:
    assert os.path.getsize(model) > limit
    text, peak = answer(model, limit, "--ram", ram)
    assert text == expected
    assert peak <= limit


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("ram", [64 * MIB, RAM])
def test_mm04_a_run_keeps_to_its_budget_where_there_is_room_for_more(
    model: Path, expected: bytes, ram: int
) -> None:
    text, peak = answer(model, 2**30, "--ram", str(ram))
    assert text == expected
    assert peak <= ram + HEADROOM < os.path.getsize(model)


@pytest.mark.sharded(of="processes")
def test_mm04_less_than_what_must_be_there_is_refused_and_not_killed(model: Path) -> None:
    with memory_limit("test", 160 * MIB) as limit:
        done = run_within(limit, model, "--ram", "16M")
        assert (done.returncode, done.stdout, limit.num_kills) == (71, b"", 0)
    assert b"try --ram" in done.stderr
