"""Many sequences of one runner: each is what it would be alone, whatever they share or is refused."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from one_sequence import OneSequence, open_cpu
from runner_cases import FAMILIES, write_variant
from tree_cases import prompt

from coldstream.errors import InvalidRequestError, OutOfMemoryError
from coldstream.kvcache import Batch, CacheSize, Segment, Sequence
from coldstream.models.cpu.runner import CpuRunner

CONTEXT = 600
SIZE = CacheSize.of(8, CONTEXT, num_trees=2)


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts behind layers of both kinds of mixer, and behind attention alone."""
    return write_variant(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture
def runner(path: Path) -> Iterator[OneSequence]:
    with open_cpu(path, threads=2, context_length=CONTEXT, cache_size=SIZE) as opened:
        yield opened


def in_use(runner: OneSequence) -> tuple[int, int, int]:
    pools = (runner._sequences.blocks, runner._sequences.states, runner._sequences.tree_rows)
    blocks, states, rows = (pool.num_blocks - pool.num_free for pool in pools)
    return blocks, states, rows


def step(
    runner: OneSequence, sequence: Sequence, ids: list[int], parents: list[int] | None = None
) -> np.ndarray:
    (logits,) = runner.step(Batch((Segment(sequence, ids, parents),)))
    return logits


def assert_holds(runner: OneSequence, sequence: Sequence, ids: list[int]) -> None:
    """The sequence goes on as the runner's own does after the same tokens; it is left one token longer."""
    assert sequence.length == len(ids)
    runner.reset()
    if ids:
        runner.prefill(ids)
    assert np.array_equal(step(runner, sequence, [77])[0], runner.decode(77))
    runner.reset()


@pytest.mark.sharded(of="models on the CPU")
def test_sp02_32_sequences_in_one_batch_are_each_what_they_are_alone(path: Path) -> None:
    random = Random(32)
    prompts = [[random.randrange(256) for _ in range(random.randint(1, 290))] for _ in range(32)]
    size = CacheSize.of(33, 300)
    with open_cpu(path, threads=2, context_length=300, cache_size=size) as runner:
        sequences = [runner.new_sequence() for _ in prompts]
        for sequence, ids in zip(sequences, prompts, strict=True):
            step(runner, sequence, ids[: len(ids) // 2 + 1])
        behind = {i: ids[len(ids) // 2 + 1 :] for i, ids in enumerate(prompts)}
        while left := [i for i in behind if behind[i]]:  # pieces of prompts of several sequences in each step
            runner.step(Batch(tuple(Segment(sequences[i], behind[i][:16]) for i in left)))
            behind = {i: behind[i][16:] for i in left}
        together = [
            runner.step(Batch(tuple(Segment(sequence, [token]) for sequence in sequences)))
            for token in (3, 1, 4)
        ]
        for i, ids in enumerate(prompts):
            runner.reset()
            runner.prefill(ids)
            alone = [runner.decode(token) for token in (3, 1, 4)]
            assert np.array_equal([step[i][0] for step in together], alone)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 300])
def test_forks_are_sequences_of_their_own(runner: OneSequence, length: int) -> None:
    trunk = runner.new_sequence()
    ids = prompt(length)
    if ids:
        step(runner, trunk, ids)
    before = in_use(runner)
    forks = [runner.fork(trunk) for _ in range(3)]
    assert in_use(runner) == before
    tails = [[i, 7, *prompt(i * 3)] for i in range(3)]
    runner.step(Batch(tuple(Segment(fork, tail) for fork, tail in zip(forks, tails, strict=True))))
    step(runner, trunk, [99])
    for fork, tail in zip(forks, tails, strict=True):
        assert_holds(runner, fork, ids + tail)
    runner.release(forks.pop())
    assert_holds(runner, trunk, [*ids, 99])
    for sequence in (trunk, *forks):
        runner.release(sequence)
    assert in_use(runner) == (0, 0, 0)


def test_forks_of_one_state_take_a_tree_and_a_chain_in_one_step(runner: OneSequence) -> None:
    """The chain's copy of the state is its own, and what the tree of the other starts from stays."""
    trunk, ids = runner.new_sequence(), prompt(70)
    step(runner, trunk, ids)
    fork, third = runner.fork(trunk), runner.fork(trunk)
    runner.step(
        Batch((Segment(trunk, [4, 5]), Segment(fork, [1, 2, 3], [-1, 0, 0]), Segment(third, [9], [-1])))
    )
    runner.commit(fork, [0, 2])
    runner.commit(third, [])
    assert_holds(runner, trunk, [*ids, 4, 5])
    assert_holds(runner, fork, [*ids, 1, 3])
    assert_holds(runner, third, ids)


@pytest.mark.parametrize("length", [0, 1, 63, 256, 300])
def test_a_sequence_goes_back_to_its_checkpoints(runner: OneSequence, length: int) -> None:
    sequence, ids = runner.new_sequence(), prompt(length)
    if ids:
        step(runner, sequence, ids)
    first = runner.checkpoint(sequence)
    step(runner, sequence, prompt(20))
    second = runner.checkpoint(sequence)
    step(runner, sequence, [8, 9])
    runner.restore(sequence, second)
    assert_holds(runner, sequence, ids + prompt(20))
    for _ in range(2):
        runner.restore(sequence, first)
        assert_holds(runner, sequence, ids)
    with pytest.raises(InvalidRequestError, match="no such checkpoint"):
        runner.restore(sequence, second)
    runner.drop(sequence, first)
    with pytest.raises(InvalidRequestError, match="no such checkpoint"):
        runner.drop(sequence, first)
    runner.release(sequence)
    assert in_use(runner) == (0, 0, 0)


BAD_BATCHES = {
    "at least one segment": lambda s, t: (),
    "of one sequence": lambda s, t: (Segment(s, [1]), Segment(s, [2])),
    "between 1 and": lambda s, t: (Segment(s, []),),
    "token ids must be in": lambda s, t: (Segment(t, [1]), Segment(s, [-1])),
    "list of integers": lambda s, t: (Segment(s, [0.5]),),
    "with 1 parents": lambda s, t: (Segment(s, [1, 2], [-1]),),
    "parent of row 1": lambda s, t: (Segment(t, [1]), Segment(s, [1, 2], [-1, 1])),
    "parent of row 0": lambda s, t: (Segment(s, [1, 2], [-2, 0]),),
    "there may be 64": lambda s, t: (Segment(s, [1] * 65, range(-1, 64)),),
    "wanted rows must be": lambda s, t: (Segment(s, [1], None, [1]),),
    "a step takes 512": lambda s, t: (Segment(s, [1] * 300), Segment(t, [1] * 213)),
}


@pytest.mark.parametrize("message", BAD_BATCHES)
def test_a_batch_that_cannot_be_computed_changes_nothing(runner: OneSequence, message: str) -> None:
    sequence, other = runner.new_sequence(), runner.new_sequence()
    step(runner, sequence, prompt(5))
    before = in_use(runner)
    with pytest.raises(InvalidRequestError, match=message):
        runner.step(Batch(BAD_BATCHES[message](sequence, other)))
    assert in_use(runner) == before
    assert_holds(runner, sequence, prompt(5))
    assert_holds(runner, other, [])


def test_a_pending_tree_waits_for_a_path(runner: OneSequence) -> None:
    sequence = runner.new_sequence()
    with pytest.raises(InvalidRequestError, match="no draft tree"):
        runner.commit(sequence, [])
    step(runner, sequence, [1, 2, 3, 4], [-1, 0, 0, 1])
    for call in (runner.fork, runner.checkpoint, lambda s: step(runner, s, [1])):
        with pytest.raises(InvalidRequestError, match="4 rows of a draft tree wait"):
            call(sequence)
    for path in ([1], [0, 3], [0, 1, 2], [4], [-1], [0, 0]):
        with pytest.raises(InvalidRequestError, match="cannot be committed"):
            runner.commit(sequence, path)
    runner.commit(sequence, [0, 1, 3])
    assert_holds(runner, sequence, [1, 2, 4])


def test_sequences_that_were_released_or_are_of_another_runner_are_refused(
    runner: OneSequence, path: Path
) -> None:
    gone = runner.new_sequence()
    runner.release(gone)
    with open_cpu(path, threads=1, context_length=16) as other:
        for sequence, message in ((gone, "released"), (other.new_sequence(), "another model")):
            for call in (runner.fork, runner.release, lambda s: step(runner, s, [1])):
                with pytest.raises(InvalidRequestError, match=message):
                    call(sequence)


def test_a_step_without_room_changes_nothing(path: Path) -> None:
    size = CacheSize(num_blocks=3, num_states=2, num_tree_rows=4)
    with open_cpu(path, threads=1, context_length=CONTEXT, cache_size=size) as runner:
        sequence = runner.new_sequence()
        step(runner, sequence, prompt(300))
        fork, third = runner.fork(sequence), runner.fork(sequence)
        with pytest.raises(
            OutOfMemoryError, match="2 more blocks of 256 positions are needed and 1 of 3 are free"
        ):
            runner.step(Batch((Segment(fork, [1]), Segment(sequence, [1]))))
        runner.release(third)
        with pytest.raises(OutOfMemoryError, match="5 more rows of draft trees are needed and 4 of 4"):
            step(runner, fork, [1] * 5, [-1] * 5)
        checkpoint = runner.checkpoint(sequence)
        step(runner, fork, [1, 2], [-1, 0])
        step(runner, sequence, [6])  # takes the last state
        with pytest.raises(OutOfMemoryError, match="1 more recurrent states are needed and 0 of 2"):
            runner.commit(fork, [0])
        runner.drop(sequence, checkpoint)
        runner.commit(fork, [0])
        assert fork.length == sequence.length == 301
        after = step(runner, fork, [5])
        for each in (fork, sequence):
            runner.release(each)
        runner.prefill([*prompt(300), 1])
        assert np.array_equal(after[0], runner.decode(5))


def test_a_step_that_is_interrupted_leaves_empty_sequences(
    runner: OneSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence, bystander = runner.new_sequence(), runner.new_sequence()
    step(runner, sequence, prompt(5))
    step(runner, bystander, prompt(6))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CpuRunner, "_run_trunk", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(runner, sequence, [1, 2], [-1, -1])
    assert_holds(runner, sequence, [])
    assert_holds(runner, bystander, prompt(6))
