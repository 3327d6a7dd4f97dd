"""What a request may demand of its answer, and when an answer repeats itself."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding import (
    Grammar,
    RepetitionStop,
    RepetitionWatch,
    SamplingParams,
    Thought,
    TokenChooser,
)
from coldstream.decoding.constraints import MAX_GRAMMAR_CHARS
from coldstream.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Grammar("yaml", "x"), "grammar.kind"),  # type: ignore[arg-type]
        (lambda: Grammar("regex"), "grammar.text"),
        (lambda: Grammar("json_object", "{}"), "grammar.text"),
        (lambda: Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1)), "grammar.text"),
        (lambda: Grammar("regex", 3), "grammar.text"),  # type: ignore[arg-type]
        (lambda: Grammar("regex", "a", is_lenient=1), "grammar.is_lenient"),  # type: ignore[arg-type]
        (lambda: Thought(is_open="yes"), "thought.is_open"),  # type: ignore[arg-type]
        (lambda: Thought(is_open=True, closing=""), "thought.closing"),
        (lambda: Thought(is_open=True, budget=-1), "thought.budget"),
        (lambda: Thought(is_open=True, forced="done"), "thought.forced"),
        (lambda: RepetitionStop(max_period=0), "repetition.max_period"),
        (lambda: RepetitionStop(repeats=1), "repetition.repeats"),
        (lambda: RepetitionStop(min_tokens=0), "repetition.min_tokens"),
        (lambda: SamplingParams(grammar="a"), "grammar"),  # type: ignore[arg-type]
        (lambda: SamplingParams(thought=5), "thought"),  # type: ignore[arg-type]
        (lambda: SamplingParams(grammar=Grammar("regex", "a"), min_tokens=1), "min_tokens and grammar"),
        (lambda: SamplingParams(grammar=Grammar("regex", "a"), ignore_eos=True), "ignore_eos and grammar"),
    ],
)
def test_a_demand_out_of_range_is_refused_by_name(make: Any, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}[: ]"):
        make()


def test_a_schema_that_is_no_text_is_refused_with_how_to_give_it() -> None:
    schema: Any = {"type": "object"}
    with pytest.raises(InvalidRequestError, match=r"give json\.dumps\(schema\)"):
        Grammar("json_schema", schema)
    assert Grammar("json_schema", json.dumps(schema)).text == '{"type": "object"}'


def test_a_demand_is_never_ignored() -> None:
    for params in (
        SamplingParams(grammar=Grammar("regex", "a")),
        SamplingParams(thought=Thought(is_open=True, budget=3)),
    ):
        assert params.is_constrained
        with pytest.raises(AssertionError, match="carried out"):
            TokenChooser(params, 0, 1, ())
    assert not SamplingParams(thought=Thought(is_open=True)).is_constrained


@given(
    tokens=st.lists(st.integers(0, 2), max_size=60),
    max_period=st.integers(1, 6),
    repeats=st.integers(2, 4),
    min_tokens=st.integers(1, 20),
)
def test_repetition_is_what_its_rule_says(
    tokens: list[int], max_period: int, repeats: int, min_tokens: int
) -> None:
    watch = RepetitionWatch(RepetitionStop(max_period, repeats, min_tokens))
    for end, token_id in enumerate(tokens, 1):
        lengths = [(max(repeats * period, min_tokens), period) for period in range(1, max_period + 1)]
        expected = any(
            length <= end and tokens[end - length + period : end] == tokens[end - length : end - period]
            for length, period in lengths
        )
        assert watch.push(token_id) == expected


def test_repetition_within_its_limits_is_left_alone() -> None:
    watch = RepetitionWatch(RepetitionStop())
    assert not any(watch.push(token_id) for token_id in [7] * 191)
    assert watch.push(7)


def test_trap_53_tables_and_code_are_no_repetition() -> None:
    """A token for each character, so that as much as possible looks alike."""
    rule = "| " + " | ".join(["---"] * 12) + " |\n"
    rows = "".join(f"| {i} | {i * i} | yes | yes | yes | yes | 0.00 | 0.00 | 0.00 |\n" for i in range(200))
    cases = "".join(f"    elif code == {i}:\n        return NAMES[{i}]\n" for i in range(200))
    matrix = "".join(f"    [{', '.join('1' if i == j else '0' for j in range(30))}],\n" for i in range(30))
    for text in (rule + rows, cases, matrix, "-" * 120 + "\n" + "=" * 120, " " * 180 + "x"):
        watch = RepetitionWatch(RepetitionStop())
        assert not any(watch.push(ord(character)) for character in text), text[:40]
