"""EngineClient: what HTTP knows of the engine, wherever that runs."""

from dataclasses import dataclass
from typing import Literal, Protocol

from coldstream.engine.engine_statistics import EngineStatistics, LiveState
from coldstream.engine.submission import Submission
from coldstream.errors import ColdstreamError
from coldstream.server.event_stream import EventStream
from coldstream.server.served_model import ServedModel

State = Literal["loading", "ready", "sleeping", "waking", "restarting", "stopping", "failed"]
"""loading: for the first time; sleeping: unloaded until the next request; waking: loaded again for one, while
requests wait; restarting: after it died; stopping: requests under way end, none begins; failed: it died too
often in a row, and is tried again later.
"""


class ServiceUnavailable(ColdstreamError):
    """No engine for now: it loads, it has died, or it stops. `retry_after_s`: when it may be back."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Health:
    """How the engine is."""

    state: State
    # Seconds since the engine last moved while requests were waiting for it; 0 if none waits.
    last_progress_age_s: float = 0.0
    retry_after_s: float = 0.0  # when it may be ready; 0: it is, or never will be
    what: str = ""  # what is being done while loading
    done: int = 0
    total: int = 0
    reason: str = ""  # why it is not ready
    restarts: int = 0  # since the start
    unloads: int = 0  # since the start, as nobody asked for long enough

    @property
    def is_sleeping(self) -> bool:
        """Whether the model is unloaded until the next request."""
        return self.state == "sleeping"


class EngineClient(Protocol):
    """An engine, for one event loop."""

    @property
    def model(self) -> ServedModel:
        """The model. Raises ServiceUnavailable before it was ready for the first time."""

    @property
    def is_sleeping(self) -> bool:
        """Whether the model is unloaded until the next request."""

    async def submit(self, submission: Submission) -> EventStream:
        """Begin a request, after waiting for a model that sleeps to be loaded; the stream ends after its last
        event. Closing it earlier cancels the request.

        A reader that falls too far behind, and an engine that dies, give a last `Failed`. Raises
        ServiceUnavailable, QueueFullError, InvalidRequestError, and ModelChangedError once the model's file
        has changed. A model that could not be loaded again gives OutOfMemoryError or ServiceUnavailable, and
        one that was not by the request's deadline DeadlineError. Nothing was begun then.
        """

    async def cancel(self, request_id: int) -> None:
        """End the answers of a request as cancelled; unknown ids are ignored."""

    async def health(self) -> Health:
        """The engine's state, at once."""

    async def statistics(self) -> EngineStatistics:
        """Counts of the running engine. Raises ServiceUnavailable if none runs."""

    async def live(self) -> LiveState:
        """The same with the experts, where they lie and how they are used. Raises as `statistics`."""
