"""Drafts by a DFlash drafter (`models/dflash/`) of one sequence: a whole block of positions at once.

A drafter of the first kind says how likely a token is at a position, one of the second how likely it is after
the token before. Either way the draft is the likeliest tree of what it says, and costs one run however many
nodes it has. The block is as long as the drafter was given: of a shorter one other tokens come out, and with
other confidence. Only where no row sees those behind it, a block has no more rows than the tree may be deep.

Knows nothing of how many nodes pay, nor of devices.
"""

from collections.abc import Sequence as Listed
from typing import Any, Protocol

import numpy as np

from coldstream.decoding.drafters.drafter import FusedRun
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.decoding.tree_builder import (
    NO_CANDIDATES,
    Candidates,
    Source,
    build_tree,
    conditional_source,
    marginal_source,
)
from coldstream.errors import ColdstreamError
from coldstream.kernels.fused.reference import FusedText
from coldstream.kvcache import Sequence
from coldstream.models.dflash.spec import DflashSpec, DraftLattice


class DflashContext(Protocol):
    """The committed rows of one sequence; see `models.dflash.context.CommittedRows`."""

    @property
    def spec(self) -> DflashSpec:
        """The drafter's."""

    @property
    def has_last(self) -> bool:
        """Whether the last committed row is known."""

    def append(self, features: Any) -> None:
        """Appends rows, features [n, spec.feature_size]. Raises a ColdstreamError, with none appended."""

    def truncate(self, length: int) -> None:
        """The sequence has `length` rows; further ones than there were are not known."""

    def draft(self, anchor: int, num_rows: int, num_candidates: int) -> DraftLattice:
        """The candidates of num_rows − 1 positions after `anchor`. Raises a ColdstreamError."""

    @property
    def has_fused_steps(self) -> bool:
        """Whether `begin_fused` may begin any."""

    def begin_fused(self, sequence: Sequence, text: FusedText) -> FusedRun | None:
        """Fused steps of a text, where the drafter's device runs them. Raises a ColdstreamError.

        sequence: the model's, which holds the text but the root, as does the context. None if there are none
        for it. What fused steps keep is in the context once they have ended.
        """


class DflashDrafter:
    """A `Drafter` that observes features: see `aux_layers`.

    num_rows: of the block, the anchor included; None for as many as the drafter was trained with.
    branching: candidates at each depth, for a drafter of the first kind.

    Once a draft is not finite, or the context has no memory or fails otherwise, it proposes nothing until the
    next `truncate`. It may be truncated to any length, and proposes nothing while the row of the last token
    is not known. Rows further back that are not known only make drafts worse.
    """

    name = "dflash"
    wants_hidden = False

    def __init__(self, context: DflashContext, *, num_rows: int | None = None, branching: int = 8) -> None:
        spec = context.spec
        num_rows = spec.block_size if num_rows is None else num_rows
        assert 2 <= num_rows <= spec.block_size, "a block has an anchor and masks, and is trained to a size"
        assert branching > 0
        self._context = context
        self._num_rows, self._branching = num_rows, branching
        self._vocab_size = spec.vocab_size
        self._aux_layers = spec.aux_layers
        self._length = 0  # computed tokens
        self._is_off = False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """See `Drafter`."""
        return self._aux_layers

    def truncate(self, length: int) -> None:
        """See `Drafter` and the class."""
        if length == self._length and not self._is_off:
            return
        self._context.truncate(length)
        self._length, self._is_off = length, False

    def extend(self, token_ids: Listed[int], hidden: Any) -> None:
        """See `Drafter`."""
        self._length += len(token_ids)
        if self._is_off or not token_ids:
            return
        try:
            self._context.append(hidden)
        except ColdstreamError:
            self._is_off = True

    def propose(self, context: Listed[int], budget: int) -> TokenTree:
        """See `Drafter`. NO_DRAFT too for a context that is not one token longer than what was observed."""
        if not self._can_draft_after(context):
            return NO_DRAFT
        num_rows = self._context.spec.rows_of_draft(budget, self._num_rows)
        try:
            lattice = self._context.draft(context[-1], num_rows, self._branching)
        except ColdstreamError:
            self._is_off = True
            return NO_DRAFT
        if not lattice.is_finite:
            self._is_off = True
            return NO_DRAFT
        return build_tree(_source(lattice, context[-1]), budget)

    def _can_draft_after(self, context: Listed[int]) -> bool:
        if self._is_off or len(context) != self._length + 1 or not self._context.has_last:
            return False
        return 0 <= context[-1] < self._vocab_size

    @property
    def has_fused_steps(self) -> bool:
        """Whether the drafter's device runs fused steps."""
        return self._context.has_fused_steps

    def begin_fused(self, context: Listed[int], sequence: Sequence, text: FusedText) -> FusedRun | None:
        """Fused steps after `context`; see `propose` and `DflashContext`. `end_fused` follows unless None.

        Raises DeviceError if they cannot be begun, with `sequence` empty.
        """
        return self._context.begin_fused(sequence, text) if self._can_draft_after(context) else None

    def end_fused(self, num_rows: int, state: Any) -> None:
        """The fused steps have ended after `num_rows` rows, which the model and the context have computed."""
        self._length += num_rows


def _source(lattice: DraftLattice, anchor: int) -> Source:
    if not lattice.is_conditional:
        return marginal_source(lattice.token_ids, lattice.log_probs)
    ranks = [{int(token): rank for rank, token in enumerate(row)} for row in lattice.token_ids]

    def children(depth: int, parent: int) -> Candidates:
        if depth > len(ranks):
            return NO_CANDIDATES
        rank = ranks[depth - 2][parent] if depth > 1 else 0
        log_probs = lattice.log_probs[depth - 1, rank]
        order = np.argsort(-log_probs, kind="stable")
        return lattice.token_ids[depth - 1][order].tolist(), log_probs[order].tolist()

    return conditional_source(children, anchor)
