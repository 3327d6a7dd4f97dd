"""Rows of a step are chosen together, each as if it were alone, by the device where they can stay there."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from far_logits import FarStep
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding.choice import SampledToken, TokenChoice, TokenChooser, begin_choices
from coldstream.decoding.logprobs import token_logprobs
from coldstream.decoding.sampling import sample_token
from coldstream.decoding.sampling_params import Logits, SamplingParams
from coldstream.errors import GenerationFault, InvalidRequestError
from coldstream.kernels.sample.settings import MAX_BIASED, Bitmask, RowSettings, bitmask_of

VOCAB = 30
GREEDY = SamplingParams(temperature=0)


def forbid_one(context: Sequence[int], logits: Logits) -> Logits:
    return np.where(np.arange(len(logits)) == 1, -np.inf, logits).astype(np.float32)


def keep_all(context: Sequence[int], logits: Logits) -> Logits:
    return logits


def fail(context: Sequence[int], logits: Logits) -> Logits:
    raise ValueError("made to fail")


@dataclass(frozen=True)
class Only:
    token_ids: Collection[int]

    def allowed(self, context: Sequence[int]) -> Bitmask | None:
        return bitmask_of(self.token_ids, VOCAB)


class Refusing:
    def allowed(self, context: Sequence[int]) -> Bitmask | None:
        raise InvalidRequestError("grammar: made to fail")


finite = st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32))
logit_rows = st.lists(finite, min_size=VOCAB, max_size=VOCAB)
broken_rows = st.sampled_from([np.nan, np.inf]).map(lambda bad: [0.0] * (VOCAB - 1) + [bad])
params_of_rows = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repeat_last_n=st.sampled_from([None, 0, 1, 3, 4, 64]),
    logprobs=st.sampled_from([None, None, 2]),
    logits_processors=st.sampled_from([None, None, [forbid_one], [fail]]),
    logit_bias=st.sampled_from([None, None, None, {2: 5.0, 4: -100.0}]),
)
rows_of_choices = st.lists(
    st.tuples(
        logit_rows | broken_rows,
        st.lists(st.integers(0, VOCAB - 1), max_size=6),  # context
        params_of_rows,
        st.integers(0, 2**64 - 1),
        st.sampled_from([(), (), {3, 4}, range(VOCAB)]),  # forbidden
        st.none(),
        st.sampled_from([None, None, Only([3, 5, 8]), Only([]), Only(range(VOCAB)), Refusing()]),
    ),
    max_size=7,
)


def outcome_alone(choice: TokenChoice, logits: Logits) -> object:
    """What `sample_token` says, an error as its text."""
    params = choice.params
    try:
        allowed = choice.constraint.allowed(choice.context) if choice.constraint else None
        token_id = sample_token(logits, choice.context, params, choice.seed, choice.forbidden_ids, allowed)
    except (GenerationFault, InvalidRequestError) as error:
        return type(error), str(error)
    count = params.logprobs
    return SampledToken(token_id, None if count is None else token_logprobs(logits, token_id, count))


def shown(outcome: object) -> object:
    return (type(outcome), str(outcome)) if isinstance(outcome, Exception) else outcome


@given(rows_of_choices, st.randoms(use_true_random=False))
def test_rows_are_each_what_they_are_alone(rows: list[tuple[Any, ...]], random: Any) -> None:
    """Here and on a device, whatever their settings; an error is that of its own row."""
    values = np.array([logits for logits, *_ in rows], np.float32).reshape(len(rows), VOCAB)
    here = [TokenChoice(values[i], *rest) for i, (_, *rest) in enumerate(rows)]
    expected = [outcome_alone(choice, values[i]) for i, choice in enumerate(here)]
    assert [shown(outcome) for outcome in begin_choices(here).outcomes()] == expected
    step, order = FarStep(values), random.sample(range(len(rows)), len(rows))
    far = [replace(here[i], logits=step[i]) for i in order]
    assert [shown(outcome) for outcome in begin_choices(far).outcomes()] == [expected[i] for i in order]
    known = [i for i in order if not isinstance(here[i].constraint, Refusing)]
    stay = [i for i in known if not here[i].needs_host]
    assert step.chosen == ([stay] if stay else [])
    brought = [i for i in known if i not in stay]
    assert step.brought == ([brought] if brought else []), "all of them at once, and no others"


def test_rows_on_a_device_and_here_may_be_mixed() -> None:
    values = np.eye(4, 6, dtype=np.float32)
    step = FarStep(values)
    logits = [values[0], step[1], values[2], step[3]]
    chosen = begin_choices([TokenChoice(each, [0], GREEDY, 0) for each in logits]).outcomes()
    assert chosen == [SampledToken(0), SampledToken(1), SampledToken(2), SampledToken(3)]
    assert (step.chosen, step.brought) == ([[1, 3]], [])


def test_a_forbidden_token_is_chosen_neither_on_a_device_nor_here() -> None:
    values = np.array([[1.0, 3.0, 2.0]] * 2, np.float32)
    step = FarStep(values)
    chosen = begin_choices(
        [TokenChoice(logits, [0], GREEDY, 0, {1}) for logits in (step[0], values[1])]
    ).outcomes()
    assert chosen == [SampledToken(2), SampledToken(2)]


def test_rows_of_another_step_are_refused_and_a_row_twice() -> None:
    steps = [FarStep(np.eye(2, 6, dtype=np.float32)) for _ in range(2)]
    with pytest.raises(AssertionError, match="in one row"):
        begin_choices([TokenChoice(steps[0][1], [0], GREEDY, 0)] * 2).outcomes()
    with pytest.raises(AssertionError, match="one step"):
        begin_choices([TokenChoice(step[row], [0], GREEDY, 0) for row, step in enumerate(steps)]).outcomes()


def test_a_device_gets_every_setting_by_its_name() -> None:
    settings = {
        "temperature": 0.25,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.75,
        "frequency_penalty": -0.5,
    }
    step = FarStep(np.zeros((1, 9), np.float32))
    params = SamplingParams(**settings, repeat_last_n=3, logit_bias={4: -2.5, 3: 1.5})  # type: ignore[arg-type]
    begin_choices([TokenChoice(step[0], [8, 0, 1, 7], params, 9, [2, 4])]).outcomes()
    biases = {"biased": (3, 4, 2), "biases": (1.5, -np.inf, -np.inf)}
    assert step.observed == [
        RowSettings(**settings, recent=[0, 1, 7], seed=9, position=4, **biases)  # type: ignore[arg-type]
    ]


def test_more_biases_than_a_device_has_room_for_are_applied_here() -> None:
    values = np.zeros((2, 2 * MAX_BIASED), np.float32)
    step = FarStep(values)
    params = SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(MAX_BIASED), -1.0))
    choices = [TokenChoice(step[row], [0], params, 0, range(MAX_BIASED, MAX_BIASED + row)) for row in (0, 1)]
    assert begin_choices(choices).outcomes() == [SampledToken(MAX_BIASED), SampledToken(MAX_BIASED + 1)]
    assert (step.chosen, step.brought) == ([[0]], [[1]])


def test_sp07_a_node_of_a_tree_has_penalties_for_its_own_path() -> None:
    """Rows of one request, whose contexts part after its last token."""
    values = np.zeros((3, 6), np.float32)
    values[:, [1, 2, 3]] = 3.0, 2.9, 2.8
    step, params = FarStep(values), SamplingParams(temperature=0, presence_penalty=1.0)
    paths = [[0], [0, 1], [0, 2]]
    chosen = begin_choices([TokenChoice(step[i], path, params, 0) for i, path in enumerate(paths)]).outcomes()
    assert chosen == [SampledToken(1), SampledToken(2), SampledToken(1)]


def test_a_penalty_counts_once_also_where_processors_see_it() -> None:
    logits = np.array([2.0, 1.5], np.float32)
    for processors in (None, [keep_all]):
        for presence_penalty, token_id in ((0.3, 0), (0.6, 1)):
            params = SamplingParams(
                temperature=0, presence_penalty=presence_penalty, logits_processors=processors
            )
            assert begin_choices([TokenChoice(logits, [0], params, 0)]).outcomes() == [SampledToken(token_id)]


def test_the_error_of_a_row_alone_is_raised() -> None:
    for logits in (np.array([0.0, np.nan], np.float32), FarStep(np.array([[0.0, np.nan]], np.float32))[0]):
        with pytest.raises(GenerationFault, match="1 of 2 logits at position 1 are not finite"):
            TokenChooser(GREEDY, 0, 1, ())(logits, [5])


def _steps(prompt: Sequence[int], count: int) -> Iterator[tuple[Logits, list[int]]]:
    context = list(prompt)
    for step in range(count):
        yield np.random.default_rng(step).normal(size=VOCAB).astype(np.float32), context
        context = [*context, step]


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_end_tokens_are_forbidden_for_exactly_min_tokens(min_tokens: int) -> None:
    params = SamplingParams(temperature=0, min_tokens=min_tokens)
    choose = TokenChooser(params, 0, 2, {3, 5})
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 5]] = 2.0, 1.0
    chosen = [choose(logits, context).token_id for _, context in _steps([8, 9], 8)]
    assert chosen == [0] * min_tokens + [3] * (8 - min_tokens)


@given(st.integers(0, 5), st.integers(0, 2**64 - 1))
def test_log_probabilities_change_no_choice_and_are_the_models_own(count: int, seed: int) -> None:
    plain = SamplingParams(temperature=1.4, repetition_penalty=1.5, min_tokens=3)
    wanted = SamplingParams(temperature=1.4, repetition_penalty=1.5, min_tokens=3, logprobs=count)
    without, with_them = TokenChooser(plain, seed, 1, {2}), TokenChooser(wanted, seed, 1, {2})
    for logits, context in _steps([1], 6):
        token_id = without(logits, context).token_id
        assert token_id == sample_token(logits, context, plain, seed, {2} if len(context) < 4 else ())
        assert without(logits, context) == SampledToken(token_id)
        assert with_them(logits, context) == SampledToken(token_id, token_logprobs(logits, token_id, count))


@pytest.mark.parametrize(
    ("params", "end_ids", "is_fused"),
    [
        (GREEDY, (2,), True),
        (replace(GREEDY, min_tokens=1), (), True),
        (replace(GREEDY, min_tokens=1), (2,), False),
        (replace(GREEDY, presence_penalty=0.5), (2,), False),
        (replace(GREEDY, logit_bias={1: 2.0}), (2,), False),
        (replace(GREEDY, logits_processors=(keep_all,)), (2,), False),
        (replace(GREEDY, logprobs=0), (2,), False),
    ],
)
def test_fused_steps_are_for_texts_whose_choices_need_no_token_before(
    params: SamplingParams, end_ids: tuple[int, ...], is_fused: bool
) -> None:
    """They know neither how many tokens there are, nor which."""
    chooser = TokenChooser(params, 0, 3, end_ids)
    text = chooser.fused_text([4, 5, 6], num_left=7, most_nodes=4)
    assert (text is not None) == is_fused
    if text is not None:
        assert (text.end_ids, text.left) == (frozenset(end_ids), 7)
