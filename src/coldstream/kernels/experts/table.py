"""Experts as GPU kernels see them: addresses."""

from dataclasses import dataclass, replace
from typing import Any

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.array import DeviceArray


@dataclass(frozen=True)
class ExpertTable:
    """One matrix of every routed expert: their addresses, and their common type and shape.

    addresses: int64 [num_experts] on the device; 0 for an expert that is not in its memory. Each points to
    `rows` adjacent GGUF rows of `cols` values, at a multiple of the type's alignment.

    step: the bytes from one expert to the next. first: the address of expert 0, if all are on the device.

    If `is_partial`, the host has all experts too: host is the stack for the CPU's kernels (`_csrc.Weight`;
    None while memory is only planned), source the address at which expert 0 of it is mapped, mapped that at
    which the device reads expert 0 over the bus (0: it cannot). pooled: int64 [num_experts] on the device, if
    the host's are in a pool: where the device reads each of them (0: it cannot).
    """

    addresses: DeviceArray
    quant_type: QuantType
    rows: int
    cols: int
    is_partial: bool = False
    host: Any = None
    mapped: int = 0
    step: int = 0
    source: int = 0
    first: int = 0
    pooled: DeviceArray | None = None

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one expert."""
        return self.rows * self.quant_type.row_bytes(self.cols)

    def part(self, begin: int, size: int, addresses: DeviceArray) -> "ExpertTable":
        """Rows begin … begin + size − 1 of every expert, whose addresses are in `addresses`."""
        offset = begin * self.quant_type.row_bytes(self.cols)
        return replace(
            self,
            addresses=addresses,
            rows=size,
            host=None if self.host is None else self.host.rows(begin, begin + size),
            mapped=self.mapped + offset if self.mapped else 0,
            source=self.source + offset if self.source else 0,
            first=self.first + offset if self.first else 0,
        )
