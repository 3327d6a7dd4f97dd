"""The engine: many requests on one model, each with the tokens that it gets alone.

Unit of work: `Engine.step`, one step of the model with rows of every answer that runs. It knows neither
threads nor sockets, and of time only the clock that it is given.

A row's bits do not depend on its neighbours, nor a token on anything but its request's seed and the tokens
before it; so who runs when, what is computed twice and what is found in the cache change no answer.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from coldstream.decoding import Chosen, Outcome
from coldstream.engine.engine_statistics import EngineCounts, EngineStatistics
from coldstream.engine.events import Delta, Event, Failed, PromptProgress, Started
from coldstream.engine.generation import cancelled_piece
from coldstream.engine.job import Job, ServedRequest
from coldstream.engine.job_memory import JobMemory
from coldstream.engine.limits import EngineLimits
from coldstream.engine.model_steps import Launched, launch, launch_ahead
from coldstream.engine.opened_model import OpenedModel
from coldstream.engine.scheduler import Scheduler
from coldstream.engine.step_cost import StepCost
from coldstream.engine.submission import Submission
from coldstream.errors import (
    ColdstreamError,
    DeadlineError,
    InvalidRequestError,
    OutOfMemoryError,
    QueueFullError,
)

_USUAL_LIMITS: Final = EngineLimits()


class Engine:
    """Requests on an opened model, which stays its caller's and is used by nobody else meanwhile."""

    def __init__(
        self,
        opened: OpenedModel,
        limits: EngineLimits = _USUAL_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds; that of `Submission.deadline`, and by which steps are measured."""
        self._opened = opened
        self._runner = opened.runner
        self._limits = limits
        self._clock = clock
        self._memory = JobMemory(opened)
        size = opened.runner.cache_size
        self._max_running = min(limits.max_running, size.num_states, opened.runner.chunk_size)
        self._scheduler = Scheduler(self._max_running, opened.runner.chunk_size)
        self._cost = StepCost(opened.runner.chunk_size)
        self._counts = EngineCounts()
        self._requests: dict[int, ServedRequest] = {}
        self._jobs: dict[int, Job] = {}  # unfinished, by key
        self._next_key = 0
        self._cancelled: set[int] = set()  # ids, until the next step
        self._flying: Launched | None = None  # a step whose tokens the host has not looked at
        self._can_admit = False  # whether anything has changed since an answer was refused for want of memory
        self._is_short = False  # whether an answer has lost its memory since one was finished
        self._is_closed = False
        self._events: list[Event] = []

    def add(self, submission: Submission) -> None:
        """Takes a request on. Its events come from `step`.

        Raises InvalidRequestError and its children for what cannot be served, and QueueFullError, both with
        nothing changed.
        """
        if self._is_closed:
            raise InvalidRequestError("this engine is closed")
        if submission.request_id in self._requests:
            raise InvalidRequestError(f"request {submission.request_id} is being served: give each a new id")
        submission.check(self._runner.spec.vocab_size, self._opened.ctx_size)
        if len(self._requests) >= self._limits.max_waiting + self._max_running:
            raise QueueFullError(
                f"{self._limits.max_waiting} requests wait already, which is the limit: try again later"
            )
        request = ServedRequest(submission, self._next_key)
        self._next_key += len(request.jobs)
        self._requests[submission.request_id] = request
        for job in request.jobs:
            self._jobs[job.key] = job
            leader = job.leader.key if job.leader else None
            priority, namespace = submission.priority, submission.namespace
            self._scheduler.add(job.key, priority=priority, namespace=namespace, leader=leader)
        self._can_admit = True

    def cancel(self, request_id: int) -> None:
        """Ends the answers of a request in the next step, with the reason `cancelled`.

        Nothing that is computed already is told of it any more. Unknown and finished ones are ignored.
        """
        if request_id in self._requests:
            self._cancelled.add(request_id)

    def step(self) -> list[Event]:
        """Computes a step of the model, or less. What happened since the last call, perhaps nothing.

        An error of one answer ends its request alone. One of the whole step ends all requests with rows in
        it; the others go on if the model does. Other exceptions, such as KeyboardInterrupt, are raised, and
        the engine goes on with the next call.
        """
        try:
            self._end_cancelled()
            self._end_overdue()
            if self._flying is not None:
                self._land(self._flying)
            else:
                self._admit()
                self._compute()
        except BaseException:
            self._start_over()
            raise
        events, self._events = self._events, []
        return events

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until `add`."""
        return not self._requests

    def statistics(self) -> EngineStatistics:
        """Counts up to now."""
        return self._counts.statistics(
            self._runner,
            running=len(self._scheduler.running),
            waiting=self._scheduler.num_waiting,
            prefixes=self._memory.cache.statistics(),
        )

    def clear_prefixes(self, namespace: str | None = None) -> None:
        """Forgets the kept prefixes of a namespace, or of all."""
        self._memory.cache.clear(namespace)

    def close(self) -> None:
        """Drops all requests, without events, and all memory of the model that the engine has.

        The model stays open. Closing twice is allowed.
        """
        self._is_closed = True
        flying = self._flying.counts if self._flying else ()
        for job in (*self._jobs.values(), *flying):
            self._memory.release(job)
            self._scheduler.remove(job.key)
        self._flying = None
        self._jobs.clear()
        self._requests.clear()
        self._memory.cache.clear()

    def _end_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, set()
        for request_id in sorted(cancelled & self._requests.keys()):
            request = self._requests[request_id]
            for job in request.jobs:
                if job.is_over:
                    continue
                if job.has_begun:
                    piece = job.last_piece("cancelled", self._runner)
                else:
                    piece = cancelled_piece(job.request)
                self._events.append(Delta(request_id, job.index, piece))
                self._let_go(job, is_trusted=job.is_trusted)
            self._counts.cancelled_requests += 1
            del self._requests[request_id]

    def _end_overdue(self) -> None:
        now = self._clock()
        for request in tuple(self._requests.values()):
            deadline = request.submission.deadline
            if deadline is not None and now >= deadline:
                what = "was not finished" if request.has_started else "had not begun"
                request_id = request.submission.request_id
                self._fail(
                    request_id,
                    DeadlineError(f"request {request_id} {what} by its deadline: allow more time"),
                )

    def _admit(self) -> None:
        """Gives memory to answers that wait, as many as there is room for."""
        while self._can_admit and (key := self._scheduler.candidate(self._is_ready)) is not None:
            job, running = self._jobs[key], self._running()
            headroom = len(running) if self._is_short else 0
            try:
                begins = self._memory.begin(job, running, headroom)
            except ColdstreamError as error:
                self._fail(job.request_id, error)
                continue
            if begins is None:
                self._can_admit = False
                return
            self._scheduler.admit(key)
            if begins:
                self._tell_start(job)

    def _is_ready(self, leader: int) -> bool:
        job = self._jobs.get(leader)
        return job is None or job.num_computed >= job.fork

    def _most_prompt_rows(self, num_decoding: int) -> int:
        """Rows of prompts in a step with so many decoding ones."""
        target_s = self._limits.target_step_ms / 1000
        return (
            self._cost.most_prompt_rows(num_decoding, target_s)
            if math.isfinite(target_s)
            else self._runner.chunk_size
        )

    def _running(self) -> list[Job]:
        return [self._jobs[key] for key in self._scheduler.running]

    def _compute(self) -> None:
        """A step with rows of those that run."""
        start = self._clock()
        counts = self._rows_of_all()
        if not counts:
            return
        launched = self._launched(counts, lambda: launch(self._runner, counts))
        if launched is None:
            return
        self._scheduler.served({job.key: count for job, count in counts.items()})
        self._tell_progress(counts)
        if self._may_fly(launched):
            self._flying = launched
            return
        self._take(launched, None)
        seconds = self._clock() - start
        self._counts.step_s += seconds
        self._cost.record(sum(counts.values()), seconds)

    def _rows_of_all(self) -> dict[Job, int]:
        """The rows of the next step, for which there is memory then, if need be that of the last answers."""
        while running := self._running():
            wanted = {job.key: job.num_wanted for job in running}
            shares = self._scheduler.share(wanted, self._most_prompt_rows)
            counts = {self._jobs[key]: rows for key, rows in shares.items()}
            if self._memory.fits(counts):
                return counts
            preempted = self._scheduler.preempt()
            if preempted is None:
                what = f"{len(running[0].token_ids)} tokens of request {running[0].request_id}"
                self._fail_all(
                    running, OutOfMemoryError(f"no memory is left for {what}: unpin kept prefixes")
                )
                continue
            self._memory.release(self._jobs[preempted])
            self._counts.preemptions += 1
            self._is_short = True
        return {}

    def _land(self, flying: Launched) -> None:
        """Tells the tokens of a step, once the next one is launched, if that needs no decision."""
        start = self._clock()
        following = None
        if self._may_fly(flying):
            going_on = {job: 1 for job in flying.asked if job.num_left > 1}
            if going_on and self._memory.fits(going_on):
                following = self._launched(going_on, lambda: launch_ahead(self._runner, flying))
                self._counts.ahead_steps += 1
        self._flying = following
        self._take(flying, following)
        self._counts.step_s += self._clock() - start

    def _may_fly(self, step: Launched) -> bool:
        """Whether the next step has the same answers, all of whose tokens the device chooses."""
        if not (self._runner.takes_chosen and step.started.is_on_device) or self._scheduler.num_waiting:
            return False
        return {job.key for job in step.asked} == set(self._scheduler.running) and all(
            job.num_missing == 0 and job.answer.chooser.is_for_device for job in step.asked
        )

    def _launched(self, counts: Mapping[Job, int], launch_it: Callable[[], Launched]) -> Launched | None:
        """A step that is launched. If that fails, so do all its requests: None."""
        try:
            launched = launch_it()
        except ColdstreamError as error:
            self._fail_all(counts, error)
            return None
        self._counts.steps += 1
        self._counts.computed_rows += sum(counts.values())
        return launched

    def _take(self, launched: Launched, following: Launched | None) -> None:
        """Appends the tokens of a step. following: the step that was launched after it, if any."""
        try:
            outcomes = launched.outcomes()
        except ColdstreamError as error:
            self._flying = None
            self._fail_all(launched.counts, error)
            return
        ahead = following.counts if following else {}
        for job, outcome in outcomes.items():
            if job.sequence is None or job.request_id in self._cancelled:
                continue
            if job.is_over:
                self._let_go(job, is_trusted=isinstance(outcome, Chosen))
                continue
            if job in ahead and not _goes_on(job, outcome):
                self._runner.take_back(job.sequence)
            self._take_one(job, outcome)

    def _take_one(self, job: Job, outcome: Outcome) -> None:
        """Takes what was chosen after the last row of a job."""
        try:
            if not isinstance(outcome, Chosen):
                raise outcome
            if job.num_missing <= 0:
                pieces = job.accept(outcome, self._runner)
                self._events += [Delta(job.request_id, job.index, piece) for piece in pieces]
                self._counts.generated_tokens += 1
        except ColdstreamError as error:
            self._fail(job.request_id, error)
            return
        if job.is_over:
            self._finish(job)
            # A row that follows a stop string may be under way, after which the sequence is worth keeping.
            if job.num_missing:
                self._let_go(job, is_trusted=True)
        elif job.num_computed in job.cuts:
            self._memory.keep(job, self._running())
            self._can_admit = True

    def _tell_start(self, job: Job) -> None:
        request = self._requests[job.request_id]
        if not request.has_started:
            request.has_started = True
            self._events.append(Started(job.request_id, job.num_reused, job.num_prompt))
            self._counts.prompt_tokens += job.num_prompt
            self._counts.reused_tokens += job.num_reused

    def _tell_progress(self, counts: Mapping[Job, int]) -> None:
        for job in counts:
            request = self._requests[job.request_id]
            done = job.num_computed
            if (
                request.submission.progress
                and job.leader is None
                and request.num_told < done < job.num_prompt
            ):
                request.num_told = done
                self._events.append(PromptProgress(job.request_id, done, job.num_prompt))

    def _finish(self, job: Job) -> None:
        """An answer is over."""
        self._forget(job)
        request = self._requests[job.request_id]
        if all(each.is_over for each in request.jobs):
            del self._requests[job.request_id]
            self._counts.finished_requests += 1

    def _fail(self, request_id: int, error: ColdstreamError) -> None:
        """Ends a request and all its answers."""
        for job in self._requests.pop(request_id).jobs:
            job.is_over = True
            self._let_go(job, is_trusted=False)
        self._counts.failed_requests += 1
        self._events.append(Failed(request_id, error))

    def _fail_all(self, jobs: Iterable[Job], error: ColdstreamError) -> None:
        """Ends all requests that have one of these jobs."""
        for job in jobs:
            if job.request_id in self._requests:
                self._fail(job.request_id, error)
            else:
                self._let_go(job, is_trusted=False)

    def _let_go(self, job: Job, *, is_trusted: bool) -> None:
        """Frees what an answer that is over has of memory; what it computed is kept if it can be trusted."""
        if is_trusted and job.sequence is not None:
            self._memory.keep(job, self._running())
        self._memory.release(job)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        self._scheduler.remove(job.key)
        self._jobs.pop(job.key, None)
        self._can_admit = True
        self._is_short = False

    def _start_over(self) -> None:
        """After an exception in a step: where no token follows what is computed, it is computed again."""
        flying = self._flying.counts if self._flying else ()
        self._flying = None
        for job in (*self._jobs.values(), *flying):
            if job.is_over:
                self._memory.release(job)
            elif job.sequence is not None and job.num_missing <= 0:
                self._runner.clear(job.sequence)
                job.num_shared = 0


def _goes_on(job: Job, outcome: Outcome) -> bool:
    """Whether the step that was launched before the outcome was known has a row of the job."""
    return isinstance(outcome, Chosen) and outcome.token_id not in job.request.all_end_ids
