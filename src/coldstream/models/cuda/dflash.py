"""Drafts by a DFlash drafter beside a model on a GPU: one captured graph each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coldstream import kvcache
from coldstream.errors import ColdstreamError
from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.cuda.program import loading_kernels
from coldstream.kernels.cuda.staged import ReadBack, StagedRing
from coldstream.kernels.rounds.reference import RoundText
from coldstream.models.cuda.dflash_block import DflashBlock, kernels_of
from coldstream.models.cuda.dflash_rings import DflashRings
from coldstream.models.cuda.dflash_rounds import DflashRoundBlock, DflashRoundRows
from coldstream.models.cuda.dflash_weights import DflashMatrices
from coldstream.models.cuda.features import FEATURE_TYPE
from coldstream.models.cuda.fused_draft import CudaRounds, TextRounds
from coldstream.models.cuda.graphs import CapturedSteps
from coldstream.models.cuda.loaded_model import Loaded
from coldstream.models.dflash.context import CommittedRows
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.lattice import DraftLattice
from coldstream.models.dflash.model import MOST_WAITING, torch_errors
from coldstream.models.dflash.spec import DflashSpec

LENGTH, ROOT, NUM_PLACES = 0, 1, 2  # of what the host writes before a draft


class CudaDflash:
    """The drafter of a runner, whose memory and captured steps it uses.

    begin, make_room: as `CudaMtp` has them.
    """

    def __init__(
        self,
        loaded: Loaded,
        file: DflashFile,
        steps: CapturedSteps,
        begin: Callable[[], None],
        make_room: Callable[[], bool],
    ) -> None:
        """The file may be closed afterwards. Raises ModelChangedError if the file shrank, OutOfMemoryError,
        DeviceError.
        """
        self._loaded, self._steps = loaded, steps
        self._begin, self._make_room = begin, make_room
        self.device = loaded.hidden.values.device
        with device_errors(), torch_errors("loading a drafter"):
            with loading_kernels(kernels_of(file.spec)):
                matrices = DflashMatrices.read(file, self.device)
            self.block = DflashBlock(loaded, matrices, file.spec)
            places = torch.zeros(NUM_PLACES, dtype=torch.int32, device=self.device)
            self._staged, self._found = StagedRing(places), ReadBack(self.block.found)
        self._table: torch.Tensor | None = None  # of the contexts that the block reads
        self.rounds = None
        if loaded.rounds is not None and loaded.features is not None:
            block = DflashRoundBlock(self.block, loaded.features)
            self.rounds = CudaRounds(loaded, block, steps, begin, make_room)

    def new_sequence(self) -> "CudaDflashSequence":
        """An empty sequence. It takes no memory before its first row."""
        return CudaDflashSequence(self)

    def use(self, rings: DflashRings) -> None:
        """Makes the block read these contexts, with what is queued from now on."""
        if self._table is not rings.table:
            self.block.contexts.copy_(rings.table)
            self._table = rings.table

    def draft(self, rings: DflashRings, length: int, root: int, num_rows: int) -> tuple[Any, Any]:
        """Candidates of num_rows − 1 positions and their log-probabilities, on the host until the next draft.

        Raises DeviceError, OutOfMemoryError.
        """
        with device_errors():
            self.use(rings)
            self._staged.next_on_host()[:] = (length, root)
            self._staged.copy(NUM_PLACES)
            places = self._staged.values
            step = partial(self.block.draft, num_rows, places[ROOT : ROOT + 1], places[LENGTH : LENGTH + 1])
            self._begin()
            self._steps.run(("dflash", (self, num_rows)), step, lambda nothing: nothing, self._make_room)
            found = self._found.copy()
            torch.cuda.current_stream().synchronize()
        count, ids = num_rows - 1, self.block.candidate_ids
        log_probs = found[ids.numel() :].view(np.float32).reshape(self.block.log_probs.shape)
        return found[: ids.numel()].reshape(ids.shape)[:count], log_probs[:count]


class CudaDflashSequence(CommittedRows[DflashRings]):
    """The context of one sequence. Raises OutOfMemoryError, GenerationFault and DeviceError."""

    def __init__(self, drafting: CudaDflash) -> None:
        spec = drafting.block.spec
        self._rings = DflashRings(spec, drafting.device, FEATURE_TYPE)
        super().__init__((self._rings,), MOST_WAITING)
        self._drafting = drafting

    @property
    def spec(self) -> DflashSpec:
        return self._drafting.block.spec

    def _copied(self, features: Any) -> torch.Tensor:
        with torch_errors("the context of a drafter"):
            return torch.as_tensor(features).to(self._drafting.device, FEATURE_TYPE, copy=True)

    def _joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _compute(self, parts: list[torch.Tensor], positions: NDArray[np.int64]) -> None:
        first, count = int(positions[0]), len(positions)
        with device_errors(), torch_errors("the context of a drafter"):
            self._rings.make_room(first + count)
            self._drafting.block.append(self._joined(parts), self._rings.table, first)
        self._rings.appended(first, count)

    @property
    def runs_rounds(self) -> bool:
        """Whether there are rounds: if all of the model's experts are on the device."""
        return self._drafting.rounds is not None

    def begin_rounds(self, sequence: kvcache.Sequence, text: RoundText) -> TextRounds | None:
        """Rounds of a text of which all rows but the root's are here; see `CudaRounds.start`. The rows that
        they keep are here afterwards. None too if rows that wait cannot be computed, which then are missing.
        """
        rounds = self._drafting.rounds
        if rounds is None or sequence.length != self.length:
            return None
        try:
            self._compute_waiting()
        except ColdstreamError:
            return None
        return rounds.start(sequence, DflashRoundRows(self), text)

    def make_room(self, length: int) -> None:
        """For rows up to position `length`."""
        with torch_errors("the context of a drafter"):
            self._rings.make_room(length)

    def use(self) -> None:
        """See `CudaDflash.use`."""
        self._drafting.use(self._rings)

    def computed(self, num_rows: int) -> None:
        """So many rows have been put behind the last one, none of which waits."""
        self._rings.appended(self.length, num_rows)
        self.length += num_rows

    def draft(self, anchor: int, num_rows: int, num_candidates: int) -> DraftLattice:
        """See `dflash.model.DflashSequence.draft`; the first kind has at most MAX_CANDIDATES."""
        assert 2 <= num_rows <= self.spec.block_size, "a block has an anchor and masks"
        self._compute_waiting()
        with torch_errors("a draft"):
            found = self._drafting.draft(self._rings, self.length, anchor, num_rows)
        token_ids, log_probs = found[0].astype(np.int64), found[1].astype(np.float64)
        if self.spec.second is None:
            return DraftLattice(token_ids[:, :num_candidates], log_probs[:, :num_candidates])
        return DraftLattice(token_ids, log_probs)
