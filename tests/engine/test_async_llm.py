"""`AsyncLLM`: tasks beside each other get their own answers, and a cancelled task leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldstream import AsyncLLM
from coldstream.engine import SamplingParams
from coldstream.errors import InvalidRequestError
from hash_runner import HashRunner, open_hash_model
from plain_loop import plain_output

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2], [3], [4, 5, 6], [7] * 30]


@pytest.fixture
async def llm(tmp_path: Path) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM.from_opened(open_hash_model(tmp_path / "tiny.gguf")) as llm:
        yield llm


def runner_of(llm: AsyncLLM) -> HashRunner:
    assert isinstance(llm.opened.runner, HashRunner)
    return llm.opened.runner


async def tokens_of(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return [token_id async for piece in llm.stream(prompt, params) for token_id in piece.token_ids]


async def test_tasks_get_the_answers_of_the_plain_loop(llm: AsyncLLM) -> None:
    wanted = [plain_output(llm.opened, prompt, GREEDY).token_ids for prompt in PROMPTS]
    streams, lists, (chat,) = await asyncio.gather(
        asyncio.gather(*(tokens_of(llm, prompt, GREEDY) for prompt in PROMPTS)),
        asyncio.gather(llm.generate(PROMPTS, GREEDY), llm.generate([PROMPTS[0]], GREEDY)),
        llm.chat([{"role": "user", "content": "def"}], GREEDY),
    )
    assert [tuple(each) for each in streams] == wanted
    assert [[output.token_ids for output in each] for each in lists] == [wanted, wanted[:1]]
    assert chat.token_ids == plain_output(llm.opened, list(chat.prompt_token_ids), GREEDY).token_ids
    said = [piece async for piece in llm.stream_chat([{"role": "user", "content": "def"}], GREEDY)]
    assert "".join(piece.text for piece in said) == chat.text


async def test_more_tasks_than_threads(llm: AsyncLLM) -> None:
    wanted = plain_output(llm.opened, [1, 2], GREEDY).token_ids
    found = await asyncio.gather(*(tokens_of(llm, [1, 2], GREEDY) for _ in range(100)))
    assert [tuple(each) for each in found] == [wanted] * 100


class Gate:
    """A logits processor that says when it was called, and goes on when it may."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    def __call__(self, context: Sequence[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self._loop.call_soon_threadsafe(self.reached.set)
        asyncio.run_coroutine_threadsafe(self.opened.wait(), self._loop).result()
        return logits


@pytest.mark.parametrize("kind", ["stream", "list"])
async def test_a_cancelled_task_ends_its_request(llm: AsyncLLM, kind: str) -> None:
    gate = Gate(asyncio.get_running_loop())
    params = replace(GREEDY, max_tokens=100, logits_processors=(gate,))
    work = tokens_of(llm, [1, 2], params) if kind == "stream" else llm.generate([[1, 2], [3]], params)
    task = asyncio.ensure_future(work)
    await gate.reached.wait()
    task.cancel()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await llm.generate([[9]], replace(GREEDY, max_tokens=40))  # a request that goes on has as many tokens
    assert runner_of(llm).computed < 60


async def test_leaving_a_stream_early_ends_its_request(llm: AsyncLLM) -> None:
    stream = llm.stream([1, 2], replace(GREEDY, max_tokens=100))
    async for _ in stream:
        break
    await stream.aclose()
    computed = runner_of(llm).computed
    await llm.generate([[9]], GREEDY)
    assert runner_of(llm).computed == computed + 12


async def test_errors_are_those_of_the_request(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        await llm.generate([""], GREEDY)
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.stream("", GREEDY)
    with pytest.raises(InvalidRequestError, match="tools"):
        await llm.chat([{"role": "user", "content": "a"}], GREEDY, chat_template_kwargs={"tools": 1})


async def test_a_closed_one_says_so(tmp_path: Path) -> None:
    async with AsyncLLM.from_opened(open_hash_model(tmp_path / "tiny.gguf")) as llm:
        stream = llm.stream([1, 2], GREEDY)
        await anext(stream)
    assert runner_of(llm).closed
    for call in (llm.generate([[1]], GREEDY), anext(stream)):
        with pytest.raises((InvalidRequestError, RuntimeError), match=r"closed|shutdown"):
            await call
    await llm.close()
