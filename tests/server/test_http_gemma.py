"""A gemma-4 behind the HTTP interface: its tags around turns, its end tokens, and its first token."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from builders import Dims, make_model, write_model
from coldstream import LLM, SamplingParams
from coldstream.engine import EngineConfig, open_model
from coldstream.gguf.vocabulary import BYTE_NAMES
from coldstream.server.local_client import LocalClient
from http_serving import Connect, events_of

EOS, BOS, TOOL_RESPONSE, TURN, TURN_END = 1, 2, 50, 105, 106
# The ids of the published vocabulary.
CONTROL_TOKENS = {
    0: "<pad>", EOS: "<eos>", BOS: "<bos>", 3: "<unk>",
    46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>", 49: "<tool_call|>", TOOL_RESPONSE: "<|tool_response>",
    51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>",
    TURN: "<|turn>", TURN_END: "<turn|>",
}  # fmt: skip
# In the manner of the published one.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|turn>' }}"
    "{{ 'model' if message.role == 'assistant' else message.role }}"
    "{{ '\\n' + message.content + '<turn|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
    "{% if false %}{{ '<|channel>thought\\n<channel|><|tool_call>call:' }}{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "Is it <turn|>?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Go on."},
]
VOCAB = 512


def tokens() -> dict[str, Any]:
    """Keys of a vocabulary of characters and bytes, with control tokens where gemma-4 has them."""
    characters = ["▁", "\n", *map(chr, range(0x21, 0x7F)), "th", "▁t", "▁th"]
    names = [CONTROL_TOKENS.get(index, f"<unused{index}>") for index in range(TURN_END + 1)]
    names += [*characters, *BYTE_NAMES]
    kinds = [3] * (TURN_END + 1) + [1] * len(characters) + [6] * len(BYTE_NAMES)
    padding = VOCAB - len(names)
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": names + [f"[PAD{index}]" for index in range(padding)],
        "tokenizer.ggml.token_type": kinds + [5] * padding,
        "tokenizer.ggml.merges": ["t h", "▁ t", "▁t h"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.eot_token_id": TURN_END,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("gemma4", dims=Dims(vocab=VOCAB), tokenizer=False)
    model.metadata |= tokens()
    (path,) = write_model(tmp_path_factory.mktemp("models") / "gemma.gguf", model)
    return path


class Noting:
    """A client that notes the prompts of its requests."""

    def __init__(self, client: LocalClient) -> None:
        self._client = client
        self.prompts: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def submit(self, submission: Any) -> Any:
        self.prompts.append(list(submission.request.prompt_token_ids))
        return await self._client.submit(submission)


@pytest.fixture(scope="module")
def gemma(path: Path) -> Iterator[Noting]:
    opened = open_model(EngineConfig.from_options({"model": str(path), "ctx_size": 512, "device": "cpu"}))
    with LocalClient(opened, "gemma") as client:
        yield Noting(client)
    opened.close()


@pytest.fixture
async def http(connect: Connect, gemma: Noting) -> AsyncIterator[httpx2.AsyncClient]:
    gemma.prompts.clear()
    async with connect(gemma) as http:
        yield http


async def chat(http: httpx2.AsyncClient, **fields: Any) -> Any:
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, **fields}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def test_turns_have_their_tags(http: httpx2.AsyncClient, gemma: Noting) -> None:
    """The first token is there once. What a user writes is text, whatever it spells."""
    await chat(http)
    (prompt,) = gemma.prompts
    assert prompt[0] == BOS
    assert prompt.count(BOS) == 1
    assert (prompt.count(TURN), prompt.count(TURN_END)) == (4, 3)
    text = gemma.model.tokenizer.decode(prompt[1:], skip_special=False)
    expected = "<|turn>user\nIs it <turn|>?<turn|>\n<|turn>model\nYes.<turn|>\n<|turn>user\nGo on.<turn|>\n"
    assert text == f"{expected}<|turn>model\n"


async def test_an_answer_is_that_of_the_prompt(http: httpx2.AsyncClient, gemma: Noting, path: Path) -> None:
    choice = (await chat(http)).json()["choices"][0]
    streamed = events_of((await chat(http, stream=True)).text)
    deltas = [event["choices"][0]["delta"] for event in streamed if event != "[DONE]" and event["choices"]]
    said = choice["message"]["content"]
    assert said
    assert "".join(delta.get("content") or "" for delta in deltas) == said
    with LLM(str(path), device="cpu", ctx_size=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        (output,) = llm.generate([{"prompt_token_ids": gemma.prompts[0]}], params)
    assert output.outputs[0].text == said


@pytest.mark.parametrize(
    ("token", "reason"),
    [(EOS, "stop"), (TOOL_RESPONSE, "stop"), (TURN_END, "stop"), (TURN, "length"), (200, "length")],
)
async def test_which_tokens_end_an_answer(http: httpx2.AsyncClient, token: int, reason: str) -> None:
    answer = (await chat(http, logit_bias={str(token): 100})).json()
    assert answer["choices"][0]["finish_reason"] == reason
    assert answer["usage"]["completion_tokens"] == (1 if reason == "stop" else 12)
