"""The live sequence: reuse never changes a logit, and an interruption never leaves a wrong state."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding import AnyLogits, StartedChoices
from coldstream.engine.live_sequence import LiveSequence, num_live_prefix
from hash_runner import HashRunner, open_hash_model


@dataclass(frozen=True)
class Results:
    """What a device has chosen."""

    tokens: list[tuple[int, int]]

    def index(self, row: int) -> int:
        return row

    def results(self) -> list[tuple[int, int]]:
        return self.tokens


def prefill(sequence: LiveSequence, prompt: list[int]) -> AnyLogits:
    return sequence.append(prompt[sequence.start(prompt) :])


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
        logits = prefill(sequence, prompt)
        expected = list(prompt)
        assert shared_runner.token_ids == expected
        assert (logits == shared_runner.current_logits()).all()
        for token_id in answer:
            sequence.append([token_id])
            sequence.trust()
            expected.append(token_id)
            assert shared_runner.token_ids == expected
        if interrupt:
            shared_runner.fail_at = 0
            with pytest.raises(RuntimeError):
                sequence.append([0])
            shared_runner.fail_at = None
            assert prefill(sequence, [*expected, 0]) is not None
            assert sequence.num_reused == 0


def test_forget_makes_the_next_prompt_start_afresh(tmp_path: Path) -> None:
    runner = open_hash_model(tmp_path / "tiny.gguf").runner
    sequence = LiveSequence(runner)
    prefill(sequence, [1, 2])
    sequence.trust()
    sequence.forget()
    prefill(sequence, [1, 2, 3])
    assert (sequence.num_reused, runner.position) == (0, 3)


def test_a_state_whose_last_logits_were_refused_is_not_extended(tmp_path: Path) -> None:
    runner = open_hash_model(tmp_path / "tiny.gguf").runner
    sequence = LiveSequence(runner)
    for is_trusted in (False, True, False):
        prefill(sequence, [1, 2])
        sequence.trust()
        sequence.append([3])
        if is_trusted:
            sequence.trust()
        prefill(sequence, [1, 2, 3, 4])
        assert (sequence.num_reused, runner.position) == (3 if is_trusted else 0, 4)
        prefill(sequence, [1, 2, 3, 4, 5])
        assert (sequence.num_reused, runner.position) == (0, 5)


def test_a_prompt_that_fails_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    runner = open_hash_model(tmp_path / "tiny.gguf").runner
    assert isinstance(runner, HashRunner)
    sequence = LiveSequence(runner)
    prefill(sequence, [1, 2])
    sequence.trust()
    runner.fail_at = 0
    with pytest.raises(RuntimeError):
        prefill(sequence, [1, 2, 3])
    runner.fail_at = None
    sequence.trust()  # of logits that there are not
    prefill(sequence, [1, 2, 3, 4])
    assert (sequence.num_reused, runner.position) == (0, 4)


def test_a_runner_that_emptied_its_state_itself_is_not_extended(tmp_path: Path) -> None:
    runner = open_hash_model(tmp_path / "tiny.gguf").runner
    sequence = LiveSequence(runner)
    prefill(sequence, [1, 2])
    sequence.trust()
    runner.clear(sequence._sequence)
    prefill(sequence, [1, 2, 3])
    assert (sequence.num_reused, runner.position) == (0, 3)


@pytest.mark.parametrize("fault", [0, 3])
def test_a_state_whose_last_choice_failed_is_not_extended(tmp_path: Path, fault: int) -> None:
    """The choice may still be under way when the next prompt comes."""
    runner = open_hash_model(tmp_path / "tiny.gguf").runner
    sequence = LiveSequence(runner)
    prefill(sequence, [1, 2])
    sequence.trust_after(StartedChoices((0,), (2,), 9, Results([(5, fault)]), {}))
    prefill(sequence, [1, 2, 3])
    assert (sequence.num_reused, runner.position) == (0 if fault else 2, 3)
    prefill(sequence, [1, 2, 3, 4])
    assert sequence.num_reused == 0, "the choice says nothing of a later state"
