"""Steps of the model for jobs: rows go in, and the choice of the tokens after them is begun.

Where a device chooses tokens, the step after them may be launched before the host knows them. Decides nothing
about who runs, and changes no job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coldstream import kvcache
from coldstream.decoding import (
    AnyLogits,
    Outcome,
    SamplingParams,
    StartedChoices,
    TokenChoice,
    TokenTree,
    begin_choices,
)
from coldstream.engine.job import Job
from coldstream.kvcache import Batch, ChosenToken, Segment
from coldstream.models.runner import ModelRunner

_LIKELIEST = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class LaunchedStep:
    """A step in flight. Not frozen, because making one is part of the time of every token."""

    counts: Mapping[Job, int]  # rows, in their order in the step
    # Of those without trees, whose logits are looked at: all that end at a checkpoint, leave forks behind or
    # have all tokens computed.
    asked: Sequence[Job]
    started: StartedChoices | None  # for each of `asked`; None: they wait for `begin`
    # Of those with trees, none of whose rows is committed: logits [vocab] after the root and each node.
    tree_logits: Mapping[Job, Sequence[AnyLogits]] = field(default_factory=dict)
    # Forks that the step leaves behind, ascending by length.
    forks: Mapping[Job, Sequence[kvcache.Sequence]] = field(default_factory=dict)
    waiting: Sequence[AnyLogits] = ()  # logits [vocab] after the row of each of `asked`, until `begin`

    @property
    def is_on_device(self) -> bool:
        """Whether a device makes all choices, which have begun, and the next step may name them."""
        return self.started is not None and self.started.is_on_device

    def begin(self) -> None:
        """Begins the choices that wait for tokens of the step before, which all jobs now have.

        Of an answer that has ended meanwhile, the likeliest token is chosen, as `launch` says. Raises as
        `begin_choices`.
        """
        if self.started is None:
            pairs = zip(self.asked, self.waiting, strict=True)
            self.started = begin_choices([_choice(job, logits) for job, logits in pairs])
            self.waiting = ()

    def outcomes(self) -> Mapping[Job, Outcome]:
        """What was chosen after the last row of each of `asked`. Waits for the device; raises its errors."""
        assert self.started is not None, "choices are begun before they are waited for"
        return dict(zip(self.asked, self.started.outcomes(), strict=True))

    def release_forks(self, runner: ModelRunner) -> None:
        """Frees them; a second time does nothing. What is kept of them has forks of its own."""
        _release(runner, self.forks)


def launch(runner: ModelRunner, counts: Mapping[Job, int], trees: Mapping[Job, TokenTree]) -> LaunchedStep:
    """Begins a step with the next rows of each job. Raises as `ModelRunner.step`.

    trees: not empty ones, of jobs with one row, behind which they come. The step leaves forks behind at the
    checkpoints that it crosses, for the caller to release. After these, and at one where it ends, the
    likeliest token is chosen. That shows that the last logits are finite, and so the states before them, as a
    state never loses what is not finite.
    """
    forks: dict[Job, list[kvcache.Sequence]] = {}
    segments, asked = [], []
    for job, count in counts.items():
        assert job.sequence is not None
        if job in trees:
            segments.append(_tree_segment(job, trees[job]))
            continue
        fork_rows, end = job.fork_rows(count), job.num_computed + count
        if fork_rows:
            forks[job] = [runner.new_sequence() for _ in fork_rows]
        is_asked = bool(fork_rows) or end == len(job.token_ids) or end in job.checkpoints
        left = tuple(zip(fork_rows, forks[job], strict=True)) if fork_rows else ()
        segments.append(Segment(job.sequence, job.next_tokens(count), None, None if is_asked else (), left))
        if is_asked:
            asked.append(job)
    try:
        rows = dict(zip(counts, runner.step(Batch(tuple(segments))), strict=True))
        choices = [_choice(job, rows[job][0]) for job in asked]
        if trees:
            counts = {job: count + len(trees.get(job, ())) for job, count in counts.items()}
        return LaunchedStep(counts, asked, begin_choices(choices), {job: rows[job] for job in trees}, forks)
    except BaseException:
        _release(runner, forks)
        raise


def launch_ahead(runner: ModelRunner, before: LaunchedStep) -> LaunchedStep:
    """Begins the step of the tokens that `before` is choosing, whose choices must all be on the device.

    Jobs that have no token left to choose after those take no part. Where a token turns out to be the
    answer's last by its id, or there is none, the step leaves its row out: see `ModelRunner.take_back`. Where
    a choice needs all tokens before it, as a grammar does, the choices wait for `LaunchedStep.begin`.
    """
    assert before.started is not None, "the tokens of a step ahead are being chosen"
    going_on = [(i, job) for i, job in enumerate(before.asked) if job.num_left > 1]
    segments, results = [], []
    for i, job in going_on:
        assert job.sequence is not None
        results.append(before.started.index(i))
        segments.append(Segment(job.sequence, ChosenToken(results[-1], job.request.all_end_ids)))
    rows = [logits[0] for logits in runner.step(Batch(tuple(segments)))]
    jobs = [job for _, job in going_on]
    if any(job.answer.chooser.needs_tokens for job in jobs):
        return LaunchedStep(dict.fromkeys(jobs, 1), jobs, None, waiting=rows)
    choices = [job.choice(logits, unseen) for job, logits, unseen in zip(jobs, rows, results, strict=True)]
    return LaunchedStep(dict.fromkeys(jobs, 1), jobs, begin_choices(choices))


def _release(runner: ModelRunner, forks: Mapping[Job, Sequence[kvcache.Sequence]]) -> None:
    for each in forks.values():
        for fork in each:
            if not fork.is_released:
                runner.release(fork)


def _tree_segment(job: Job, tree: TokenTree) -> Segment:
    assert job.sequence is not None
    parents = (-1, *(1 + parent for parent in tree.parents))
    return Segment(job.sequence, (job.token_ids[-1], *tree.token_ids), parents)


def _choice(job: Job, logits: AnyLogits) -> TokenChoice:
    if job.num_missing or job.is_over:
        return TokenChoice(logits, job.token_ids[: job.num_computed], _LIKELIEST, seed=0)
    return job.choice(logits)
