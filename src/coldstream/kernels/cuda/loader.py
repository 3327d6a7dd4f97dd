"""Weights and caches in device memory: the part of `Ops` that loads.

Over a `MemoryPlan` nothing is read but small tensors, and nothing is allocated. Large tensors are queued and
copied together by `finish_loading`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.cuda.memory import Memory, MemoryPlan
from coldstream.kernels.cuda.upload import Progress, Upload, run_uploads
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.gathered_rows import read_rows
from coldstream.kernels.quant_tensor import QuantTensor

DTYPES = {"float32": torch.float32, "int32": torch.int32, "int8": torch.int8, "uint8": torch.uint8}


CudaWeight = QuantTensor | ExpertTable


class CudaLoader:
    """See `Ops` for the methods."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.planning = isinstance(memory, MemoryPlan)
        self._uploads: list[Upload] = []
        self._on_host = CpuOps(threads=1)  # for small tensors

    def finish_loading(self, progress: Progress | None) -> None:
        """Copies all queued weights. Raises ModelChangedError if the file ends early."""
        uploads, self._uploads = self._uploads, []
        run_uploads(uploads, progress)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return self.memory.persistent(shape, DTYPES[dtype]).zero_()

    def int_vector(self, values: Sequence[int]) -> torch.Tensor:
        return self._copied(torch.tensor(values, dtype=torch.int32))

    def load_weight(self, file: GGUFFile, info: TensorInfo) -> CudaWeight:
        blocks = self.memory.persistent((info.num_bytes,), torch.uint8)
        if not self.planning:
            self._uploads.append(Upload(file, info, blocks))
        if len(info.shape) == 3:
            return self.stack(blocks, info.quant_type, info.shape)
        return QuantTensor.from_bytes(blocks, info.quant_type, info.shape)

    def load_rows(self, file: GGUFFile, info: TensorInfo, row_ids: Sequence[int]) -> QuantTensor:
        shape = (len(row_ids), info.shape[1])
        num_bytes = len(row_ids) * info.quant_type.row_bytes(info.shape[1])
        blocks = self.memory.persistent((num_bytes,), torch.uint8)
        if not self.planning:
            blocks.copy_(torch.from_numpy(read_rows(file, info, row_ids)))
        return QuantTensor.from_bytes(blocks, info.quant_type, shape)

    def load_float_weight(self, file: GGUFFile, info: TensorInfo) -> QuantTensor:
        """As F32, the only type that its kernel reads."""
        if self.planning:
            values = self.memory.persistent(info.shape, torch.float32)
        else:
            values = self.float_array(self.read_values(file, info))
        return QuantTensor.from_bytes(values.view(torch.uint8), QuantType.F32, info.shape)

    def read_values(self, file: GGUFFile, info: TensorInfo) -> np.ndarray[Any, Any]:
        return self._on_host.read_values(file, info)

    def float_array(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return self._copied(torch.from_numpy(values))

    def split_rows(self, weight: CudaWeight, sizes: Sequence[int]) -> tuple[CudaWeight, ...]:
        if isinstance(weight, QuantTensor):
            return weight.split_rows(sizes)
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self._part(weight, *part) for part in zip(begins, sizes, strict=True))

    def _part(self, table: ExpertTable, begin: int, size: int) -> ExpertTable:
        """Rows begin … begin + size − 1 of every expert; in partial tables all addresses are still 0."""
        if table.is_partial:
            addresses = torch.zeros(table.addresses.shape, dtype=torch.int64)
        else:
            addresses = table.addresses + begin * table.quant_type.row_bytes(table.cols)
        return table.part(begin, size, self._copied(addresses))

    def stack(self, blocks: torch.Tensor, quant_type: QuantType, shape: Sequence[int]) -> ExpertTable:
        """The experts [experts, rows, cols] in contiguous `blocks`, which the caller keeps alive."""
        num_experts, rows, cols = shape
        first = 0 if self.planning else blocks.data_ptr()
        addresses = torch.arange(num_experts, dtype=torch.int64) * (rows * quant_type.row_bytes(cols)) + first
        return ExpertTable(self._copied(addresses), quant_type, rows, cols)

    def _copied(self, values: torch.Tensor) -> torch.Tensor:
        copy = self.memory.persistent(tuple(values.shape), values.dtype)
        return copy if self.planning else copy.copy_(values)
