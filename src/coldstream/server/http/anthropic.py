"""Anthropic's POST /v1/messages and /v1/messages/count_tokens, over the same chats as OpenAI's."""

import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from coldstream.engine.events import Delta
from coldstream.server.http.answers import Answers, Serving
from coldstream.server.http.anthropic_answer import MessageBlocks, usage_of
from coldstream.server.http.anthropic_request import CountRequest, MessagesRequest
from coldstream.server.http.bodies import BodyRoute
from coldstream.server.http.chat_reading import ChatPrompt, read_chat
from coldstream.server.http.chat_request import ChatRequest
from coldstream.server.http.guard import namespace_of
from coldstream.server.http.models import served_model
from coldstream.server.http.problems import problem_of
from coldstream.server.http.shapes import (
    AnthropicError,
    AnthropicMessageShape,
    TokenCountShape,
    documented,
)
from coldstream.server.http.sse import StreamedAnswer, respond_unless_gone, sse

_PING = sse({"type": "ping"}, event="ping")


def anthropic_router(serving: Serving) -> APIRouter:
    """The routes over an engine."""
    router = APIRouter(route_class=BodyRoute)

    @router.post(
        "/v1/messages",
        response_model=None,
        responses=documented(AnthropicMessageShape, AnthropicError, streams=True),
    )
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await respond_unless_gone(request, _answer(serving, body, request.scope))

    @router.post(
        "/v1/messages/count_tokens",
        response_model=None,
        responses=documented(TokenCountShape, AnthropicError),
    )
    async def count_tokens(body: CountRequest) -> dict[str, Any]:
        """How many tokens a conversation has, written out for the model."""
        chat = await _read(serving, body.as_chat, body.model)
        return {"input_tokens": len(chat.request.prompt_token_ids)}

    return router


async def _answer(serving: Serving, body: MessagesRequest, scope: Scope) -> Response:
    chat = await _read(serving, body.as_answerable, body.model)
    namespace = namespace_of(scope, None)
    answers = Answers(serving, [serving.submission(chat.request, chat.served.tokenizer.eos_ids, namespace)])
    if not body.stream:
        return await _whole(chat, answers)
    await answers.begin_stream()
    events = _events(chat, answers, serving.settings.keep_alive_s)
    return StreamedAnswer(events, answers.close, serving.settings.slow_reader_s)


async def _read(serving: Serving, body: Callable[[], ChatRequest], model: str | None) -> ChatPrompt:
    served = served_model(serving.client, model)
    return await run_in_threadpool(lambda: read_chat(body(), served, serving.settings))


def _message(chat: ChatPrompt, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": chat.served.name,
        **fields,
    }


async def _whole(chat: ChatPrompt, answers: Answers) -> Response:
    blocks = MessageBlocks(chat.parser(), is_thinking=chat.is_thinking)
    async with answers, aclosing(answers.events(3600, lambda: chat.is_complete)) as events:
        async for item in events:
            if item is not None and isinstance(item[1], Delta):
                blocks.push(item[1].piece)
    assert blocks.statistics is not None, "an answer ends with its statistics"
    usage = usage_of(blocks.statistics)
    return JSONResponse(_message(chat, content=blocks.content, **blocks.ending, usage=usage))


async def _events(chat: ChatPrompt, answers: Answers, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
    """The stream, each event under its own name; what fails in the middle is said in its last one."""
    blocks = MessageBlocks(chat.parser(), is_thinking=chat.is_thinking)
    usage = {"input_tokens": len(chat.request.prompt_token_ids), "output_tokens": 0}
    start = _message(chat, content=[], stop_reason=None, stop_sequence=None, usage=usage)
    yield sse({"type": "message_start", "message": start}, event="message_start")
    yield _PING
    try:
        async with aclosing(answers.events(keep_alive_s, lambda: chat.is_complete)) as events:
            async for item in events:
                if item is None:
                    yield _PING
                elif isinstance(item[1], Delta):
                    for event in blocks.push(item[1].piece):
                        yield sse(event, event=event["type"])
        assert blocks.statistics is not None, "an answer ends with its statistics"
        end = {"type": "message_delta", "delta": blocks.ending, "usage": usage_of(blocks.statistics)}
        yield sse(end, event="message_delta")
        yield sse({"type": "message_stop"}, event="message_stop")
    except Exception as error:
        yield sse(problem_of(error).anthropic_body, event="error")
