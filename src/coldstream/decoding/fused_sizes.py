"""How many tokens each fused step drafts (`engine/fused_steps.py`).

A fused step is launched before the host knows the result of the step before it. Its size is therefore chosen
from older results.
"""

from collections import deque
from dataclasses import dataclass
from math import log
from typing import Final, Protocol

from coldstream.decoding.acceptance import AcceptanceModel
from coldstream.decoding.backoff import OBSERVED_STEPS, Backoff
from coldstream.decoding.row_times import RowTimes
from coldstream.decoding.token_tree import TokenTree
from coldstream.decoding.tree_size import SizePolicy, TreeSize
from coldstream.kernels.fused.reference import FusedResult

# A step of more than eight rows has other kernels, with which the ninth costs a fifth of a step.
MOST_NODES: Final = 7
_BELIEVED: Final = 0.75  # chance of a drafted token to be right, before any was tried


class FusedSizes(Protocol):
    """Chooses the sizes of fused steps that follow each other."""

    @property
    def most(self) -> int:
        """The most tokens that are drafted."""

    def start(self) -> None:
        """A new run of fused steps begins. Steps that were not recorded belong to an older run."""

    def backs_off(self) -> bool:
        """Whether plain steps are better for now; the same until something is recorded."""

    def is_idle(self) -> bool:
        """Whether plain steps will be better for long, so that a drafter need not observe tokens."""

    def went_on(self, num_steps: int, seconds: float, *, is_usual: bool = True) -> None:
        """`num_steps` plain steps took `seconds` together. is_usual: whether others take as long."""

    def next(self) -> int:
        """Tokens that the next fused step drafts."""

    def record(self, accepted: FusedResult, seconds: float, *, is_usual: bool = True) -> None:
        """The result and the seconds of the oldest fused step that was not recorded yet.

        is_usual: whether others of its size take as long.
        """


@dataclass(frozen=True)
class FixedFusedSizes:
    """Fused steps that draft `most` tokens."""

    most: int

    def start(self) -> None:
        """See `FusedSizes`."""

    def backs_off(self) -> bool:
        """See `FusedSizes`."""
        return False

    def is_idle(self) -> bool:
        """See `FusedSizes`."""
        return False

    def went_on(self, num_steps: int, seconds: float, *, is_usual: bool = True) -> None:
        """See `FusedSizes`."""

    def next(self) -> int:
        """See `FusedSizes`."""
        return self.most

    def record(self, accepted: FusedResult, seconds: float, *, is_usual: bool = True) -> None:
        """See `FusedSizes`."""


class FusedSizesByCost:
    """Fused steps of as many tokens as give the most a second, by acceptance and measured times.

    The policy is that of trees (`tree_size.py`). The time of a fused step includes its draft. It is
    compared with a fused step without a draft, which costs a little more than a step of a model without
    drafts, because the block goes on. Once drafts have not paid for long, fused steps back off for a while
    (`backoff.py`). Acceptance is counted by depth (`acceptance.py`), since the host does not see what
    the device's block says of its tokens before they are verified.
    """

    most = MOST_NODES

    def __init__(self) -> None:
        self._acceptance = AcceptanceModel()
        self._policy = SizePolicy(RowTimes())
        self._launched: deque[TreeSize | None] = deque()
        self._is_first = True
        self._backoff = Backoff()

    def start(self) -> None:
        """See `FusedSizes`."""
        self._launched.clear()
        self._is_first = True

    def backs_off(self) -> bool:
        """See `FusedSizes`."""
        return self._backoff.num_steps > 0

    def is_idle(self) -> bool:
        """See `FusedSizes`."""
        return self._backoff.num_steps > OBSERVED_STEPS

    def went_on(self, num_steps: int, seconds: float, *, is_usual: bool = True) -> None:
        """See `FusedSizes`."""
        self._policy.went_on(num_steps, seconds, is_usual=is_usual)
        self._backoff.went_by(num_steps, has_gained=self._policy.has_gained)

    def next(self) -> int:
        """See `FusedSizes`."""
        size = None
        if self._policy.should_draft():
            size = self._policy.choose(self._acceptance.expected(_NAME, _chain(self.most)), 0.0)
        self._launched.append(size)
        return size.num_nodes if size else 0

    def record(self, accepted: FusedResult, seconds: float, *, is_usual: bool = True) -> None:
        """See `FusedSizes`. The first step of a run is not timed, as it begins with work of its own."""
        size = self._launched.popleft()
        num_accepted = max(0, len(accepted.token_ids) - 1)
        if not self._is_first:
            self._policy.record(seconds, size, 1.0 + num_accepted, is_usual=is_usual)
        self._is_first = False
        self._backoff.went_by(1, has_gained=self._policy.has_gained)
        if not accepted.is_last:
            self._acceptance.record(_NAME, _chain(accepted.num_drafted), range(num_accepted))


_NAME: Final = "fused"


def _chain(num_nodes: int) -> TokenTree:
    """A draft of which nothing is known but its length."""
    log_probs = tuple((1 + node) * log(_BELIEVED) for node in range(num_nodes))
    return TokenTree((0,) * num_nodes, tuple(range(-1, num_nodes - 1)), log_probs)
