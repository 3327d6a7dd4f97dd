"""What a request gives back: pieces of text as they come, and the whole with its statistics.

Names of fields are vLLM's where the idea is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from coldstream.decoding import SpeculationStatistics

FinishReason = Literal["stop", "length", "cancelled", "repetition", "grammar"]
"""stop: an end token or a stop string; length: max_tokens or the end of the context; cancelled: by the
caller; repetition: the answer repeated itself, and the request wanted that to end it; grammar: the grammar
came to a dead end, or to a limit, before the answer matched.
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
    expert_hit_rate: float | None = None  # share of expert uses that were in fast memory; None: all are
    speculation: SpeculationStatistics | None = None  # None: nothing was drafted

    @property
    def prompt_tokens_per_s(self) -> float:
        """Speed of the prompt tokens that were not reused; 0 if there is no first token."""
        return _rate(self.prompt_tokens - self.reused_tokens, self.time_to_first_token_s)

    @property
    def generated_tokens_per_s(self) -> float:
        """Speed of the tokens after the first; 0 before the second. The prompt's last row gives the first."""
        return _rate(max(0, self.generated_tokens - 1), self.generation_s)


@dataclass(frozen=True)
class Logprob:
    """How likely the model found a token, by its own logits (see `SamplingParams.logprobs`)."""

    logprob: float  # natural logarithm
    rank: int  # 1: the likeliest
    decoded_token: str  # bytes that are no text by themselves become U+FFFD


TokenLogprobs = Mapping[int, Logprob]
"""By token id, in the order of rank."""


@dataclass(frozen=True)
class Piece:
    """A piece of streamed text. The last one has a finish reason and statistics; its text may be empty.

    `token_ids` are those decided since the piece before; text may lag behind them, as a character can need
    several tokens and a possible stop string is held back. `logprobs` has an entry for each of them.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # None unless they were asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # see `CompletionOutput`
    statistics: Statistics | None = None

    def ending(self) -> tuple[FinishReason, Statistics]:
        """Finish reason and statistics of the last piece; asking any other one is a mistake."""
        assert self.finish_reason is not None
        assert self.statistics is not None
        return self.finish_reason, self.statistics


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `text` ends before a stop string or end token; `token_ids` are all generated."""

    index: int  # among the answers to the prompt
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None  # the stop string, or the one of `stop_token_ids`, that ended it
    logprobs: tuple[TokenLogprobs, ...] | None  # for each token; None unless they were asked for
    cumulative_logprob: float | None  # of the generated tokens together; None as `logprobs`
    statistics: Statistics


@dataclass(frozen=True)
class RequestOutput:
    """A finished request: a prompt and its answers, `SamplingParams.n` of them."""

    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.outputs[0].finish_reason

    @property
    def statistics(self) -> Statistics:
        """Statistics of the first answer; each answer has its own."""
        return self.outputs[0].statistics


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
