"""Reads prompts and conversations into requests that a model can compute."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from coldstream.decoding import SEED_BITS, SamplingParams
from coldstream.engine.answer import Request
from coldstream.engine.grammar import Grammars
from coldstream.engine.prompts import (
    Conversation,
    as_conversations,
    as_prompts,
    checked_ids,
    params_of_each,
    read_prompt,
)
from coldstream.errors import ContextFullError, InvalidRequestError, host_memory_errors
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.tokenizer import Tokenizer


class ReadsText(Protocol):
    """What reading a request takes of a model: `OpenedModel`, or one that another process computes."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate: ...

    @property
    def grammars(self) -> Grammars: ...

    @property
    def ctx_size(self) -> int:
        """Tokens of a prompt and its answer together."""

    @property
    def seed(self) -> int | None:
        """For requests that name none; None: a fresh one for each."""

    @property
    def tier(self) -> str:
        """Of CPU kernels."""

    @property
    def threads(self) -> int:
        """CPU threads that compute."""


class RequestReader:
    """Makes the requests of a model. Raises InvalidRequestError for what can't be served."""

    def __init__(self, opened: ReadsText) -> None:
        self._opened = opened

    def of_prompts(
        self,
        prompts: object,
        params: SamplingParams | Sequence[SamplingParams] | None,
        default: SamplingParams,
    ) -> list[Request]:
        """A prompt or a list of them. params: for all, one for each, or None for `default`."""
        items = as_prompts(prompts)
        names = [f"prompts[{index}]" for index in range(len(items))] if len(items) > 1 else ["prompt"]
        each = params_of_each(params, len(items), default)
        return [self.of_prompt(*one) for one in zip(items, names, each, strict=False)]

    def of_chats(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None,
        default: SamplingParams,
        settings: Mapping[str, Any],
    ) -> list[Request]:
        """A conversation or a list of them, otherwise as `of_prompts`. settings: see `of_chat`."""
        conversations = as_conversations(messages)
        each = params_of_each(params, len(conversations), default)
        return [self.of_chat(*one, settings) for one in zip(conversations, each, strict=True)]

    @host_memory_errors()
    def of_chat(self, messages: Conversation, params: SamplingParams, settings: Mapping[str, Any]) -> Request:
        """A conversation, written out by the model's chat template with these settings."""
        chat = self._opened.chat_template.render(messages, **settings)
        token_ids = self._opened.tokenizer.encode_segments(
            chat.segments, max_tokens=self._opened.ctx_size - 1
        )
        return self._with_params(None, token_ids, "prompt", params)

    @host_memory_errors()
    def of_prompt(self, prompt: object, name: str, params: SamplingParams) -> Request:
        """A text or token ids in any of the shapes of `LLM.generate`. Errors call it `name`."""
        read = read_prompt(prompt, name)
        if read.token_ids is not None:
            token_ids = self.checked_ids(read.token_ids, name, self._opened.ctx_size - 1)
        else:
            token_ids = self._encoded(read.text or "", name)
        return self._with_params(read.text, token_ids, name, params)

    def _encoded(self, text: str, name: str) -> list[int]:
        try:
            return self._opened.tokenizer.encode(
                text, parse_special=True, max_tokens=self._opened.ctx_size - 1
            )
        except InvalidRequestError as error:
            named = str(error).replace("prompt", name, 1)
            if isinstance(error, ContextFullError):
                raise ContextFullError(named, error.num_tokens, is_exact=error.is_exact) from error
            raise type(error)(named) from error

    def _with_params(
        self, prompt: str | None, token_ids: Sequence[int], name: str, params: SamplingParams
    ) -> Request:
        if not token_ids:
            raise InvalidRequestError(f"{name}: it is empty, give at least one character or token")
        opened = self._opened
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if stop_token_ids and max(stop_token_ids) >= opened.tokenizer.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids: {max(stop_token_ids)} is not a token id of a vocabulary of "
                f"{opened.tokenizer.vocab_size}"
            )
        biases = dict(params.logit_bias or ())
        if biases and max(biases) >= opened.tokenizer.vocab_size:
            raise InvalidRequestError(
                f"logit_bias: {max(biases)} is not a token id of a vocabulary of "
                f"{opened.tokenizer.vocab_size}"
            )
        opened.grammars.check(params)
        room = self._opened.ctx_size - len(token_ids)
        seeds = (params.seed, opened.seed, secrets.randbits(SEED_BITS))
        return Request(
            prompt=prompt,
            prompt_token_ids=tuple(token_ids),
            params=params,
            seed=next(seed for seed in seeds if seed is not None),
            max_tokens=min(room, params.max_tokens or room),
            end_ids=frozenset() if params.ignore_eos else opened.tokenizer.eos_ids,
            stop_token_ids=stop_token_ids,
            tier=opened.tier,
            threads=opened.threads,
        )

    def checked_ids(self, token_ids: object, name: str, max_tokens: int) -> list[int]:
        """`token_ids`, called `name` in errors, as at most `max_tokens` ids of the vocabulary."""
        return checked_ids(
            token_ids,
            name,
            max_tokens=max_tokens,
            ctx_size=self._opened.ctx_size,
            vocab_size=self._opened.tokenizer.vocab_size,
        )
