"""What the API process and the engine process say to each other, over a pair of sockets that only they hold.

A frame is the length of its payload in four bytes, big-endian, and the payload, one message as `codec` writes
it. First comes `Open`; then the engine process answers `Loading` any number of times, and `Ready` or `Died`.
Closing the socket ends the engine process.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Self, cast

from coldstream.engine.engine_statistics import LiveState
from coldstream.engine.events import Delta, Event, Failed, PromptProgress, Started
from coldstream.engine.limits import EngineLimits
from coldstream.engine.request import Piece
from coldstream.engine.submission import Submission
from coldstream.errors import ColdstreamError
from coldstream.planning.config import EngineConfig
from coldstream.server.codec import ProtocolError, decode, encode
from coldstream.server.served_model import EngineFacts

MAX_FRAME_BYTES: Final = 16 << 20
AT_REST: Final = 0  # no ticket of a `Count`
_LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True)
class PromptCache:
    """Where prefixes of prompts are kept beside the model's own memory."""

    ram_bytes: int = 0  # 0: not in RAM
    folder: str | None = None  # None: not in files


@dataclass(frozen=True)
class Open:
    """Open this model."""

    config: EngineConfig
    limits: EngineLimits
    cache: PromptCache


@dataclass(frozen=True)
class Cancel:
    """End the answers of a request."""

    request_id: int


@dataclass(frozen=True)
class Count:
    """Tell the engine's state."""

    ticket: int


@dataclass(frozen=True)
class Loading:
    """How far opening is: `done` of `total` of `what`."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """The model is open; submissions may come."""

    facts: EngineFacts


@dataclass(frozen=True)
class Died:
    """The engine process ends, for this reason."""

    error: ColdstreamError


@dataclass(frozen=True)
class Accepted:
    """A submission waits or runs; its events follow."""

    request_id: int


@dataclass(frozen=True)
class Refused:
    """A submission that the engine did not take."""

    request_id: int
    error: ColdstreamError


@dataclass(frozen=True)
class Counted:
    """The answer to `Count`, or, unasked, the state of an engine with nothing to do."""

    ticket: int  # `AT_REST`: unasked
    live: LiveState


@dataclass(frozen=True)
class Alive:
    """Steps go on, though no event came of them lately."""


@dataclass(frozen=True)
class Texts:
    """Deltas in order, column by column: those that nothing but their texts and tokens belongs to.

    A step gives one to each answer, and one message takes less time than one for each.
    """

    request_ids: tuple[int, ...]
    indices: tuple[int, ...]
    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len({len(column) for column in (self.request_ids, self.indices, self.texts, self.token_ids)}) > 1:
            raise ProtocolError("columns of different lengths in a Texts")

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> Self:
        """Deltas for which `is_text` holds."""
        pieces = [delta.piece for delta in deltas]
        return cls(
            tuple([delta.request_id for delta in deltas]),
            tuple([delta.index for delta in deltas]),
            tuple([piece.text for piece in pieces]),
            tuple([piece.token_ids for piece in pieces]),
        )

    def deltas(self) -> Iterator[Delta]:
        """What it was made of."""
        columns = zip(self.request_ids, self.indices, self.texts, self.token_ids, strict=True)
        for request_id, index, text, token_ids in columns:
            yield Delta(request_id, index, Piece(text, token_ids))


ToEngine = Open | Submission | Cancel | Count
FromEngine = (
    Loading
    | Ready
    | Died
    | Accepted
    | Refused
    | Counted
    | Alive
    | Started
    | PromptProgress
    | Delta
    | Texts
    | Failed
)


def is_text(event: Event) -> bool:
    """Whether an event is a delta that nothing but its text and tokens belongs to."""
    if not isinstance(event, Delta):
        return False
    piece = event.piece
    others = (piece.logprobs, piece.finish_reason, piece.stop_reason, piece.statistics)
    return others == (None, None, None, None)


def joined(events: Iterable[Event]) -> Iterator[FromEngine]:
    """Events in their order, those of text that follow each other as one message."""
    for are_texts, group in groupby(events, is_text):
        if are_texts:
            yield Texts.of(cast(list[Delta], list(group)))
        else:
            yield from group


def framed(message: ToEngine | FromEngine, direction: Any) -> bytes:
    """The frame of a message of `direction`, `ToEngine` or `FromEngine`.

    Raises ProtocolError if it is too large, or holds what is no data.
    """
    payload = encode(message, direction)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(payload)} bytes, allowed are {MAX_FRAME_BYTES}"
        )
    return _LENGTH.pack(len(payload)) + payload


def payload_length(header: bytes) -> int:
    """Bytes of the payload behind these four. Raises ProtocolError if they are too many."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes, allowed are {MAX_FRAME_BYTES}")
    return int(length)


class ToEngineReader:
    """Splits what arrives into messages to the engine. Holds one unfinished frame at most."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[ToEngine]:
        """The messages that are whole now. Raises ProtocolError at the first that is none."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + payload_length(bytes(self._data[: _LENGTH.size]))
            if len(self._data) < end:
                return
            payload = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield decode(payload, ToEngine)
