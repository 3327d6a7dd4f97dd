"""Files of experts for the tests of the pool that reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from cpu_cases import Output

from coldstream.kernels import _csrc
from coldstream.kernels.quant_tensor import QuantTensor

Experts = tuple[QuantTensor, QuantTensor, QuantTensor]
GAP = 4096 + 32  # bytes of 255 around each stack: no layer begins on a page


@dataclass
class ExpertFile:
    """Layers of experts at awkward places of a file, and a pool over it that has no slots yet."""

    path: Path
    layers: Sequence[Experts]
    num_threads: int = 3
    parts: list[list[tuple[int, int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        data = bytearray(b"\xff" * GAP)
        for experts in self.layers:
            self.parts.append([])
            for stack in experts:
                content = stack.blocks.numpy().tobytes()
                self.parts[-1].append((0, len(data), len(content) // stack.shape[0]))
                data += content + b"\xff" * (GAP + 32 * len(self.parts))
        self.path.write_bytes(data)

    @property
    def num_experts(self) -> int:
        return self.layers[0][0].shape[0]

    def pool(self, num_slots: int | None = None, num_staging: int = 2) -> _csrc.ExpertPool:
        """With `num_slots` of each size."""
        with self.path.open("rb") as file:
            files = [(file.fileno(), self.path.name)]
            pool = _csrc.ExpertPool(files, self.parts, self.num_experts, self.num_threads)
        if num_slots is not None:
            pool.allocate([num_slots] * len(pool.slot_bytes), num_staging)
        return pool

    def weights(self, pool: _csrc.ExpertPool, layer: int) -> list[_csrc.Weight]:
        return [
            _csrc.Weight.from_pool(pool, layer, part, int(stack.quant_type), *stack.shape[1:])
            for part, stack in enumerate(self.layers[layer])
        ]

    def run(
        self, runtime: _csrc.Runtime, pool: _csrc.ExpertPool, layer: int, x: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """The experts of one layer in the step that has begun."""
        gate, up, down = self.weights(pool, layer)
        out = Output(*ids.shape, self.layers[layer][2].shape[1])
        _csrc.request_experts(runtime, pool, gate, ids)
        _csrc.pooled_experts(runtime, pool, x, ids, gate, up, down, out.rows)
        return out.checked()


def owners(pool: _csrc.ExpertPool) -> list[int]:
    """Owners of all slots, without free ones."""
    found = [int(o) for c in range(len(pool.slot_bytes)) for o in pool.owners(c) if o >= 0]
    assert len(found) == len(set(found)), "an expert has two slots"
    return found
