"""POST /v1/responses: OpenAI's newer interface over the same chats. It keeps nothing between requests."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Scope

from coldstream.engine.events import Delta
from coldstream.engine.request import Statistics
from coldstream.server.http.answers import Answers, Serving
from coldstream.server.http.bodies import BodyRoute
from coldstream.server.http.chat_reading import ChatPrompt, read_chat
from coldstream.server.http.guard import namespace_of
from coldstream.server.http.logprob_shapes import chat_logprobs
from coldstream.server.http.models import served_model
from coldstream.server.http.problems import Problem, ProblemError, problem_of
from coldstream.server.http.responses_answer import ResponseItems
from coldstream.server.http.responses_request import ReasoningConfig, ResponsesInput, ResponsesRequest
from coldstream.server.http.responses_tools import FlatTool
from coldstream.server.http.shapes import ResponseShape, ResponseTokensShape, documented
from coldstream.server.http.sse import KEEP_ALIVE, StreamedAnswer, json_bytes, respond_unless_gone, sse

Fields = dict[str, Any]

_NOT_KEPT: Final = "responses are not kept: send all items of the conversation to POST /v1/responses"
_ABSENT: Final = {
    "compact": "conversations are not compacted here: ask the model for a summary, and begin with that",
}


def responses_router(serving: Serving) -> APIRouter:
    """The route over an engine."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/responses", include_in_schema=False)  # llama.cpp's other name
    @router.post("/v1/responses", response_model=None, responses=documented(ResponseShape, streams=True))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await respond_unless_gone(request, _respond(serving, body, request.scope))

    @router.post("/v1/responses/input_tokens", response_model=None, responses=documented(ResponseTokensShape))
    async def input_tokens(body: ResponsesInput) -> Fields:
        """How many tokens a conversation has, written out for the model."""
        served = served_model(serving.client, body.model)
        chat = await run_in_threadpool(lambda: read_chat(body.as_chat(), served, serving.settings))
        return {"object": "response.input_tokens", "input_tokens": len(chat.request.prompt_token_ids)}

    @router.api_route("/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def others(rest: str) -> Response:
        """What would need a memory of responses."""
        raise ProblemError(Problem(404, _ABSENT.get(rest, _NOT_KEPT), code="not_found"))

    return router


async def _respond(serving: Serving, body: ResponsesRequest, scope: Scope) -> Response:
    served = served_model(serving.client, body.model)
    chat = await run_in_threadpool(lambda: read_chat(body.as_answerable(), served, serving.settings))
    namespace = namespace_of(scope, None)
    answers = Answers(serving, [serving.submission(chat.request, served.tokenizer.eos_ids, namespace)])
    answer = _ResponseAnswer(body, chat)
    if not body.stream:
        return await answer.whole(answers)
    await answers.begin_stream()
    events = answer.events(answers, serving.settings.keep_alive_s)
    return StreamedAnswer(events, answers.close, serving.settings.slow_reader_s)


class _ResponseAnswer:
    """The response to one request."""

    def __init__(self, body: ResponsesRequest, chat: ChatPrompt) -> None:
        num_top, tokenizer = body.num_logprobs, chat.served.tokenizer
        self._items = ResponseItems(
            chat.parser(),
            body.offered,
            logprobs=None if num_top is None else lambda piece: chat_logprobs(piece, tokenizer, num_top),
            has_sealed_thoughts=body.wants_sealed_thoughts,
        )
        self._num_events = 0
        self._is_complete = lambda: chat.is_complete
        self._fields = _settings(body, chat)

    async def whole(self, answers: Answers) -> Response:
        """The answer at once."""
        async with answers, aclosing(answers.events(3600, self._is_complete)) as events:
            async for item in events:
                if item is not None and isinstance(item[1], Delta):
                    self._items.push(item[1].piece)
        return Response(json_bytes(self._ended()), media_type="application/json")

    async def events(self, answers: Answers, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
        """The stream, each event under its own name; what fails in the middle is said in its last one."""
        begun = self._response("in_progress")
        for chunk in self._sent(
            {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
        ):
            yield chunk
        try:
            async with aclosing(answers.events(keep_alive_s, self._is_complete)) as events:
                async for item in events:
                    if item is None:
                        yield KEEP_ALIVE
                    elif isinstance(item[1], Delta):
                        for chunk in self._sent(self._items.push(item[1].piece)):
                            yield chunk
            ended = self._ended()
            last = {"type": f"response.{ended['status']}", "response": ended}
        except Exception as error:
            problem = problem_of(error)
            detail = {"code": "server_error", "message": problem.body["error"]["message"]}
            last = {"type": "response.failed", "response": {**self._response("failed"), "error": detail}}
        for chunk in self._sent([last]):
            yield chunk

    def _sent(self, events: Iterable[Fields]) -> list[bytes]:
        chunks = []
        for event in events:
            chunks.append(sse({**event, "sequence_number": self._num_events}, event=event["type"]))
            self._num_events += 1
        return chunks

    def _response(self, status: str, **more: Any) -> Fields:
        fields = {"status": status, "error": None, "incomplete_details": None, "output": self._items.output}
        return {**self._fields, **fields, **more}

    def _ended(self) -> Fields:
        assert self._items.statistics is not None, "an answer ends with its statistics"
        usage = _usage(self._items.statistics, self._items.reasoning_tokens)
        if not self._items.is_incomplete:
            return self._response("completed", usage=usage, completed_at=int(time.time()))
        return self._response("incomplete", usage=usage, incomplete_details={"reason": "max_output_tokens"})


def _settings(body: ResponsesRequest, chat: ChatPrompt) -> Fields:
    """The fields of a response that say what was asked for, and what came of it."""
    params = chat.request.params
    form, reasoning = body.text.format if body.text else None, body.reasoning or ReasoningConfig()
    choice = body.tool_choice or "auto"
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": chat.served.name,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "text": {
            "format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"},
            **({"verbosity": body.text.verbosity} if body.text and body.text.verbosity else {}),
        },
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": [_shown(tool) for tool in body.offered.shown],
        "truncation": "disabled",
        "user": body.user,
    }


def _shown(tool: FlatTool) -> Fields:
    """A tool as it was given, with what the official client wants to see of a function."""
    needed = {"description": None, "parameters": None, "strict": False} if tool.type == "function" else {}
    return {**needed, **tool.model_dump(exclude_none=True)}


def _usage(statistics: Statistics, reasoning_tokens: int) -> Fields:
    total = statistics.prompt_tokens + statistics.generated_tokens
    return {
        "input_tokens": statistics.prompt_tokens,
        "input_tokens_details": {"cached_tokens": statistics.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": statistics.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": min(reasoning_tokens, statistics.generated_tokens)},
        "total_tokens": total,
    }
