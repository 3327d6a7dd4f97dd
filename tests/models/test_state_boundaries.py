"""Sequences that a step leaves behind on its way: each is what it would be after a step that ends there."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import open_cuda
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_sequence import OneSequence, open_cpu
from runner_cases import FAMILIES, write_mixed_layers, write_variant
from tree_cases import prompt

from coldstream.errors import InvalidRequestError, OutOfMemoryError
from coldstream.kernels.ops import MIN_FORK_ROWS
from coldstream.kvcache import Batch, CacheSize, ChosenToken, Demand, Segment, Sequence
from coldstream.models.cpu.runner import CpuRunner

CONTEXT = 600
MIN = MIN_FORK_ROWS
SIZE = CacheSize.of(8, CONTEXT, num_trees=1)


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def runner(path: Path) -> Iterator[OneSequence]:
    with open_cpu(path, threads=2, context_length=CONTEXT, cache_size=SIZE) as opened:
        yield opened


def in_use(runner: OneSequence) -> tuple[int, int]:
    pools = (runner._sequences.blocks, runner._sequences.states)
    blocks, states = (pool.num_blocks - pool.num_free for pool in pools)
    return blocks, states


def step(
    runner: OneSequence, sequence: Sequence, ids: list[int], forks: tuple[tuple[int, Sequence], ...] = ()
) -> np.ndarray:
    (logits,) = runner.step(Batch((Segment(sequence, ids, forks=forks),)))
    return np.array(logits)


def following(runner: OneSequence, sequence: Sequence) -> list[np.ndarray]:
    """Logits after two further tokens, which the sequence has then."""
    return [step(runner, sequence, [token])[0] for token in (77, 78)]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.sampled_from((0, 1, 240, 256, 300)),
    num_rows=st.integers(MIN + 1, 212),  # with the first ones no more than a step takes
    data=st.data(),
)
def test_any_boundaries_have_the_bits_of_steps_that_end_there(
    runner: OneSequence, first: int, num_rows: int, data: st.DataObject
) -> None:
    boundaries = sorted(data.draw(st.sets(st.integers(MIN, num_rows - 1), min_size=1, max_size=4)))
    is_shared = data.draw(st.booleans())
    # All draws come first: one that ends the example would leave sequences behind.
    order = data.draw(st.permutations(range(len(boundaries) + 1)))
    ids, text = prompt(first + num_rows), runner.new_sequence()
    if first:
        step(runner, text, ids[:first])
    forks = tuple((boundary, runner.new_sequence()) for boundary in boundaries)
    shared = runner.fork(text) if is_shared else None
    free, need = runner.free, runner.need_of([Demand(text, num_rows, None, [each for _, each in forks])])
    last = step(runner, text, ids[first:], forks)
    assert free.num_blocks - runner.free.num_blocks == need.num_blocks
    assert free.num_states - runner.free.num_states == need.num_states
    lengths = [*(first + boundary for boundary in boundaries), first + num_rows]
    held = [*(fork for _, fork in forks), text]
    assert [each.length for each in held] == lengths
    # In any order, as each may be the first to write to a block that they share.
    found = {i: following(runner, held[i]) for i in order}
    for i, length in enumerate(lengths):
        alone = runner.new_sequence()
        expected = step(runner, alone, ids[:length])
        assert np.array_equal(found[i], following(runner, alone))
        runner.release(alone)
    assert np.array_equal(last, expected)
    if shared is not None and first:
        alone = runner.new_sequence()
        step(runner, alone, ids[:first])
        assert np.array_equal(following(runner, shared), following(runner, alone))
        held += [shared, alone]
    for each in held:
        runner.release(each)
    if shared is not None and not first:
        runner.release(shared)
    assert in_use(runner) == (0, 0)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_a_gpu_leaves_what_the_cpu_does(tmp_path: Path) -> None:
    """Beside another prompt and a token, in a block that the text goes on in, and across its end."""
    path, ids = write_mixed_layers(tmp_path, "qwen35moe"), prompt(300)
    with (
        open_cuda(path, context_length=CONTEXT, kv_type="i16", cache_size=SIZE) as gpu,
        open_cpu(path, threads=1, context_length=CONTEXT, cache_size=SIZE, kv_type="i16") as cpu,
    ):
        found, expected = ([], [])
        for runner, results in ((gpu, found), (cpu, expected)):
            text, other, third = (runner.new_sequence() for _ in range(3))
            step(runner, text, ids[:200])
            forks = tuple((boundary, runner.new_sequence()) for boundary in (17, 56, 60, 99))
            runner.step(
                Batch(
                    (
                        Segment(third, [5]),
                        Segment(text, ids[200:], forks=forks),
                        Segment(other, ids[:20]),
                    )
                )
            )
            held = [text, *(fork for _, fork in forks), other, third]
            results += [logits for each in held for logits in following(runner, each)]
            for each in held:
                runner.release(each)
            assert in_use(runner) == (0, 0)
        for one, another in zip(found, expected, strict=True):
            assert np.array_equal(one, another)


def test_several_sequences_of_a_step_leave_forks(runner: OneSequence) -> None:
    texts = [runner.new_sequence() for _ in range(3)]
    ids = [prompt(40), [5], prompt(30)[::-1]]
    first, second = runner.new_sequence(), runner.new_sequence()
    runner.step(
        Batch(
            (
                Segment(texts[0], ids[0], forks=((39, first),)),
                Segment(texts[1], ids[1]),
                Segment(texts[2], ids[2], forks=((MIN, second),)),
            )
        )
    )
    for sequence, tokens in (
        *zip(texts, ids, strict=True), (first, ids[0][:39]), (second, ids[2][:MIN])
    ):  # fmt: skip
        alone = runner.new_sequence()
        step(runner, alone, tokens)
        assert np.array_equal(following(runner, sequence), following(runner, alone))
        runner.release(alone)
    for sequence in (*texts, first, second):
        runner.release(sequence)
    assert in_use(runner) == (0, 0)


Fresh = Callable[[], Sequence]
BAD_SEGMENTS: dict[str, Callable[[Sequence, Sequence, Fresh], Segment]] = {
    "a fork after 15 of 40": lambda s, t, new: Segment(s, [1] * 40, forks=((MIN - 1, new()),)),
    "a fork after 40 of 40": lambda s, t, new: Segment(s, [1] * 40, forks=((40, new()),)),
    "a fork after 20 of 40": lambda s, t, new: Segment(s, [1] * 40, forks=((20, new()), (20, new()))),
    "a fork after 16 of 8": lambda s, t, new: Segment(s, [1] * 8, forks=((MIN, new()),)),
    "named twice": lambda s, t, new: Segment(s, [1] * 40, forks=((20, s),)),
    "is named twice in a": lambda s, t, new: Segment(s, [1] * 40, forks=((20, e := new()), (21, e))),
    "holds 5 tokens": lambda s, t, new: Segment(s, [1] * 40, forks=((20, t),)),
    "only a chain": lambda s, t, new: Segment(s, [1] * 40, range(-1, 39), forks=((20, new()),)),
    "a token that is result": lambda s, t, new: Segment(s, ChosenToken(0, frozenset()), forks=((20, new()),)),
}


@pytest.mark.parametrize("message", BAD_SEGMENTS)
def test_forks_that_no_step_can_leave_are_refused(runner: OneSequence, message: str) -> None:
    sequence, other, made = runner.new_sequence(), runner.new_sequence(), []
    for each in (sequence, other):
        step(runner, each, prompt(5))

    def new() -> Sequence:
        made.append(runner.new_sequence())
        return made[-1]

    before = in_use(runner)
    with pytest.raises(InvalidRequestError, match=message):
        runner.step(Batch((BAD_SEGMENTS[message](sequence, other, new),)))
    assert in_use(runner) == before
    assert (sequence.length, other.length) == (5, 5)
    assert all(each.state is None and not each.length for each in made)
    for each in (sequence, other, *made):
        runner.release(each)


def test_a_fork_that_was_released_or_is_of_another_runner_is_refused(runner: OneSequence, path: Path) -> None:
    sequence, gone = runner.new_sequence(), runner.new_sequence()
    runner.release(gone)
    with open_cpu(path, threads=1, context_length=64) as other:
        for fork, message in ((gone, "released"), (other.new_sequence(), "another model")):
            with pytest.raises(InvalidRequestError, match=message):
                step(runner, sequence, prompt(40), ((20, fork),))
    assert in_use(runner) == (0, 0)


def test_a_step_without_room_for_a_fork_changes_nothing(path: Path) -> None:
    with open_cpu(path, threads=1, context_length=CONTEXT, cache_size=CacheSize(4, 2)) as runner:
        sequence, forks = runner.new_sequence(), [runner.new_sequence() for _ in range(2)]
        with pytest.raises(OutOfMemoryError, match="3 more recurrent states are needed and 2 of 2"):
            step(runner, sequence, prompt(40), ((20, forks[0]), (30, forks[1])))
        assert in_use(runner) == (0, 0)
        step(runner, sequence, prompt(40), ((20, forks[0]),))
        assert (sequence.length, forks[0].length) == (40, 20)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("part", ["_run_trunk", "_logits_of"])
def test_a_step_that_fails_leaves_nothing(
    runner: OneSequence, monkeypatch: pytest.MonkeyPatch, part: str, error: type[BaseException]
) -> None:
    sequence, fork = runner.new_sequence(), runner.new_sequence()
    step(runner, sequence, prompt(5))

    def fail(*_: object) -> None:
        raise error("made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(CpuRunner, part, fail)
        with pytest.raises(error):
            step(runner, sequence, prompt(40), ((20, fork),))
    assert (sequence.length, fork.length) == (0, 0)
    assert in_use(runner) == (0, 0)
    step(runner, sequence, prompt(40), ((20, fork),))
    for each in (sequence, fork):
        runner.release(each)
    assert in_use(runner) == (0, 0)
