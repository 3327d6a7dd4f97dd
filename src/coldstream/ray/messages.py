"""What the server and its replicas say to each other, as data in the bytes of `server/codec.py`.

A replica answers a submission with batches of messages: `Accepted` or `Refused` alone in the first, then the
request's events. `Died`, wherever it comes, is the last: the replica's engine has ended.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from coldstream.engine.engine_statistics import LiveState
from coldstream.engine.events import Event, Failed
from coldstream.errors import GenerationFault
from coldstream.server.client import Health, ServiceUnavailable
from coldstream.server.codec import encode
from coldstream.server.messages import Accepted, Died, FromEngine, Refused
from coldstream.server.served_model import EngineFacts


@dataclass(frozen=True)
class ReplicaState:
    """How a replica is."""

    replica: str  # its name in Ray Serve
    facts: EngineFacts
    health: Health
    live: LiveState | None  # None: it has ended, or is in a first step that takes long


def encoded(messages: Iterable[Accepted | Refused | Died | Event]) -> list[bytes]:
    """A batch. A request that failed because the engine has ended says that it died."""
    return [encode(_as_sent(message), FromEngine) for message in messages]


def _as_sent(message: Accepted | Refused | Died | Event) -> Accepted | Refused | Died | Event:
    if isinstance(message, Failed) and isinstance(message.error, ServiceUnavailable):
        return Died(GenerationFault(str(message.error)))
    return message
