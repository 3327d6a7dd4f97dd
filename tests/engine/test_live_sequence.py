"""The live sequence: reuse never changes a logit, and an interruption never leaves a wrong state."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.engine.live_sequence import LiveSequence, num_live_prefix
from hash_runner import HashRunner, open_hash_model

ids = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(st.integers(0, 2), max_size=6), ids)
def test_all_live_tokens_are_reused_or_none(live: list[int], prompt: list[int]) -> None:
    extends = len(prompt) > len(live) and prompt[: len(live)] == live
    assert num_live_prefix(live, prompt) == (len(live) if extends else 0)


@pytest.fixture(scope="module")
def shared_runner(tmp_path_factory: pytest.TempPathFactory) -> HashRunner:
    runner = open_hash_model(tmp_path_factory.mktemp("live") / "tiny.gguf").runner
    assert isinstance(runner, HashRunner)
    return runner


@given(st.lists(st.tuples(ids, st.lists(st.integers(0, 2), max_size=4), st.booleans()), max_size=8))
def test_logits_never_depend_on_what_was_live(
    shared_runner: HashRunner, requests: list[tuple[list[int], list[int], bool]]
) -> None:
    sequence = LiveSequence(shared_runner)
    for prompt, answer, interrupt in requests:
        logits = sequence.prefill(prompt, None)
        expected = list(prompt)
        assert shared_runner.token_ids == expected
        assert (logits == shared_runner.current_logits()).all()
        for token_id in answer:
            sequence.decode(token_id)
            sequence.trust()
            expected.append(token_id)
            assert shared_runner.token_ids == expected
        if interrupt:
            shared_runner.fail_at = 0
            with pytest.raises(RuntimeError):
                sequence.decode(0)
            shared_runner.fail_at = None
            assert sequence.prefill([*expected, 0], None) is not None
            assert sequence.num_reused == 0


def test_forget_makes_the_next_prompt_start_afresh(tmp_path: Path) -> None:
    runner = open_hash_model(tmp_path / "tiny.gguf").runner
    sequence = LiveSequence(runner)
    sequence.prefill([1, 2], None)
    sequence.trust()
    sequence.forget()
    sequence.prefill([1, 2, 3], None)
    assert (sequence.num_reused, runner.position) == (0, 3)


def test_a_state_whose_last_logits_were_refused_is_not_extended(tmp_path: Path) -> None:
    runner = open_hash_model(tmp_path / "tiny.gguf").runner
    sequence = LiveSequence(runner)
    for is_trusted in (False, True, False):
        sequence.prefill([1, 2], None)
        sequence.trust()
        sequence.decode(3)
        if is_trusted:
            sequence.trust()
        sequence.prefill([1, 2, 3, 4], None)
        assert (sequence.num_reused, runner.position) == (3 if is_trusted else 0, 4)
        sequence.prefill([1, 2, 3, 4, 5], None)
        assert (sequence.num_reused, runner.position) == (0, 5)


def test_a_prompt_that_fails_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    runner = open_hash_model(tmp_path / "tiny.gguf").runner
    assert isinstance(runner, HashRunner)
    sequence = LiveSequence(runner)
    sequence.prefill([1, 2], None)
    sequence.trust()
    runner.fail_at = 0
    with pytest.raises(RuntimeError):
        sequence.prefill([1, 2, 3], None)
    runner.fail_at = None
    sequence.trust()  # of logits that there are not
    sequence.prefill([1, 2, 3, 4], None)
    assert (sequence.num_reused, runner.position) == (0, 4)


def test_a_runner_that_emptied_its_state_itself_is_not_extended(tmp_path: Path) -> None:
    runner = open_hash_model(tmp_path / "tiny.gguf").runner
    sequence = LiveSequence(runner)
    sequence.prefill([1, 2], None)
    sequence.trust()
    runner.clear(sequence._sequence)
    sequence.prefill([1, 2, 3], None)
    assert (sequence.num_reused, runner.position) == (0, 3)
