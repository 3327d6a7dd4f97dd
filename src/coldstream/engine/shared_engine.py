"""An engine that threads share. It has no thread of its own: who waits for an event takes the steps for all.

Requests of all threads run side by side in these steps. Each caller has a queue, into which the events of its
own requests go, whoever takes the step that gives them.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

from coldstream.engine.answer import Request
from coldstream.engine.engine import Engine
from coldstream.engine.events import Delta, Event, Failed
from coldstream.engine.submission import Submission
from coldstream.errors import ColdstreamError, InvalidRequestError
from coldstream.forks import OwnProcess

_CALLED_BY_STEP = "a function that a step calls cannot use the same LLM: call it from another thread"


class AbandonedError(Exception):
    """`CallerRequests.abandon` was called while a thread waited for an event."""


class SharedEngine:
    """All methods may be called from any thread, `CallerRequests.cancel` also from a signal handler.

    In a forked child they raise GenerationFault, or do nothing where nothing is asked for.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        """make: called when the engine is first needed."""
        self.process = OwnProcess()
        self._make = make
        self._engine: Engine | None = None
        self._max_running: int | None = None  # kept, because asking the engine ends steps in flight
        # Its lock is reentrant: a stream that is dropped may cancel its request anywhere.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._stepping: int | None = None  # the thread that uses the engine now
        self._is_closed = False
        self._ids = count()
        self._queues: dict[int, deque[Event]] = {}  # of unfinished requests
        self._arrived: deque[Submission] = deque()
        self._cancelled: deque[int] = deque()

    def requests(self) -> "CallerRequests":
        """For the requests of one caller."""
        return CallerRequests(self)

    @property
    def max_running(self) -> int:
        """The most answers that have memory at a time."""
        if self._max_running is None:
            with self.exclusively() as engine:
                self._max_running = engine.max_running
        return self._max_running

    @contextmanager
    def exclusively(self) -> Iterator[Engine]:
        """The engine between two steps, with nothing in flight.

        Raises InvalidRequestError after `close`, and in a function that a step calls.
        """
        self.check()  # before the lock, which a forked child may find taken forever
        with self._lock:
            while True:
                self.check()
                if self._stepping is None:
                    break
                self._wait()
            self._stepping = threading.get_ident()
        refused: Sequence[Event] = ()
        try:
            engine, refused = self._with_news()
            engine.settle()
            yield engine
        finally:
            with self._lock:
                self._step_ended(refused)

    def check(self) -> None:
        """Raises InvalidRequestError after `close`, and GenerationFault in a forked child."""
        self.process.check()
        self._check_open()

    def close(self) -> None:
        """Ends all requests and the engine, once the step that another thread takes is done.

        Callers that wait raise InvalidRequestError. Closing twice is allowed. Raises InvalidRequestError, and
        changes nothing, in a function that a step calls.
        """
        if not self.process.is_here():
            return
        with self._lock:
            if self._stepping == threading.get_ident():
                raise InvalidRequestError("this LLM cannot be closed by a function that its request calls")
            self._is_closed = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._stepping is None)
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def submit(self, request: Request, queue: deque[Event], *, progress: bool) -> int:
        """Queues a request, whose events go to `queue`; its id. It runs once somebody takes steps."""
        self.check()
        with self._lock:
            self.check()
            request_id = next(self._ids)
            self._queues[request_id] = queue
            self._arrived.append(Submission(request_id, request, progress=progress))
            return request_id

    def cancel(self, request_id: int) -> None:
        """Ends a request in the next step; an unknown or finished one is ignored."""
        self._cancelled.append(request_id)

    def wake(self) -> None:
        """Has those who wait look again whether they are to go on."""
        with self._lock:
            self._condition.notify_all()

    def next_event(self, mine: "CallerRequests") -> Event:
        """The next event of unfinished requests. Takes steps, or waits for who does.

        Raises as `Engine.step`, InvalidRequestError after `close` and in a function that a step calls, and
        AbandonedError.
        """
        self.process.check()  # before the lock, which a forked child may find taken forever
        with self._lock:
            while True:
                self._check_open()
                if mine.is_abandoned:
                    raise AbandonedError
                if mine.queue:
                    return mine.queue.popleft()
                if self._stepping is None:
                    self._take_step()
                else:
                    self._wait()

    def _take_step(self) -> None:
        """Takes a step for all callers. The lock, which this thread holds, is free meanwhile."""
        self._stepping = threading.get_ident()
        events: Sequence[Event] = ()
        try:
            self._lock.release()
            engine, refused = self._with_news()
            events = [*refused, *engine.step()] if refused else engine.step()
        finally:
            self._lock.acquire()
            self._step_ended(events)

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequestError("this LLM is closed")

    def _wait(self) -> None:
        if self._stepping == threading.get_ident():
            raise InvalidRequestError(_CALLED_BY_STEP)
        self._condition.wait()

    def _with_news(self) -> tuple[Engine, list[Event]]:
        """The engine, with what was submitted and cancelled since; events of what it refuses."""
        if self._engine is None:
            self._engine = self._make()
        engine, refused = self._engine, list[Event]()
        while self._arrived:
            submission = self._arrived.popleft()
            try:
                engine.add(submission)
            except ColdstreamError as error:
                refused.append(Failed(submission.request_id, error))
        while self._cancelled:
            engine.cancel(self._cancelled.popleft())
        return engine, refused

    def _step_ended(self, events: Sequence[Event]) -> None:
        """Gives events to the callers whose they are. This thread holds the lock."""
        self._stepping = None
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.append(event)
        self._condition.notify_all()

    def forget(self, request_ids: Collection[int], unfinished: Collection[int]) -> None:
        """No events of these requests are wanted any more; the unfinished ones are cancelled."""
        if not self.process.is_here():
            return
        with self._lock:
            for request_id in request_ids:
                self._queues.pop(request_id, None)
            self._cancelled += unfinished
            if not self._queues and self._stepping is None and self._engine is not None:
                self._rest()

    def _rest(self) -> None:
        """Ends what the device does ahead, as nobody may take a step for long. The lock is free meanwhile."""
        self._stepping = threading.get_ident()
        refused: Sequence[Event] = ()
        try:
            self._lock.release()
            engine, refused = self._with_news()
            with suppress(ColdstreamError):  # of requests that nobody waits for
                engine.settle()
        finally:
            self._lock.acquire()
            self._step_ended(refused)


class CallerRequests:
    """Requests of one caller, and the queue of their events. `close` has to follow."""

    def __init__(self, engine: SharedEngine) -> None:
        self.queue: deque[Event] = deque()
        self.is_abandoned = False
        self._engine = engine
        self._ids: list[int] = []
        self._num_open: dict[int, int] = {}  # unfinished answers of each unfinished request

    def add(self, request: Request, *, progress: bool = False) -> int:
        """Submits a request; its id. progress: whether `PromptProgress` events are wanted."""
        request_id = self._engine.submit(request, self.queue, progress=progress)
        self._ids.append(request_id)
        self._num_open[request_id] = request.params.n
        return request_id

    def cancel(self, request_id: int) -> None:
        """Ends a request with the reason `cancelled`, which is among its last events."""
        self._engine.cancel(request_id)

    def next_event(self) -> Event:
        """The next event of an unfinished request, of which there must be one. Raises as `SharedEngine`."""
        event = self._engine.next_event(self)
        if isinstance(event, Delta):
            if event.piece.finish_reason is not None:
                self._num_open[event.request_id] -= 1
                if self._num_open[event.request_id] == 0:
                    del self._num_open[event.request_id]
        elif isinstance(event, Failed):
            del self._num_open[event.request_id]
        return event

    def abandon(self) -> None:
        """Has `next_event` raise AbandonedError in whatever thread waits for it, or calls it later."""
        self.is_abandoned = True
        self._engine.wake()

    def close(self) -> None:
        """Cancels what is not finished. Closing twice is allowed."""
        self._engine.forget(self._ids, self._num_open)
        self._ids, self._num_open = [], {}
