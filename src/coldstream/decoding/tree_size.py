"""How many nodes of drafts a step verifies, and whether to draft at all: by expected tokens a second.

A step has r roots, one of each sequence, and n nodes. It yields r + the sum of the nodes' probabilities to be
accepted, and takes the time of r + n rows. With mixtures of experts that time is neither convex nor smooth in
n: rows share experts, kernels change and expert caches miss. So every size is looked at, and the one is taken
whose tokens are worth most beside its time. A second is worth the tokens that it gave lately, with drafts or
without them, whichever are more; the draft itself is spent when its size is chosen. Times are those of the
last steps with as many rows, and hold what the experts took that such steps missed. Drafts are asked for as
many nodes as fill a range of `row_times.py`, because a device that captures steps by their rows needs a
capture for each number.

`AskedNodes` learns that number from drafts before. A draft takes longer the more nodes it has, and what
further nodes bring depends on the text. So the time is learned by the nodes asked for. By node it is learned
how much more a step was worth whose size could be chosen with the node than without it. Of a draft shorter
than what was asked for, the nodes that it does not have brought nothing. Nodes beyond those asked for are
forecast as the last ones go on. So a draft grows as soon as that may pay, and no node is drafted to be thrown
away, but for a few that tell whether the forecast is right.

Estimates of what is not done grow stale, so a small share of the time goes into doing it anyway. Half the
share pays for *probes*, steps with another size than the best; half for *explorations*, drafts made although
drafts have not paid lately. Each waits until its expected overhead has been earned, and pays the real one.
The overhead of a probe is its time beyond that in which the best size is expected to yield as many tokens.
The overhead of an exploration is its time beyond as many plain steps as it gave tokens.

Whether drafts pay is decided by what they gave and took, not by estimates, which may be wrong together. They
are compared with plain steps that follow each other. A plain step after one with a draft is not typical: it
finds other weights in the caches, sleeping threads on a CPU, and on a GPU no step under way beside which it
could be launched. Texts that are easy to draft for a while differ from texts that are always hard: the gain
of a draft varies more. Drafts pay as long as their mean gain may be positive. So of every 256 steps 6 are
plain ones, and the first 24; and an exploration pays for the step after it too. A step in which a device
captures a graph takes as long as thirty steps, and says nothing of whether drafts pay. But a probe or an
exploration pays for that too.

How many steps will have no draft is known beforehand (`num_plain`), as nothing but their own time changes it.
So they need not be asked about nor recorded one by one, and a drafter may observe the last of them only.

Everything is a pure function of the calls so far: times are passed in.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from math import ceil, inf, sqrt
from typing import Final

from coldstream.decoding.loss_bound import LossBound
from coldstream.decoding.row_times import MAX_ROWS, RowTimes, last_rows, row_range

_FIRST: Final = 4  # nodes asked for before anything is known
# The same where what drafts lose is bounded, as one bad draft would spend it all; the most until they gain.
_BOUND_FIRST: Final = 3
# Drafts from one with a node more than is best to the next: twice as many each time that it brought nothing.
_LEAST_DISTANCE: Final = 2
_MOST_DISTANCE: Final = 16
_ASKED_WEIGHT: Final = 1 / 16  # weight of the newest draft
_LEAST_S: Final = 1e-9


class AskedNodes:
    """Learns from drafts how many nodes to ask for."""

    def __init__(self, first: int = _FIRST) -> None:
        self._first = first
        self._times = RowTimes()
        self._brought: list[float] = []  # by node: tokens that it brought beyond the nodes before it
        self._num_asked = 1  # nodes that were asked for in the last draft
        self._ahead: list[float] = []  # what 1, 2 … nodes more than those of the last draft may bring
        self._num_best, self._tokens_s = 1, 0.0  # nodes that seemed best for the last draft, and of `best`
        self._more_distance, self._until_more = _LEAST_DISTANCE, 1  # in drafts

    @property
    def draft_s(self) -> float:
        """What drafts that are to have as many nodes as the last one take; 0 before that is known."""
        return self._seconds(self._num_asked)

    def record(self, draft_s: float, worths: Sequence[float], num_asked: int) -> None:
        """A draft that was to have `num_asked` nodes took so long.

        worths: by number of nodes, from 0 to at least those asked for. Each is what a step of the best size
        up to that number is worth beside its time; of more nodes it is a forecast. None is less than the one
        before.
        """
        self._num_asked = num_asked
        if self._until_more > 0:
            self._until_more -= 1
        elif num_asked > self._num_best:
            more_s = self._seconds(num_asked) - self._seconds(self._num_best)
            has_brought = worths[num_asked] - worths[self._num_best] > self._tokens_s * more_s
            self._more_distance = (
                _LEAST_DISTANCE if has_brought else min(_MOST_DISTANCE, 2 * self._more_distance)
            )
            self._until_more = self._more_distance - 1
        self._times.record(min(self._num_asked, MAX_ROWS), max(_LEAST_S, draft_s))
        self._ahead = [worth - worths[num_asked] for worth in worths[num_asked + 1 :]]
        for node, (before, worth) in enumerate(pairwise(worths[: 1 + num_asked])):
            if node < len(self._brought):
                self._brought[node] += _ASKED_WEIGHT * (worth - before - self._brought[node])
            else:
                self._brought.append(worth - before)

    def best(self, most: int, tokens_s: float) -> int:
        """How many to ask for, at most `most`, where a second is worth so many tokens.

        One more than is best where it is forecast to pay, and in some other drafts: what nodes bring is known
        only where they are asked for.
        """
        if not self._times.has_any:
            return min(most, self._first)
        gains = accumulate(self._brought[: min(most, MAX_ROWS)])
        worths = [gain - tokens_s * self._seconds(1 + node) for node, gain in enumerate(gains)]
        best = 1 + worths.index(max(worths))
        self._num_best, self._tokens_s = best, tokens_s
        tries_more = best <= self._num_asked and self._until_more == 0
        return min(most, best + (tries_more or (best == self._num_asked and self._more_may_pay(tokens_s))))

    def _more_may_pay(self, tokens_s: float) -> bool:
        """Whether more nodes than those of the last draft are forecast to be worth their time."""
        drafted_s = self._seconds(self._num_asked)
        return any(
            gain > tokens_s * (self._seconds(self._num_asked + more) - drafted_s)
            for more, gain in enumerate(self._ahead, 1)
        )

    def _seconds(self, num_asked: int) -> float:
        return self._times.seconds(min(num_asked, MAX_ROWS)) or 0.0


_WEIGHT = 1 / 32  # weight of the newest draft in the mean gain, and in the tokens a second with drafts
# In plain steps: the mean gain that is believed at first, the least that is remembered, and the least that
# counts of one draft, as something else may have slowed its step.
_FIRST_GAIN, _LEAST_MEAN_GAIN, _LEAST_GAIN = 0.1, -0.5, -1.0
_DOUBT = 2.0  # standard errors by which the true gain may exceed the mean
# How much faster than plain ones steps with drafts have to be. Long steps leave a CPU's caches to
# other weights: plain steps of the demo model between them take a sixth longer than without any drafts.
_MARGIN = 1.1
_STALE = 128  # steps after which a time should be measured again
_PROBE_DISTANCE = 16  # steps from one probe to the next, at least
_MOST_SAVED = 4096  # steps whose shares are saved for probes; at half a percent that is the time of 20 steps
_LEAST_OVERHEAD_S = 1e-9
_FIRST_PLAIN_STEPS, _PLAIN_STEPS, _PLAIN_DISTANCE = 24, 6, 256
_BOUND_PLAIN_STEPS: Final = 8  # the first where what drafts lose is bounded
# Where experts are missing, plain steps differ as the experts in fast memory do. So they are measured again
# soon in the first steps, and often while drafts do not make a token much faster.
_NEW_STEPS, _NEW_DISTANCE, _NEAR_DISTANCE, _MUCH = 144, 24, 64, 1.3
_FIRST_USE_STEPS: Final = 1024  # in which the first use of a shape has to pay
# Steps that are recorded together: many enough to take no time, few enough for times to be new.


class SizeReason(Enum):
    """Why a size was chosen."""

    FASTEST = "the most expected tokens for its time"
    PLAIN = "no node is expected to be worth its time"
    PROBE = "measured again although another size is expected to be faster"
    UNMEASURED = "no plain step has been measured yet"
    NOT_ASKED = "nothing was drafted: drafts have not paid lately, or a plain step is measured"
    FIXED = "so many are verified, whatever they cost"


@dataclass(frozen=True)
class TreeSize:
    """How many of a draft's first nodes to verify, and why."""

    num_nodes: int
    reason: SizeReason
    rate: float | None = None  # expected tokens a second; of 0 nodes: those of a plain step without a draft
    best_rate: float | None = None  # rate of the size that is worth most
    tokens: float = 1.0  # expected tokens of the step
    draft_s: float = 0.0  # what the draft took
    is_exploration: bool = False  # the draft was made although drafts have not paid lately


def expected_rates(
    probabilities: Sequence[float],
    step_s: Callable[[int], float],
    draft_s: float,
    num_roots: int = 1,
) -> list[float]:
    """The expected tokens a second by number of nodes, for all that fit into `MAX_ROWS` rows.

    probabilities: by node, that it and the path to it are accepted. step_s(rows): the seconds of a step.
    draft_s: those of the draft, which a plain step (0 nodes) does without.
    """
    num_sizes = min(len(probabilities), MAX_ROWS - num_roots) + 1
    tokens = accumulate(probabilities, initial=float(num_roots))
    return [
        expected / (step_s(num_roots + n) + (draft_s if n else 0.0))
        for n, expected in zip(range(num_sizes), tokens, strict=False)
    ]


class SizePolicy:
    """Decides for the drafts of one sequence, or of about as many sequences in each step, by the times of
    their steps.

    times: may be shared with the policies of other drafters, one of which records each step. probe_share:
    of the time, at most, that goes into probes and explorations. A draft that is not used while drafts pay on
    the whole is neither. bound: of what drafts may lose; None: of none. misses: whether experts may be
    missing in fast memory, by which plain steps of a text differ from those of another one.

    For every step: `should_draft`; if so, `num_asked`, a draft and `choose`; then the step and `record`.
    """

    def __init__(
        self,
        times: RowTimes,
        *,
        probe_share: float = 0.01,
        bound: LossBound | None = None,
        misses: bool = False,
    ) -> None:
        self._times, self._bound, self._misses = times, bound, misses
        self._used_rows: set[int] = set()  # of steps with nodes
        self._asked = AskedNodes() if bound is None else AskedNodes(_BOUND_FIRST)
        self._num_asked = 0  # nodes asked for in the next draft of each sequence
        self._mean_tokens = self._mean_s = 0.0  # means over steps with drafts
        self._gain, self._gain_variance = _FIRST_GAIN, 0.0  # of drafts, in plain steps
        self._for_drafts = _Purse(probe_share / 2)
        self._for_probes = _Purse(probe_share / 2)
        self._num_since_probe = 0
        self._num_steps = self._num_plain = 0  # all steps, and the last ones in a row without a draft
        self._has_explored = False  # whether the last step was an exploration

    @property
    def pays(self) -> bool:
        """Whether drafts may have paid lately, by the tokens that they gave and the time that they took."""
        standard_error = sqrt(self._gain_variance * _WEIGHT / 2)
        return self._gain + _DOUBT * standard_error >= 0

    @property
    def has_gained(self) -> bool:
        """Whether they have paid in the mean, without any doubt in their favour."""
        return self._gain >= 0

    def should_draft(self) -> bool:
        """Whether the next step should have a draft."""
        return self.num_plain() == 0

    def num_plain(self, num_roots: int = 1) -> int:
        """How many steps, the next one first, should have no draft: 0 if the next one should have one.

        Where drafts have not paid, of steps with so many roots that take as long as such steps did lately.
        """
        first = _FIRST_PLAIN_STEPS if self._bound is None else _BOUND_PLAIN_STEPS
        if not self._times.has_any or self._num_steps < first:
            return max(1, first - self._num_steps)
        planned = max(0, _PLAIN_STEPS - self._num_steps % self._plain_distance(num_roots))
        if self._bound is not None:
            first_s = 0.0 if self._used_rows else self._bound.first_use_s
            planned = max(planned, self._bound.num_steps_until_any(self._known_s(num_roots), first_s))
        if self.pays:
            return planned
        return max(planned, self._for_drafts.num_steps_until(self._asked.draft_s, self._known_s(num_roots)))

    def _plain_distance(self, num_roots: int) -> int:
        """How many steps there are from the first of some plain steps to the next ones."""
        if not self._misses:
            return _PLAIN_DISTANCE
        if self._num_steps < _NEW_STEPS:
            return _NEW_DISTANCE
        gains_much = self._mean_tokens * self._known_s(num_roots) > _MUCH * num_roots * self._mean_s > 0
        return _PLAIN_DISTANCE if gains_much else _NEAR_DISTANCE

    def num_asked(self, most: int, num_roots: int = 1) -> int:
        """How many nodes the draft of each sequence that comes next is to have, at most `most`.

        For one sequence as many as make all the rows of a range, unless there is no room for them.
        """
        tokens_s = self._tokens_s(num_roots) if self._times.has_any else 0.0
        if self._bound is not None and not (tokens_s and self._bound.has_gained(self._known_s(num_roots))):
            most = min(most, _BOUND_FIRST)
        self._num_asked = self._asked.best(most, tokens_s)
        if num_roots == 1:
            self._num_asked = min(most, last_rows(min(MAX_ROWS, 1 + self._num_asked)) - 1)
        return self._num_asked

    def choose(self, probabilities: Sequence[float], draft_s: float, num_roots: int = 1) -> TreeSize:
        """The size for drafts that took `draft_s`; see `expected_rates` for the rest.

        Calculates with the usual time of drafts that were to have as many nodes, not with that of these.
        """
        if self._times.seconds(num_roots) is None:
            return TreeSize(0, SizeReason.UNMEASURED, draft_s=draft_s)
        is_exploration = not self.pays
        tokens = list(accumulate(probabilities, initial=float(num_roots)))
        tokens_s = self._tokens_s(num_roots)
        worths = self._worths(tokens, tokens_s, num_roots)
        if self._num_asked:
            each = self._worths_of_asked(probabilities, tokens_s, num_roots)
            self._asked.record(draft_s, each, self._num_asked)
        rates = expected_rates(probabilities, self._known_s, self._asked.draft_s, num_roots)
        best = worths.index(max(worths))  # the smallest of equal ones
        probe = self._probe(rates, best, tokens, num_roots)
        n, reason = best, SizeReason.FASTEST if best else SizeReason.PLAIN
        if probe is not None:
            n, reason = probe, SizeReason.PROBE
        return TreeSize(n, reason, rates[n], rates[best], tokens[n], draft_s, is_exploration)

    def _worths(self, tokens: Sequence[float], tokens_s: float, num_roots: int) -> list[float]:
        """By the number of nodes: what a step expected to give so many tokens is worth beside its time."""
        return [
            expected - tokens_s * (self._known_s(num_roots + n) + self._share_of_first_use_s(num_roots, n))
            for n, expected in enumerate(tokens[: 1 + MAX_ROWS - num_roots])
        ]

    def _worths_of_asked(
        self, probabilities: Sequence[float], tokens_s: float, num_roots: int
    ) -> list[float]:
        """By the nodes asked of each drafter: what a step of the best size up to them is worth.

        Also of more nodes than were asked for, up to those of the next range of rows.
        """
        next_rows = last_rows(min(MAX_ROWS, num_roots * (1 + self._num_asked) + 1))
        most = max(self._num_asked, next_rows // num_roots - 1)
        if len(probabilities) >= self._num_asked * num_roots:
            probabilities = _continued(probabilities, most * num_roots)
        tokens = list(accumulate(probabilities, initial=float(num_roots)))
        among = list(accumulate(self._worths(tokens, tokens_s, num_roots), max))
        return [among[min(len(among) - 1, n * num_roots)] for n in range(1 + most)]

    def record(
        self,
        step_s: float,
        size: TreeSize | None = None,
        tokens: float = 1.0,
        num_roots: int = 1,
        *,
        is_usual: bool = True,
    ) -> None:
        """A step with so many roots gave `tokens` and took `step_s` besides its draft.

        size: what was chosen for it, None without a draft. is_usual: whether others of its kind take as long;
        without a draft, those that follow each other.
        """
        if size is None:
            self.went_on(1, step_s, num_roots, is_usual=is_usual)
            return
        self._count(1, step_s, num_roots + size.num_nodes, says_more=is_usual and size.num_nodes > 0)
        self._num_plain = 0
        taken_s = size.draft_s + step_s
        if size.num_nodes:
            self._used_rows.add(num_roots + size.num_nodes)
        if self._bound is not None:
            plain_s = self._known_s(num_roots)
            # Plain steps among drafts find the experts that drafts left in fast memory.
            margin = _MARGIN if self._misses and size.num_nodes else 1.0
            self._bound.gained(tokens / num_roots * plain_s / margin - taken_s, plain_s)
        if size.best_rate is not None:
            if size.reason is SizeReason.PROBE:
                self._for_probes.spend(max(0.0, taken_s - size.tokens / size.best_rate))
                self._num_since_probe = 0
            else:
                gain_s = self._gain_s(size.num_nodes, tokens / num_roots, taken_s, num_roots)
                if size.is_exploration:
                    self._for_drafts.spend(max(0.0, -gain_s))
                if is_usual:
                    self._learn_gain(gain_s / self._known_s(num_roots), tokens, taken_s)
        self._has_explored = size.is_exploration
        self._earn(1, taken_s, num_roots)

    def went_on(self, num_steps: int, seconds: float, num_roots: int = 1, *, is_usual: bool = True) -> None:
        """So many steps with so many roots, all without a draft, took so long together.

        is_usual: whether those that follow each other take as long.
        """
        self._count(num_steps, seconds, num_roots, says_more=is_usual and self._num_plain > 1)
        self._num_plain += num_steps
        if self._has_explored:
            self._for_drafts.spend(max(0.0, seconds - num_steps * self._known_s(num_roots)))
        self._has_explored = False
        self._earn(num_steps, seconds, num_roots)

    def _count(self, num_steps: int, seconds: float, num_rows: int, *, says_more: bool) -> None:
        """says_more: whether the time is one of such steps."""
        if says_more or not self._times.has_any:
            self._times.record(num_rows, seconds, num_steps)
        else:
            self._times.skip(num_steps)
        self._num_steps += num_steps
        self._num_since_probe += num_steps

    def _earn(self, num_steps: int, seconds: float, num_roots: int) -> None:
        self._for_drafts.earn(num_steps, seconds)
        self._for_probes.earn(num_steps, seconds)
        if self._bound is not None and self._times.has_any:
            self._bound.earn(num_steps, seconds, self._known_s(num_roots))

    def _first_use_s(self, num_roots: int, num_nodes: int) -> float:
        """What the next step of so many nodes takes more as the first of its shape."""
        is_new = num_nodes > 0 and num_roots + num_nodes not in self._used_rows
        return self._bound.first_use_s if self._bound is not None and is_new else 0.0

    def _share_of_first_use_s(self, num_roots: int, num_nodes: int) -> float:
        """The same, in each of the steps in which that has to pay; without end if it may not be lost."""
        first_s = self._first_use_s(num_roots, num_nodes)
        if first_s and self._bound is not None and not self._bound.affords(first_s):
            return inf
        return first_s / _FIRST_USE_STEPS

    def _gain_s(self, num_nodes: int, plain_steps: float, taken_s: float, num_roots: int) -> float:
        """A draft's gain over so many plain steps."""
        margin = _MARGIN if num_nodes else 1.0
        return plain_steps * self._known_s(num_roots) / margin - taken_s

    def _learn_gain(self, gain: float, tokens: float, taken_s: float) -> None:
        """Takes a draft's gain, in plain steps, into the mean.

        Also that of one that was not used, whose step may be slow because of those before it.
        """
        off = max(_LEAST_GAIN, gain) - self._gain
        self._gain = max(_LEAST_MEAN_GAIN, self._gain + _WEIGHT * off)
        self._gain_variance += _WEIGHT * (off * off - self._gain_variance)
        self._mean_tokens += _WEIGHT * (tokens - self._mean_tokens)
        self._mean_s += _WEIGHT * (taken_s - self._mean_s)

    def _tokens_s(self, num_roots: int) -> float:
        """What a second is worth."""
        plain = num_roots / self._known_s(num_roots)
        return max(plain, self._mean_tokens / self._mean_s) if self._mean_s else plain

    def _known_s(self, num_rows: int) -> float:
        seconds = self._times.seconds(num_rows)
        assert seconds is not None, "sizes are compared once a step was measured"
        return seconds

    def _probe(
        self, rates: Sequence[float], best: int, tokens: Sequence[float], num_roots: int
    ) -> int | None:
        """The size to probe in this step: that whose time is the stalest for the overhead of a probe."""
        if self._num_since_probe < _PROBE_DISTANCE:
            return None
        fastest: dict[int, int] = {}  # size by range of rows
        for n, rate in enumerate(rates):
            rows = row_range(num_roots + n)
            if rate > rates[fastest.setdefault(rows, n)]:
                fastest[rows] = n
        wanted, urgency, overhead_s = None, 0.0, 0.0
        for each, n in fastest.items():
            age = self._times.age(num_roots + n)
            if each == row_range(num_roots + best) or age < _STALE:
                continue
            taken_s = tokens[n] / rates[n] + (0.0 if n else self._asked.draft_s)
            taken_s += self._first_use_s(num_roots, n)
            expected_s = max(_LEAST_OVERHEAD_S, taken_s - tokens[n] / rates[best])
            if age / expected_s > urgency:
                wanted, urgency, overhead_s = n, age / expected_s, expected_s
        return wanted if self._for_probes.affords(overhead_s) else None


def _continued(probabilities: Sequence[float], num_nodes: int) -> list[float]:
    """At least so many, if each further node is as likely beside the one before as the last one is."""
    before, last = [1.0, 1.0, *probabilities][-2:]
    ratio = min(1.0, last / before) if before else 0.0
    return [*probabilities, *(last * ratio**n for n in range(1, 1 + num_nodes - len(probabilities)))]


class _Purse:
    """Seconds that may be spent on something: a share of what all steps took, not saved up without end."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._left_s = 0.0

    def earn(self, num_steps: int, seconds: float) -> None:
        """So many steps took so long together."""
        earned_s = self._share * seconds
        self._left_s = min(self._left_s + earned_s, _MOST_SAVED * earned_s / num_steps)

    def num_steps_until(self, seconds: float, step_s: float) -> int:
        """After how many more steps, each of `step_s`, so much can be afforded: 0 if it can."""
        missing_s, earned_s = seconds - self._left_s, self._share * step_s
        if missing_s <= 0:
            return 0
        return ceil(missing_s / earned_s) if earned_s else sys.maxsize

    def affords(self, seconds: float) -> bool:
        """Whether so much is left."""
        return self._left_s >= seconds

    def spend(self, seconds: float) -> None:
        """It took so long, which may be more than is left."""
        self._left_s -= seconds
