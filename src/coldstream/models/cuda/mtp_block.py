"""The MTP block of a model in a GPU's memory: weights, caches, and the steps that graphs capture.

It reads the embedding and the head of the trunk that it was loaded beside, and computes in the trunk's
workspace, on its stream. Its experts are all on the device.
"""

from dataclasses import dataclass
from typing import Any, Final, Self

from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray, as_type
from coldstream.kernels.cuda.copy_rows import copy_float_rows_cuda, copy_rows_cuda
from coldstream.kernels.cuda.copy_values import copy_values_cuda
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.ops import MAX_SHORT_CHAIN, Rows, Weight
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.top_log_probs.cuda import SMALL_RANKS
from coldstream.kvcache.cache import CacheSize
from coldstream.kvcache.sequence_cache import SequenceCache
from coldstream.models.cuda.inputs import MAX_DECODE_ROWS, Inputs, StepShape
from coldstream.models.mtp.model import MAX_DRAFT_IDS, MtpModel, MtpOutputs

BRANCHING: Final = SMALL_RANKS  # candidates after a row
SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of captured runs; others have rows of no sequence at their end
MAX_MTP_ROWS = SIZES[-1]  # of a run; more are several runs


@dataclass(frozen=True)
class LoadedMtp:
    """The block in some memory, with what its steps read and write."""

    memory: Memory
    ops: CudaOps
    model: MtpModel
    head: QuantTensor  # of the first MAX_DRAFT_IDS tokens
    sequences: SequenceCache
    inputs: Inputs
    # What the block reads of rows, float32 [.., S]: of the trunk's last step, and before each row of a run.
    trunk_states: Any  # [MAX_DECODE_ROWS, S]; with several residual streams of as many rows as a step has
    states: Any  # [MAX_MTP_ROWS, S]
    outputs: Activations  # [MAX_MTP_ROWS, E], of a run
    last: Activations  # [1, E], the output that candidates follow
    # With several residual streams those of `outputs` and of `last`, [.., S]; otherwise their values.
    output_states: Any
    last_state: Any
    candidates: Any  # int32 [2, BRANCHING]: ids, and log-probabilities as their bits

    @classmethod
    def into(
        cls, ops: CudaOps, model: MtpModel, size: CacheSize, context_length: int, kv_type: str, most_rows: int
    ) -> Self:
        """For sequences of up to `context_length` rows.

        size: of the trunk's caches; most_rows: of its steps.
        """
        spec, memory = model.layer.spec, ops.memory
        hidden_size, state_size = spec.hidden_size, spec.nextn_state_size
        has_streams = state_size != hidden_size
        outputs = ops.activations(MAX_MTP_ROWS, hidden_size, persistent=True)
        last = ops.activations(1, hidden_size, persistent=True)

        def states(num_rows: int) -> Any:
            return memory.persistent((num_rows, state_size), "float32")

        return cls(
            memory,
            ops,
            model,
            first_rows(model.layer.output, MAX_DRAFT_IDS),
            SequenceCache(spec, ops, CacheSize(size.num_blocks, size.num_states), kv_type),
            Inputs.into(ops, MAX_MTP_ROWS, context_length),
            states(most_rows if has_streams else MAX_DECODE_ROWS),
            states(MAX_MTP_ROWS),
            outputs,
            last,
            states(MAX_MTP_ROWS) if has_streams else outputs.values,
            states(1) if has_streams else last.values,
            memory.persistent((2, BRANCHING), "int32"),
        )

    @property
    def has_streams(self) -> bool:
        """Whether it reads several residual streams of a row."""
        return self.last_state is not self.last.values

    def keep_streams(self, last: int, layer: int, x: DeviceArray) -> None:
        """Keeps the streams x after the trunk's last layer, which has the number `last`."""
        if layer == last:
            self.ops.launch(copy_values_cuda, x, self.trunk_states[: len(x)])

    def run_rows(self, shape: StepShape) -> None:
        """Rows of the inputs after `states`, with the results in `outputs`."""
        token_ids, rows = self.inputs.take(shape)
        found = self.compute_rows(token_ids, self.states[: shape.num_rows], rows)
        self.ops.launch(copy_rows_cuda, found.outputs, self.outputs.rows(0, shape.num_rows))
        if self.has_streams:
            self.ops.launch(copy_float_rows_cuda, found.states, self.output_states[: shape.num_rows])

    def compute_rows(self, token_ids: DeviceArray, states: DeviceArray, rows: Rows) -> MtpOutputs:
        """The results of rows after `states`, valid until the next step."""
        self.ops.start_step(rows)
        try:
            return self.model.forward(token_ids, states, rows, self.sequences.tensors)
        finally:
            self.ops.finish_step()

    def follow(self, found: MtpOutputs, row: DeviceArray | None = None) -> None:
        """Makes a row of `found` the one that candidates follow. row: int32 [1], on the device; None: 0."""
        self.ops.launch(copy_rows_cuda, found.outputs, self.last, row)
        if self.has_streams:
            self.ops.launch(copy_float_rows_cuda, found.states, self.last_state, row)

    def follow_run(self, row: int) -> None:
        """Makes a row of the last run the one that candidates follow."""
        states = self.output_states[row : row + 1]
        self.follow(MtpOutputs(self.outputs.rows(row, 1), states))

    def run_head(self) -> None:
        """The likeliest tokens after `last`, into `candidates`."""
        self.memory.start_step()
        self._run_head()

    def run_link(self, shape: StepShape) -> None:
        """Runs one row after `last`, with the likeliest of `candidates` as its token. Then as `run_head`.

        The row replaces `last`.
        """
        token_ids, rows = self.inputs.take(shape)
        self.ops.launch(copy_values_cuda, self.candidates[:1, :1], token_ids.reshape(1, 1))
        self.compute_link(token_ids, rows)

    def compute_link(self, token_ids: DeviceArray, rows: Rows) -> None:
        """Runs a row after `last` and replaces it. Then as `run_head`."""
        self.ops.start_step(rows)
        try:
            found = self.model.forward(token_ids, self.last_state, rows, self.sequences.tensors)
            self.follow(found)
            self._run_head()
        finally:
            self.ops.finish_step()

    def _run_head(self) -> None:
        (logits,) = self.ops.linear(self.last, (self.head,))
        ids, log_probs = self.candidates[:1], as_type(self.candidates[1:], "float32")
        self.ops.top_log_probs_into(logits, ids, log_probs)

    def run_all(self) -> None:
        """Every kind of step, with runs of all sizes: to count memory and find kernels."""
        self.run_head()
        for is_deep in (False, True):
            self.run_link(StepShape(1, is_deep=is_deep))
            for size in SIZES:
                if size <= MAX_MTP_ROWS:
                    self.run_rows(run_shape(size, is_deep=is_deep))


def run_shape(num_rows: int, *, is_deep: bool) -> StepShape:
    """The shape of a run, with the next size that there is a graph for."""
    padded = next(size for size in SIZES if size >= num_rows)
    return StepShape(padded, has_prompts=padded > MAX_SHORT_CHAIN, is_deep=is_deep)


def first_rows(weight: Weight, count: int) -> QuantTensor:
    """A view of at most so many rows."""
    assert isinstance(weight, QuantTensor), "a head is a matrix"
    rows, cols = weight.shape
    return QuantTensor(weight.blocks[:count], weight.quant_type, (min(rows, count), cols))
