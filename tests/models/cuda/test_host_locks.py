"""Experts of a file of which the system page-locks a part only, on the host's model of a GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import open_partly
from one_sequence import OneSequence
from runner_cases import token_ids

from builders import Dims, write_gguf
from coldstream.experts.copies import DirectCopies, FileCopies
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.cuda import host_memory
from host_device import HostDevice
from host_driver import HostDriver
from host_gpu import gpu_on

LAYERS = 4
PIECE_BYTES = 1 << 16

Tokens = Callable[[], list[np.ndarray]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("locks") / "small.gguf"
    write_gguf(path, dims=Dims(layers=LAYERS, experts=16, experts_used=3))
    return path


@pytest.fixture
def driver(compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """Of a GPU for which memory is locked in small pieces, of which one is given back after a refusal."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(host_memory, "SPARE_PIECES", 1)
    with gpu_on(compiled_for_the_host):
        yield compiled_for_the_host.driver
    compiled_for_the_host.driver.most_registered = 2**62


def open_with_bus(path: Path) -> OneSequence:
    """With slots for two fifths of the experts; others are read over the bus, prefetched, or the CPU's."""
    return open_partly(path, 0.4, streamed=0.5, prefetching=Prefetching(1, 2))


def logits_of(runner: OneSequence, num_prompt: int) -> list[np.ndarray]:
    """After a prompt, and after each of six tokens."""
    return [runner.prefill(token_ids(num_prompt)), *(runner.decode(token) for token in range(6))]


def layers_read(runner: OneSequence) -> list[bool]:
    tables = runner.runner._loaded.ops.model_executor.tables
    return [tables.reads(layer) for layer in range(LAYERS)]


@pytest.mark.sharded(2)
@pytest.mark.parametrize("num_prompt", [5, 80])
def test_a_refusal_at_any_piece_gives_the_same_bits_and_leaves_nothing_locked(
    path: Path, driver: HostDriver, num_prompt: int
) -> None:
    with open_with_bus(path) as runner:
        wanted, all_bytes = logits_of(runner, num_prompt), sum(driver.registered.values())
        assert layers_read(runner) == [True] * LAYERS
        assert not any("page-locked" in each for each in runner.runner.warnings)
        file_bytes = runner.runner.file.num_bytes
        assert runner.runner.locked_bytes == (file_bytes, file_bytes)
    assert not driver.registered
    counts = []
    for share in (0.0, 0.02, 0.4, 0.7, 0.999):
        most = driver.most_registered = round(share * all_bytes)
        with open_with_bus(path) as runner:
            assert most - 2 * PIECE_BYTES < sum(driver.registered.values()) <= max(0, most - PIECE_BYTES)
            found, read = logits_of(runner, num_prompt), layers_read(runner)
            assert runner.runner.locked_bytes == (file_bytes, sum(driver.registered.values()))
            (said,) = [each for each in runner.runner.warnings if "page-locked" in each]
            assert "the CPU computes the experts in the rest that the GPU lacks: close programs" in said
        assert read == sorted(read, reverse=True)  # the first layers of the file
        counts.append(sum(read))
        assert not driver.registered
        assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert counts[:2] == [0, 0]
    assert 0 < counts[2] < counts[3] < LAYERS


def test_each_layer_of_a_prompt_is_copied_from_where_it_is_locked_or_through_a_ring(
    path: Path, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_with_bus(path):
        driver.most_registered = round(0.6 * sum(driver.registered.values()))
    used = set()
    for kind in (DirectCopies, FileCopies):
        begin = kind.begin
        monkeypatch.setattr(
            kind,
            "begin",
            lambda copies, *rest, begin=begin, kind=kind: (used.add(kind), begin(copies, *rest))[1],
        )
    with open_with_bus(path) as runner:
        runner.prefill(token_ids(80))
    assert used == {DirectCopies, FileCopies}


def test_a_pool_in_ram_that_is_locked_in_part_gives_the_same_bits_and_says_so(
    path: Path, driver: HostDriver
) -> None:
    def found() -> tuple[list[np.ndarray], list[str], int]:
        with open_partly(path, 0.4, in_ram=0.4) as runner:
            locked, logits = sum(driver.registered.values()), logits_of(runner, 40)
            return logits, [each for each in runner.runner.warnings if "page-locked" in each], locked

    wanted, nothing, all_bytes = found()
    assert nothing == []
    for most in (0, all_bytes // 2, all_bytes - 1):
        driver.most_registered = most
        logits, (said,), locked = found()
        assert locked <= most
        assert "RAM for experts could not be page-locked, or only in part" in said
        assert not driver.registered
        assert all(np.array_equal(one, other) for one, other in zip(logits, wanted, strict=True))
