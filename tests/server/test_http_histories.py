"""What agents and chats keep in their histories, against templates with the restrictions of published ones.

Every request is a 200 whose prompt is the one of the same conversation in the words of this server's chats.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import anthropic as anthropic_sdk
import httpx2
import openai as openai_sdk
import pytest
from anthropic import AsyncAnthropic

from coldstream.engine import LLM, SamplingParams
from coldstream.engine.request import Piece, Statistics
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.fitted_messages import SYSTEM_FRAME
from coldstream.server.http.anthropic_answer import MessageBlocks, signature_of
from coldstream.server.local_client import LocalClient
from coldstream.server.output import output_parser
from http_serving import TEMPLATE, URL, Connect, WithTemplate, events_of

USER: Any = {"role": "user", "content": "import os"}
AFTER: Any = {"role": "assistant", "content": "x"}
BRIEF = "Be brief, from now on."
LEFT_OUT = "left out: this model reads text only]"
# ChatML whose system message must be first, whose roles alternate, and which knows three efforts.
STRICT = (
    "{% if enable_thinking is undefined or enable_thinking %}"
    "{% set e = reasoning_effort | default('xhigh') %}"
    "{% if e not in ('low', 'medium', 'xhigh') %}{{ raise_exception('Unexpected effort ' + e) }}{% endif %}"
    "<|im_start|>system\n{{ e }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System must be first') }}{% endif %}"
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %}|{{ k }}={{ v }}{% endfor %}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Prompt = Callable[[str, dict[str, Any]], Any]


class Strict(WithTemplate):
    """The engine behind `STRICT`; it keeps each prompt that it is given."""

    def __init__(self, client: LocalClient) -> None:
        super().__init__(client)
        control = client.model.tokenizer.vocabulary.control_ids
        template = ChatTemplate(STRICT, control, {})
        self.model = replace(client.model, template_source=STRICT, chat_template=template)
        self.prompts: list[str] = []

    async def submit(self, submission: Any) -> Any:
        ids = submission.request.prompt_token_ids
        self.prompts.append(self.model.tokenizer.decode(ids, skip_special=False))
        return await self._client.submit(submission)


@pytest.fixture(scope="module")
def strict(local_client: LocalClient) -> Iterator[Strict]:
    client = Strict(local_client)
    yield client
    client.model.chat_template.close()


@pytest.fixture
def prompt(connect: Connect, strict: Strict) -> Prompt:
    """The prompt that a body posted to a path becomes."""

    async def posted(path: str, body: dict[str, Any]) -> str:
        async with connect(strict) as http:
            response = await http.post(path, json={"max_tokens": 1, **body})
        assert response.status_code == 200, response.text
        return strict.prompts[-1]

    return posted


async def chat_prompt(prompt: Prompt, messages: list[Any], **more: Any) -> str:
    text: str = await prompt("/v1/chat/completions", {"messages": messages, **more})
    return text


async def messages_prompt(prompt: Prompt, messages: list[Any], **more: Any) -> str:
    text: str = await prompt("/v1/messages", {"messages": messages, **more})
    return text


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_a_late_system_message_is_in_the_prompt_behind_what_came_before(
    prompt: Prompt, role: str
) -> None:
    before = await chat_prompt(prompt, [USER])
    late = await chat_prompt(prompt, [USER, {"role": role, "content": BRIEF}])
    shared = before[: before.index("import os") + len("import os")]
    assert late.startswith(shared)
    assert SYSTEM_FRAME.format(BRIEF) in late[len(shared) :]
    if role == "system":
        assert late.split("import os")[1] in await messages_prompt(
            prompt, [USER, {"role": "system", "content": [{"type": "text", "text": BRIEF}]}]
        )


async def test_responses_place_late_developer_messages_as_chats_do(prompt: Prompt) -> None:
    turns = [USER, {"role": "developer", "content": BRIEF}, {"role": "user", "content": "go"}]
    items = [{"type": "message", **turn} for turn in turns]
    reported = await prompt("/v1/responses", {"input": items, "max_output_tokens": 1})
    assert reported == await chat_prompt(prompt, turns)


@pytest.mark.parametrize(
    ("effort", "known"),
    [
        ("minimal", "low"),
        ("low", "low"),
        ("medium", "medium"),
        ("high", "medium"),
        ("xhigh", "xhigh"),
        ("max", "xhigh"),
    ],
)
async def test_efforts_of_every_route_become_those_of_the_template(
    prompt: Prompt, effort: str, known: str
) -> None:
    chats = [
        await chat_prompt(prompt, [USER], reasoning_effort=effort),
        await chat_prompt(prompt, [USER], chat_template_kwargs={"reasoning_effort": effort}),
        await prompt(
            "/v1/responses", {"input": "import os", "reasoning": {"effort": effort}, "max_output_tokens": 1}
        ),
    ]
    assert set(chats) == {await chat_prompt(prompt, [USER], reasoning_effort=known)}
    assert chats[0].startswith(f"<|im_start|>system\n{known}<|im_end|>")
    if effort != "minimal":
        thinking = {"thinking": {"type": "adaptive"}, "output_config": {"effort": effort}}
        assert await messages_prompt(prompt, [USER], **thinking) == chats[0]


async def test_no_effort_is_no_thought(prompt: Prompt) -> None:
    reported = await chat_prompt(prompt, [USER], reasoning_effort="none")
    assert reported == await chat_prompt(prompt, [USER], enable_thinking=False)
    assert reported.startswith("<|im_start|>user")


async def test_props_say_what_efforts_become(connect: Connect, strict: Strict) -> None:
    async with connect(strict) as http:
        props = (await http.get("/props")).json()
    efforts = props["chat_template_caps"]["reasoning_efforts"]
    assert efforts["high"] == {"reasoning_effort": "medium"}
    assert efforts["none"] == {"enable_thinking": False}
    assert props["chat_template_caps"]["supports_late_system_role"] is False


async def test_the_servers_template_settings_give_way_to_those_of_requests(
    connect: Connect, strict: Strict
) -> None:
    kwargs = {"reasoning_effort": "low", "enable_thinking": True}
    asked: list[tuple[dict[str, Any], str]] = [
        ({}, "low"),
        ({"reasoning_effort": "xhigh"}, "xhigh"),
        ({"chat_template_kwargs": {"reasoning_effort": "max"}}, "xhigh"),
        ({"chat_template_kwargs": {"reasoning_effort": "max"}, "reasoning_effort": "low"}, "xhigh"),
        ({"enable_thinking": False}, ""),
    ]
    async with connect(strict, chat_template_kwargs=kwargs) as http:
        for more, effort in asked:
            body = {"messages": [USER], "max_tokens": 1, **more}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
            head = f"<|im_start|>system\n{effort}<|im_end|>\n" if effort else ""
            assert strict.prompts[-1].startswith(head + "<|im_start|>user")


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ({"type": "function", "function": {"name": "f", "arguments": ""}}, "f"),
        ({"function": {"name": "f", "arguments": None}}, "f"),
        ({"function": {"name": "f"}}, "f"),
        ({"function": {"name": "f", "arguments": '{"a": 5}'}}, "f|a=5"),
        ({"function": {"name": "f", "arguments": {"a": 5}}}, "f|a=5"),
        ({"function": {"name": "f", "arguments": '{"a": '}}, 'f|arguments={"a": '),
        ({"function": {"name": "f", "arguments": "[5]"}}, "f|arguments=[5]"),
        ({"function": {"name": "f", "arguments": 5}}, "f|arguments=5"),
        ({"type": "custom", "custom": {"name": "patch", "input": "*** End"}}, "patch|input=*** End"),
    ],
)
async def test_earlier_calls_of_any_kind_are_shown(prompt: Prompt, call: dict[str, Any], shown: str) -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", **call}]}
    reported = await chat_prompt(
        prompt, [USER, answer, {"role": "tool", "tool_call_id": "a", "content": "done"}]
    )
    assert f"<tool_call>{shown}</tool_call>" in reported
    assert "<|im_start|>tool\ndone<|im_end|>" in reported


async def test_the_older_form_of_calls_is_that_of_tools(prompt: Prompt) -> None:
    function = {"name": "f", "arguments": '{"a": 5}'}
    older = [
        USER,
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "f", "content": "done"},
    ]
    newer = [
        USER,
        {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]
    assert await chat_prompt(prompt, older) == await chat_prompt(prompt, newer)


async def test_answers_of_other_servers_are_texts(prompt: Prompt) -> None:
    for message, text in (
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
        ({"content": None, "audio": {"id": "audio_1"}}, f"[audio {LEFT_OUT}"),
    ):
        reported = await chat_prompt(prompt, [USER, {"role": "assistant", **message}, USER])
        assert f"<|im_start|>assistant\n{text}<|im_end|>" in reported


async def test_results_with_pictures_and_references_are_texts_in_their_order(prompt: Prompt) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    result = [
        {"type": "text", "text": "read"},
        {"type": "image", "source": source},
        {"type": "tool_reference", "tool_name": "TaskStop"},
        {"type": "hologram"},
    ]
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"p": "a"}}
    reported = await messages_prompt(
        prompt,
        [
            USER,
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": result}],
            },
        ],
    )
    lines = ["read", f"[image image/png {LEFT_OUT}", "[tool TaskStop can be called]"]
    lines.append(f"[content of type hologram {LEFT_OUT}")
    assert "<|im_start|>tool\n" + "\n".join(lines) + "<|im_end|>" in reported
    assert "<tool_call>Read|p=a</tool_call>" in reported


async def test_what_other_servers_tools_did_is_the_assistants_text(prompt: Prompt) -> None:
    answer = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rain"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [{"type": "web_search_result", "title": "Rain", "url": "http://r"}],
        },
        {"type": "text", "text": "It rains."},
    ]
    reported = await messages_prompt(prompt, [USER, {"role": "assistant", "content": answer}, USER])
    text = '[called web_search with {"query": "rain"}]\n[result of web search]\nRain\nhttp://r\nIt rains.'
    assert f"<|im_start|>assistant\n{text}<|im_end|>" in reported


async def test_the_last_message_is_continued_where_asked(prompt: Prompt) -> None:
    messages = [USER, {"role": "assistant", "content": "import "}]
    continued = await chat_prompt(prompt, messages, continue_final_message=True, add_generation_prompt=False)
    assert continued.endswith("<|im_start|>assistant\nimport ")
    assert continued == await chat_prompt(prompt, messages, continue_final_message=True)
    assert continued == await messages_prompt(prompt, messages)
    assert (await chat_prompt(prompt, messages)).endswith("<|im_start|>assistant\n")
    assert (await chat_prompt(prompt, messages, add_generation_prompt=False)).endswith("import <|im_end|>\n")


@pytest.mark.parametrize(
    "more",
    [
        {"add_generation_prompt": True},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
    ids=lambda more: next(iter(more)),
)
async def test_what_a_continued_message_cannot_have_is_refused(
    http: httpx2.AsyncClient, more: dict[str, Any]
) -> None:
    messages = [USER, {"role": "assistant", "content": "import "}]
    body = {"messages": messages, "max_tokens": 1, "continue_final_message": True, **more}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"


async def test_a_prefill_is_continued_as_the_library_does(http: httpx2.AsyncClient, llm: LLM) -> None:
    messages: Any = [USER, {"role": "assistant", "content": "import sys\n"}]
    params = SamplingParams(temperature=0, max_tokens=8)
    (expected,) = llm.chat(messages, params, continue_final_message=True, add_generation_prompt=False)
    claude = AsyncAnthropic(base_url=URL, api_key="none", http_client=http, max_retries=0)
    message = await claude.messages.create(
        model="demo", max_tokens=8, messages=messages, extra_body={"temperature": 0}
    )
    (block,) = message.content
    assert block.type == "text"
    assert block.text == expected.text


async def test_thoughts_are_signed_and_come_back(connect: Connect, thinker: WithTemplate) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 6}
    body: dict[str, Any] = {"model": "demo", "max_tokens": 24, "thinking": thinking, "messages": [USER]}
    async with connect(thinker) as http:
        claude = AsyncAnthropic(base_url=URL, api_key="none", http_client=http, max_retries=0)
        greedy: Any = {**body, "extra_body": {"temperature": 0}}
        whole = await claude.messages.create(**greedy)
        async with claude.messages.stream(**greedy) as stream:
            streamed = await stream.get_final_message()
        raw = {**body, "temperature": 0, "stream": True}
        events = events_of((await http.post("/v1/messages", json=raw)).text)
        again = {
            **body,
            "messages": [USER, {"role": "assistant", "content": whole.to_dict()["content"]}, USER],
        }
        wrong = {**again, "messages": [*again["messages"]]}
        wrong["messages"][1] = {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "x", "signature": "of another server"}],
        }
        statuses = [(await http.post("/v1/messages", json=each)).status_code for each in (again, wrong)]
    thought, copy = whole.content[0], streamed.content[0]
    assert thought.type == "thinking"
    assert copy.type == "thinking"
    assert thought.signature.startswith("1:")
    assert (thought.thinking, thought.signature) == (copy.thinking, copy.signature)
    deltas = [each["delta"]["type"] for each in events if each.get("index") == 0 and "delta" in each]
    assert deltas[-1] == "signature_delta"
    assert deltas.count("signature_delta") == 1
    assert statuses == [200, 200]


async def test_the_clients_say_that_a_prompt_is_too_long_with_both_numbers(
    http: httpx2.AsyncClient, llm: LLM
) -> None:
    claude = AsyncAnthropic(base_url=URL, api_key="none", http_client=http, max_retries=0)
    size = llm.opened.ctx_size
    for content, count in (("x = 1\n" * size, r"\d+"), ("x" * (4 << 20), r"at least \d+")):
        with pytest.raises(
            anthropic_sdk.BadRequestError, match=f"prompt is too long: {count} tokens > {size - 1} maximum"
        ):
            await claude.messages.create(
                model="demo", max_tokens=1, messages=[{"role": "user", "content": content}]
            )
    client = openai_sdk.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", http_client=http, max_retries=0)
    with pytest.raises(openai_sdk.BadRequestError) as refused:
        await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x = 1\n" * size}]
        )
    body: Any = refused.value.body
    assert (body["code"], body["type"]) == ("context_length_exceeded", "exceed_context_size_error")
    assert body["n_prompt_tokens"] > body["n_ctx"] == size


def test_a_thought_that_is_empty_has_its_signed_block() -> None:
    """As of a model that ends the thought at once, which the prompt has begun."""
    source = TEMPLATE.read_text()
    statistics = Statistics(1, 0, 1, 0.1, 0.1, "none", 1, 0)
    end = Piece("</think>\n\nHi.", finish_reason="stop", statistics=statistics)
    for is_thinking, kinds in ((True, ["thinking", "text"]), (False, ["text"])):
        parser = output_parser(source, [], is_thinking=is_thinking)
        blocks = MessageBlocks(parser, is_thinking=is_thinking)
        events = blocks.push(end)
        assert [block["type"] for block in blocks.content] == kinds
        starts = [each["content_block"]["type"] for each in events if each["type"] == "content_block_start"]
        assert starts == kinds
        if is_thinking:
            assert blocks.content[0]["thinking"] == ""
            assert blocks.content[0]["signature"] == signature_of("")


async def test_the_prompt_of_a_conversation_and_its_length_can_be_asked_for(
    connect: Connect, strict: Strict
) -> None:
    """What the engine gets, for every way to write the conversation, and however long it is."""
    for more in ({}, {"reasoning_effort": "low"}, {"add_generation_prompt": False}):
        body = {"messages": [USER], "max_tokens": 1, **more}
        async with connect(strict) as http:
            prompt = (await http.post("/apply-template", json=body)).json()["prompt"]
            counted = (await http.post("/v1/chat/completions/input_tokens", json=body)).json()
            usage = (await http.post("/v1/chat/completions", json=body)).json()["usage"]
        assert prompt == strict.prompts[-1]
        assert counted == {"input_tokens": usage["prompt_tokens"]}
    endless = {"messages": [{"role": "user", "content": "x = 1\n" * 4096}]}
    async with connect(strict) as http:
        assert (
            endless["messages"][0]["content"]
            in ((await http.post("/apply-template", json=endless)).json()["prompt"])
        )
        assert (await http.post("/chat/completions/input_tokens", json=endless)).status_code == 400


async def test_routes_have_llama_cpp_s_names_without_a_version(http: httpx2.AsyncClient) -> None:
    chat = {"messages": [USER], "temperature": 0, "max_tokens": 3}
    for path, body, key in (
        ("/chat/completions", chat, "choices"),
        ("/chat/completions/input_tokens", chat, "input_tokens"),
        ("/responses", {"input": "import os", "temperature": 0, "max_output_tokens": 3}, "status"),
    ):
        short, long = [(await http.post(prefix + path, json=body)).json() for prefix in ("", "/v1")]
        assert short[key] == long[key]
    assert (await http.get("/models")).json() == (await http.get("/v1/models")).json()
    native = await http.post("/completion", json={"prompt": "import"})
    assert native.status_code == 404
    assert "/v1/completions" in native.json()["error"]["message"]
