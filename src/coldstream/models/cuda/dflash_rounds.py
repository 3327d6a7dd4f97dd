"""Rounds that a DFlash drafter drafts; see `fused_draft.py`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from coldstream.kernels.draft_block.cuda import choose_chain_cuda
from coldstream.kernels.rounds.cuda import RoundArrays, RoundKernels
from coldstream.models.cuda.features import Features
from coldstream.models.cuda.fused_draft import RoundShape

if TYPE_CHECKING:
    from coldstream.models.cuda.dflash import CudaDflashSequence
    from coldstream.models.cuda.dflash_block import DflashBlock


class DflashRoundBlock:
    """Implements `RoundBlock`: the likeliest chain of the candidates of a block."""

    candidate = None  # a draft is whole at once

    def __init__(self, block: "DflashBlock", features: Features) -> None:
        """features: of the model's last step."""
        self._block, self._features = block, features

    @property
    def most_nodes(self) -> int:
        """See `RoundBlock`."""
        return self._block.spec.block_size - 1

    def draft(self, kernels: RoundKernels, arrays: RoundArrays, shape: RoundShape) -> None:
        """See `RoundBlock`."""
        block, num_nodes = self._block, shape.num_rows - 1
        num_rows = block.spec.rows_of_draft(num_nodes, block.spec.block_size)
        block.draft(num_rows, arrays.root, arrays.length)
        choose_chain_cuda(
            block.candidate_ids[: num_rows - 1],
            block.log_probs[: num_rows - 1],
            arrays.model_columns[1 : 1 + num_nodes],
        )

    def follow(self, arrays: RoundArrays, shape: RoundShape) -> None:
        """See `RoundBlock`."""
        features = self._features.of(slice(shape.num_rows))
        self._block.append(features, self._block.contexts, arrays.first, arrays.count)

    def state_of(self, row: int) -> torch.Tensor | None:
        """See `RoundBlock`: none is wanted."""


class DflashRoundRows:
    """Implements `RoundRows`: the context of a sequence, which has all of its rows."""

    state_id = 0  # the block finds its rows otherwise

    def __init__(self, sequence: "CudaDflashSequence") -> None:
        self._sequence = sequence

    @property
    def length(self) -> int:
        """See `RoundRows`."""
        return self._sequence.length

    def reserve(self, num_rows: int) -> None:
        """See `RoundRows`."""
        self.lengthen(num_rows)

    def lengthen(self, num_rows: int) -> bool:
        """See `RoundRows`. The table that rounds read is exchanged behind those in flight."""
        self._sequence.make_room(self.length + num_rows)
        self._sequence.use()
        return False

    def write_table(self, table: Any) -> None:
        """See `RoundRows`: there is nothing to write."""

    def keep(self, num_rows: int) -> None:
        """See `RoundRows`."""
        self._sequence.computed(num_rows)

    @contextmanager
    def whole_or_cleared(self) -> Iterator[None]:
        """See `RoundRows`."""
        try:
            yield
        except BaseException:
            self._sequence.cut(0)
            raise
