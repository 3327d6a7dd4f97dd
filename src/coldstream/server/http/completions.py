"""POST /v1/completions: text that goes on from one or several prompts."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from coldstream.engine.answer import Request as EngineRequest
from coldstream.engine.events import Delta
from coldstream.engine.request import Piece, Statistics
from coldstream.server.http.accounts import PromptProgressReports, ending_of, timings, usage
from coldstream.server.http.answers import Answers, Serving
from coldstream.server.http.bodies import BodyRoute
from coldstream.server.http.completion_request import CompletionRequest, check_completion
from coldstream.server.http.fields import sampling_of
from coldstream.server.http.guard import namespace_of
from coldstream.server.http.logprob_shapes import CompletionLogprobs
from coldstream.server.http.models import context_errors, served_model
from coldstream.server.http.problems import problem_of
from coldstream.server.http.settings import ServerSettings
from coldstream.server.http.shapes import Completion, documented
from coldstream.server.http.sse import DONE, KEEP_ALIVE, StreamedAnswer, respond_unless_gone, sse
from coldstream.server.served_model import ServedModel

Fields = dict[str, Any]


@dataclass
class _RunningChoice:
    """One answer to one prompt."""

    index: int
    logprobs: CompletionLogprobs | None
    texts: list[str] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    ending: Fields | None = None
    statistics: Statistics | None = None

    def push(self, piece: Piece) -> Fields:
        """The choice of a chunk with this piece."""
        self.texts.append(piece.text)
        columns = None if self.logprobs is None else self.logprobs.of(piece)
        for name, values in (columns or {}).items():
            self.columns.setdefault(name, []).extend(values)
        chunk: Fields = {"index": self.index, "text": piece.text, "logprobs": columns, "finish_reason": None}
        if piece.finish_reason is not None:
            self.ending, self.statistics = ending_of(piece), piece.statistics
            chunk |= self.ending
        return chunk

    @property
    def whole(self) -> Fields:
        """The choice of a response that comes at once."""
        logprobs = None if self.logprobs is None else self.columns
        text = "".join(self.texts)
        return {"index": self.index, "text": text, "logprobs": logprobs, **(self.ending or {})}


class _RunningCompletion:
    """A completion that is computed: what is the same in all its chunks, and its choices."""

    def __init__(
        self, body: CompletionRequest, served: ServedModel, requests: Sequence[EngineRequest]
    ) -> None:
        self.body = body
        self._fields: Fields = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": f"coldstream-{served.facts.fingerprint[:12]}",
        }
        if body.stream and body.wants_usage:
            self._fields["usage"] = None  # of all chunks but the last one, as OpenAI's documentation has it
        per_prompt = requests[0].params.n
        self.of_prompts = [
            [_RunningChoice(per_prompt * prompt + index, self._logprobs()) for index in range(per_prompt)]
            for prompt in range(len(requests))
        ]

    def _logprobs(self) -> CompletionLogprobs | None:
        return None if self.body.logprobs is None else CompletionLogprobs(self.body.logprobs)

    def with_fields(self, **fields: Any) -> Fields:
        return {**self._fields, **fields}

    @property
    def counts(self) -> Fields:
        """`usage` and `timings`, once all answers have ended."""
        found = [[choice.statistics for choice in choices] for choices in self.of_prompts]
        ended = [[each for each in of_prompt if each is not None] for of_prompt in found]
        return {"usage": usage(ended), "timings": timings(ended)}

    def push(self, prompt: int, delta: Delta) -> Fields:
        """The chunk of a piece; the last one has the timings."""
        chunk = self.with_fields(choices=[self.of_prompts[prompt][delta.index].push(delta.piece)])
        has_all = all(choice.statistics for choices in self.of_prompts for choice in choices)
        return {**chunk, "timings": self.counts["timings"]} if has_all else chunk


def completions_router(serving: Serving) -> APIRouter:
    """The route over an engine."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/completions", response_model=None, responses=documented(Completion, streams=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on from a prompt."""
        return await respond_unless_gone(request, _answer(serving, body, request.scope))

    return router


async def _answer(serving: Serving, body: CompletionRequest, scope: Scope) -> Response:
    served = served_model(serving.client, body.model)
    requests = await run_in_threadpool(_read, body, served, serving.settings)
    namespace = namespace_of(scope, body.cache_salt)
    progress = bool(body.return_progress and body.stream)
    submissions = [
        serving.submission(each, served.tokenizer.eos_ids, namespace, progress=progress) for each in requests
    ]
    answers = Answers(serving, submissions)
    completion = _RunningCompletion(body, served, requests)
    if not body.stream:
        return await _whole(completion, answers)
    await answers.begin_stream()
    events = _chunks(completion, answers, serving.settings.keep_alive_s)
    return StreamedAnswer(events, answers.close, serving.settings.slow_reader_s)


def _read(body: CompletionRequest, served: ServedModel, settings: ServerSettings) -> list[EngineRequest]:
    """Encode the prompts; this blocks."""
    check_completion(body, settings.max_prompts)
    params = sampling_of(
        body,
        served.default_sampling,
        settings,
        logprobs=body.logprobs,
        grammar=body.constraint,
        skip_special_tokens=body.skip_special_tokens,
    )
    prompts = body.prompts
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{index}]" for index in range(len(prompts))]
    with context_errors(served, "prompt"):
        return [
            served.requests.of_prompt(prompt, name, params)
            for prompt, name in zip(prompts, names, strict=True)
        ]


async def _whole(completion: _RunningCompletion, answers: Answers) -> Response:
    async with answers, aclosing(answers.events(keep_alive_s=3600)) as events:
        async for item in events:
            if item is not None and isinstance(item[1], Delta):
                completion.push(item[0], item[1])
    choices = [choice.whole for choices in completion.of_prompts for choice in choices]
    return JSONResponse(completion.with_fields(choices=choices, **completion.counts))


async def _chunks(
    completion: _RunningCompletion, answers: Answers, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """The stream; what fails in the middle is said in its last event."""
    body = completion.body
    began = time.monotonic()
    reports = [PromptProgressReports(began) for _ in completion.of_prompts] if body.return_progress else []
    try:
        async with aclosing(answers.events(keep_alive_s)) as events:
            async for item in events:
                if item is None:
                    yield KEEP_ALIVE
                    continue
                if reports and (report := reports[item[0]].of(item[1])):
                    yield sse(completion.with_fields(choices=[], prompt_progress=report))
                if isinstance(item[1], Delta):
                    yield sse(completion.push(item[0], item[1]))
        if body.wants_usage:
            yield sse(completion.with_fields(choices=[], **completion.counts))
    except Exception as error:
        yield sse(problem_of(error).body)
    yield DONE
