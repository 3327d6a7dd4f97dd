"""The requests of an engine from their submission to their last event. Takes no steps.

`ServedRequests` knows who waits, who has memory, what is reported, and how each ends. `JobMemory` is the
model's memory as jobs use it: they begin with kept prefixes, make room for each other, and leave prefixes
behind. It decides nothing about who runs.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from coldstream.engine.answer import cancelled_piece
from coldstream.engine.engine_statistics import EngineCounts, EngineStatistics
from coldstream.engine.events import Delta, Event, Failed, PromptProgress, Started
from coldstream.engine.job import Job
from coldstream.engine.limits import EngineLimits
from coldstream.engine.opened_model import OpenedModel
from coldstream.engine.request import Piece
from coldstream.engine.scheduler import Scheduler
from coldstream.engine.submission import Submission
from coldstream.errors import (
    ColdstreamError,
    DeadlineError,
    InvalidRequestError,
    NotFiniteError,
)
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache import CacheSize, Demand, PrefixCache, PrefixTier, Sequence


class JobMemory:
    """A runner's memory and its prefix cache, both for jobs alone."""

    def __init__(self, opened: OpenedModel, tiers: Collection[PrefixTier] = ()) -> None:
        """tiers: of kept prefixes, see `PrefixCache`."""
        self._opened = opened
        self._runner = opened.runner
        self.cache = PrefixCache(opened.runner, max_states=opened.runner.cache_size.num_states, tiers=tiers)

    def num_kept(self, job: Job) -> int:
        """Tokens of the longest kept prefix that the job could begin with now, those of tiers left out."""
        return self.cache.longest(job.token_ids, job.submission.namespace)

    def begin(self, job: Job, running: Collection[Job], headroom: int) -> bool | None:
        """Gives the job a sequence with the longest kept prefix of its tokens, if there is room beside what
        the running ones are about to need.

        headroom: blocks that have to stay free. True if the answer begins, False if it goes on; None without
        room, with nothing changed. Without running jobs there is always room; see `fits`. Raises as
        `Job.begin`, with nothing changed.
        """
        submission = job.submission
        prefix = self.cache.begin(job.token_ids, submission.boundaries, submission.namespace)
        rest = Demand(prefix.sequence, len(job.token_ids) - prefix.length)
        demands = [*(demand_of(each, each.num_missing) for each in running), rest]
        try:
            has_room = not running or self._make_room(demands, headroom)
            begins = job.begin(prefix, self._opened) if has_room else None
        except BaseException:
            self._runner.release(prefix.sequence)
            raise
        if begins is None:
            self._runner.release(prefix.sequence)
        return begins

    def owns_next_rows(self, jobs: Collection[Job]) -> bool:
        """Whether a further row of each job takes no memory, as is so for most tokens."""
        owns_next_row = self._runner.owns_next_row
        owned = [job.sequence is not None and owns_next_row(job.sequence) for job in jobs]
        return all(owned)

    def fits(self, counts: Mapping[Job, int], more_states: int = 0) -> bool:
        """Makes room for a step with these rows, by letting kept prefixes go. False if there is too little.

        A prefix that a job shares memory with, and that keeps it from going on, is let go too.
        """
        demands = self._demands(counts)
        if self._make_room(demands, more_states=more_states):
            return True
        for job in counts:
            for length in job.shared_with:
                self.cache.forget(job.token_ids[:length], job.submission.namespace)
        return self._make_room(demands, more_states=more_states)

    def fitted(self, counts: Mapping[Job, int]) -> dict[Job, int] | None:
        """Makes room for a step with these rows, or with fewer where it cannot leave all forks behind.

        It ends at the first checkpoint for which there is no state then. None where `fits` says no.
        """
        fitting = dict(counts)
        while with_forks := [job for job, count in fitting.items() if job.fork_rows(count)]:
            if self._make_room(self._demands(fitting)):
                return fitting
            last = with_forks[-1]
            fitting[last] = last.fork_rows(fitting[last])[-1]
        return fitting if self.fits(fitting) else None

    def keep(self, job: Job, running: Collection[Job]) -> None:
        """Keeps the prefix that the job holds, from whose last row finite logits were seen.

        Not if the job, or one of those that run, could not go on then for want of memory.
        """
        assert job.sequence is not None
        demands = [demand_of(each, 1) for each in running if each is not job]
        is_within = job.sequence.length % BLOCK_POSITIONS > 0
        if job.is_over or self._make_room([*demands, demand_of(job, 1)], int(is_within), 1):
            self.cache.keep(job.token_ids, job.sequence, job.submission.namespace)
            job.shared.append(job.sequence.length)

    def keep_fork(self, job: Job, fork: Sequence, running: Collection[Job]) -> None:
        """Keeps a prefix that a step of the job has left behind; the fork stays the caller's. Not if one of
        those that run could not go on then.

        Its memory is there already: what it shares with the job counts as what the next row copies.
        """
        if self._make_room([demand_of(each, 1) for each in running]):
            self.cache.keep(job.token_ids, fork, job.submission.namespace)
            job.shared.append(fork.length)

    def make_room(self, num_tokens: int) -> bool:
        """Evicts kept prefixes until a new sequence of so many tokens has room. False if it lacks."""
        return self._make_room([Demand(self._runner.new_sequence(), num_tokens)])

    def release(self, job: Job) -> None:
        """Frees the job's sequence; its tokens stay."""
        if job.sequence is not None:
            sequence, job.sequence = job.sequence, None
            self._runner.release(sequence)

    def _demands(self, counts: Mapping[Job, int]) -> list[Demand]:
        """Of a step with these rows, and with all forks that it is to leave behind."""
        demands = []
        for job, count in counts.items():
            demand, fork_rows = demand_of(job, count), job.fork_rows(count)
            if fork_rows:
                demand = replace(demand, forks=[self._runner.new_sequence() for _ in fork_rows])
            demands.append(demand)
        return demands

    def _make_room(self, demands: Collection[Demand], more_blocks: int = 0, more_states: int = 0) -> bool:
        has_windows = self._runner.cache_size.num_window_blocks > 0
        more = CacheSize(more_blocks, more_states, num_window_blocks=more_blocks if has_windows else 0)
        return self.cache.make_room(self._runner.need_of(demands).with_more(more))


def demand_of(job: Job, num_rows: int) -> Demand:
    """Memory for the next rows of a job."""
    assert job.sequence is not None, "a job without memory does not run"
    return Demand(job.sequence, num_rows)


_LATE_SHARE: Final = 2 / 3  # share of the time up to a deadline after which an answer counts as late
MIN_SHARED: Final = 64  # least common tokens of two prompts that are worth a wait and a checkpoint


class ServedRequest:
    """A submission whose events are not all reported."""

    def __init__(self, submission: Submission, first_key: int, now: float) -> None:
        """first_key: of the first answer; the others have those after it. now: by the deadline's clock."""
        self.submission = submission
        self.late_from: float | None = None
        if submission.deadline is not None:
            self.late_from = now + _LATE_SHARE * (submission.deadline - now)
        self.jobs: list[Job] = []  # of all answers
        self.has_started = False
        self.num_reported = 0  # prompt tokens that `PromptProgress` has reported
        for index, request in enumerate(submission.request.answers()):
            first = self.jobs[0] if self.jobs else None
            self.jobs.append(Job(first_key + index, submission, index, request, first))


class ServedRequests:
    """All requests of one engine, their answers as jobs, and the events that nobody has taken yet."""

    def __init__(self, opened: OpenedModel, limits: EngineLimits, tiers: Collection[PrefixTier] = ()) -> None:
        """tiers: of kept prefixes, see `PrefixCache`."""
        self._opened = opened
        self._limits = limits
        self.memory = JobMemory(opened, tiers)
        self.scheduler = Scheduler(limits.max_running, opened.runner.chunk_size)
        self.counts = EngineCounts()
        self.cancelled: set[int] = set()  # ids of cancelled requests whose answers have not ended yet
        self._requests: dict[int, ServedRequest] = {}
        self._jobs: dict[int, Job] = {}  # unfinished, by key
        self._next_key = 0
        self._can_admit = False  # whether anything has changed since an answer was refused for want of memory
        self._is_short = False  # whether an answer has lost its memory since one was finished
        self._events: list[Event] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def running(self) -> list[Job]:
        """The jobs that have memory, the first in the scheduler's order first."""
        return [self._jobs[key] for key in self.scheduler.running]

    def job(self, key: int) -> Job:
        """An unfinished job by its key."""
        return self._jobs[key]

    def add(self, submission: Submission, now: float) -> None:
        """A request waits. Raises as `Engine.add`, with nothing changed.

        now: by the clock of its deadline; without one it does not count.
        """
        if submission.request_id in self._requests:
            raise InvalidRequestError(f"request {submission.request_id} is being served: give each a new id")
        submission.check(self._opened.runner.spec.vocab_size, self._opened.ctx_size)
        owners = [each.submission.owner for each in self._requests.values()]
        self._limits.check_room(submission.owner, owners)
        request = ServedRequest(submission, self._next_key, now)
        self._next_key += len(request.jobs)
        self._requests[submission.request_id] = request
        for job in request.jobs:
            self._jobs[job.key] = job
            self.scheduler.add(job.key, priority=submission.priority, owner=submission.owner)
        self._can_admit = True

    def cancel(self, request_id: int) -> None:
        """Marks a request; unknown ones are ignored."""
        if request_id in self._requests:
            self.cancelled.add(request_id)

    def admit(self, now: float) -> None:
        """Gives memory to answers that wait, as many as there is room for.

        Those that have waited for most of the time up to their deadline come after all others. Under overload
        they would take the time of answers that can still be finished.
        """

        def is_late(key: int) -> bool:
            job = self._jobs[key]
            late_from = self._requests[job.request_id].late_from
            return late_from is not None and now > late_from and not job.has_begun

        while self._can_admit and (key := self.scheduler.candidate(self._is_ready, is_late)) is not None:
            job, running = self._jobs[key], self.running
            if self._waits_for_prefix(job, running):
                continue
            try:
                begins = self.memory.begin(job, running, len(running) if self._is_short else 0)
            except ColdstreamError as error:
                self.fail([job], error)
                continue
            if begins is None:
                self._can_admit = False
                return
            self.scheduler.admit(key)
            if begins:
                self._report_start(job)

    def preempt(self) -> bool:
        """Takes the memory of the last of the running answers. False if there is only one."""
        key = self.scheduler.preempt()
        if key is None:
            return False
        self.memory.release(self._jobs[key])
        self.counts.preemptions += 1
        self._is_short = True
        return True

    def report_progress(self, jobs: Collection[Job]) -> None:
        """Reports how far the prompts of jobs are that a step had rows of."""
        for job in jobs:
            request = self._requests[job.request_id]
            wants = request.submission.progress and job.index == 0
            if wants and request.num_reported < job.num_computed < job.num_prompt:
                request.num_reported = job.num_computed
                self._events.append(PromptProgress(job.request_id, job.num_computed, job.num_prompt))

    def report(self, job: Job, piece: Piece | None) -> None:
        """Reports one more token, by its piece if it has one."""
        self.counts.generated_tokens += 1
        if piece is not None:
            self._events.append(Delta(job.request_id, job.index, piece))

    def finish(self, job: Job) -> None:
        """Reports the last piece of an answer, which is not scheduled any more."""
        piece = job.last_piece("length", self._opened.runner)
        self._events.append(Delta(job.request_id, job.index, piece))
        self._forget(job)
        if all(each.is_over for each in self._requests[job.request_id].jobs):
            del self._requests[job.request_id]
            self.counts.finished_requests += 1

    def keep(self, job: Job) -> None:
        """Keeps the prefix that a job holds, whose last logits are known to be finite."""
        self.memory.keep(job, self.running)
        self._can_admit = True

    def keep_forks(self, job: Job, forks: Iterable[Sequence]) -> None:
        """Keeps what a step of a job has left behind, after whose last row finite logits were seen."""
        for fork in forks:
            self.memory.keep_fork(job, fork, self.running)
            self._can_admit = True

    def let_go(self, job: Job, *, logits_checked: bool) -> None:
        """Frees the memory of an answer that is over; what it computed is kept if its logits were checked."""
        if logits_checked and job.sequence is not None:
            self.keep(job)
        self.memory.release(job)
        self._can_admit = True

    def fail(self, jobs: Iterable[Job], error: ColdstreamError) -> None:
        """Ends all requests that have one of these jobs, each with one event.

        After logits that are not finite no kept prefix is used again: any may be damaged.
        """
        if isinstance(error, NotFiniteError):
            self.memory.cache.clear()
        for job in jobs:
            self.memory.release(job)
            request = self._requests.pop(job.request_id, None)
            if request is not None:
                for each in request.jobs:
                    each.is_over = True
                    self.memory.release(each)
                    self._forget(each)
                self.counts.failed_requests += 1
                self._events.append(Failed(job.request_id, error))

    def is_ending(self, job: Job, now: float) -> bool:
        """Whether `end_cancelled` or `end_overdue` is about to end the job's request."""
        deadline = job.submission.deadline
        return job.request_id in self.cancelled or (deadline is not None and now >= deadline)

    def end_cancelled(self) -> None:
        """Ends the answers of all requests that are marked."""
        if not self.cancelled:
            return
        cancelled, self.cancelled = self.cancelled, set()
        for request_id in sorted(cancelled & self._requests.keys()):
            for job in self._requests.pop(request_id).jobs:
                if job.is_over:
                    self.memory.release(job)
                    continue
                if job.has_begun:
                    piece = job.last_piece("cancelled", self._opened.runner)
                else:
                    piece = cancelled_piece(job.request)
                self._events.append(Delta(request_id, job.index, piece))
                self._forget(job)
                self.let_go(job, logits_checked=job.logits_checked)
            self.counts.cancelled_requests += 1

    def end_overdue(self, now: float) -> None:
        """Ends the requests whose deadline has come."""
        for request in list(self._requests.values()):
            deadline = request.submission.deadline
            if deadline is not None and now >= deadline:
                what = "was not finished" if request.has_started else "had not begun"
                name = f"request {request.submission.request_id}"
                self.fail(request.jobs[:1], DeadlineError(f"{name} {what} by its deadline: allow more time"))

    def start_over(self, in_flight: Collection[Job]) -> None:
        """After an exception in a step: where no token follows what is computed, it is computed again.

        in_flight: those of a step whose outcome is lost.
        """
        for job in (*self._jobs.values(), *in_flight):
            if job.is_over:
                self.memory.release(job)
            elif job.sequence is not None and (job.num_missing <= 0 or job.sequence.pending):
                self._opened.runner.clear(job.sequence)
                job.shared.clear()

    def drop_all(self, in_flight: Collection[Job]) -> None:
        """Forgets all requests without an event, and all kept prefixes but those in tiers that last."""
        for job in (*self._jobs.values(), *in_flight):
            self.memory.release(job)
            self.scheduler.remove(job.key)
        self._jobs.clear()
        self._requests.clear()
        self.memory.cache.close()

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def statistics(self) -> EngineStatistics:
        """Counts up to now."""
        return self.counts.statistics(
            self._opened.runner,
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            prefixes=self.memory.cache.statistics(),
        )

    def _is_ready(self, key: int) -> bool:
        """Whether the prefix that an answer begins with is computed, or will not be."""
        job = self._jobs[key]
        if job.follows is None:
            return True
        other, length = job.follows
        if other.key not in self._jobs:
            job.follows = None  # it may follow another one
            return True
        return other.num_computed >= length

    def _waits_for_prefix(self, job: Job, running: Collection[Job]) -> bool:
        """Whether an answer that may begin is to wait for a prefix of its prompt that another one computes.

        Computed side by side, both would compute it.
        """
        if job.has_begun or job.follows is not None:
            return False
        kept = self.memory.num_kept(job)
        found = [(_num_common(job, other), other) for other in running if _shares_prefixes(job, other)]
        length, other = max(found, key=lambda each: each[0], default=(0, None))
        if other is None or length < kept + MIN_SHARED or not other.leave_checkpoint(length):
            return False
        job.follows = (other, length)
        return True

    def _report_start(self, job: Job) -> None:
        request = self._requests[job.request_id]
        if not request.has_started:
            request.has_started = True
            self._events.append(Started(job.request_id, job.num_reused, job.num_prompt))
            self.counts.prompt_tokens += job.num_prompt
            self.counts.reused_tokens += job.num_reused

    def _forget(self, job: Job) -> None:
        self.scheduler.remove(job.key)
        self._jobs.pop(job.key, None)
        self._can_admit = True
        self._is_short = False


def _shares_prefixes(job: Job, other: Job) -> bool:
    """Whether one may begin with a prefix of the other, which still computes its prompt."""
    return job.submission.namespace == other.submission.namespace and other.num_computed < other.num_prompt


def _num_common(job: Job, other: Job) -> int:
    """Tokens of the prompt that both begin with, without the last of either, whose logits each needs."""
    most = min(job.num_prompt, other.num_prompt) - 1
    differ = np.flatnonzero(job.prompt_array[:most] != other.prompt_array[:most])
    return int(differ[0]) if len(differ) else most
