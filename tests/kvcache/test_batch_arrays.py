"""What steps and commits read of a batch and of a path, in memory that graphs point into."""

from pathlib import Path

import numpy as np
import pytest

from bench.runners import open_cpu_runner
from builders import Dims, write_gguf
from cache_shape import Shape
from coldstream.errors import InvalidRequestError
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.ops import MAX_TREE_ROWS
from coldstream.kvcache import Batch, CacheSize, Segment, SequenceCache
from coldstream.kvcache.batch import (
    BatchArrays,
    BatchLimits,
    BatchSize,
    CheckedSegment,
    PathArrays,
    check_batch,
    path_in_windows,
)
from coldstream.kvcache.sequence_cache import AcceptedPath


def test_rows_of_a_batch_name_their_sequences_and_parents() -> None:
    """A chain, a tree and another chain, whose sequences have committed 2, 300 and no tokens."""
    cache = SequenceCache(Shape(), CpuOps(1), CacheSize(6, 3, 8), "f32")
    sequences = [cache.new() for _ in range(3)]

    def reserved(*segments: Segment) -> list[CheckedSegment]:
        checked = check_batch(Batch(segments), cache, BatchLimits(100, 400, 400, 3))
        cache.reserve([segment.demand for segment in checked])
        return checked

    for sequence, length in zip(sequences, (2, 300), strict=False):
        reserved(Segment(sequence, [1] * length))
        cache.append(sequence, length)
    first, second, third = sequences
    segments = reserved(
        Segment(first, [5, 6, 7]), Segment(second, [8, 9, 8, 9], [-1, 0, 0, 2]), Segment(third, [4, 3])
    )
    size = BatchSize(num_rows=10, num_segments=3, num_blocks=2)
    arrays = BatchArrays(np.full(size.num_values, 77, np.int32), size)
    assert arrays.write(segments) == 9
    batch, tree = arrays.rows.batch, second.pending
    assert batch is not None
    assert tree is not None
    assert arrays.token_ids.tolist() == [5, 6, 7, 8, 9, 8, 9, 4, 3, 77]
    assert arrays.rows.positions[:9].tolist() == [2, 3, 4, 300, 301, 301, 302, 0, 1]
    assert batch.indices[:9].tolist() == [2, 3, 4, 300, 301, 302, 303, 0, 1]
    assert batch.segments[:9].tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert batch.parents[:9].tolist() == [-1, 0, 1, -1, 3, 3, 5, -1, 7]
    assert batch.kept[:9].tolist() == [-1, -1, -1, *tree.kept, -1, -1]
    states = [first.state] * 3 + [second.state] * 4 + [third.state] * 2
    assert arrays.rows.state_ids[:9].tolist() == states
    assert batch.tables.tolist() == [[*first.blocks, 77], second.blocks, [*third.blocks, 77]]


@pytest.mark.parametrize(
    ("parents", "is_branching"),
    [(None, False), ([-1], False), ([-1, 0, 1], False), ([-1, 0, 0], True), ([-1, -1], True)],
)
def test_a_draft_is_branching_unless_each_row_follows_the_one_before(
    parents: list[int] | None, is_branching: bool
) -> None:
    cache = SequenceCache(Shape(), CpuOps(1), CacheSize(6, 3, 8), "f32")
    segment = Segment(cache.new(), [1] * len(parents or [1, 2]), parents)
    [checked] = check_batch(Batch([segment]), cache, BatchLimits(100, 400, 400, 3))
    assert checked.is_branching == is_branching


def test_rows_behind_a_batch_are_of_no_sequence() -> None:
    size = BatchSize(num_rows=5, num_segments=3, num_blocks=2)
    memory = np.full(size.num_values + 4, 77, np.int32)
    arrays = BatchArrays(memory, size)
    arrays.pad(2)
    batch = arrays.rows.batch
    assert batch is not None
    assert arrays.token_ids.tolist() == [77, 77, 0, 0, 0]
    for values in (arrays.rows.positions, arrays.rows.state_ids, batch.segments, batch.indices, batch.kept):
        assert values.tolist() == [77, 77, -1, -1, -1]
    assert (batch.tables == 77).all()
    assert batch.tables.shape == (3, 2)
    assert (memory[size.num_values :] == 77).all()


@pytest.mark.parametrize("has_windows", [False, True])
def test_a_path_lies_where_a_commit_reads_it(has_windows: bool) -> None:
    num_values = PathArrays.num_values(4, has_windows=has_windows)
    memory = np.full(num_values + 2, 77, np.int32)
    arrays = PathArrays(memory, 4, has_windows=has_windows)
    arrays.write(AcceptedPath((0, 2, 5), (8, 9, 3), 300, 6, (11, 12), (0, 13)))
    path = arrays.path
    assert [int(each[0]) for each in (path.state_id, path.count, path.first)] == [6, 3, 300]
    assert path.sources[:3].tolist() == [0, 2, 5]
    assert path.kept[:3].tolist() == [8, 9, 3]
    assert path.table[:2].tolist() == [11, 12]
    assert (len(path.sources), len(path.kept), len(path.table)) == (MAX_TREE_ROWS, MAX_TREE_ROWS, 4)
    assert (memory[num_values:] == 77).all()
    arrays_of_path = [values for values in vars(path).values() if values is not None]
    assert len({values.ctypes.data for values in arrays_of_path}) == len(arrays_of_path) == 6 + has_windows
    if has_windows:
        of_windows = path_in_windows(path)
        assert of_windows.table[:2].tolist() == [0, 13]
        assert of_windows.sources is path.sources


def test_logits_of_a_text_leave_other_sequences_alone_and_segments_are_counted(tmp_path: Path) -> None:
    (path,) = write_gguf(tmp_path / "tiny.gguf", dims=Dims(layers=2, interval=2))
    with open_cpu_runner(path, threads=1, context_length=16, cache_size=CacheSize.of(3, 16)) as runner:
        live, other = runner.new_sequence(), runner.new_sequence()
        for sequence in (live, other):
            runner.extend(sequence, [1, 2, 3])
        runner.logits([9, 8, 7])
        assert live.length == 3
        assert np.array_equal(runner.extend(live, [4]), runner.extend(other, [4]))
        runner._limits = type(runner._limits)(runner.spec.vocab_size, 16, 8, 1)
        with pytest.raises(InvalidRequestError, match="a batch of 2 segments, but a step takes 1"):
            runner.step(Batch((Segment(live, [1]), Segment(other, [1]))))
        assert live.length == other.length == 4
