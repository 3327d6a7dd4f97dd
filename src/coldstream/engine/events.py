"""What the engine reports of a request while it serves it."""

from dataclasses import dataclass

from coldstream.engine.request import Piece
from coldstream.errors import ColdstreamError


@dataclass(frozen=True)
class Started:
    """The first event of a request: computing begins."""

    request_id: int
    num_reused: int  # tokens of the prompt that are not computed again
    prompt_tokens: int


@dataclass(frozen=True)
class PromptProgress:
    """More tokens of a prompt are computed; reported after each step that did not finish it."""

    request_id: int
    done: int
    total: int


@dataclass(frozen=True)
class Delta:
    """A piece of an answer. The last one of each answer has a finish reason and statistics."""

    request_id: int
    index: int  # of the answer
    piece: Piece


@dataclass(frozen=True)
class Failed:
    """The last event of a request that failed, with all its answers."""

    request_id: int
    error: ColdstreamError


Event = Started | PromptProgress | Delta | Failed
