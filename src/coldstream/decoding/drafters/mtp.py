"""Drafts by a model's own block for multi-token prediction (`models/mtp/model.py`), of one sequence.

Row p of the block is token x_{p+1} after the trunk's hidden state h_p, from row 0 on. The row of the last
computed token's state waits for the next token, which is the root of a proposal. A proposal first computes
the rows that wait, in one run whose output predicts the first drafted token. Then it computes one row for
each drafted token that is followed further. The hidden state of that row is the output before it. Those rows
are forgotten afterwards: accepted tokens come back with the trunk's hidden states.

The draft is a chain of the likeliest tokens, and beside each the next likely ones as leaves, best first. A
row of the chain is computed only if the tree has room for what it predicts.

Hidden states stay where the block computes; here they are no more than things to hand over. Knows nothing of
how many nodes pay.
"""

from bisect import bisect_left
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Listed
from contextlib import closing
from math import inf, isfinite, log
from typing import Any, Protocol

from coldstream.decoding.drafters.drafter import FusedRun
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.decoding.tree_builder import NO_CANDIDATES, Candidates, Path, build_tree
from coldstream.errors import ColdstreamError, GenerationFault
from coldstream.kernels.fused.reference import FusedText
from coldstream.kvcache import Sequence

State = Any  # a row's hidden state, as the block keeps it


class DraftBlock(Protocol):
    """The block's rows of one sequence; see `models.mtp.model.MtpRows`."""

    @property
    def length(self) -> int:
        """Rows so far."""

    @property
    def room(self) -> int:
        """Rows that may follow."""

    def keep(self, hidden: Any) -> list[State]:
        """Copies of hidden states [rows, E] that a runner returned, one for each row."""

    def append(self, token_ids: Listed[int], states: Listed[State]) -> None:
        """Appends at least one row and at most `room`: each a token, and the state before it.

        Raises a ColdstreamError for states that are not finite, and if it fails, with no row appended.
        """

    def chain(self, num_steps: int) -> Generator[Candidates, None, None]:
        """The likeliest tokens after the last row, the best first; then those after the best one, and so on.

        At most num_steps times, while there is room. Log-probabilities are NaN unless all is finite. The rows
        in between do not count, and are gone when the generator is closed. Raises as `append`.
        """

    @property
    def has_fused_steps(self) -> bool:
        """Whether `begin_fused` may begin any."""

    def begin_fused(self, sequence: Sequence, text: FusedText) -> "FusedRun | None":
        """Fused steps of a text after the last row, its root, where the block's device runs them.

        sequence: the model's, which holds the text but the root. None if there are none for it.
        """

    def truncate(self, length: int) -> None:
        """Forgets all rows but the first `length`."""


class MtpDrafter:
    """A `Drafter`.

    max_steps: depth of the tree. A node whose path is less likely than min_followed, by the block, is a leaf.
    max_waiting: rows that may wait. The block goes on without those before them, so that neither a long
    prompt nor tokens without drafts cost anything. With the last 256 rows of 2,600, drafts of the demo model
    are as good as with all of them: 3.50 tokens a step against 3.42; with 64 rows 3.24.

    The defaults were compared with the best depth up to 8 and the best limit up to 0.5 on the demo model. A
    row of the block cost 0.08 or 0.24 of a step of the model, and a further row of the step 0.1 or 0.3. On
    greedy text the defaults give at least 0.96 of the best tokens per time, on text sampled at temperature 1
    at least 0.83.

    Once something is not finite, or the block has no memory or fails otherwise, it proposes nothing until
    the next `truncate`.

    It may be truncated to any length. If it does not know the state of the last token then, it proposes
    nothing until it observes a further token. The block goes on without the rows that it cannot compute. That
    is so for all lengths but the present one and those of waiting rows. A length beyond the present one says
    that the drafter did not observe the tokens between.
    """

    name = "mtp"
    wants_hidden = True
    aux_layers: tuple[int, ...] = ()

    def __init__(
        self, block: DraftBlock, *, max_steps: int = 6, min_followed: float = 0.2, max_waiting: int = 256
    ) -> None:
        assert max_steps > 0
        assert max_waiting > 0
        self._block = block
        self._max_steps, self._max_waiting = max_steps, max_waiting
        self._min_log_prob = log(min_followed) if min_followed > 0 else -inf
        self._is_off = False
        self._length = 0  # computed tokens
        self._end = 0  # rows before this one are in the block or in `_missing`
        self._missing: list[int] = []  # rows that cannot be computed, ascending
        # Rows that wait: the states of the last computed tokens, and all their next tokens but the last.
        self._states: list[State] = []
        self._tokens: list[int] = []
        self._root: int | None = None  # the token with which the block already has the last waiting row

    def truncate(self, length: int) -> None:
        """See `Drafter` and the class."""
        self._take_root_back()
        if length == self._length and not self._is_off:
            return
        self._is_off = False
        first = self._length - len(self._states)
        if first < length <= self._length:
            del self._states[length - first :], self._tokens[length - first - 1 :]
        else:
            self._forget_waiting()
            last = max(0, length - 1)  # the row that waits for a token, whose state is not known
            self._end = min(self._end, last)
            del self._missing[bisect_left(self._missing, self._end) :]
            self._block.truncate(self._end - len(self._missing))
            self._skip(last)
        self._length = length

    def extend(self, token_ids: Listed[int], hidden: Any) -> None:
        """See `Drafter`."""
        first, self._length = self._length, self._length + len(token_ids)
        if self._is_off or not token_ids:
            return
        if self._root != token_ids[0]:
            self._take_root_back()
        if not self._states:
            self._skip(first)
        if self._root is not None or not self._states:
            self._root, self._tokens, self._states = None, [], []
            token_ids = token_ids[1:]
        self._tokens += token_ids
        if (excess := len(self._states) + len(hidden) - self._max_waiting) > 0:
            self._skip(self._end + excess)
            del self._tokens[:excess]
            hidden = hidden[max(0, excess - len(self._states)) :]
            del self._states[:excess]
        self._states += self._block.keep(hidden)

    def propose(self, context: Listed[int], budget: int) -> TokenTree:
        """See `Drafter`. NO_DRAFT too for a context that is not one token longer than what was observed."""
        try:
            return self._drafted(budget) if self._catch_up(context) else NO_DRAFT
        except ColdstreamError:
            self._turn_off()
            return NO_DRAFT

    @property
    def has_fused_steps(self) -> bool:
        """Whether the block's device runs fused steps."""
        return self._block.has_fused_steps

    def begin_fused(self, context: Listed[int], sequence: Sequence, text: FusedText) -> FusedRun | None:
        """Fused steps after `context`; see `propose` and `DraftBlock`. Unless None, `end_fused` must follow.

        Raises DeviceError if they cannot be begun, with `sequence` empty.
        """
        try:
            is_known = self._catch_up(context)
        except ColdstreamError:
            self._turn_off()
            return None
        return self._block.begin_fused(sequence, text) if is_known else None

    def end_fused(self, num_rows: int, state: State | None) -> None:
        """The fused steps have ended after `num_rows` rows, which the model and the block have computed.

        state: that of the last one, as the block keeps it; None if it is not known.
        """
        if num_rows == 0:
            return
        self._length += num_rows
        self._end += num_rows
        self._take_root_back()
        self._tokens, self._states = [], [] if state is None else [state]

    def _catch_up(self, context: Listed[int]) -> bool:
        """Computes the rows that wait, with the last of `context` as root; whether the block knows the state
        before it. Raises as `append`.
        """
        if self._is_off or not self._states or len(context) != self._length + 1:
            return False
        self._take_root_back()
        self._block.append([*self._tokens, context[-1]], self._states)
        self._root, self._end = context[-1], self._length
        self._tokens, self._states = [], self._states[-1:]
        return True

    def _drafted(self, budget: int) -> TokenTree:
        with closing(self._block.chain(min(self._max_steps, budget))) as steps:
            return build_tree(_Chain(steps, self._min_log_prob).candidates, budget)

    def _take_root_back(self) -> None:
        """The last waiting row has no token again."""
        if self._root is not None:
            self._root = None
            self._end -= 1
            self._block.truncate(self._block.length - 1)

    def _skip(self, end: int) -> None:
        """The block goes on at row `end` without those before it."""
        self._missing += range(self._end, end)
        self._end = end

    def _turn_off(self) -> None:
        self._take_root_back()
        self._forget_waiting()
        self._is_off = True

    def _forget_waiting(self) -> None:
        self._tokens, self._states = [], []


class _Chain:
    """Candidates along the chain of the likeliest tokens.

    A step of the block is taken when the candidates after its row are asked for. The builder of a tree asks
    only for a node behind which the tree has room.
    """

    def __init__(self, steps: Iterator[Candidates], min_log_prob: float) -> None:
        self._steps, self._min_log_prob = steps, min_log_prob
        self._path: Path = ()  # path to the node of the chain that is followed next
        self._log_prob = 0.0  # of that path

    def candidates(self, path: Path) -> Candidates:
        """A `tree_builder.Source`. Raises GenerationFault for logits that are not finite, and as `chain`."""
        if path != self._path or self._log_prob < self._min_log_prob:
            return NO_CANDIDATES
        found = next(self._steps, None)
        if found is None:
            return NO_CANDIDATES
        token_ids, log_probs = found
        if not isfinite(log_probs[0]):
            raise GenerationFault("logits of a draft are not finite")
        self._path = (*path, token_ids[0])
        self._log_prob += log_probs[0]
        return found
