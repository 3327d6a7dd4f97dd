"""The model's memory as jobs use it: they begin with kept prefixes, make room for each other, and leave
prefixes behind. Decides nothing about who runs.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from coldstream.engine.job import Job
from coldstream.engine.opened_model import OpenedModel
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache import Demand, PrefixCache, PrefixTier, Sequence


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
        prefix = self.cache.begin(
            job.token_ids,
            submission.boundaries,
            submission.namespace,
            comes_again=submission.comes_again,
        )
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
        return all(job.sequence is not None and owns_next_row(job.sequence) for job in jobs)

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
        need = self._runner.need_of(demands)
        return self.cache.make_room(need.num_blocks + more_blocks, need.num_states + more_states)


def demand_of(job: Job, num_rows: int) -> Demand:
    """Memory for the next rows of a job."""
    assert job.sequence is not None, "a job without memory does not run"
    return Demand(job.sequence, num_rows)
