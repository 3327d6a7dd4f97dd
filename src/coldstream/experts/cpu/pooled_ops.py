"""The operations on the CPU for a model whose experts don't fit into memory.

The stacks of routed experts are parts of a pool. It reads experts from the file as routers choose them. All
other operations, and all results, are those of `CpuOps`.
"""

from coldstream.experts.cpu.pooled_stacks import PooledStacks
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import Array, CpuOps, UnreadCpuOps, expert_glu
from coldstream.kernels.ops import ExpertOutputs, ExpertWeights, Routing


class PooledCpuOps(CpuOps):
    """`CpuOps` over `stacks`.

    Their pool needs its slots first, and `ExpertPool.begin_step` before each run of a captured graph.
    """

    def __init__(self, threads: int, tier: str, stacks: PooledStacks) -> None:
        super().__init__(threads, tier)
        self._pool = stacks.pool
        self._stacks = stacks

    def map_weight(self, file: GGUFFile, info: TensorInfo) -> _csrc.Weight:
        return (
            self._stacks.weight(info) if info.name in self._stacks.parts else super().map_weight(file, info)
        )

    def experts(self, x: Array, routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """Missing experts are read while the shared expert and those in memory are computed."""
        _csrc.request_experts(self._runtime, self._pool, weights.gate, routing.ids)
        shared = self.shared_expert(x, weights)
        routed = self.routed_experts(x, routing.ids, weights)
        return ExpertOutputs(routed, shared, routing, bias=weights.down_bias)

    def routed_experts(self, x: Array, topk_ids: Array, weights: ExpertWeights) -> Array:
        out = self._empty(*topk_ids.shape, weights.down.num_rows)
        stacks = weights.gate, weights.up, weights.down
        glu = expert_glu(weights.activation, weights.biases)
        _csrc.pooled_experts(self._runtime, self._pool, x, topk_ids, *stacks, out, glu)
        return out


class UnreadPooledCpuOps(UnreadCpuOps, PooledCpuOps):
    """`UnreadCpuOps` for `PooledCpuOps`, whose pool needs no slots then."""
