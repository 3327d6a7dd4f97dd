"""The table of n-grams beside a GPU: what is counted, and rows that cannot be read or come too late."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import open_cuda, open_partly
from one_sequence import OneSequence, open_cpu
from runner_cases import token_ids

from bench.runners import open_model_file, resident_plan
from builders import Dims, make_model, write_model
from coldstream.errors import GenerationFault, ModelChangedError, StorageError
from coldstream.gguf.reader import GGUFFile
from coldstream.models.cuda.capacity import ngram_bytes
from coldstream.models.cuda.runner import CudaRunner

pytestmark = pytest.mark.usefixtures("gpu")

TABLE = "per_layer_token_embd.weight"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The table is the last tensor of the file."""
    dims = Dims(layers=3, interval=3, experts=4, experts_used=2)
    model = make_model("qwen4exp", ngrams=True, dims=dims, types={"per_layer_*": "F32"})
    model.tensors[TABLE] = model.tensors.pop(TABLE)
    return write_model(tmp_path / "tiny.gguf", model)[0]


@pytest.fixture
def runner(path: Path) -> Iterator[OneSequence]:
    with open_cuda(path) as opened:
        yield opened


def cuda_of(runner: OneSequence) -> CudaRunner:
    assert isinstance(runner.runner, CudaRunner)
    return runner.runner


def test_the_plan_counts_what_ram_holds(path: Path, runner: OneSequence) -> None:
    reader = cuda_of(runner)._ngrams
    assert reader is not None
    runner.extend(token_ids(20))
    taken = reader.mailbox.num_bytes + reader.table.cache_bytes
    file, spec = open_model_file(path)
    with file:
        fixed = resident_plan(file, spec, 256).placement.fixed
        assert fixed.host_ngrams == ngram_bytes(spec, fixed.chunk_size)
        assert 0.9 * fixed.host_ngrams < taken < 1.1 * fixed.host_ngrams
        assert fixed.total == sum(fixed.parts.values())
    assert reader.table.misses > 0
    assert cuda_of(runner).reads_file


def test_rows_of_a_prompt_are_read_beside_the_step_before(path: Path, runner: OneSequence) -> None:
    """All but those that depend on what comes before."""
    reader = cuda_of(runner)._ngrams
    assert reader is not None
    ids, asked = token_ids(60), list[int]()
    expected = np.array(runner.extend(ids))
    reader.read_ahead(np.array(ids, np.int32))
    before, heads = reader.table.misses, reader.mailbox.ids.shape[1]
    runner.reset()
    assert np.array_equal(runner.extend(ids), expected)
    assert reader.table.misses == before
    others = np.array(token_ids(59), np.int32)
    reader.read_ahead(others)
    before = reader.table.misses
    np.array(runner.extend(others.tolist()))
    assert reader.table.misses <= before + 2 * heads
    with open_partly(path, 0.5, chunk_size=80) as partly:
        reader = cuda_of(partly)._ngrams
        assert reader is not None
        read_ahead = reader.read_ahead
        reader.read_ahead = lambda tokens: asked.append(len(tokens)) or read_ahead(tokens)
        logits = np.array(partly.extend(token_ids(180)))
    assert asked == [80, 20]
    with open_cpu(path, threads=1, context_length=256) as plain:
        assert np.array_equal(logits, plain.extend(token_ids(180)))


def test_fl01_a_table_that_shrinks_is_an_error(
    path: Path, runner: OneSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the state of the file, and, in the middle of a step, by a row that is not there."""
    runner.extend(token_ids(5))
    os.truncate(path, path.stat().st_size - 400 * 4 * 64)
    with pytest.raises(ModelChangedError, match=r"tiny\.gguf"):
        runner.extend(token_ids(7))
    monkeypatch.setattr(GGUFFile, "check_unchanged", lambda file: None)
    runner.reset()
    for _ in range(2):
        with pytest.raises(ModelChangedError, match=r"tiny\.gguf has become shorter: restore the file"):
            np.array(runner.extend(token_ids(60)))
        assert runner.sequence.length == 0


def test_a_row_that_cannot_be_read_is_an_error(runner: OneSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = cuda_of(runner)._ngrams
    assert reader is not None
    runner.extend([3, 4])

    class Failing:
        problem = 5

    monkeypatch.setattr(reader, "table", Failing())
    with pytest.raises(StorageError, match="a row of n-grams cannot be read: Input/output error"):
        np.array(runner.extend([5]))
    assert runner.sequence.length == 0


def test_rows_that_come_too_late_are_an_error(runner: OneSequence) -> None:
    """As kernels say it that have waited for as long as they may."""
    reader = cuda_of(runner)._ngrams
    assert reader is not None
    runner.extend([3, 4])
    reader.mailbox.done.numpy()[1] = 1
    with pytest.raises(GenerationFault, match="rows of n-grams were not read in time"):
        np.array(runner.extend([5]))
    assert runner.sequence.length == 0
