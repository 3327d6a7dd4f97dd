"""Weights and caches in device memory: the part of `Ops` that loads.

Over a `MemoryPlan` nothing is read but small tensors, once for all plans, and nothing is allocated. Large
tensors are queued and copied together by `finish_loading`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.cuda.array import DeviceArray, HostArray, PlannedArray, as_type
from coldstream.kernels.cuda.contents import clear, write
from coldstream.kernels.cuda.memory import Memory, MemoryPlan, aligned
from coldstream.kernels.cuda.runtime import allocations
from coldstream.kernels.cuda.upload import Progress, Upload, run_uploads
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.gathered_rows import read_rows
from coldstream.kernels.quant_tensor import QuantTensor

CudaWeight = QuantTensor | ExpertTable


class CudaLoader:
    """See `Ops` for the methods.

    has_host_tables: whether tables, of which a token reads a row, are in page-locked RAM. table_bytes: what
    they take in either memory.
    """

    def __init__(self, memory: Memory, *, has_host_tables: bool = False) -> None:
        self.memory = memory
        self.has_host_tables = has_host_tables
        self.table_bytes = 0
        self.planning = isinstance(memory, MemoryPlan)
        self._uploads: list[Upload] = []

    def finish_loading(self, progress: Progress | None) -> None:
        """Copies all queued weights. Raises ModelChangedError if the file ends early."""
        uploads, self._uploads = self._uploads, []
        run_uploads(uploads, progress)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        array = self.memory.persistent(shape, dtype)
        clear(array)
        return array

    def int_vector(self, values: Sequence[int]) -> DeviceArray:
        return self._copied(np.array(values, np.int32))

    def load_weight(self, file: GGUFFile, info: TensorInfo) -> CudaWeight:
        blocks = self.memory.persistent((info.num_bytes,), "uint8")
        if not self.planning:
            self._uploads.append(Upload(file, info, blocks))
        if len(info.shape) == 3:
            return self.stack(blocks, info.quant_type, info.shape)
        return QuantTensor.from_bytes(blocks, info.quant_type, info.shape)

    def load_table(self, file: GGUFFile, info: TensorInfo) -> QuantTensor:
        """A matrix of which a token reads a row. Queued as all large tensors are."""
        self.table_bytes += aligned(info.num_bytes)
        shape = (info.num_bytes,)
        blocks: DeviceArray
        if not self.has_host_tables:
            blocks = self.memory.persistent(shape, "uint8")
        elif self.planning:
            blocks = PlannedArray(0, shape, "uint8")
        else:
            blocks = HostArray.of(allocations.page_locked(shape, "uint8"))
        if not self.planning:
            self._uploads.append(Upload(file, info, blocks))
        return QuantTensor.from_bytes(blocks, info.quant_type, info.shape)

    def load_rows(self, file: GGUFFile, info: TensorInfo, row_ids: Sequence[int]) -> QuantTensor:
        shape = (len(row_ids), info.shape[1])
        num_bytes = len(row_ids) * info.quant_type.row_bytes(info.shape[1])
        blocks = self.memory.persistent((num_bytes,), "uint8")
        if not self.planning:
            write(blocks, read_rows(file, info, row_ids))
        return QuantTensor.from_bytes(blocks, info.quant_type, shape)

    def load_float_weight(
        self, file: GGUFFile, info: TensorInfo, scales: np.ndarray[Any, Any] | None = None
    ) -> QuantTensor:
        """As F32, the only type that its kernel reads."""
        if self.planning:
            values = self.memory.persistent(info.shape, "float32")
        else:
            read = self.read_values(file, info)
            values = self.float_array(read if scales is None else read * scales)
        return QuantTensor.from_bytes(as_type(values, "uint8"), QuantType.F32, info.shape)

    def read_values(self, file: GGUFFile, info: TensorInfo) -> np.ndarray[Any, Any]:
        if info.quant_type is QuantType.F32:
            data = file.read_kept(info) if self.planning else file.read(info)
            return data.view(np.float32).reshape(info.shape)
        # Not kept: a runtime of the CPU's kernels must not outlive the interpreter, as a model may.
        return CpuOps(threads=1).read_values(file, info)

    def float_array(self, values: np.ndarray[Any, Any]) -> DeviceArray:
        return self._copied(values)

    def split_rows(self, weight: CudaWeight, sizes: Sequence[int]) -> tuple[CudaWeight, ...]:
        if isinstance(weight, QuantTensor):
            return weight.split_rows(sizes)
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self._part(weight, *part) for part in zip(begins, sizes, strict=True))

    def _part(self, table: ExpertTable, begin: int, size: int) -> ExpertTable:
        """Rows begin … begin + size − 1 of every expert; in partial tables all addresses are still 0."""
        if table.is_partial:
            addresses = np.zeros(table.addresses.shape, np.int64)
        else:
            first = table.first + begin * table.quant_type.row_bytes(table.cols)
            addresses = first + table.step * np.arange(len(table.addresses), dtype=np.int64)
        return table.part(begin, size, self._copied(addresses))

    def stack(self, blocks: DeviceArray, quant_type: QuantType, shape: Sequence[int]) -> ExpertTable:
        """The experts [experts, rows, cols] in contiguous `blocks`, which the caller keeps alive."""
        num_experts, rows, cols = shape
        first = 0 if self.planning else blocks.data_ptr()
        step = rows * quant_type.row_bytes(cols)
        addresses = first + step * np.arange(num_experts, dtype=np.int64)
        return ExpertTable(self._copied(addresses), quant_type, rows, cols, step=step, first=first)

    def _copied(self, values: np.ndarray[Any, Any]) -> DeviceArray:
        copy = self.memory.persistent(values.shape, values.dtype.name)
        write(copy, values)
        return copy
