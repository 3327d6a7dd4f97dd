"""How one request picks its tokens and when it ends. This module knows neither text processing nor models.

Names and defaults are llama.cpp's where the idea is the same, the Python spellings vLLM's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coldstream.decoding.checks import MAX_COUNT, check_flag, check_integer, check_real
from coldstream.decoding.constraints import Grammar, RepetitionStop, Thought
from coldstream.errors import InvalidRequestError, shown

Logits = NDArray[np.float32]  # [vocab]

LogitsProcessor = Callable[[Sequence[int], Logits], Logits]
"""Takes the token ids so far and float32 logits [vocab]; returns float32 logits of the same shape. May write
−inf to forbid a token, and may write into the logits that it is given, which are a copy. One that raises or
returns anything else ends the request with InvalidRequestError.
"""

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_SEED = 2**64 - 1
MAX_N = 1024
MAX_LOGPROBS = 1024


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling settings, checked on creation (InvalidRequestError names the field and its
    range).

    The steps run in this order: biases, penalties, logits processors, what a grammar or a thought's budget
    forbids, tokens that `min_tokens` forbids, top-k, top-p, min-p, temperature. `temperature` 0 takes the
    largest logit that is left before top-k. Meaning of each step: `coldstream.decoding.sampling`. Neither `n`
    nor `logprobs` changes a token of the first answer.

    Where `logits_processors` look at all logits, a GPU's are brought to the host and the token is chosen
    there, by the same definition and with the same result. So they are where biases and `min_tokens` together
    concern more than 1,024 tokens.
    """

    temperature: float = 0.8
    top_k: int = 40  # 0 or −1: off, kept as 0
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int | None = 64  # tokens that penalties look back on, prompt included; None: all of them
    seed: int | None = None  # None: a fresh one, reported with the result
    max_tokens: int | None = None  # None: until an end token or the end of the context
    # Generation ends before the first of these in the text: one string or several, kept as a tuple.
    stop: Sequence[str] | None = None
    ignore_eos: bool = False  # treat end tokens like any other
    logits_processors: Sequence[LogitsProcessor] | None = None  # kept as a tuple
    # Generation ends after one of these, whose text is left out; kept as a tuple.
    stop_token_ids: Sequence[int] | None = None
    # Tokens before which no end token (unless ignored) and none of `stop_token_ids` is chosen; a stop string
    # counts if it ends in the text of a later one.
    min_tokens: int = 0
    include_stop_str_in_output: bool = False  # the stop string or stop token that ended the text stays in it
    skip_special_tokens: bool = True  # control tokens are not in the text, as in vLLM
    # Control tokens are in the text in any case, each between two marks that no other text holds, for who
    # finds messages and calls by them: `coldstream.gguf.tokenizer.MARKS`.
    marks_control_tokens: bool = False
    # Answers to the prompt. The first is that of n = 1, the one with index i that of seed
    # `derived_seed(seed, i)`.
    n: int = 1
    # For each token: this many of the likeliest and the chosen one, by the model's own logits, which no
    # penalty, filter or temperature has changed.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # not served: see `LLM.logits`
    # What is added to the logits of some tokens, by token id, −100 to 100; kept as a tuple of pairs by id.
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    grammar: Grammar | None = None  # what the answer is made to match
    thought: Thought | None = None  # where a thought before the answer ends, and when it has to
    repetition: RepetitionStop | None = None  # ends an answer that repeats itself

    def __post_init__(self) -> None:
        for each in fields(self):
            if isinstance(value := getattr(self, each.name), np.generic):
                object.__setattr__(self, each.name, value.item())
        check_real("temperature", self.temperature, 0, 1e6)
        check_real("top_p", self.top_p, 0, 1)
        check_real("min_p", self.min_p, 0, 1)
        check_real("repetition_penalty", self.repetition_penalty, 0.01, 100)
        check_real("presence_penalty", self.presence_penalty, -2, 2)
        check_real("frequency_penalty", self.frequency_penalty, -2, 2)
        check_integer("top_k", self.top_k, -1, MAX_COUNT)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        check_integer("repeat_last_n", self.repeat_last_n, 0, MAX_COUNT, optional=True)
        check_integer("seed", self.seed, 0, MAX_SEED, optional=True)
        check_integer("max_tokens", self.max_tokens, 1, MAX_COUNT, optional=True)
        check_integer("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens, {self.max_tokens}, not {self.min_tokens}"
            )
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("include_stop_str_in_output", self.include_stop_str_in_output)
        check_flag("skip_special_tokens", self.skip_special_tokens)
        check_flag("marks_control_tokens", self.marks_control_tokens)
        check_integer("n", self.n, 1, MAX_N)
        if self.n > 1 and self.temperature == 0:
            raise InvalidRequestError(
                f"n must be 1 at temperature 0, where all answers are the same, not {self.n}"
            )
        check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        if self.prompt_logprobs is not None:
            raise InvalidRequestError(
                f"prompt_logprobs must be None, not {shown(self.prompt_logprobs)}: LLM.logits(token_ids) "
                "gives the logits after each token of a prompt"
            )
        self._check_constraints()
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_stop_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _checked_biases(self.logit_bias))
        object.__setattr__(self, "logits_processors", _checked_processors(self.logits_processors))

    def _check_constraints(self) -> None:
        for name, kind in (("grammar", Grammar), ("thought", Thought), ("repetition", RepetitionStop)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidRequestError(f"{name} must be a {kind.__name__} or None, not {shown(value)}")
        if self.grammar is not None and (self.min_tokens > 0 or self.ignore_eos):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidRequestError(
                f"{name} and grammar exclude each other: the grammar says where an answer ends"
            )

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar or a thought's budget decides which tokens may follow."""
        return self.grammar is not None or (self.thought is not None and self.thought.budget is not None)

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes any logit."""
        active = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return active and self.repeat_last_n != 0


def _checked_stop(stop: object) -> tuple[str, ...]:
    stops = _as_tuple("stop", "a string or a list of strings", (stop,) if isinstance(stop, str) else stop)
    if not all(isinstance(text, str) for text in stops):
        raise InvalidRequestError(f"stop must be a string or a list of strings, not {shown(stop)}")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop: at most {MAX_STOP_STRINGS} stop strings, not {len(stops)}")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stop: a stop string has 1 to {MAX_STOP_CHARS} characters, not {len(text)}"
            )
    return stops


def _checked_stop_token_ids(ids: object) -> tuple[int, ...]:
    ids = _as_tuple("stop_token_ids", "a list of token ids", ids)
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS} ids, not {len(ids)}")
    for token_id in ids:
        is_integer = isinstance(token_id, Integral) and not isinstance(token_id, bool)
        if not is_integer or not 0 <= token_id <= MAX_COUNT:
            raise InvalidRequestError(f"stop_token_ids: {shown(token_id)} is not a token id")
    return tuple(int(token_id) for token_id in ids)


def _checked_biases(biases: object) -> tuple[tuple[int, float], ...]:
    wanted = "a mapping of token ids to numbers"
    pairs = _as_tuple("logit_bias", wanted, list(biases.items()) if isinstance(biases, Mapping) else biases)
    if len(pairs) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(f"logit_bias: at most {MAX_LOGIT_BIASES} tokens, not {len(pairs)}")
    checked: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InvalidRequestError(f"logit_bias must be {wanted}, not {shown(biases)}")
        token_id, bias = pair
        check_integer("logit_bias: a token id", token_id, 0, MAX_COUNT)
        check_real(f"logit_bias: the bias of token {token_id}", bias, -100, 100)
        checked[token_id] = float(bias)
    return tuple(sorted(checked.items()))


def _checked_processors(processors: object) -> tuple[LogitsProcessor, ...]:
    processors = _as_tuple("logits_processors", "a list of functions", processors)
    for processor in processors:
        if not callable(processor):
            raise InvalidRequestError(f"logits_processors: {shown(processor)} is not a function")
    return processors


def _as_tuple(name: str, wanted: str, values: object) -> tuple[Any, ...]:
    if values is None:
        return ()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        raise InvalidRequestError(f"{name} must be {wanted}, not {shown(values)}")
    return tuple(values)
