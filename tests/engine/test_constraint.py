"""What may follow depends on the tokens of an answer only: in trees, behind thoughts, beside others."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.decoding import Grammar, RepetitionStop, Thought
from coldstream.engine import LLM, SamplingParams
from coldstream.engine.constraint import MAX_GAP_BYTES, AnswerConstraint, ThoughtTokens
from coldstream.engine.engine import Engine
from coldstream.engine.events import Delta, Started
from coldstream.engine.grammar import Grammars
from coldstream.engine.request_reader import RequestReader
from coldstream.engine.submission import Submission
from coldstream.kernels.sample.settings import Bitmask, mask_words
from grammar_cases import POINT, PROMPT, answer, of_schema, opened_demo
from plain_loop import plain_output


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with opened_demo("none") as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with opened_demo("ngram") as llm:
        yield llm


@pytest.fixture(scope="module")
def grammars(plain: LLM) -> Grammars:
    return plain.opened.grammars


# --- which tokens may follow -----------------------------------------------------------------------------


def test_end_tokens_may_follow_exactly_where_the_answer_may_end(grammars: Grammars, plain: LLM) -> None:
    tokenizer = plain.opened.tokenizer
    matcher = grammars.matcher(Grammar("regex", "ab(cd)?"))
    ends = sorted(tokenizer.eos_ids)
    seen = ""
    for character in "abcd":
        found = tokens_of(matcher.mask(), plain)
        assert found.intersection(ends) == (set(ends) if seen in ("ab", "abcd") else set())
        matcher.append(tokenizer.encode(character)[0])
        seen += character
    assert tokens_of(matcher.mask(), plain) == set(ends)


def test_no_control_token_is_text_of_an_answer(grammars: Grammars, plain: LLM) -> None:
    vocabulary = plain.opened.tokenizer.vocabulary
    found = tokens_of(grammars.matcher(Grammar("regex", r"(?s:.)*")).mask(), plain)
    others = set(vocabulary.control_ids.values()) - plain.opened.tokenizer.eos_ids
    assert not found & others
    assert len(found) > plain.opened.tokenizer.vocab_size // 2


def tokens_of(mask: Bitmask | None, llm: LLM) -> set[int]:
    """The tokens whose bits are set; all without a mask."""
    count = llm.opened.tokenizer.vocab_size
    if mask is None:
        return set(range(count))
    assert mask.shape == (mask_words(count),)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[count:].any()
    return set(np.flatnonzero(bits).tolist())


class Request:
    """What `Grammars.constraint` reads of a request."""

    def __init__(self, params: SamplingParams, end_ids: frozenset[int]) -> None:
        self.params, self.prompt_token_ids, self.all_end_ids = params, (1, 2, 3), end_ids


@settings(max_examples=60)
@given(data=st.data())
def test_each_node_of_a_tree_sees_its_own_prefix(grammars: Grammars, plain: LLM, data: st.DataObject) -> None:
    """Whatever was asked before: the answer is a pure function of the prefix."""
    thought = data.draw(st.sampled_from([None, Thought(is_open=True, budget=4), Thought(is_open=True)]))
    params = SamplingParams(grammar=of_schema(POINT), thought=thought)
    request: Any = Request(params, plain.opened.tokenizer.eos_ids)
    used = grammars.constraint(request)
    assert used is not None
    nodes: list[tuple[int, ...]] = [()]
    for _ in range(data.draw(st.integers(2, 25))):
        parent = data.draw(st.sampled_from(nodes))
        fresh = grammars.constraint(request)
        assert fresh is not None
        expected = tokens_of(fresh.allowed((1, 2, 3, *parent)), plain)
        assert tokens_of(used.allowed((1, 2, 3, *parent)), plain) == expected
        allowed = expected - plain.opened.tokenizer.eos_ids
        if allowed:
            nodes.append((*parent, data.draw(st.sampled_from(sorted(allowed)))))


# --- thoughts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_trap_53_a_thought_is_closed_at_its_budget_and_the_grammar_begins_behind_it(
    plain: LLM, drafting: LLM, budget: int
) -> None:
    thought = Thought(is_open=True, budget=budget)
    outputs = [answer(llm, of_schema(POINT), thought=thought) for llm in (plain, drafting)]
    assert outputs[0].token_ids == outputs[1].token_ids
    reasoning, closed, text = outputs[0].text.partition("\n</think>\n\n")
    assert closed
    assert bool(reasoning) == bool(budget)
    assert set(json.loads(text)) == {"x", "name"}
    assert "</think>" not in text


def test_trap_53_a_budget_without_a_grammar_closes_the_thought_once(plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, thought=Thought(is_open=True, budget=10))
    text = plain.generate(PROMPT, params)[0].text
    assert text.count("</think>") == 1
    free = plain.generate(PROMPT, replace(params, thought=None))[0]
    assert text.startswith(plain.opened.tokenizer.decode(free.token_ids[:10]))


def test_a_thought_that_never_began_is_not_closed(plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, thought=Thought(is_open=False, budget=0))
    free = plain.generate(PROMPT, replace(params, thought=None))[0]
    assert plain.generate(PROMPT, params)[0].token_ids == free.token_ids


def test_a_budget_never_splits_a_character(plain: LLM) -> None:
    """The character's bytes are tokens of their own; what closes the thought waits for the last of them."""
    tokenizer = plain.opened.tokenizer
    by_bytes = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocab_size)}
    first, *rest = [by_bytes[bytes([byte])] for byte in "𝛑".encode()]
    params = SamplingParams(thought=Thought(is_open=True, budget=1))
    request: Any = Request(params, frozenset())
    constraint = plain.opened.grammars.constraint(request)
    assert constraint is not None
    context = [1, 2, 3, first]
    for token_id in rest:
        assert constraint.allowed(context) is None
        context.append(token_id)
    assert len(tokens_of(constraint.allowed(context), plain)) == 1


def test_a_thought_before_a_grammar_holds_no_end_token_and_runs_into_no_text(plain: LLM) -> None:
    tokenizer = plain.opened.tokenizer
    request: Any = Request(
        SamplingParams(grammar=of_schema(POINT), thought=Thought(is_open=True)), tokenizer.eos_ids
    )
    constraint = plain.opened.grammars.constraint(request)
    assert constraint is not None
    context = [1, 2, 3, *tokenizer.encode("so </think")]
    left = tokens_of(constraint.allowed(context), plain)
    kept = [tokenizer.token_bytes(index) for index in left]
    assert all(not text.startswith(b">") or not text[1:].strip() for text in kept)
    assert b">" in kept
    assert not left & tokenizer.eos_ids


def test_a_few_blanks_lie_between_a_thought_and_its_grammar(plain: LLM) -> None:
    tokenizer = plain.opened.tokenizer
    spaced = replace(of_schema(POINT), whitespace="\n")
    request: Any = Request(SamplingParams(grammar=spaced, thought=Thought(True)), tokenizer.eos_ids)
    constraint = plain.opened.grammars.constraint(request)
    assert constraint is not None
    (blank,) = tokenizer.encode("\n")
    context = [1, 2, 3, *tokenizer.encode("so </think>")]
    for _ in range(MAX_GAP_BYTES):
        left = tokens_of(constraint.allowed(context), plain)
        assert left >= {blank, *tokenizer.encode("{")}
        assert not left.intersection(tokenizer.encode("a"))
        context.append(blank)
    assert blank not in tokens_of(constraint.allowed(context), plain)
    context += tokenizer.encode("{")
    assert blank in tokens_of(constraint.allowed(context), plain)


def test_an_answer_before_a_grammar_may_begin_with_a_thought_or_not(plain: LLM) -> None:
    """The opening tag has to be one token for that, as it is in the vocabularies of models that think."""
    tokenizer = plain.opened.tokenizer
    (opening,) = tokenizer.encode("def")
    thought = replace(ThoughtTokens.of(Thought(False, budget=2), tokenizer, ()), opening_id=opening)
    matcher = plain.opened.grammars.matcher(of_schema(POINT))
    ends, count = tokenizer.eos_ids, tokenizer.vocab_size
    constraint = AnswerConstraint(matcher, thought, 0, ends, tokenizer.token_bytes, count)
    (brace,) = tokenizer.encode("{")
    assert tokens_of(constraint.allowed(()), plain) >= {opening, brace}
    assert len(tokens_of(constraint.allowed((opening,)), plain)) > 1000
    assert opening not in tokens_of(constraint.allowed((brace,)), plain)
    inside = (opening, *tokenizer.encode("a = 1")[:2])
    assert tokens_of(constraint.allowed(inside), plain) == {thought.forced_ids[0]}


# --- repetition ------------------------------------------------------------------------------------------


def test_endless_repetition_ends_and_says_so(plain: LLM, drafting: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, repetition=RepetitionStop(min_tokens=40))
    prompt = "x = 1\n" * 6
    outputs = [llm.generate(prompt, params)[0] for llm in (plain, drafting)]
    assert [output.finish_reason for output in outputs] == ["repetition", "repetition"]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert len(outputs[0].token_ids) == 40
    assert plain.generate(prompt, replace(params, repetition=None))[0].finish_reason == "length"


# --- beside other requests -------------------------------------------------------------------------------


@pytest.mark.sharded(of="models on the CPU")
def test_demands_of_requests_in_one_step_are_their_own(plain: LLM) -> None:
    """Each answer is the one that its request gets alone, with neighbours that are cancelled on the way."""
    thought = Thought(is_open=True, budget=5)
    each = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=40, **demand)
        for seed, demand in enumerate(
            [
                {"grammar": of_schema(POINT)},
                {},
                {"grammar": Grammar("regex", "[a-z ]{3,40}\\.")},
                {"thought": thought},
                {"grammar": of_schema(POINT), "thought": thought},
                {"grammar": Grammar("json_object")},
                {"repetition": RepetitionStop(max_period=4, repeats=2, min_tokens=4)},
                {"grammar": Grammar("lark", 'start: ("a" | "b"){5,9}')},
            ]
        )
    ]
    alone = [plain_output(plain.opened, PROMPT, params) for params in each]
    plain.forget()
    reader = RequestReader(plain.opened)
    engine = Engine(plain.opened)
    for request_id in range(2 * len(each)):
        request = reader.of_prompt(PROMPT, "prompt", each[request_id // 2])
        engine.add(Submission(request_id, request))
    tokens: dict[int, list[int]] = {request_id: [] for request_id in range(2 * len(each))}
    reasons = {}
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, Delta):
                tokens[event.request_id] += event.piece.token_ids
                reasons[event.request_id] = event.piece.finish_reason
        engine.cancel(1 + 2 * (len(tokens[0]) % len(each)))
    assert [tuple(tokens[2 * i]) for i in range(len(each))] == [output.token_ids for output in alone]
    assert [reasons[2 * i] for i in range(len(each))] == [output.finish_reason for output in alone]
    engine.close()


def test_a_grammar_that_grows_too_complex_ends_its_own_request(plain: LLM) -> None:
    plain.forget()
    reader = RequestReader(plain.opened)
    engine = Engine(plain.opened)
    costly = Grammar("regex", "(((a{1,100}){1,100}){1,100}){1,100}")
    for request_id, grammar in enumerate([costly, of_schema(POINT)]):
        params = SamplingParams(temperature=0.9, seed=5, max_tokens=400, grammar=grammar)
        engine.add(Submission(request_id, reader.of_prompt(PROMPT, "prompt", params)))
    text, reasons = "", {}
    while not engine.is_idle:
        for event in engine.step():
            assert isinstance(event, Delta | Started)
            if isinstance(event, Delta):
                reasons[event.request_id] = event.piece.finish_reason
                text += event.piece.text if event.request_id == 1 else ""
    assert reasons == {0: "grammar", 1: "stop"}
    assert text == answer(plain, of_schema(POINT)).text
    engine.close()
    outputs = [answer(plain, costly) for _ in range(3)]
    assert all(output.finish_reason == "grammar" for output in outputs)
    assert len({output.token_ids for output in outputs}) == 1
    assert outputs[0].text
    assert not outputs[0].text.strip("a")
