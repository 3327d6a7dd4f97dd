"""Rounds that a model's block for multi-token prediction drafts; see `fused_draft.py`."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from coldstream import kvcache
from coldstream.kernels.ops import MAX_SHORT_CHAIN
from coldstream.kernels.rounds.cuda import MAX_ROUND_ROWS, RoundArrays, RoundKernels
from coldstream.kernels.rounds.reference import NUM_COLUMNS
from coldstream.kvcache.sequence_cache import Demand, SequenceCache
from coldstream.models.cuda.fused_draft import RoundShape, shaped_rows
from coldstream.models.cuda.inputs import StepShape
from coldstream.models.whole_or_cleared import WholeOrCleared

if TYPE_CHECKING:
    from coldstream.models.cuda.mtp import LoadedMtp


class MtpRoundBlock:
    """Implements `RoundBlock`: a chain of the block's likeliest tokens."""

    most_nodes = MAX_ROUND_ROWS - 1

    def __init__(self, mtp: "LoadedMtp") -> None:
        self._mtp = mtp

    @property
    def candidate(self) -> torch.Tensor:
        """See `RoundBlock`."""
        return self._mtp.candidates[0, :1]

    def draft(self, kernels: RoundKernels, arrays: RoundArrays, shape: RoundShape) -> None:
        """See `RoundBlock`. It begins after the block's last output."""
        step = StepShape(1, is_deep=shape.is_deep)
        columns = arrays.link_columns.view(NUM_COLUMNS, 1)
        self._mtp.run_head()
        kernels.extend_draft(0)
        for depth in range(1, shape.num_rows - 1):
            self._mtp.compute_link(*shaped_rows(columns, arrays.block_table, step))
            kernels.extend_draft(depth)

    def follow(self, arrays: RoundArrays, shape: RoundShape) -> None:
        """See `RoundBlock`."""
        mtp, num_rows = self._mtp, shape.num_rows
        columns = arrays.block_columns[: NUM_COLUMNS * num_rows].view(NUM_COLUMNS, num_rows)
        step = StepShape(num_rows, has_prompts=num_rows > MAX_SHORT_CHAIN, is_deep=shape.is_deep)
        token_ids, rows = shaped_rows(columns, arrays.block_table, step)
        mtp.follow(mtp.compute_rows(token_ids, mtp.trunk_states[:num_rows], rows), arrays.last_row)

    def state_of(self, row: int) -> torch.Tensor | None:
        """See `RoundBlock`."""
        return self._mtp.trunk_states[row].clone()


class MtpRoundRows:
    """Implements `RoundRows`. The last row is the text's root, which the block computed last."""

    def __init__(self, cache: SequenceCache, rows: kvcache.Sequence) -> None:
        self._cache, self._rows = cache, rows

    @property
    def length(self) -> int:
        """See `RoundRows`."""
        return self._rows.length

    @property
    def state_id(self) -> int:
        """See `RoundRows`."""
        assert self._rows.state is not None
        return self._rows.state

    def reserve(self, num_rows: int) -> None:
        """See `RoundRows`."""
        demand = Demand(self._rows, num_rows)
        self._cache.check_room([demand])
        self._cache.reserve([demand])

    def lengthen(self, num_rows: int) -> bool:
        """See `RoundRows`."""
        return self._cache.lengthen(self._rows, num_rows)

    def write_table(self, table: Any) -> None:
        """See `RoundRows`."""
        table[: len(self._rows.blocks)] = self._rows.blocks

    def keep(self, num_rows: int) -> None:
        """See `RoundRows`."""
        self._cache.append(self._rows, num_rows)
        self._cache.cut(self._rows, self._rows.length)

    def whole_or_cleared(self) -> AbstractContextManager[None]:
        """See `RoundRows`."""
        return WholeOrCleared(self._cache, [self._rows])
