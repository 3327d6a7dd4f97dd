"""`LLM`: the engine for people who write Python.

    llm = LLM("model.gguf", threads=8)
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)
    for piece in llm.stream("Once upon a time"):
        print(piece.text, end="")

Keyword arguments are the fields of `EngineConfig`. One request computes at a time.
"""

import os
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from types import TracebackType
from typing import Any, Self, cast

from coldstream.decoding import Logits, Progress, SamplingParams
from coldstream.engine.config import EngineConfig
from coldstream.engine.generation import Request, Stream, generate_pieces
from coldstream.engine.live_sequence import LiveSequence
from coldstream.engine.opened_model import OpenedModel, open_model
from coldstream.engine.request import Piece, RequestOutput
from coldstream.errors import InvalidRequestError, OutOfMemoryError, host_memory_errors
from coldstream.gguf.tokenizer import StreamDecoder
from coldstream.placement.hardware import Hardware

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

_RENDERER_ARGUMENTS = {"messages", "tools", "add_generation_prompt"}
_SEED_BITS = 53  # so that a drawn seed survives a trip through JSON


class LLM:
    """A model, ready to generate. Also a context manager; `close` gives the file and the memory back.

    Raises any of coldstream's errors on opening: ConfigError for an unknown or impossible setting,
    ModelNotFoundError, DownloadError, ModelFormatError and its children, OutOfMemoryError.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        config = EngineConfig.from_options({"model": os.fspath(model), **options})
        self._take(open_model(config))

    @classmethod
    def from_opened(cls, opened: OpenedModel) -> Self:
        """An LLM over a model that is already open; it is closed with the LLM."""
        llm = cls.__new__(cls)
        llm._take(opened)
        return llm

    def _take(self, opened: OpenedModel) -> None:
        self._opened = opened
        self._sequence = LiveSequence(opened.runner)
        self._computing = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def opened(self) -> OpenedModel:
        """The parts: concrete configuration, runner, tokenizer, template and the file's sampling defaults."""
        return self._opened

    def close(self) -> None:
        """Release the model; not while another thread computes with it. Closing twice is allowed.

        Later requests, and streams that go on, raise InvalidRequestError.
        """
        if not self._closed:
            self._closed = True
            self._opened.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Complete each prompt, a text or a list of token ids, one after the other.

        `params` None: the model file's own sampling defaults. A given seed serves every prompt. Raises
        InvalidRequestError before computing anything if any prompt can't be served.
        """
        requests = [self._request(prompt, params) for prompt in _as_list(prompts)]
        return [self._complete(request) for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, progress: Progress | None = None
    ) -> Stream:
        """Complete one prompt piece by piece. `progress` hears (prompt tokens done, prompt tokens in all)."""
        return self._stream(self._request(prompt, params), progress)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer a conversation of `{"role": …, "content": …}`, written out by the model's chat template."""
        return self._complete(self._chat_request(messages, params, template_kwargs))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        progress: Progress | None = None,
    ) -> Stream:
        """`chat`, piece by piece. A conversation that extends the previous one computes only what is new."""
        return self._stream(self._chat_request(messages, params, template_kwargs), progress)

    @host_memory_errors()
    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Logits after each of `token_ids`, from an empty context: float32 [T, vocab].

        Raises InvalidRequestError for an id out of range or more ids than the context holds, OutOfMemoryError
        if the result wouldn't fit.
        """
        self._check_open()
        ids = self._checked_ids(token_ids, self._ctx_size)
        need = len(ids) * self._opened.tokenizer.vocab_size * 4
        free = Hardware.measure().ram_available_bytes
        if need > free:
            raise OutOfMemoryError(
                f"logits of {len(ids)} tokens need {need / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} GiB are free: ask for fewer tokens at a time"
            )
        with self._exclusive():
            self._sequence.forget()
            return self._opened.runner.logits(ids)

    @property
    def _ctx_size(self) -> int:
        assert self._opened.config.ctx_size, "an opened model has a concrete context"
        return self._opened.config.ctx_size

    @host_memory_errors()
    def _chat_request(
        self, messages: Messages, params: SamplingParams | None, template_kwargs: Mapping[str, Any] | None
    ) -> Request:
        self._check_open()
        settings = dict(template_kwargs or {})
        if reserved := _RENDERER_ARGUMENTS & settings.keys():
            raise InvalidRequestError(f"chat template setting {min(reserved)!r}: reserved for the renderer")
        chat = self._opened.chat_template.render(messages, **settings)
        token_ids = self._opened.tokenizer.encode_segments(chat.segments, max_tokens=self._ctx_size - 1)
        return self._with_params(None, token_ids, params)

    @host_memory_errors()
    def _request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        self._check_open()
        if isinstance(prompt, str):
            tokenizer = self._opened.tokenizer
            token_ids = tokenizer.encode(prompt, parse_special=True, max_tokens=self._ctx_size - 1)
            return self._with_params(prompt, token_ids, params)
        return self._with_params(None, self._checked_ids(prompt, self._ctx_size - 1), params)

    def _with_params(
        self, prompt: str | None, token_ids: Sequence[int], params: SamplingParams | None
    ) -> Request:
        if not token_ids:
            raise InvalidRequestError("the prompt is empty")
        opened = self._opened
        params = params or opened.default_sampling
        room = self._ctx_size - len(token_ids)
        seeds = (params.seed, opened.config.seed, secrets.randbits(_SEED_BITS))
        return Request(
            prompt=prompt,
            prompt_token_ids=tuple(token_ids),
            params=params,
            seed=next(seed for seed in seeds if seed is not None),
            max_tokens=min(room, params.max_tokens or room),
            end_ids=frozenset() if params.ignore_eos else opened.tokenizer.eos_ids,
            tier=opened.runner.tier,
            threads=opened.runner.threads,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("this LLM is closed")

    def _checked_ids(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        if not 1 <= len(token_ids) <= max_tokens:
            raise InvalidRequestError(
                f"{len(token_ids)} tokens: a context of {self._ctx_size} has room for 1 to {max_tokens}; "
                "shorten the prompt or raise ctx_size (--ctx-size)"
            )
        vocab_size = self._opened.tokenizer.vocab_size
        for token_id in token_ids:
            is_integer = isinstance(token_id, Integral) and not isinstance(token_id, bool)
            if not is_integer or not 0 <= token_id < vocab_size:
                raise InvalidRequestError(f"{token_id!r} is not a token id of a vocabulary of {vocab_size}")
        return [int(token_id) for token_id in token_ids]

    def _stream(self, request: Request, progress: Progress | None = None) -> Stream:
        def pieces(is_cancelled: Callable[[], bool]) -> Generator[Piece, None, None]:
            with host_memory_errors(), self._exclusive():
                decoder = StreamDecoder(self._opened.tokenizer)
                for piece in generate_pieces(request, self._sequence, decoder, is_cancelled, progress):
                    yield piece
                    self._check_open()

        return Stream(pieces)

    @host_memory_errors()
    def _complete(self, request: Request) -> RequestOutput:
        pieces = list(self._stream(request))
        finish_reason, statistics = pieces[-1].ending()
        return RequestOutput(
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
            finish_reason=finish_reason,
            statistics=statistics,
        )

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the model for one request; a second is refused, as two sequences would mix in one state."""
        if not self._computing.acquire(blocking=False):
            raise InvalidRequestError("another request is computing: finish or close its stream first")
        try:
            self._check_open()
            yield
        finally:
            self._computing.release()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Several prompts as they are; one, a text or something that begins with a token id, as a list of one."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)
