"""What a request gives back: pieces of text as they come, and the whole with its statistics."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]
"""stop: an end token or a stop string; length: max_tokens or the end of the context; cancelled: by the
caller.
"""


@dataclass(frozen=True)
class Statistics:
    """One request in numbers. Sampling and detokenising are part of the times, tokenising is not."""

    prompt_tokens: int
    reused_tokens: int  # of the prompt, found in the model's state and not computed again
    generated_tokens: int
    time_to_first_token_s: float  # from the start of computing
    generation_s: float  # from the first token to the last
    tier: str  # of CPU kernels
    threads: int
    seed: int  # gives the same tokens again
    expert_hit_rate: float | None = (
        None  # of uses that found their expert in fast memory; None: all are there
    )

    @property
    def prompt_tokens_per_s(self) -> float:
        """Speed of the prompt tokens that were not reused; 0 if there is no first token."""
        return _rate(self.prompt_tokens - self.reused_tokens, self.time_to_first_token_s)

    @property
    def generated_tokens_per_s(self) -> float:
        """Speed of the tokens after the first, which the prompt's last row gave; 0 before the second."""
        return _rate(max(0, self.generated_tokens - 1), self.generation_s)


@dataclass(frozen=True)
class Piece:
    """A piece of streamed text. The last one has a finish reason and statistics; its text may be empty.

    `token_ids` are those decided since the piece before; text may lag behind them, as a character can need
    several tokens and a possible stop string is held back.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    statistics: Statistics | None = None

    def ending(self) -> tuple[FinishReason, Statistics]:
        """Finish reason and statistics of the last piece; asking any other one is a mistake."""
        assert self.finish_reason is not None
        assert self.statistics is not None
        return self.finish_reason, self.statistics


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. `text` ends before a stop string or end token; `token_ids` are all generated."""

    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    statistics: Statistics


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
