"""Drafts for the answer that runs alone: what its drafter is told, and steps that verify a tree.

The drafter follows one sequence at a time. Beside others an answer decodes plainly, and the drafter is told
of nothing; it takes part again, with a gap in what it knows, when an answer is alone.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

import numpy as np

from coldstream.decoding import (
    AnyLogits,
    Chosen,
    Pick,
    Speculation,
    TokenTree,
    begin_picks,
    generate_in_rounds,
    verify_draft,
)
from coldstream.decoding.drafters import MtpDrafter
from coldstream.engine.drafting import told_states
from coldstream.engine.job import Job
from coldstream.engine.rounds import SequenceRounds, begin_rounds
from coldstream.kernels.ops import MAX_TREE_ROWS
from coldstream.kernels.rounds.reference import Accepted
from coldstream.kvcache import Batch, Segment
from coldstream.models.runner import ModelRunner, States


class JobDrafts:
    """A drafter and the job that it follows."""

    def __init__(self, runner: ModelRunner, speculation: Speculation) -> None:
        """speculation: of a drafter that nobody else uses."""
        self._runner = runner
        self._speculation = speculation
        self._drafter = speculation.drafter
        self._job: Job | None = None  # whose statistics are being made
        self._followed: Job | None = None
        self._known: list[int] = []  # tokens of the sequence that the drafter follows

    def tell(self, job: Job, num_rows: int) -> None:
        """Tells of the rows that the last step computed, all of this job."""
        done = job.num_computed
        self._begin(job)
        if self._speculation.is_idle:
            return
        self._follow(job, done - num_rows)
        token_ids = job.token_ids[done - num_rows : done]
        states = self._states
        self._drafter.extend(token_ids, None if states is None else states(range(num_rows)))
        self._known += token_ids

    def draft(self, job: Job) -> TokenTree:
        """What may follow the tokens of a job whose last one alone is not computed; perhaps nothing."""
        self._begin(job)
        if not self._speculation.is_idle:
            self._follow(job, job.num_computed)
        return self._speculation.draft(job.token_ids, job.num_left - 1)

    def computed_plainly(self, seconds: float) -> None:
        """The step after an empty draft took so long."""
        self._speculation.verified((), seconds, is_cut=False)
        if self._job is not None:
            self._job.speculation = self._speculation.statistics()

    def verified(self, job: Job, tree: TokenTree, on_accepted: Callable[[], None]) -> Generator[Chosen]:
        """Computes a draft, and yields the tokens along it, which `Job.tokens` then has.

        on_accepted: is called for each token that was drafted. Closing the iterator early is allowed. Raises
        what the step, the choice and the commit raise.
        """

        def begin(rows: Sequence[AnyLogits], tree: TokenTree, context: Sequence[int]) -> Pick:
            return begin_picks(job.answer.chooser, rows, tree, context)

        model, vocab_size = _OneJob(self, job), self._runner.spec.vocab_size
        try:
            with closing(
                verify_draft(model, job.tokens, tree, begin, self._speculation, vocab_size)
            ) as tokens:
                for count, chosen in enumerate(tokens):
                    if count > 0:
                        on_accepted()
                    yield chosen
        finally:
            job.speculation = self._speculation.statistics()

    @property
    def has_rounds(self) -> bool:
        """Whether a device may draft by itself."""
        return isinstance(self._drafter, MtpDrafter) and self._drafter.runs_rounds

    def in_rounds(self, job: Job, on_round: Callable[[Accepted], None]) -> Generator[Chosen] | None:
        """A few rounds that the device drafts by itself, as `verified` has one step; None if it does not.

        They have MAX_TREE_ROWS rows together, so that others do not wait for long. on_round: is told of each.
        """
        speculation, chooser = self._speculation, job.answer.chooser
        text = chooser.round_text(job.token_ids, job.num_left, speculation.most_round_nodes)
        if text is None or job.sequence is None:
            return None
        self._begin(job)
        self._follow(job, job.num_computed)
        rounds = begin_rounds(
            self._runner, job.sequence, speculation, text, job.token_ids, self._known.extend
        )
        return None if rounds is None else self._tokens_of(job, rounds, _Counted(speculation, on_round))

    def _tokens_of(self, job: Job, rounds: SequenceRounds, drafts: "_Counted") -> Generator[Chosen]:
        vocab_size = self._runner.spec.vocab_size
        most = max(1, MAX_TREE_ROWS // (1 + self._speculation.most_round_nodes))
        try:
            yield from generate_in_rounds(rounds, job.tokens, drafts, vocab_size, most_rounds=most)
        finally:
            if rounds.has_failed:
                self._known = []
            job.speculation = self._speculation.statistics()

    def step(self, job: Job, token_ids: Sequence[int], parents: Sequence[int]) -> Sequence[AnyLogits]:
        """Computes a tree; logits [vocab] after each row."""
        assert job.sequence is not None
        (rows,) = self._runner.step(Batch((Segment(job.sequence, token_ids, parents),)))
        logits: Sequence[AnyLogits] = rows
        return logits

    def commit(self, job: Job, token_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Keeps these rows, with these tokens, of the last tree, and tells the drafter."""
        assert job.sequence is not None
        states = self._states
        told = states(np.array(rows)) if states is not None and rows else None
        self._runner.commit(job.sequence, rows)
        if rows:
            self._drafter.extend(token_ids, told)
            self._known += token_ids

    @property
    def _states(self) -> States | None:
        return told_states(self._runner, self._drafter)

    def _begin(self, job: Job) -> None:
        if job is not self._job:
            self._job = job
            self._speculation.start()

    def _follow(self, job: Job, length: int) -> None:
        """Has the drafter know the sequence of this job, which has so many tokens."""
        if len(self._known) == length and self._followed is job:
            return
        common = _num_common(self._known, job.token_ids[:length])
        self._drafter.cut(common)
        if common < length and self._states is None:
            self._drafter.extend(job.token_ids[common:length], None)
        elif common < length:
            self._drafter.cut(length)
        self._known = job.token_ids[:length]
        self._followed = job


class _Counted:
    """Drafts of rounds, of which somebody else is told too."""

    def __init__(self, speculation: Speculation, on_round: Callable[[Accepted], None]) -> None:
        self.begin_rounds, self.next_round = speculation.begin_rounds, speculation.next_round
        self._speculation, self._on_round = speculation, on_round

    def round_ended(self, accepted: Accepted, seconds: float) -> None:
        self._speculation.round_ended(accepted, seconds)
        self._on_round(accepted)


class _OneJob:
    """A job as decoding's `DraftModel`."""

    def __init__(self, drafts: JobDrafts, job: Job) -> None:
        self._drafts, self._job = drafts, job
        self._token_ids: Sequence[int] = ()

    def verify(self, token_ids: Sequence[int], parents: Sequence[int]) -> Sequence[AnyLogits]:
        self._token_ids = token_ids
        return self._drafts.step(self._job, token_ids, parents)

    def commit(self, rows: Sequence[int]) -> None:
        self._drafts.commit(self._job, [self._token_ids[row] for row in rows], rows)


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
