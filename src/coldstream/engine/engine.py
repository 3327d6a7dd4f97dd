"""The engine: many requests on one model, each with the tokens that it gets alone.

Unit of work: `Engine.step`, one step of the model with rows of every answer that runs. It knows neither
threads nor sockets, and of time only the clock that it is given.

A row's bits do not depend on its neighbours. A token depends on nothing but its request's seed and the tokens
before it. So no answer changes with the order of requests, with what is computed twice, or with what is found
in the cache.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Final

from coldstream import kvcache
from coldstream.decoding import AnyLogits, Outcome, SampledToken, TokenTree
from coldstream.engine.engine_statistics import EngineStatistics, LiveState
from coldstream.engine.events import Event
from coldstream.engine.fused_steps import FusedSteps
from coldstream.engine.job import Job
from coldstream.engine.job_drafts import JobDrafts
from coldstream.engine.limits import EngineLimits
from coldstream.engine.model_steps import LaunchedStep, launch, launch_ahead
from coldstream.engine.opened_model import OpenedModel
from coldstream.engine.served_requests import ServedRequests
from coldstream.engine.step_cost import StepCost
from coldstream.engine.submission import Submission
from coldstream.errors import ColdstreamError, InvalidRequestError, OutOfMemoryError
from coldstream.kernels.ops import MAX_TREE_ROWS
from coldstream.kvcache import PrefixTier

_USUAL_LIMITS: Final = EngineLimits()


class Engine:
    """Requests on an opened model, which stays its caller's and is used by nobody else meanwhile."""

    def __init__(
        self,
        opened: OpenedModel,
        limits: EngineLimits = _USUAL_LIMITS,
        clock: Callable[[], float] = time.monotonic,
        tiers: Collection[PrefixTier] = (),
    ) -> None:
        """clock: seconds; that of `Submission.deadline`, and by which steps are measured.

        tiers: where kept prefixes go that have no room in the model's memory, the fastest first; now the
        engine's own.
        """
        self._runner = opened.runner
        self._target_s = limits.target_step_ms / 1000
        self._clock = clock
        chunk_size = opened.runner.chunk_size
        self._max_running = min(limits.max_running, opened.runner.cache_size.num_states, chunk_size)
        limits = replace(limits, max_running=self._max_running)
        self._served = ServedRequests(opened, limits, tiers)
        self._cost = StepCost(chunk_size)
        # The cost of chunks of one prompt alone. Its entries expire after 64 steps, because timings drift.
        self._lone_cost = StepCost(chunk_size, stale=64)
        self._in_flight: LaunchedStep | None = None  # a step whose tokens the host has not looked at
        self._in_flight_since = 0.0  # when it was launched, or when the step before it ended
        self._drafts = JobDrafts(opened.runner, opened.speculation) if opened.speculation else None
        self._fused: FusedSteps | None = None  # steps of the only job that runs
        self._is_closed = False

    def add(self, submission: Submission) -> None:
        """Takes a request on. Its events come from `step`.

        Raises InvalidRequestError and its children for what cannot be served, and QueueFullError, both with
        nothing changed.
        """
        if self._is_closed:
            raise InvalidRequestError("this engine is closed")
        self._served.add(submission, self._clock() if submission.deadline is not None else 0.0)

    def cancel(self, request_id: int) -> None:
        """Ends the answers of a request in the next step, with the reason `cancelled`.

        What is computed already is not reported any more. Unknown and finished ones are ignored.
        """
        self._served.cancel(request_id)

    def step(self) -> list[Event]:
        """Computes a step of the model, or less. What happened since the last call, perhaps nothing.

        An error of one answer ends its request alone. One of the whole step ends all requests with rows in
        it; the others go on if the model does. Other exceptions, such as KeyboardInterrupt, are raised, and
        the engine goes on with the next call.
        """
        try:
            now = self._clock()
            if self._fused is not None and self._served.is_ending(self._fused.job, now):
                self._end_fused(self._fused)
            self._served.end_cancelled()
            self._served.end_overdue(now)
            if self._fused is not None:
                self._continue_fused(self._fused, now)
            elif self._in_flight is not None:
                self._end_in_flight(self._in_flight, now)
            else:
                if self._served.scheduler.num_waiting:
                    self._served.admit(now)
                    now = self._clock()
                self._compute(now)
        except BaseException:
            self._served.start_over(self._drop_in_flight())
            self._end_steps()
            raise
        return self._served.take_events()

    def settle(self) -> None:
        """Ends cancelled requests and what the device does ahead of the host, for others that use the model.

        What happened is among the events of the next `step`. Raises as `step`.
        """
        try:
            if self._fused is not None:
                self._end_fused(self._fused)
            self._served.end_cancelled()
            if self._in_flight is not None:
                self._end_in_flight(self._in_flight, self._clock(), may_go_on=False)
        except BaseException:
            self._served.start_over(self._drop_in_flight())
            self._end_steps()
            raise

    def make_room(self, num_tokens: int) -> None:
        """Evicts kept prefixes until a new sequence of so many tokens has room beside the running ones.

        Raises OutOfMemoryError without such room.
        """
        if not self._served.memory.make_room(num_tokens):
            running = len(self._served.running)
            raise OutOfMemoryError(
                f"{num_tokens} tokens have no room in the context memory beside {running} running requests: "
                f"finish or close these first, or choose a larger --parallel"
            )

    @property
    def max_running(self) -> int:
        """The most answers that have memory at a time."""
        return self._max_running

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until `add`.

        A step that is in flight when the last answer ends is still to be ended: until then threads of the CPU
        look for what the device may ask them.
        """
        return not self._served and self._in_flight is None

    def statistics(self) -> EngineStatistics:
        """Counts up to now."""
        return self._served.statistics()

    def live(self) -> LiveState:
        """The same with the experts, as they are now, and the times that go to them.

        Waits for a step that runs. Where its device has failed, as the step will say, the times are left out.
        """
        times = None
        with suppress(ColdstreamError):
            times = self._runner.expert_times
        return LiveState(replace(self.statistics(), expert_times=times), self._runner.expert_map())

    def keep_prefix(self, token_ids: Sequence[int], sequence: kvcache.Sequence) -> None:
        """Keeps all that a sequence of the model's holds for requests that begin with these tokens.

        The sequence stays the caller's, and shares its memory with the kept prefix. Only for one from whose
        last logits a token was chosen, see `PrefixCache.keep`; nothing is kept of an empty one.
        """
        self._served.memory.cache.keep(token_ids, sequence)

    def clear_prefixes(self, namespace: str | None = None) -> None:
        """Forgets the kept prefixes of a namespace, or of all; then drafters too, if no request is served."""
        self._served.memory.cache.clear(namespace)
        if namespace is None and self._drafts is not None and not self._served:
            self._drafts.forget()

    def check_integrity(self) -> None:
        """Raises AssertionError if the kept prefixes contradict themselves or their memory."""
        self._served.memory.cache.check_integrity()

    def check_file(self) -> None:
        """Raises ModelChangedError if no request can be computed any more, as the file has changed."""
        self._runner.check_file()

    def rest(self) -> bool:
        """Saves a kept prefix to the tiers that last, for moments when nobody waits. False if all are saved.

        Raises DeviceError.
        """
        return not self._is_closed and self._served.memory.cache.save_one()

    def close(self) -> None:
        """Drops all requests, without events, and all memory of the model that the engine has.

        Prefixes that are to last are saved first. The model stays open. Closing twice is allowed.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._served.drop_all(self._drop_in_flight())
        self._end_steps()
        if self._drafts is not None:
            self._drafts.forget()

    def _drop_in_flight(self) -> tuple[Job, ...]:
        """Gives up the outcome of what is in flight, and what it has left behind; the jobs of the step."""
        fused, self._fused = self._fused, None
        if fused is not None:
            with suppress(ColdstreamError):  # its sequence is empty then, and the job is computed again
                fused.end()
        step, self._in_flight = self._in_flight, None
        if step is None:
            return ()
        step.release_forks(self._runner)
        return tuple(step.counts)

    def _end_steps(self) -> None:
        """Ends dropped steps at the runner, or threads of the CPU would look for requests until the next."""
        with suppress(ColdstreamError):  # of the dropped steps, whose answers are computed again or gone
            self._runner.end_steps()

    def _compute(self, start: float) -> None:
        """A step with rows of those that run, from now on."""
        if self._begins_fused(start):
            return
        counts = self._rows_of_all()
        if not counts:
            return
        is_chunk = not math.isinf(self._target_s) and (
            len(counts) == 1 and all(count < job.num_wanted for job, count in counts.items())
        )
        trees = self._trees(counts)
        drafted = start if self._drafts is None else self._clock()
        launched = self._launched(counts, lambda: launch(self._runner, counts, trees))
        if launched is None:
            return
        self._in_flight = launched
        self._served.scheduler.served([job.key for job in counts])
        self._served.report_progress(counts.keys())
        if self._drafts is not None:
            self._drafts.observe(launched)
        since = self._clock()
        if self._may_run_ahead(launched):
            self._in_flight_since = start
            self._served.counts.add_times(start, drafted, since, since, since)
            return
        self._in_flight = None
        arrived = self._take(launched, None)
        end = self._clock()
        self._served.counts.add_times(start, drafted, since, arrived, end)
        self._record_cost(launched, end - start, is_chunk=is_chunk)

    def _record_cost(self, step: LaunchedStep, seconds: float, *, is_chunk: bool) -> None:
        """is_chunk: whether the step had rows of one prompt alone, which goes on behind them."""
        if math.isinf(self._target_s):
            return
        num_rows = sum(step.counts.values())
        self._cost.record(num_rows, seconds)
        if is_chunk:
            self._lone_cost.record(num_rows, seconds)

    def _alone(self) -> Job | None:
        """The only answer there is."""
        if self._served.scheduler.num_waiting:
            return None
        running = self._served.running
        return running[0] if len(running) == 1 else None

    def _begins_fused(self, start: float) -> bool:
        """Takes the first fused step of the only job. False, with none taken, if there are none for it."""
        drafts, served = self._drafts, self._served
        if drafts is None or not drafts.has_fused or drafts.backs_off:
            return False
        job = self._alone()
        if job is None or not job.logits_checked:
            return False
        if not self._has_room_for_fused(job, more_states=1):  # for the checkpoint
            return False
        try:
            self._fused = drafts.begin_fused(job, served.counts.count_fused)
        except ColdstreamError as error:
            served.fail([job], error)
            return True
        if self._fused is None:
            return False
        self._continue_fused(self._fused, start)
        return True

    def _continue_fused(self, fused: FusedSteps, start: float) -> None:
        """Takes the tokens of a fused step. Others are launched unless somebody waits."""
        launched = self._take_fused(fused) or start
        end = self._clock()
        self._served.counts.add_times(start, start, launched, end, end)

    def _take_fused(self, fused: FusedSteps) -> float | None:
        """When what is launched was; None if that failed."""
        job, launched = fused.job, None
        try:
            if not self._served.scheduler.num_waiting and self._has_room_for_fused(job):
                fused.launch()
            launched = self._clock()
            if not fused.is_over:
                with closing(fused.take()) as tokens:
                    self._push_all(job, tokens)
        except ColdstreamError as error:
            self._end_fused(fused)
            self._served.fail([job], error)
            return launched
        if fused.is_over or job.has_ended:
            self._end_fused(fused)
        self._end_if_over(job)
        return launched

    def _end_fused(self, fused: FusedSteps) -> None:
        self._fused = None
        try:
            fused.end()
        except ColdstreamError as error:
            self._served.fail([fused.job], error)

    def _has_room_for_fused(self, job: Job, more_states: int = 0) -> bool:
        return self._served.memory.fits({job: min(MAX_TREE_ROWS, job.num_left)}, more_states)

    def _trees(self, counts: Mapping[Job, int]) -> dict[Job, TokenTree]:
        """Drafts for those of a step's jobs that decode."""
        drafts, memory = self._drafts, self._served.memory
        if drafts is None:
            return {}
        jobs = [job for job in counts if job.logits_checked]
        num_free = self._runner.chunk_size - sum(counts.values())
        most = drafts.most_nodes(len(jobs), len(counts) - len(jobs), num_free)
        if most > 0 and not memory.fits({**counts, **{job: 1 + min(most, job.num_left - 1) for job in jobs}}):
            most = 0
        return drafts.draft(jobs if most > 0 else (), most)

    def _rows_of_all(self) -> dict[Job, int]:
        """The rows of the next step, for which there is memory then, if need be that of the last answers."""
        running = self._served.running
        decodes = [job.num_wanted == 1 for job in running]  # a list is quicker for one than a generator
        if len(running) <= self._runner.chunk_size and all(decodes):
            counts = dict.fromkeys(running, 1)
            if self._served.memory.owns_next_rows(running) or self._served.memory.fits(counts):
                return counts
        while running := self._served.running:
            wanted = {job.key: job.num_wanted for job in running}
            shares = self._served.scheduler.share(wanted, self._most_prompt_rows)
            counts = {self._served.job(key): rows for key, rows in shares.items()}
            fitting = self._served.memory.fitted(counts)
            if fitting is not None:
                return fitting
            if not self._served.preempt():
                what = f"{len(running[0].token_ids)} tokens of request {running[0].request_id}"
                error = OutOfMemoryError(f"no memory is left for {what}: unpin kept prefixes")
                self._served.fail(running, error)
        return {}

    def _most_prompt_rows(self, num_decoding: int, wanted: Sequence[int]) -> int:
        """Rows of prompts that want so many each, in a step with so many decoding ones."""
        if math.isinf(self._target_s):
            return self._runner.chunk_size
        if any(len(job.token_ids) > job.num_prompt for job in self._served.running):
            return self._cost.most_prompt_rows(num_decoding, wanted, self._target_s)
        most = self._lone_cost.prompt_rows_alone(self._target_s)
        return self._cost.prompt_rows_together(num_decoding, wanted, most, self._target_s)

    def _end_in_flight(self, step: LaunchedStep, start: float, *, may_go_on: bool = True) -> None:
        """Takes the tokens of a step, once the next one is launched, if that needs no decision."""
        if self._drafts is not None:
            self._drafts.draft(step.asked, 0)
        following = None
        if may_go_on and self._may_run_ahead(step):
            going_on = {job: 1 for job in step.asked if job.num_left > 1}
            if going_on and self._served.memory.fits(going_on):
                following = self._launched(going_on, lambda: launch_ahead(self._runner, step))
                self._served.counts.ahead_steps += 1
        self._in_flight = following
        launched = self._clock()
        arrived = self._take(step, following)
        self._begin_choices()
        if self._drafts is not None and following is not None:
            self._drafts.observe(following, is_ahead=True)
        end = self._clock()
        self._served.counts.add_times(start, start, launched, arrived, end)
        self._record_cost(step, end - self._in_flight_since, is_chunk=False)
        self._in_flight_since = end

    def _begin_choices(self) -> None:
        """Those of the step in flight that needed the tokens of the step before."""
        step = self._in_flight
        if step is None:
            return
        try:
            step.begin()
        except ColdstreamError as error:
            self._in_flight = None
            self._served.fail(step.counts, error)

    def _may_run_ahead(self, step: LaunchedStep) -> bool:
        """Whether the next step has the same answers, all of whose tokens the device chooses."""
        scheduler = self._served.scheduler
        if self._drafts is not None and self._drafts.will_draft(len(step.counts)):
            return False
        if not (self._runner.takes_chosen and step.is_on_device) or scheduler.num_waiting:
            return False
        return {job.key for job in step.asked} == set(scheduler.running) and all(
            job.num_missing == 0 and job.answer.chooser.is_for_device for job in step.asked
        )

    def _launched(
        self, counts: Mapping[Job, int], launch_it: Callable[[], LaunchedStep]
    ) -> LaunchedStep | None:
        """A step that is launched. If that fails, so do all its requests: None."""
        try:
            launched = launch_it()
        except ColdstreamError as error:
            self._served.fail(counts, error)
            return None
        self._served.counts.count_step(launched.counts.values())
        for rows in launched.tree_logits.values():
            self._served.counts.count_draft(len(rows) - 1)
        return launched

    def _take(self, launched: LaunchedStep, following: LaunchedStep | None) -> float:
        """Appends the tokens of a step, and keeps what it has left behind. Returns when they were there.

        following: the step that was launched after it, if any.
        """
        try:
            return self._take_outcomes(launched, following)
        finally:
            launched.release_forks(self._runner)

    def _take_outcomes(self, launched: LaunchedStep, following: LaunchedStep | None) -> float:
        drafts = self._drafts
        try:
            outcomes = launched.outcomes()
            if drafts is not None and launched.tree_logits:
                drafts.begin_picks(launched.tree_logits)
        except ColdstreamError as error:
            self._in_flight = None
            self._served.fail(launched.counts, error)
            return self._clock()
        arrived = self._clock()
        ahead = following.counts if following else {}
        for job, outcome in outcomes.items():
            if isinstance(outcome, SampledToken) and job in launched.forks:
                self._served.keep_forks(job, launched.forks[job])
            if job.sequence is None or job.request_id in self._served.cancelled:
                continue
            if job.is_over:
                self._served.let_go(job, logits_checked=isinstance(outcome, SampledToken))
                continue
            if job in ahead and not _goes_on(job, outcome):
                self._runner.take_back(job.sequence)
            if drafts is not None and len(job.token_ids) > job.num_prompt and job.num_missing <= 0:
                drafts.chosen(job)
            self._take_one(job, outcome)
        if drafts is not None:
            for job, rows in launched.tree_logits.items():
                self._take_along(drafts, job, rows)
            drafts.end_step()
        return arrived

    def _take_one(self, job: Job, outcome: Outcome) -> None:
        """Takes what was chosen after the last row of a job: its next token, or a proof at a checkpoint."""
        try:
            if not isinstance(outcome, SampledToken):
                raise outcome
            if job.num_missing <= 0:
                job.tokens.append(outcome.token_id, self._runner.spec.vocab_size)
                self._served.report(job, job.push(outcome))
        except ColdstreamError as error:
            self._served.fail([job], error)
            return
        if job.has_ended:
            self._served.finish(job)
            # A row that follows a stop string may be under way, after which the sequence is worth keeping.
            if job.num_missing:
                self._served.let_go(job, logits_checked=True)
        elif job.num_computed in job.checkpoints:
            self._served.keep(job)

    def _take_along(self, drafts: JobDrafts, job: Job, rows: Sequence[AnyLogits]) -> None:
        """Takes the tokens along the tree of a job, unless its request has failed meanwhile."""
        if job.sequence is None:
            return
        try:
            with closing(drafts.verified(job, rows)) as tokens:
                self._push_all(job, self._counted(tokens))
        except ColdstreamError as error:
            self._served.fail([job], error)
            return
        self._end_if_over(job)

    def _counted(self, tokens: Iterable[tuple[SampledToken, bool]]) -> Iterator[SampledToken]:
        for chosen, is_drafted in tokens:
            self._served.counts.accepted_tokens += is_drafted
            yield chosen

    def _push_all(self, job: Job, tokens: Iterable[SampledToken]) -> None:
        """Reports tokens that `Job.tokens` has, up to the answer's last or a cancellation."""
        for chosen in tokens:
            self._served.report(job, job.push(chosen))
            if job.has_ended or job.request_id in self._served.cancelled:
                break

    def _end_if_over(self, job: Job) -> None:
        if job.has_ended:
            self._served.finish(job)
            self._served.let_go(job, logits_checked=True)


def _goes_on(job: Job, outcome: Outcome) -> bool:
    """Whether the step that was launched before the outcome was known has a row of the job."""
    return isinstance(outcome, SampledToken) and outcome.token_id not in job.request.all_end_ids
