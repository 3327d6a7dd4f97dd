"""An MTP block on a GPU: it drafts a chain without the host between its steps.

It reads the embedding and the head of the trunk that it was loaded beside, and computes in the trunk's
workspace, on its stream. Its experts are all on the device.
"""

from collections.abc import Callable, Generator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import torch

from coldstream import kvcache
from coldstream.errors import OutOfMemoryError
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.copy_rows import copy_rows_cuda
from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.ops import MAX_SHORT_CHAIN, SHORT_CONTEXT, Rows, Weight
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.rounds.reference import RoundText
from coldstream.kernels.top_log_probs.cuda import FEW_RANKS
from coldstream.kvcache.batch import CheckedSegment
from coldstream.kvcache.cache import CacheSize
from coldstream.kvcache.sequence_cache import SequenceCache
from coldstream.models.cuda.fused_draft import CudaRounds, TextRounds
from coldstream.models.cuda.graphs import CapturedSteps
from coldstream.models.cuda.inputs import MAX_DECODE_ROWS, Inputs, StepShape
from coldstream.models.cuda.mtp_rounds import MtpRoundBlock, MtpRoundRows
from coldstream.models.mtp.model import MtpModel

if TYPE_CHECKING:
    from coldstream.models.cuda.loaded_model import Loaded

BRANCHING: Final = FEW_RANKS  # candidates after a row
SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of captured runs; others have rows of no sequence at their end
MAX_MTP_ROWS = SIZES[-1]  # of a run; more are several runs
TokenIds = np.ndarray[tuple[int], np.dtype[np.int32]]
# Candidates are among the first ids, as a head of 248,320 rows takes longer to read than the block. Byte
# pairs were merged in the order of how often they occur, so that the first ids are those of most text.
MAX_DRAFT_IDS = 2**16
MAX_CHAIN = 64  # steps of a chain, whose candidates reach the host together


@dataclass(frozen=True)
class LoadedMtp:
    """The block in some memory, with what its steps read and write."""

    memory: Memory
    ops: CudaOps
    model: MtpModel
    head: QuantTensor  # of the first MAX_DRAFT_IDS tokens
    sequences: SequenceCache
    inputs: Inputs
    trunk_states: torch.Tensor  # float32 [MAX_DECODE_ROWS, E], of the rows of the trunk's last step
    states: torch.Tensor  # float32 [MAX_MTP_ROWS, E], before each row of a run
    outputs: Activations  # [MAX_MTP_ROWS, E], of a run
    last: Activations  # [1, E], the output that candidates follow
    candidates: torch.Tensor  # int32 [2, BRANCHING]: ids, and log-probabilities as their bits

    @classmethod
    def into(
        cls, memory: Memory, ops: CudaOps, model: MtpModel, size: CacheSize, context_length: int, kv_type: str
    ) -> Self:
        """For sequences of up to `context_length` rows; size: of the trunk's caches."""
        hidden_size = model.layer.spec.hidden_size
        return cls(
            memory,
            ops,
            model,
            first_rows(model.layer.output, MAX_DRAFT_IDS),
            SequenceCache(model.layer.spec, ops, CacheSize(size.num_blocks, size.num_states), kv_type),
            Inputs.into(ops, MAX_MTP_ROWS, context_length),
            memory.persistent((MAX_DECODE_ROWS, hidden_size), torch.float32),
            memory.persistent((MAX_MTP_ROWS, hidden_size), torch.float32),
            ops.activations(MAX_MTP_ROWS, hidden_size, persistent=True),
            ops.activations(1, hidden_size, persistent=True),
            memory.persistent((2, BRANCHING), torch.int32),
        )

    def run_rows(self, shape: StepShape) -> None:
        """Rows of the inputs after `states`, with the results in `outputs`."""
        token_ids, rows = self.inputs.take(shape)
        found = self.compute_rows(token_ids, self.states[: shape.num_rows], rows)
        self.ops.launch(copy_rows_cuda, found, self.outputs.rows(0, shape.num_rows))

    def compute_rows(self, token_ids: torch.Tensor, states: torch.Tensor, rows: Rows) -> Activations:
        """The results of rows after `states`, valid until the next step."""
        self.ops.start_step(rows)
        try:
            found: Activations = self.model.forward(token_ids, states, rows, self.sequences.tensors)
            return found
        finally:
            self.ops.finish_step()

    def follow(self, outputs: Activations, row: torch.Tensor) -> None:
        """Makes a row of `outputs` the one that candidates follow; row: int32 [1], on the device."""
        self.ops.launch(copy_rows_cuda, outputs, self.last, row)

    def run_head(self) -> None:
        """The likeliest tokens after `last`, into `candidates`."""
        self.memory.start_step()
        self._run_head()

    def run_link(self, shape: StepShape) -> None:
        """The likeliest of `candidates` as the token of the inputs' only row after `last`, which is replaced;
        then as `run_head`.
        """
        token_ids, rows = self.inputs.take(shape)
        token_ids.copy_(self.candidates[0, :1])
        self.compute_link(token_ids, rows)

    def compute_link(self, token_ids: torch.Tensor, rows: Rows) -> None:
        """A row after `last`, which is replaced; then as `run_head`."""
        self.ops.start_step(rows)
        try:
            found = self.model.forward(token_ids, self.last.values, rows, self.sequences.tensors)
            self.ops.launch(copy_rows_cuda, found, self.last)
            self._run_head()
        finally:
            self.ops.finish_step()

    def _run_head(self) -> None:
        (logits,) = self.ops.linear(self.last, (self.head,))
        ids, log_probs = self.candidates[:1], self.candidates[1:].view(torch.float32)
        self.ops.top_log_probs_into(logits, ids, log_probs)

    def run_all(self) -> None:
        """Every kind of step, with runs of all sizes: to count memory and find kernels."""
        self.run_head()
        for is_deep in (False, True):
            self.run_link(StepShape(1, is_deep=is_deep))
            for size in SIZES:
                if size <= MAX_MTP_ROWS:
                    self.run_rows(_shape_of(size, is_deep=is_deep))


def _shape_of(num_rows: int, *, is_deep: bool) -> StepShape:
    """The shape of a run, with the next size that there is a graph for."""
    padded = next(size for size in SIZES if size >= num_rows)
    return StepShape(padded, has_prompts=padded > MAX_SHORT_CHAIN, is_deep=is_deep)


def first_rows(weight: Weight, count: int) -> QuantTensor:
    """A view of at most so many rows."""
    assert isinstance(weight, QuantTensor), "a head is a matrix"
    rows, cols = weight.shape
    return QuantTensor(weight.blocks[:count], weight.quant_type, (min(rows, count), cols))


class CudaMtp:
    """The block of a runner, whose memory and captured steps it uses.

    begin: called before each step of the block, which writes over the outputs of the runner's last step.
    make_room: as `CapturedSteps.run` has it.
    """

    def __init__(
        self,
        loaded: "Loaded",
        context_length: int,
        steps: CapturedSteps,
        begin: Callable[[], None],
        make_room: Callable[[], bool],
    ) -> None:
        assert loaded.mtp is not None, "the runner was loaded with its block"
        self.context_length = context_length
        self._loaded, self._steps = loaded.mtp, steps
        self.rounds = None
        if loaded.rounds is not None:
            self.rounds = CudaRounds(loaded, MtpRoundBlock(loaded.mtp), steps, begin, make_room)
        self._begin, self._make_room = begin, make_room
        self._found = torch.zeros((MAX_CHAIN, 2, BRANCHING), dtype=torch.int32, pin_memory=True)

    def new_sequence(self) -> "CudaMtpSequence":
        """An empty sequence. It takes no memory before its first row."""
        return CudaMtpSequence(self, self._loaded.sequences.new())

    def append(
        self, sequence: kvcache.Sequence, token_ids: Several[int], states: Several[torch.Tensor]
    ) -> None:
        """See `CudaMtpSequence.append`."""
        loaded, first = self._loaded, sequence.length
        try:
            with device_errors():
                for start in range(0, len(token_ids), MAX_MTP_ROWS):
                    part = slice(start, start + MAX_MTP_ROWS)
                    count = len(token_ids[part])
                    torch.stack(list(states[part]), out=loaded.states[:count])
                    self._run_rows(sequence, token_ids[part])
                    loaded.sequences.append(sequence, count)
                loaded.ops.launch(copy_rows_cuda, loaded.outputs.rows(count - 1, 1), loaded.last)
        except BaseException:
            # Only keys and values behind the end have changed.
            loaded.sequences.cut(sequence, first)
            raise

    def draft(self, sequence: kvcache.Sequence, num_steps: int) -> list[tuple[list[int], list[float]]]:
        """See `CudaMtpSequence.chain`."""
        loaded, first = self._loaded, sequence.length
        try:
            with device_errors():
                self._run("mtp head", None, loaded.run_head)
                self._found[0].copy_(loaded.candidates, non_blocking=True)
                for step in range(1, num_steps):
                    shape = self._write(sequence, np.zeros(1, np.int32))
                    self._run("mtp link", shape, partial(loaded.run_link, shape))
                    loaded.sequences.append(sequence, 1)
                    self._found[step].copy_(loaded.candidates, non_blocking=True)
                torch.cuda.current_stream().synchronize()
        finally:
            loaded.sequences.cut(sequence, first)
        found = self._found[:num_steps]
        token_ids, log_probs = found[:, 0].tolist(), found[:, 1].view(torch.float32).tolist()
        return list(zip(token_ids, log_probs, strict=True))

    def round_rows(self, sequence: kvcache.Sequence) -> MtpRoundRows:
        """Its rows, for rounds."""
        return MtpRoundRows(self._loaded.sequences, sequence)

    def cut(self, sequence: kvcache.Sequence, length: int) -> None:
        """See `CudaMtpSequence.cut`."""
        self._loaded.sequences.cut(sequence, length)
        if length == 0:
            self._loaded.sequences.clear(sequence)

    def _run_rows(self, sequence: kvcache.Sequence, token_ids: Several[int]) -> None:
        shape = self._write(sequence, np.array(token_ids, np.int32))
        self._run("mtp rows", shape, partial(self._loaded.run_rows, shape))

    def _write(
        self, sequence: kvcache.Sequence, token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> StepShape:
        """Queues the inputs of rows that follow the sequence's, for which memory is reserved."""
        sequences, inputs = self._loaded.sequences, self._loaded.inputs
        segment = CheckedSegment.chain(sequence, token_ids, np.arange(0))
        sequences.check_room([segment.demand])
        sequences.reserve([segment.demand])
        end = sequence.length + len(token_ids)
        shape = _shape_of(len(token_ids), is_deep=end > SHORT_CONTEXT)
        arrays = inputs.on_host(shape.num_rows)
        arrays.pad(arrays.write([segment]))
        inputs.copy(shape.num_rows)
        return shape

    def _run(self, kind: str, shape: object, step: Callable[[], None]) -> None:
        self._begin()
        self._steps.run((kind, shape), step, lambda nothing: nothing, self._make_room)


class CudaMtpSequence:
    """Rows of one sequence; it gives its memory back once it is cut to none."""

    def __init__(self, block: CudaMtp, sequence: kvcache.Sequence) -> None:
        self._block, self._sequence = block, sequence

    @property
    def length(self) -> int:
        """Rows so far."""
        return self._sequence.length

    @property
    def room(self) -> int:
        """Rows that may follow."""
        return self._block.context_length - self.length

    def keep(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Copies of hidden states [rows, E], one for each row, on the device."""
        return list(hidden.clone().unbind())

    def append(self, token_ids: Several[int], states: Several[torch.Tensor]) -> None:
        """Appends at least one row and at most `room`: each a token and the state before it, float32 [E].

        Raises DeviceError and OutOfMemoryError, with no row appended. States that are not finite show in the
        candidates.
        """
        assert 0 < len(token_ids) == len(states), "a row is a token and a hidden state"
        if len(token_ids) > self.room:
            raise OutOfMemoryError(
                f"{len(token_ids)} rows of a draft, but {self.room} fit into the context: try a larger "
                "--ctx-size"
            )
        self._block.append(self._sequence, token_ids, states)

    def chain(self, num_steps: int) -> Generator[tuple[list[int], list[float]], None, None]:
        """Candidates after the last row, then after the best of them, and so on; directly after `append`.

        At most num_steps times, while there is room, all computed when the first is asked for;
        log-probabilities are NaN if a logit is not finite. Raises as `append`.
        """
        yield from self._block.draft(self._sequence, min(num_steps, 1 + self.room, MAX_CHAIN))

    @property
    def runs_rounds(self) -> bool:
        """Whether there are rounds: if all of the model's experts are on the device."""
        return self._block.rounds is not None

    def begin_rounds(self, sequence: kvcache.Sequence, text: RoundText) -> TextRounds | None:
        """Rounds after the last row, which is the text's root; directly after `append`. See
        `CudaRounds.start`. The rows that they keep are in the block afterwards.
        """
        rounds = self._block.rounds
        return (
            None if rounds is None else rounds.start(sequence, self._block.round_rows(self._sequence), text)
        )

    def cut(self, length: int) -> None:
        """Forgets all rows but the first `length`. Raises InvalidRequestError if there are fewer."""
        self._block.cut(self._sequence, length)
