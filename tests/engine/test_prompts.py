"""What may be given as prompts, conversations and settings, and what is refused by name before computing."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.engine import LLM, SamplingParams
from coldstream.errors import InvalidRequestError
from hash_runner import HashRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
USER = {"role": "user", "content": "def"}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
)
keys = st.sampled_from(["prompt", "prompt_token_ids", "role", "content", "tool_calls", "user", 1, None])
anything = st.recursive(
    scalars | st.builds(object) | st.just(GREEDY) | st.just(np.zeros((1, 2, 0))) | st.just(np.array(["a"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=2),
        st.sets(scalars),
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 1, 4],
        (3, 1, 4),
        [[3, 1, 4]],
        [(3, 1, 4)],
        ([3, 1, 4],),
        np.array([3, 1, 4]),
        np.array([3, 1, 4], np.uint16),
        np.array([[3, 1, 4]]),
        [np.array([3, 1, 4])],
        [np.int64(3), 1, np.int32(4)],
        {"prompt_token_ids": [3, 1, 4]},
        [{"prompt_token_ids": np.array([3, 1, 4])}],
    ],
)
def test_token_ids_of_every_kind_are_one_prompt(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt, GREEDY)
    assert output.prompt is None
    assert output.prompt_token_ids == (3, 1, 4)
    assert all(type(token_id) is int for token_id in output.prompt_token_ids)
    assert output.token_ids == llm.generate([[3, 1, 4]], GREEDY)[0].token_ids


def test_dicts_of_text_and_of_both(llm: LLM) -> None:
    (by_text,) = llm.generate("def", GREEDY)
    for prompts in ({"prompt": "def"}, [{"prompt": "def"}], np.array(["def"])):
        assert llm.generate(prompts, GREEDY)[0].prompt == "def"  # type: ignore[arg-type]
        assert llm.generate(prompts, GREEDY)[0].token_ids == by_text.token_ids  # type: ignore[arg-type]
    (both,) = llm.generate({"prompt": "abc", "prompt_token_ids": by_text.prompt_token_ids}, GREEDY)
    assert (both.prompt, both.token_ids) == ("abc", by_text.token_ids)
    assert "".join(piece.text for piece in llm.stream({"prompt": "def"}, GREEDY)) == by_text.text


def test_prompts_of_several_kinds_go_together(llm: LLM) -> None:
    outputs = llm.generate(["def", [1, 2], {"prompt": "the"}], GREEDY)
    assert [output.prompt for output in outputs] == ["def", None, "the"]


@pytest.mark.parametrize("prompts", [[], (), np.array([])])
def test_no_prompts_have_no_answers(llm: LLM, prompts: Any) -> None:
    assert llm.generate(prompts) == []
    assert llm.generate(prompts, []) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be a list of prompts, or a text, a list of token ids, or a dict"),
        (5, "not 5"),
        (1.5, "not 1.5"),
        (object(), "not a value of type object"),
        ({"def"}, "not a value of type set"),
        (b"def", "not bytes: decode them first"),
        (bytearray(b"def"), "not bytearray: decode them first"),
        (np.array(3), "not a value of type ndarray"),
        ("", "prompt: it is empty"),
        ({}, "a dict has prompt or prompt_token_ids, this one nothing"),
        ({"text": "def"}, "a dict has prompt or prompt_token_ids, this one 'text'"),
        ({"prompt": "def", "multi_modal_data": {}}, "this one 'multi_modal_data'"),
        ({"prompt": None}, "prompt must be a text, not None"),
        ({"prompt": b"def"}, "prompt must be a text, not bytes: decode them first"),
        ({"prompt": 3, "prompt_token_ids": [1]}, "prompt must be a text, not 3"),
        ({"prompt_token_ids": "def"}, "prompt_token_ids must be"),
        ({"prompt_token_ids": None}, "prompt_token_ids must be"),
        ([None], "prompt must be a text, a list of token ids, or a dict with prompt or prompt_token_ids, "),
        ([b"def"], "not bytes: decode them first"),
        ([[]], "prompt: 0 tokens: a context of 256 has room for 1 to 255"),
        ([[1, "a"]], "prompt: 'a' is not a token id of a vocabulary of 320"),
        ([[None]], "prompt: None is not a token id"),
        ([True], "prompt: True is not a token id"),
        ([[320]], "prompt: 320 is not a token id of a vocabulary of 320"),
        ([[10**5000]], "a value of type int is not a token id"),
        (["fine", None], "prompts[1] must be a text"),
        (["fine", 1], "prompts[1] must be a text, a list of token ids, or a dict with"),
        (["fine", [1.5]], "prompts[1]: 1.5 is not a token id"),
        (["fine", ""], "prompts[1]: it is empty"),
        (["fine", "1" * 300], "prompts[1]: 300 tokens, the limit is 255"),
        (["fine", "a\udc00"], "prompts[1]: character 1 is a lone surrogate"),
        ("1" * 300, "prompt: 300 tokens, the limit is 255"),
        (np.array([[1.5]]), "token ids are a vector of integers, not float64 of shape (1,)"),
        (np.zeros((1, 2, 2), int), "token ids are a vector of integers, not int64 of shape (2, 2)"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(
    llm: LLM, runner: HashRunner, prompts: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompts, GREEDY)
    assert message in str(caught.value)
    assert runner.computed == 0


@pytest.mark.sharded(of="models on the CPU")
@given(anything, anything)
@settings(max_examples=400)
def test_nothing_but_an_invalid_request_comes_of_any_arguments(llm: LLM, first: Any, second: Any) -> None:
    for call in (llm.generate, llm.chat, llm.stream, llm.stream_chat):
        for arguments in ((first, GREEDY), ("def", first), (first, second)):
            with suppress(InvalidRequestError):
                call(*arguments)
    for name in ("add_generation_prompt", "tools", "chat_template_kwargs"):
        with suppress(InvalidRequestError):
            llm.chat([USER], GREEDY, **{name: first})
    with suppress(InvalidRequestError):
        llm.logits(first)


@pytest.mark.parametrize("prompt", [None, ["def"], [None], b"def", 5, "", np.array([1.5])])
def test_a_stream_refuses_it_too(llm: LLM, runner: HashRunner, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.stream(prompt, GREEDY)
    assert runner.computed == 0


@pytest.mark.parametrize("ids", [None, 5, "def", b"def", [[1]], np.array([1.5])])
def test_logits_of_what_are_no_ids_are_refused(llm: LLM, ids: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^token_ids"):
        llm.logits(ids)


def test_settings_for_each_prompt(llm: LLM) -> None:
    longer = SamplingParams(seed=3, max_tokens=7, ignore_eos=True)
    outputs = llm.generate(["def", "def"], [GREEDY, longer])
    assert outputs[0].token_ids == llm.generate("def", GREEDY)[0].token_ids
    assert outputs[1].token_ids == llm.generate("def", sampling_params=longer)[0].token_ids
    outputs = llm.chat([[USER], [USER]], [GREEDY, longer])
    assert [len(output.token_ids) for output in outputs] == [4, 7]


@pytest.mark.parametrize(
    ("sampling_params", "message"),
    [
        (
            {"temperature": 0},
            "sampling_params must be SamplingParams or a list of them, not a value of type dict",
        ),
        (
            [GREEDY, None],
            "sampling_params must be SamplingParams or a list of them, not a value of type list",
        ),
        ([GREEDY], "sampling_params must be one for all prompts or one for each of 2, not 1"),
        ([GREEDY] * 3, "one for each of 2, not 3"),
        (0.5, "not 0.5"),
    ],
)
def test_settings_that_fit_no_prompt(
    llm: LLM, runner: HashRunner, sampling_params: Any, message: str
) -> None:
    for request in (
        lambda: llm.generate(["def", "the"], sampling_params),
        lambda: llm.chat([[USER], [USER]], sampling_params),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            request()
        assert message in str(caught.value)
    assert runner.computed == 0


def test_a_stream_takes_settings_of_one_answer(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="n must be 1 for a stream, which gives one answer, not 2"):
        llm.stream("def", SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="n must be 1"):
        llm.stream_chat([USER], SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="sampling_params must be"):
        llm.stream("def", [GREEDY])  # type: ignore[arg-type]


def test_progress_is_reported_to_a_function(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="progress must be a function, not 5"):
        llm.stream("def", progress=5)  # type: ignore[arg-type]


def test_stop_tokens_and_biases_outside_the_vocabulary_are_refused(llm: LLM, runner: HashRunner) -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids: 320 is not a token id of a vocabulary of"):
        llm.generate(["def", "the"], [GREEDY, SamplingParams(stop_token_ids=[1, 320])])
    with pytest.raises(InvalidRequestError, match="logit_bias: 320 is not a token id of a vocabulary of 320"):
        llm.generate(["def", "the"], [GREEDY, SamplingParams(logit_bias={320: 1.0, 1: 1.0})])
    assert runner.computed == 0


def test_a_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    other = [{"role": "system", "content": "be brief"}, USER]
    (first,), (second,) = llm.chat([USER], GREEDY), llm.chat(other, GREEDY)
    both = llm.chat([[USER], other], GREEDY)
    assert [output.token_ids for output in both] == [first.token_ids, second.token_ids]
    assert first.prompt_token_ids != second.prompt_token_ids
    assert llm.chat([]) == []


def test_a_chat_hands_tools_and_settings_to_the_template(llm: LLM) -> None:
    render = llm.opened.chat_template.render
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    settings = {"enable_thinking": True}
    rendered = render([USER], tools=tools, add_generation_prompt=False, enable_thinking=True)
    expected = llm.opened.tokenizer.encode_segments(rendered.segments)
    assert expected != llm.opened.tokenizer.encode_segments(render([USER]).segments)
    (output,) = llm.chat(
        [USER], GREEDY, tools=tools, add_generation_prompt=False, chat_template_kwargs=settings
    )
    assert list(output.prompt_token_ids) == expected
    pieces = list(
        llm.stream_chat(
            [USER], GREEDY, tools=tools, add_generation_prompt=False, chat_template_kwargs=settings
        )
    )
    assert "".join(piece.text for piece in pieces) == output.text
    plain = list(llm.chat([USER], GREEDY)[0].prompt_token_ids)
    assert plain == llm.opened.tokenizer.encode_segments(render([USER]).segments)


@pytest.mark.parametrize(
    ("messages", "settings", "message"),
    [
        (None, {}, "messages: expected a list of objects"),
        ("def", {}, "messages: expected a list of objects"),
        (USER, {}, "messages: expected a list of objects"),
        ([USER, "def"], {}, "messages: expected a list of objects"),
        ([[USER], [None]], {}, "messages: expected a list of objects"),
        ([{"role": "robot", "content": "def"}], {}, "messages[0].role: 'robot' is not one of"),
        ([USER], {"tools": "look"}, "tools: expected a list of objects"),
        (
            [USER],
            {"chat_template_kwargs": ["enable_thinking"]},
            "chat_template_kwargs must be a dict, not a value of type list",
        ),
        ([USER], {"chat_template_kwargs": {1: True}}, "chat template setting 1: reserved"),
        ([USER], {"chat_template_kwargs": {"heat": 1}}, "chat template setting 'heat': unknown"),
        ([USER], {"add_generation_prompt": 1}, "add_generation_prompt must be True or False, not 1"),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(
    llm: LLM, runner: HashRunner, messages: Any, settings: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(messages, GREEDY, **settings)
    assert message in str(caught.value)
    assert runner.computed == 0
