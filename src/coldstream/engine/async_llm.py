"""`AsyncLLM`: an `LLM` for programs with an asyncio event loop.

    async with AsyncLLM("model.gguf") as llm:
        async for piece in llm.stream("Once upon a time"):
            print(piece.text, end="")

Steps are taken in worker threads, so that the event loop stays free. Requests of all tasks run side by side.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self, Unpack

from coldstream.decoding import SamplingParams
from coldstream.engine.answer import Request
from coldstream.engine.engine import Engine
from coldstream.engine.lists import generate_list
from coldstream.engine.llm import LLM
from coldstream.engine.opened_model import OpenedModel
from coldstream.engine.prompts import ChatOptions, Conversation, Prompt, one_params, template_settings
from coldstream.engine.request import Piece, RequestOutput
from coldstream.engine.request_reader import RequestReader
from coldstream.engine.shared_engine import SharedEngine
from coldstream.engine.stream import Stream

_NUM_THREADS: Final = 32  # more tasks than these wait for each other, but for a step at most


class AsyncLLM:
    """`generate`, `chat` and streams as coroutines of one event loop. A cancelled task ends its request.

    A long prompt is computed in parts, so that other answers go on meanwhile, as in the server.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        """Opens a model with the settings of `LLM`, and raises what it raises. Blocks meanwhile."""
        self._take(LLM(model, **settings))

    @classmethod
    def from_opened(cls, opened: OpenedModel) -> Self:
        """Over a model that is already open; it is closed with this object."""
        own = cls.__new__(cls)
        own._take(LLM.from_opened(opened))
        return own

    def _take(self, llm: LLM) -> None:
        self._owner, self._opened = llm, llm.opened
        opened = llm.opened
        self._reader = RequestReader(opened)
        self._engine = SharedEngine(lambda: Engine(opened))
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="AsyncLLM")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def opened(self) -> OpenedModel:
        """See `LLM.opened`."""
        return self._opened

    async def close(self) -> None:
        """Release the model, once a running step is done. Unfinished requests raise InvalidRequestError."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._close)

    def _close(self) -> None:
        self._engine.close()
        self._threads.shutdown()
        self._owner.close()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """See `LLM.generate`."""
        self._engine.check()
        return await self._complete_all(
            self._reader.of_prompts(prompts, sampling_params, self._opened.default_sampling)
        )

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """See `LLM.chat`."""
        self._engine.check()
        return await self._complete_all(
            self._reader.of_chats(
                messages, sampling_params, self._opened.default_sampling, template_settings(**template)
            )
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece, None]:
        """See `LLM.stream`. Leaving the loop, `aclose` and a cancelled task end the request."""
        self._engine.check()
        params = one_params(sampling_params, self._opened.default_sampling)
        return self._pieces(self._reader.of_prompt(prompt, "prompt", params))

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        **template: Unpack[ChatOptions],
    ) -> AsyncGenerator[Piece, None]:
        """See `LLM.stream_chat`, and `stream`."""
        self._engine.check()
        params = one_params(sampling_params, self._opened.default_sampling)
        return self._pieces(self._reader.of_chat(messages, params, template_settings(**template)))

    async def _complete_all(self, requests: Sequence[Request]) -> list[RequestOutput]:
        if not requests:
            return []
        mine, loop = self._engine.requests(), asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._threads, lambda: generate_list(requests, mine, self._engine.max_running)
            )
        except asyncio.CancelledError:
            mine.abandon()
            raise

    async def _pieces(self, request: Request) -> AsyncGenerator[Piece, None]:
        stream, loop = Stream(request, self._engine), asyncio.get_running_loop()
        try:
            while True:
                piece = await loop.run_in_executor(self._threads, next, stream, None)
                if piece is None:
                    return
                yield piece
        finally:
            stream.cancel()  # `close` would wait for a step
