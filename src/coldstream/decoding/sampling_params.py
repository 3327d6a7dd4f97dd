"""How one request picks its tokens. Numbers only: this module knows neither text processing nor models.

Names and defaults are llama.cpp's where the idea is the same, the Python spellings vLLM's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coldstream.errors import InvalidRequestError

Logits = NDArray[np.float32]  # [vocab]


class DeviceLogits(Protocol):
    """Logits [vocab] that lie where they were computed; `numpy.asarray` brings them."""

    def __len__(self) -> int: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Logits: ...

    def choose(
        self,
        context: Sequence[int],
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        repeat_last_n: int | None,
        has_penalties: bool,
        seed: int,
    ) -> int | None:
        """The token that `sample_token` would choose to follow `context`; None if it would raise."""


AnyLogits = Logits | DeviceLogits

LogitsProcessor = Callable[[Sequence[int], Logits], Logits]
"""Takes the token ids so far and float32 logits [vocab]; returns logits of the same shape. May write −inf to
forbid a token; must not change its arguments.
"""

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling settings, checked on creation (InvalidRequestError names the field and its
    range).

    The steps run in this order: penalties, logits processors, top-k, top-p, min-p, temperature. `temperature`
    0 takes the largest logit after penalties and processors. Meaning of each step:
    `coldstream.decoding.sampling`.
    """

    temperature: float = 0.8
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int | None = 64  # tokens that penalties look back on, prompt included; None: all of them
    seed: int | None = None  # None: a fresh one, reported with the result
    max_tokens: int | None = None  # None: until an end token or the end of the context
    stop: Sequence[str] = ()  # generation ends before the first of these in the text
    ignore_eos: bool = False  # treat end tokens like any other
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, 0, 1e6)
        _check_real("top_p", self.top_p, 0, 1)
        _check_real("min_p", self.min_p, 0, 1)
        _check_real("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_real("presence_penalty", self.presence_penalty, -2, 2)
        _check_real("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_integer("top_k", self.top_k, 0, 2**31)
        if self.repeat_last_n is not None:
            _check_integer("repeat_last_n", self.repeat_last_n, 0, 2**31)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, 2**31)
        object.__setattr__(self, "stop", _checked_stop(self.stop))

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes any logit."""
        active = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return active and self.repeat_last_n != 0


def _check_real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}, not {value!r}")


def _checked_stop(stop: object) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise InvalidRequestError(f"stop must be a string or a list of strings, not {stop!r}")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings, not {len(stops)}")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(f"a stop string has 1 to {MAX_STOP_CHARS} characters, not {len(text)}")
    return tuple(stops)
