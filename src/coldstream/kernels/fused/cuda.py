"""The decisions of `reference.py` on the device, over memory that a captured fused step reads and writes."""

import ctypes
from pathlib import Path
from typing import Any

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.fused.reference import NUM_COLUMNS, FusedState
from coldstream.kernels.ops import MAX_TREE_ROWS
from coldstream.kernels.sample.admit import MAX_ENDS
from coldstream.kernels.sample.cuda import SETTINGS_WORDS

MAX_FUSED_ROWS = MAX_TREE_ROWS
RESULT_WORDS = 2  # before the tokens of a result: how many there are, and the fault
THREADS = 32
PROGRAM = CudaProgram(
    Path(__file__).with_name("fused.cu"), ("extend_draft", "write_model_rows", "accept_rows")
)


@declared_in("fused/fused.cu", "FusedState")
class DeviceState(ctypes.Structure): ...


@declared_in("fused/fused.cu")
class FusedStep(ctypes.Structure): ...


STATE_WORDS = ctypes.sizeof(DeviceState) // 4


class FusedArrays:
    """Everything that fused steps of up to MAX_FUSED_ROWS rows read and write, int32 in one piece of memory.

    The memory, [`num_values`], is the host's or a device's. In front are the tables of blocks, then what the
    host writes once for a text, `num_written` in all, then what only the device writes.
    """

    def __init__(self, memory: Any, num_blocks: int, *, has_windows: bool = False) -> None:
        """num_blocks: of a sequence, at most. has_windows: whether layers with windows have their own."""
        self._memory, self._end = memory, 0
        self.table, self.block_table = self._next(num_blocks), self._next(num_blocks)
        self.window_table = self._next(num_blocks) if has_windows else None
        self.num_table_values = self._end
        self.state = self._next(STATE_WORDS)
        self.kept, self.sources = self._next(MAX_FUSED_ROWS), self._next(MAX_FUSED_ROWS)
        self.settings = self._next(MAX_FUSED_ROWS * SETTINGS_WORDS).reshape(MAX_FUSED_ROWS, SETTINGS_WORDS)
        self.ends = self._next(MAX_ENDS)
        self.num_written = self._end
        self.model_columns = self._next(NUM_COLUMNS * MAX_FUSED_ROWS)
        self.block_columns = self._next(NUM_COLUMNS * MAX_FUSED_ROWS)
        self.link_columns = self._next(NUM_COLUMNS)
        self.count, self.first = self._next(1), self._next(1)
        self.chosen = self._next(2 * MAX_FUSED_ROWS).reshape(MAX_FUSED_ROWS, 2)
        self.result = self._next(RESULT_WORDS + MAX_FUSED_ROWS)

    @staticmethod
    def num_values(num_blocks: int, *, has_windows: bool = False) -> int:
        """int32 values for sequences of up to `num_blocks` blocks."""
        per_row = 2 + SETTINGS_WORDS + 2 * NUM_COLUMNS + 2 + 1
        single = STATE_WORDS + MAX_ENDS + NUM_COLUMNS + 2 + RESULT_WORDS
        return (2 + has_windows) * num_blocks + per_row * MAX_FUSED_ROWS + single

    @property
    def length(self) -> Any:
        """[1], positions of the model's sequence."""
        return self._of_state(DeviceState.length.offset)

    @property
    def root(self) -> Any:
        """[1], the token that was chosen last."""
        return self._of_state(DeviceState.root.offset)

    @property
    def last_row(self) -> Any:
        """[1], the row that was kept last."""
        return self._of_state(DeviceState.last_row.offset)

    @property
    def state_id(self) -> Any:
        """[1], the recurrent state of the model's sequence."""
        return self._of_state(DeviceState.state_id.offset)

    def _of_state(self, offset: int) -> Any:
        return self.state[offset // 4 : offset // 4 + 1]

    def write_state(self, state: FusedState, state_id: int, block_state_id: int, num_ends: int) -> None:
        """Writes the state before the first fused step; only to memory of the host."""
        values = (state.length, state.block_length, state.left, state.root)
        self.state[:] = (*values, 0, state_id, block_state_id, num_ends)

    def _next(self, count: int) -> Any:
        first, self._end = self._end, self._end + count
        return self._memory[first : self._end]


class FusedKernels:
    """Launches the decisions of fused steps of `num_rows` rows, over arrays on the device.

    candidate: int32 [1], the likeliest token after the last row of the block that was computed; None where
    `extend_draft` is not used.
    """

    def __init__(self, arrays: FusedArrays, num_rows: int, candidate: DeviceArray | None) -> None:
        assert 1 <= num_rows <= MAX_FUSED_ROWS, "a fused step has a root, and no more rows than a tree"
        self._step = FusedStep(
            state=arrays.state.data_ptr(),
            model_rows=arrays.model_columns.data_ptr(),
            block_rows=arrays.block_columns.data_ptr(),
            link_row=arrays.link_columns.data_ptr(),
            kept=arrays.kept.data_ptr(),
            count=arrays.count.data_ptr(),
            first=arrays.first.data_ptr(),
            settings=arrays.settings.data_ptr(),
            chosen=arrays.chosen.data_ptr(),
            ends=arrays.ends.data_ptr(),
            candidate=None if candidate is None else candidate.data_ptr(),
            result=arrays.result.data_ptr(),
            num_rows=num_rows,
        )

    def extend_draft(self, depth: int) -> None:
        """Token number `depth` of the draft, and the link's row after it; see `link_row`."""
        self._launch("extend_draft", depth)

    def write_model_rows(self) -> None:
        """See `model_rows`; the settings of the sampler get the positions of the tokens after them."""
        self._launch("write_model_rows")

    def accept_rows(self) -> None:
        """See `accept` and `block_rows`; the tokens go into `result`, behind their number and the fault."""
        self._launch("accept_rows")

    def _launch(self, kernel: str, *args: int) -> None:
        PROGRAM.kernel(kernel).launch((1, 1, 1), THREADS, (self._step, *args))
