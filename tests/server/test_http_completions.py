"""Completions through the official client: texts, lists, token ids, log-probabilities, streams."""

from typing import Any

import httpx2
from openai import AsyncOpenAI

from coldstream.decoding import derived_seed
from coldstream.engine import LLM, SamplingParams
from http_serving import events_of

PROMPT = "import os\nimport sys\n"
GREEDY: Any = {"model": "demo", "temperature": 0, "max_tokens": 16}


async def test_an_answer_is_that_of_the_library_for_text_and_for_its_token_ids(
    openai: AsyncOpenAI, llm: LLM
) -> None:
    (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))
    for prompt in (PROMPT, [PROMPT], list(expected.prompt_token_ids), [list(expected.prompt_token_ids)]):
        completion = await openai.completions.create(prompt=prompt, **GREEDY)
        assert [choice.text for choice in completion.choices] == [expected.text]
        assert completion.choices[0].finish_reason == "length"


async def test_sc06_answers_to_several_prompts_keep_their_places(openai: AsyncOpenAI, llm: LLM) -> None:
    prompts = [PROMPT, "def main(", "class Reader"]
    completion = await openai.completions.create(
        prompt=prompts, model="demo", temperature=1.2, max_tokens=8, n=2, seed=11
    )
    for place, choice in enumerate(completion.choices):
        prompt, answer = divmod(place, 2)
        params = SamplingParams(temperature=1.2, max_tokens=8, seed=derived_seed(11, answer))
        assert (choice.index, choice.text) == (place, llm.generate(prompts[prompt], params)[0].text)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == sum(len(llm.opened.tokenizer.encode(each)) for each in prompts)
    assert completion.usage.completion_tokens <= 6 * 8


async def test_logprobs_have_the_older_apis_columns(openai: AsyncOpenAI, llm: LLM) -> None:
    completion = await openai.completions.create(prompt=PROMPT, logprobs=3, **GREEDY)
    (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16, logprobs=3))
    found, by_ids = completion.choices[0].logprobs, expected.outputs[0].logprobs
    assert found is not None
    assert by_ids is not None
    chosen = [by_id[token_id] for by_id, token_id in zip(by_ids, expected.token_ids, strict=True)]
    assert found.tokens == [each.decoded_token for each in chosen]
    assert found.token_logprobs == [each.logprob for each in chosen]
    text = completion.choices[0].text
    for start, token in zip(found.text_offset or (), found.tokens or (), strict=True):
        assert text[start : start + len(token)] == token
    assert all(len(top) == 3 for top in found.top_logprobs or ())


async def test_a_stream_is_the_answer(http: httpx2.AsyncClient, openai: AsyncOpenAI) -> None:
    body = {"prompt": [PROMPT, "def main("], **GREEDY, "logprobs": 0}
    whole = await openai.completions.create(**body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of((await http.post("/v1/completions", json={**body, **options})).text)
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert whole.usage is not None
    assert usage["usage"]["completion_tokens"] == whole.usage.completion_tokens
    for choice in whole.choices:
        own = [each for event in events for each in event["choices"] if each["index"] == choice.index]
        assert "".join(each["text"] for each in own) == choice.text
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == [choice.finish_reason]
        assert choice.logprobs is not None
        assert [t for each in own for t in each["logprobs"]["tokens"]] == choice.logprobs.tokens
        assert [t for each in own for t in each["logprobs"]["text_offset"]] == choice.logprobs.text_offset


async def test_tokens_go_to_text_and_back(http: httpx2.AsyncClient, llm: LLM) -> None:
    text = "def naïve() -> str:\n    return '<|im_end|>'\n"
    tokens = (await http.post("/tokenize", json={"content": text})).json()["tokens"]
    assert tokens == llm.opened.tokenizer.encode(text, parse_special=True)
    plain = (await http.post("/tokenize", json={"content": text, "parse_special": False})).json()["tokens"]
    assert len(plain) > len(tokens)
    assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"content": text}
    pieces = (await http.post("/tokenize", json={"content": text, "with_pieces": True})).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    assert (await http.post("/detokenize", json={"tokens": [6144]})).status_code == 400
