"""FL02, FL03: a model file that is overwritten in use yields no further token, with any reader.

One that is replaced or deleted is still read.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import open_cuda, open_partly
from one_sequence import OneSequence, open_cpu
from runner_cases import token_ids

from coldstream.assets import demo_model_path
from coldstream.errors import ModelChangedError
from coldstream.experts.prefetch import Prefetching
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kvcache.batch import CheckedSegment
from coldstream.models.cpu.runner import CpuRunner
from file_changes import await_tick, overwrite_experts

CONTEXT = CpuRunner.chunk_size + 64
PROMPT = token_ids(CONTEXT - 32)  # of two steps
WRITTEN = "was written to while in use, .* load the model again"
Open = Callable[[Path], OneSequence]


def open_mapped(path: Path) -> OneSequence:
    return open_cpu(path, threads=2, context_length=CONTEXT)


def open_with_ram(path: Path) -> OneSequence:
    """Room for some experts, the others on the disk."""
    runner = open_cpu(path, threads=2, context_length=CONTEXT, ram_bytes=30 << 20)
    assert runner.disk is not None
    return runner


def open_partly_resident(path: Path) -> OneSequence:
    """The GPU reads half of what it misses over the bus, and asks the CPU for the rest."""
    return open_partly(path, 0.5, streamed=0.5, context_length=CONTEXT)


def open_without_residents(path: Path) -> OneSequence:
    return open_partly(path, 0.0, context_length=CONTEXT, ring_bytes=4 * 2**20)


def open_prefetching(path: Path) -> OneSequence:
    return open_partly(path, 0.25, context_length=CONTEXT, prefetching=Prefetching(1, 8))


def open_resident(path: Path) -> OneSequence:
    """The GPU holds all weights."""
    return open_cuda(path, context_length=CONTEXT)


READERS = [  # of the file, when they compute
    pytest.param(open_mapped, id="mapped"),
    pytest.param(open_with_ram, id="ram"),
    pytest.param(open_partly_resident, id="partly-resident", marks=pytest.mark.gpu),
    pytest.param(open_without_residents, id="without-residents", marks=pytest.mark.gpu),
    pytest.param(open_prefetching, id="prefetching", marks=pytest.mark.gpu),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model to be overwritten: the bundled one, which GPUs have kernels for."""
    return Path(shutil.copy(demo_model_path(), tmp_path / "demo.gguf"))


def assert_refused(runner: OneSequence) -> None:
    """Requests of every kind, before anything is computed."""

    def computed(done: int, total: int) -> None:
        raise AssertionError("computed over bytes of another file")

    for _ in range(2):
        with pytest.raises(ModelChangedError, match=WRITTEN):
            runner.extend(PROMPT[:5], computed)
        with pytest.raises(ModelChangedError, match=WRITTEN):
            runner.logits(PROMPT[:5])
        assert runner.position == 0


@pytest.mark.parametrize("keeps_time", [False, True], ids=["", "time-put-back"])
@pytest.mark.parametrize("open_runner", READERS)
def test_fl03_between_two_requests(open_runner: Open, keeps_time: bool, path: Path) -> None:
    with open_runner(path) as runner:
        for _ in range(3):
            runner.reset()
            runner.prefill(PROMPT[:20])
            runner.decode(3)
        overwrite_experts(path, keeps_time=keeps_time)
        assert_refused(runner)


@pytest.mark.parametrize("open_runner", READERS)
def test_fl02_attributes_change_between_two_tokens(open_runner: Open, path: Path) -> None:
    """A label, a time of access, a mode or a link changes no token."""
    with open_runner(path) as runner:
        expected = runner.logits(PROMPT[:24])
        runner.reset()
        found = [runner.prefill(PROMPT[:20])]
        changes: tuple[Callable[[], object], ...] = (
            lambda: os.setxattr(path, "user.label", b"x"),
            lambda: os.utime(path, ns=(1, path.stat().st_mtime_ns)),
            lambda: path.chmod(0o640),
            lambda: path.with_name("link").hardlink_to(path),
        )
        for change, token in zip(changes, PROMPT[20:24], strict=True):
            await_tick(path)
            change()
            found.append(runner.decode(token))
        assert np.array_equal(found, expected[19:])
        overwrite_experts(path, keeps_time=True)
        assert_refused(runner)


@pytest.mark.parametrize("open_runner", READERS)
def test_fl03_between_two_tokens(open_runner: Open, path: Path) -> None:
    with open_runner(path) as runner:
        runner.prefill(PROMPT[:20])
        runner.decode(3)
        overwrite_experts(path)
        with pytest.raises(ModelChangedError, match=WRITTEN):
            runner.decode(4)
        assert_refused(runner)


@pytest.mark.parametrize("open_runner", READERS)
def test_fl03_between_two_steps_of_a_prompt(open_runner: Open, path: Path) -> None:
    """Results from bytes of both versions are not returned."""
    done_tokens = []

    def progress(done: int, total: int) -> None:
        done_tokens.append(done)
        if len(done_tokens) == 1:
            overwrite_experts(path)

    with open_runner(path) as runner:
        with pytest.raises(ModelChangedError, match=WRITTEN):
            np.asarray(runner.extend(PROMPT, progress))
        assert len(done_tokens) <= 2
        assert_refused(runner)


@pytest.mark.parametrize("open_runner", READERS)
def test_fl03_while_logits_of_all_tokens_are_computed(
    open_runner: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_runner(path) as runner:
        launch, launched = runner._launch, []

        def overwriting(segments: list[CheckedSegment]) -> None:
            launch(segments)
            launched.append(segments)
            if len(launched) == 1:
                overwrite_experts(path)

        monkeypatch.setattr(runner.runner, "_launch", overwriting)
        with pytest.raises(ModelChangedError, match=WRITTEN):
            runner.logits(PROMPT)
        monkeypatch.undo()
        assert_refused(runner)


@pytest.mark.parametrize("open_runner", READERS)
def test_fl02_a_file_that_is_replaced_or_deleted_is_still_read(
    open_runner: Open, path: Path, tmp_path: Path
) -> None:
    with open_runner(path) as runner:
        expected = runner.logits(PROMPT)
        other = Path(shutil.copy(path, tmp_path / "other.gguf"))
        overwrite_experts(other)
        path.chmod(0o400)
        other.replace(path)
        assert np.array_equal(runner.logits(PROMPT), expected)
        path.unlink()
        assert np.array_equal(runner.logits(PROMPT), expected)


@pytest.mark.parametrize(
    "open_runner", [*READERS, pytest.param(open_resident, id="resident", marks=pytest.mark.gpu)]
)
def test_fl03_while_it_is_loaded(open_runner: Open, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were copied are of one file or of none."""
    read, names = GGUFFile.read, set()

    def overwriting(file: GGUFFile, info: TensorInfo) -> np.ndarray:
        data = read(file, info)
        names.add(info.name)
        if len(names) == 3:
            overwrite_experts(path)
        return data

    monkeypatch.setattr(GGUFFile, "read", overwriting)
    with pytest.raises(ModelChangedError, match=WRITTEN):
        open_runner(path)


@pytest.mark.gpu
def test_a_model_that_the_gpu_holds_whole_does_not_need_its_file(path: Path) -> None:
    with open_resident(path) as runner:
        expected = runner.logits(PROMPT)
        overwrite_experts(path)
        assert np.array_equal(runner.logits(PROMPT), expected)
        path.unlink()
        assert np.array_equal(runner.logits(PROMPT), expected)
