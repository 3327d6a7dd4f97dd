"""Drafts for the answers that an engine decodes: what their drafters observe, and tokens along their trees.

Each answer has a drafter of its own, which follows its sequence. A tree has the fewer nodes the more answers
share a step. If there is but one drafter, as for fused steps, only an answer that is alone has drafts. Beside
others it decodes plainly, and its drafter observes nothing and goes on with a gap.
"""

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence

import numpy as np

from coldstream.decoding import (
    MAX_TREE_NODES,
    NO_DRAFT,
    AnyLogits,
    DraftCounts,
    ExpertUses,
    Pick,
    SampledToken,
    SizeReason,
    Speculation,
    StepCosts,
    TokenTree,
    TreeWalk,
    TriedDraft,
    begin_all_picks,
    uses_between,
)
from coldstream.decoding.drafters import with_fused_steps
from coldstream.engine.draft_follower import DraftFollower
from coldstream.engine.fused_steps import FusedSteps
from coldstream.engine.job import Job
from coldstream.engine.model_steps import LaunchedStep
from coldstream.kernels.fused.reference import FusedResult
from coldstream.models.runner import ModelRunner


class JobDrafts:
    """Drafters and the jobs that they follow.

    The order in a step: `draft`, then the launch, then `observe`. Then come `chosen` for each job without a
    tree that had a token before, and `begin_picks` and `verified` for the others. `end_step` is last.
    """

    def __init__(self, runner: ModelRunner, speculation: Speculation) -> None:
        """speculation: of drafters that nobody else uses."""
        self._runner = runner
        self._speculation, self._sizes = speculation, speculation.sizes
        self._fused_sizes = speculation.sizes.fused
        self._is_one = speculation.more is None
        first = DraftFollower(runner, speculation.drafter)
        self._followers: dict[DraftFollower, Job | None] = {first: None}
        self._start = 0.0  # when the step was drafted
        self._drafted: dict[Job, TokenTree] = {}  # trees of this step, empty ones included
        self._draft_s: dict[Job, float] = {}
        self._build_s: dict[Job, float] = {}
        self._size_s = self._choose_s = 0.0  # seconds for all trees of the step
        self._uses_before: ExpertUses | None = None
        self._uses: ExpertUses | None = None  # expert uses before the step
        self._captured_before = 0
        self._first_rows: dict[Job, int] = {}  # first rows in the step, by job with a tree
        self._picks: Mapping[Job, Pick] = {}
        self._tried: dict[Job, TriedDraft] = {}
        self._reason = SizeReason.NOT_ASKED
        self._backed_off = False  # whether fused steps back off and the step is a plain one in their place

    def may_draft(self, num_jobs: int) -> bool:
        """Whether something may be drafted soon where so many jobs run."""
        is_idle = self._fused_sizes.is_idle() if self.backs_off else self._sizes.is_idle(num_jobs)
        return self._most_nodes(num_jobs) > 0 and not is_idle

    def will_draft(self, num_jobs: int) -> bool:
        """Whether something is to be drafted before the next step of so many jobs, or by a device in it."""
        most = self._most_nodes(num_jobs)
        if most == 0 or self.has_fused:
            return not self.backs_off and self.may_draft(num_jobs)
        return self._sizes.will_draft(most, num_jobs)

    def most_nodes(self, num_jobs: int, num_prompts: int, num_free: int) -> int:
        """The most nodes for each of so many jobs that decode, in a step with rows of so many prompts.

        num_free: rows that the step has left.
        """
        if num_jobs == 0 or (num_prompts and (self._is_one or not self._sizes.drafts_beside_prompts)):
            return 0
        return max(0, min(self._most_nodes(num_jobs), num_free // num_jobs))

    def draft(self, jobs: Collection[Job], most: int) -> dict[Job, TokenTree]:
        """What may follow the tokens of jobs whose last one alone is not computed, at most `most` nodes each;
        without empty trees. The time of the step begins behind the drafts.

        Of more jobs than can have drafts, nothing is learned either.
        """
        self._backed_off = self.backs_off and len(jobs) == 1
        jobs = jobs if self._most_nodes(len(jobs)) > 0 and not self._backed_off else ()
        self._draft_s, self._build_s, self._first_rows, self._picks, self._tried = {}, {}, {}, {}, {}
        self._size_s = self._choose_s = 0.0
        self._uses, self._captured_before = None, self._runner.num_captured
        budget = self._sizes.budget(most, len(jobs)) if jobs else 0
        trees = [self._propose(job, min(budget, job.num_left - 1)) for job in jobs]
        self._start = time.perf_counter()
        if budget > 0:
            counts = self._sizes.sizes(trees, sum(self._draft_s.values()))
            trees = [tree.first(count) for tree, count in zip(trees, counts, strict=True)]
            self._size_s = time.perf_counter() - self._start
        self._uses_before = self._runner.expert_uses if any(trees) else None
        self._reason = self._sizes.reason if jobs else SizeReason.NOT_ASKED
        self._drafted = dict(zip(jobs, trees, strict=True))
        return {job: tree for job, tree in self._drafted.items() if tree}

    def observe(self, launched: LaunchedStep, *, is_ahead: bool = False) -> None:
        """Lets drafters observe the rows that a step has committed, and notes where the others are.

        The step is the model's last. is_ahead: it was launched before its tokens were known, which now are of
        those jobs that go on.
        """
        may_draft, end = self.may_draft(len(launched.counts)), 0
        for job, count in launched.counts.items():
            first, end = end, end + count
            if job in launched.tree_logits:
                self._first_rows[job] = first
            elif may_draft and (not is_ahead or job.goes_on):
                done = job.num_computed
                follower = self._following(job, done - count)
                follower.extend(job.token_ids[done - count : done], follower.states_of(range(first, end)))

    def chosen(self, job: Job) -> None:
        """A token was chosen after the row of a job without a tree."""
        self._count(job, 0, 0)

    def begin_picks(self, tree_logits: Mapping[Job, Sequence[AnyLogits]]) -> None:
        """Begins to choose the tokens along all trees of the step. Raises a device's errors."""
        start = time.perf_counter()
        self._picks = begin_all_picks(
            {
                job: (job.answer.chooser, rows, self._drafted[job], job.token_ids)
                for job, rows in tree_logits.items()
            }
        )
        self._choose_s = time.perf_counter() - start

    def verified(self, job: Job, rows: Sequence[AnyLogits]) -> Generator[tuple[SampledToken, bool]]:
        """Yields the tokens along a tree that was computed, each with whether it was drafted. `Job.tokens`
        then has them, and their rows are committed.

        rows: logits [vocab] after the root and each node. Closing the iterator early is allowed. Raises what
        the choice and the commit raise.
        """
        tree, root_id = self._drafted[job], job.token_ids[-1]
        walk = TreeWalk(tree)
        try:
            for chosen in walk.take(job.tokens, self._picks[job], self._runner.spec.vocab_size):
                yield chosen, len(walk.rows) > 1
        finally:
            self._commit(job, [(root_id, *tree.token_ids)[row] for row in walk.rows], walk.rows)
            self._tried[job] = TriedDraft(tree, walk.accepted, walk.is_truncated)
            if self._uses is None:  # counted once a token of the step is known
                self._uses = uses_between(self._uses_before, self._runner.expert_uses)
            self._count(job, len(tree), len(walk.accepted), self._choose_s + walk.choose_s)

    def _commit(self, job: Job, token_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Keeps these rows, with these tokens, of the job's tree; its drafter observes them."""
        assert job.sequence is not None
        follower = self._following(job, job.num_computed)
        states = follower.states_of(np.array(rows) + self._first_rows[job]) if rows else None
        self._runner.commit(job.sequence, rows)
        if rows:
            follower.extend(token_ids, states)

    def end_step(self) -> None:
        """All tokens of the step are known, and all trees committed or given up."""
        drafted, self._drafted = self._drafted, {}
        if self._backed_off:
            seconds, self._backed_off = time.perf_counter() - self._start, False
            self._fused_sizes.went_on(1, seconds, is_usual=False)  # it may have begun before
        if drafted:
            tried = [
                self._tried.get(job, TriedDraft(tree, (), is_truncated=True)) for job, tree in drafted.items()
            ]
            is_usual = self._runner.num_captured == self._captured_before
            self._sizes.record(tried, time.perf_counter() - self._start, is_usual=is_usual)

    def forget(self) -> None:
        """Gives back all memory of drafters, which others of them may need."""
        for follower in self._followers:
            follower.forget()

    @property
    def has_fused(self) -> bool:
        """Whether a device may draft by itself."""
        return with_fused_steps(self._speculation.drafter) is not None

    @property
    def backs_off(self) -> bool:
        """Whether a device that may draft by itself is not to for now, nor the host."""
        return self.has_fused and self._fused_sizes.backs_off()

    def begin_fused(self, job: Job, on_step: Callable[[FusedResult], None]) -> FusedSteps | None:
        """Begins fused steps of a job; None if there are none for it. on_step: called with each result.

        Raises DeviceError, with the job's sequence empty.
        """
        drafter = with_fused_steps(self._speculation.drafter)
        text = job.answer.chooser.fused_text(job.token_ids, job.num_left, self._fused_sizes.most)
        if drafter is None or text is None:
            return None

        def on_accepted(accepted: FusedResult, seconds: float) -> None:
            _counts_of(job, self._speculation).count_fused(accepted, seconds)
            on_step(accepted)

        follower = self._following(job, job.num_computed)
        fused = FusedSteps(self._runner, job, follower, drafter, self._fused_sizes, on_accepted)
        return fused if fused.begin(text) else None

    def _most_nodes(self, num_jobs: int) -> int:
        if num_jobs == 0 or (num_jobs > 1 and self._is_one):
            return 0
        return min(MAX_TREE_NODES, self._runner.cache_size.num_tree_rows // num_jobs - 1)

    def _propose(self, job: Job, budget: int) -> TokenTree:
        start = time.perf_counter()
        tree = (
            self._following(job, job.num_computed).propose(job.token_ids, budget) if budget > 0 else NO_DRAFT
        )
        self._draft_s[job], self._build_s[job] = time.perf_counter() - start, tree.build_s
        return tree

    def _following(self, job: Job, length: int) -> DraftFollower:
        """The job's follower, behind the first so many of its tokens."""
        follower = next((each for each, owner in self._followers.items() if owner is job), None)
        follower = follower or self._new_follower(job)
        follower.follow(job, job.token_ids, length)
        return follower

    def _new_follower(self, job: Job) -> DraftFollower:
        """Takes the follower of a job that does not run any more, which may know the beginning of this one's
        tokens, or makes one. The others of such jobs give their memory back.
        """
        left = [each for each, owner in self._followers.items() if owner is None or owner.sequence is None]
        if self._is_one:
            left = list(self._followers)
        if not left:
            assert self._speculation.more is not None, "a drafter that there is once can always be taken"
            left = [DraftFollower(self._runner, self._speculation.more())]
        best = max(left, key=lambda each: each.num_common(job.token_ids))
        for other in left:
            if other is not best:
                other.forget()
                self._followers[other] = None
        self._followers[best] = job
        return best

    def _count(self, job: Job, num_drafted: int, num_accepted: int, choose_s: float = 0.0) -> None:
        """What all answers of a step share counts for each of them."""
        costs = StepCosts(
            time.perf_counter() - self._start - self._size_s,
            self._draft_s.get(job, 0.0),
            self._build_s.get(job, 0.0),
            self._size_s,
            choose_s,
            self._uses,
        )
        _counts_of(job, self._speculation).count(num_drafted, num_accepted, self._reason, costs)


def _counts_of(job: Job, speculation: Speculation) -> DraftCounts:
    if job.drafts is None:
        job.drafts = DraftCounts(speculation.drafter.name)
    return job.drafts
