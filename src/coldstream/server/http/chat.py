"""POST /v1/chat/completions: a conversation, answered at once or piece by piece. Beside it, how many tokens
it has, and the prompt that the chat template makes of it.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from coldstream.engine.events import Delta, Event
from coldstream.server.http.accounts import PromptProgressReports, timings, usage
from coldstream.server.http.answers import Answers, Serving
from coldstream.server.http.bodies import BodyRoute
from coldstream.server.http.chat_answer import ChatAnswer
from coldstream.server.http.chat_reading import ChatPrompt, read_chat, rendered_chat
from coldstream.server.http.chat_request import ChatRequest
from coldstream.server.http.guard import namespace_of
from coldstream.server.http.models import served_model
from coldstream.server.http.problems import problem_of
from coldstream.server.http.shapes import ChatCompletion, RenderedPrompt, TokenCountShape, documented
from coldstream.server.http.sse import DONE, KEEP_ALIVE, StreamedAnswer, respond_unless_gone, sse


def chat_router(serving: Serving) -> APIRouter:
    """The routes over an engine."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/chat/completions", include_in_schema=False)  # llama.cpp's other name
    @router.post(
        "/v1/chat/completions", response_model=None, responses=documented(ChatCompletion, streams=True)
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await respond_unless_gone(request, _answer(serving, body, request.scope))

    @router.post("/chat/completions/input_tokens", include_in_schema=False)
    @router.post(
        "/v1/chat/completions/input_tokens", response_model=None, responses=documented(TokenCountShape)
    )
    async def input_tokens(body: ChatRequest) -> dict[str, Any]:
        """How many tokens a conversation has, written out for the model."""
        served = served_model(serving.client, body.model)
        chat = await run_in_threadpool(read_chat, body, served, serving.settings)
        return {"input_tokens": len(chat.request.prompt_token_ids)}

    @router.post("/apply-template", response_model=None, responses=documented(RenderedPrompt))
    async def apply_template(body: ChatRequest) -> dict[str, Any]:
        """The prompt that the chat template makes of a conversation."""
        served = served_model(serving.client, body.model)
        return {"prompt": await run_in_threadpool(rendered_chat, body, served, serving.settings)}

    return router


async def _answer(serving: Serving, body: ChatRequest, scope: Scope) -> Response:
    served = served_model(serving.client, body.model)
    chat = await run_in_threadpool(read_chat, body, served, serving.settings)
    submission = serving.submission(
        chat.request,
        served.tokenizer.eos_ids,
        namespace_of(scope, body.cache_salt),
        progress=bool(body.return_progress and body.stream),
    )
    answers = Answers(serving, [submission])
    if not body.stream:
        return await _whole(chat, answers)
    await answers.begin_stream()
    events = _chunks(chat, answers, serving.settings.keep_alive_s)
    return StreamedAnswer(events, answers.close, serving.settings.slow_reader_s)


async def _whole(chat: ChatPrompt, answers: Answers) -> Response:
    choices = chat.answers()
    async with answers:
        await _fill(chat, choices, answers)
    head = _Head(chat, "chat.completion")
    return JSONResponse(
        head.with_fields(
            choices=[
                {
                    "index": index,
                    "message": choice.message,
                    "logprobs": choice.logprobs,
                    **choice.ending,
                }
                for index, choice in enumerate(choices)
            ],
            usage=_usage(choices),
            timings=timings([_statistics(choices)]),
        )
    )


async def _fill(chat: ChatPrompt, choices: Sequence[ChatAnswer], answers: Answers) -> None:
    async with aclosing(answers.events(3600, lambda: chat.is_complete)) as events:
        async for item in events:
            if item is not None and isinstance(item[1], Delta):
                choices[item[1].index].push(item[1].piece)


async def _chunks(chat: ChatPrompt, answers: Answers, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
    """The stream: roles, deltas, ends, counts. What fails in the middle is said in its last event."""
    head, choices = _Head(chat, "chat.completion.chunk"), chat.answers()
    progress = PromptProgressReports(time.monotonic()) if chat.body.return_progress else None
    for index in range(len(choices)):
        yield head.chunk(index, {"role": "assistant", "content": ""})
    try:
        async with aclosing(answers.events(keep_alive_s, lambda: chat.is_complete)) as events:
            async for item in events:
                if item is None:
                    yield KEEP_ALIVE
                    continue
                if progress is not None and (report := progress.of(item[1])):
                    yield sse(head.with_fields(choices=[], prompt_progress=report))
                for chunk in _chunks_of(item[1], head, choices):
                    yield chunk
        if chat.body.wants_usage:
            yield sse(
                head.with_fields(choices=[], usage=_usage(choices), timings=timings([_statistics(choices)]))
            )
    except Exception as error:
        yield sse(problem_of(error).body)
    yield DONE


def _chunks_of(event: Event, head: "_Head", choices: Sequence[ChatAnswer]) -> list[bytes]:
    match event:
        case Delta(index=index, piece=piece):
            return _delta_chunks(head, choices, index, choices[index].push(piece))
        case _:
            return []


def _delta_chunks(
    head: "_Head", choices: Sequence[ChatAnswer], index: int, deltas: Sequence[dict[str, Any]]
) -> list[bytes]:
    """Chunks of one answer; log-probabilities go with the first text after their tokens."""
    choice = choices[index]
    chunks = []
    for delta in deltas:
        chunks.append(head.chunk(index, delta, choice.take_logprobs()))
    if choice.statistics is not None:
        rest = choice.take_logprobs()
        has_all = all(each.statistics for each in choices)
        more = {"timings": timings([_statistics(choices)])} if has_all else {}
        chunks.append(head.chunk(index, {}, rest, choice.ending, **more))
    return chunks


class _Head:
    """The fields that all chunks of a response share."""

    def __init__(self, chat: ChatPrompt, kind: str) -> None:
        self._fields = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": chat.served.name,
            "system_fingerprint": f"coldstream-{chat.served.facts.fingerprint[:12]}",
        }

    def with_fields(self, **fields: Any) -> dict[str, Any]:
        return {**self._fields, **fields}

    def chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        ending: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        choice |= ending or {}
        return sse(self.with_fields(choices=[choice], **more))


def _statistics(choices: Sequence[ChatAnswer]) -> list[Any]:
    return [choice.statistics for choice in choices]


def _usage(choices: Sequence[ChatAnswer]) -> dict[str, Any]:
    return usage([_statistics(choices)], sum(choice.reasoning_tokens for choice in choices))
