"""The end of attention on the GPU: chunks merged by `merge.cu`, or, where rows have one each, `finish.cu`."""

import ctypes
from pathlib import Path

from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, QuantActivations
from coldstream.kernels.attention.arguments import AttentionShape, ChosenWords, DecodeWorkspace
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.indexer.records import ChosenBlocks
from coldstream.kernels.ops import AttentionHeads, AttentionInputs, Rows

MERGE_BATCH = 32  # chunks
BATCH_BYTES = MERGE_BATCH * GROUP_SIZE * 4  # of shared memory
FEWEST_BATCHES, MOST_BATCHES = 2, 6  # in shared memory at once
STATIC_BYTES = 10 << 10  # of shared memory beside them, at most
FINISH_WARPS = 4  # of a block of threads of `finish.cu`
MOST_TOGETHER = 2  # groups of columns that a head is rotated back over
GATE_ALIGNMENT = 4  # elements between rows of gates, unless a head has only one


@declared_in("attention/merge.cuh")
class MergeArguments(ctypes.Structure): ...


def gates_of(inputs: AttentionInputs, heads: AttentionHeads) -> DeviceArray | None:
    """The rows that hold the gates of heads; None without gates."""
    gates: DeviceArray | None = inputs.query_gate if heads.output_gate == "query" else inputs.gate
    return None if heads.output_gate == "none" else gates


class MergeKernels:
    """The kernels for one shape, compiled when first used.

    shared_per_block: bytes of the device's shared memory, at least for a batch.
    """

    def __init__(self, shape: AttentionShape, shared_per_block: int) -> None:
        self.shape = shape
        has_sinks = str(shape.has_sinks).lower()
        parameters = f"{shape.head_dim}, coldstream::OutputGate::{shape.output_gate}, {has_sinks}"
        rotated = shape.head_dim & -shape.head_dim
        self._groups = min(MOST_TOGETHER, max(1, rotated // GROUP_SIZE))  # that a block or a warp takes
        self._most_batches = min(MOST_BATCHES, (shared_per_block - STATIC_BYTES) // BATCH_BYTES)
        self._fewest_batches = min(FEWEST_BATCHES, self._most_batches)
        self._finishing = f"coldstream::attention_finish<{parameters}>"
        self._merging = {
            batches: f"coldstream::attention_merge<{parameters}, {batches}{', true' * shape.has_choice}>"
            for batches in {self._fewest_batches, self._most_batches}
        }
        self.programs = {
            "merge.cu": CudaProgram(Path(__file__).with_name("merge.cu"), tuple(self._merging.values())),
            "finish.cu": CudaProgram(Path(__file__).with_name("finish.cu"), (self._finishing,)),
        }

    def merge(
        self,
        gates: DeviceArray | None,
        heads: AttentionHeads,
        rows: Rows,
        workspace: DecodeWorkspace,
        chosen: ChosenBlocks | None = None,
        *,
        out: DeviceArray | None = None,
        quantised: QuantActivations | None = None,
    ) -> None:
        """Attention of every row, as float32, int8 or both, from what `IntegerKernels.attend` left.

        chosen: see `IntegerQueries`. gates: see `gates_of`; unless a head has only one, their row stride is a
        multiple of 4. Writes out float32 [T, H · D] and quantised (K = H · D, padded to whole groups),
        contiguous.
        """
        shape, num_rows, max_chunks = self.shape, len(rows.positions), workspace.values.shape[2]
        gate_stride = 0 if gates is None else gates.stride(0)
        if shape.output_gate != "head" and gate_stride % GATE_ALIGNMENT:
            raise ValueError(
                f"{gate_stride} elements between rows of gates, not a multiple of {GATE_ALIGNMENT}"
            )
        arguments = MergeArguments(
            values=workspace.values.data_ptr(),
            stats=workspace.stats.data_ptr(),
            positions=rows.positions.data_ptr(),
            num_rows=num_rows,
            gate_stride=gate_stride,
            num_heads=shape.num_heads,
            max_chunks=max_chunks,
            window=heads.window or 0,
            chosen=ChosenWords.of(chosen),
        )
        for name, array in (("gates", gates), ("sinks", heads.sinks), ("out", out)):
            if array is not None:
                setattr(arguments, name, array.data_ptr())
        if quantised is not None:
            arguments.codes, arguments.scales = quantised.q.data_ptr(), quantised.scales.data_ptr()
            arguments.sums = quantised.sums.data_ptr()
        items = -(-shape.num_heads * shape.head_dim // (self._groups * GROUP_SIZE))
        if max_chunks == 1:
            self.programs["finish.cu"].kernel(self._finishing).launch(
                (-(-num_rows * items // FINISH_WARPS), 1, 1), 32 * FINISH_WARPS, (arguments,), overlap=True
            )
            return
        # More batches hide the latency of a long row's chunks, in the room of a second block of threads.
        is_short = max_chunks <= self._fewest_batches * MERGE_BATCH
        batches = self._fewest_batches if is_short else self._most_batches
        # All groups' batches but the last are whole.
        chunks = (
            max_chunks if self._groups == 1 else self._groups * -(-max_chunks // MERGE_BATCH) * MERGE_BATCH
        )
        self.programs["merge.cu"].kernel(self._merging[batches]).launch(
            (items, num_rows, 1),
            GROUP_SIZE,
            (arguments,),
            shared_bytes=min(chunks * GROUP_SIZE * 4, batches * BATCH_BYTES),
            overlap=True,
        )
