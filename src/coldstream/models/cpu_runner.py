"""A model on the CPU: weights mapped, the forward pass captured once and replayed by C++."""

from pathlib import Path
from typing import Self

import numpy as np

from coldstream.errors import host_memory_errors
from coldstream.experts.disk_tier import DiskStatistics, DiskTier
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cpu_ops import CpuOps, RoutingCpuOps
from coldstream.kernels.ops import Rows
from coldstream.kernels.pooled_cpu_ops import PooledCpuOps, UnreadCpuOps
from coldstream.kvcache.cache import ModelCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.ram_budget import RamNeeds, disk_tier_within
from coldstream.models.runner import Array, ModelRunner, Progress
from coldstream.models.spec import ModelSpec
from coldstream.placement.hardware import Hardware
from coldstream.placement.policies import Policy


class CpuRunner(ModelRunner):
    """See `ModelRunner`."""

    # Rows of the captured graph: enough to keep matrix units busy, few enough for activations to stay small.
    chunk_size = 512
    head_rows = 16

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        ops: CpuOps,
        context_length: int,
        kv_type: str,
        disk: DiskTier | None = None,
    ) -> None:
        super().__init__(file, spec, context_length)
        self._ops = ops
        self._disk = disk
        self._model = CausalLM.load(file, spec, ops)
        self._cache = ModelCache(spec, ops, num_slots=1, context_length=context_length, kv_type=kv_type)
        size = self.chunk_size
        self._token_ids = ops.zeros((size,), "int32")
        self._rows = Rows(positions=ops.zeros((size,), "int32"), slots=ops.zeros((size,), "int32"))
        self._trunk = ops.capture(size, lambda: self._model.forward(self._token_ids, self._rows, self._cache))
        self._head_input = ops.zeros((self.head_rows, spec.hidden_size), "float32")
        self._head = ops.capture(self.head_rows, lambda: self._model.logits(self._head_input))

    @classmethod
    @host_memory_errors()
    def open(
        cls,
        path: Path,
        *,
        threads: int,
        tier: str = "auto",
        context_length: int = 4096,
        kv_type: str = "f16",
        record_routing: bool = False,
        ram_bytes: int | None = None,
        policy: Policy | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """`load` of the model at `path`. Raises ModelNotFoundError and ModelFormatError besides."""
        file = GGUFFile.open(path)
        try:
            spec = ModelSpec.from_gguf(file.metadata, file.tensors)
            return cls.load(
                file,
                spec,
                threads=threads,
                tier=tier,
                context_length=context_length,
                kv_type=kv_type,
                record_routing=record_routing,
                ram_bytes=ram_bytes,
                policy=policy,
                progress=progress,
            )
        except BaseException:
            file.close()
            raise

    @classmethod
    @host_memory_errors()
    def load(
        cls,
        file: GGUFFile,
        spec: ModelSpec,
        *,
        threads: int,
        tier: str,
        context_length: int,
        kv_type: str,
        record_routing: bool = False,
        ram_bytes: int | None = None,
        policy: Policy | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Maps the weights of an open file and captures the forward pass; the runner then closes the file.

        context_length positions are reserved (touched only as they fill). With record_routing, `topk_ids` has
        what each step's routers chose. progress is called with (done, total) bytes while the file is read
        ahead. Raises InconsistentError for weights that contradict the format's conventions, UnsupportedError
        for a tier this machine lacks; the file stays open then.

        ram_bytes bounds weights, caches and activations together. If they are more, experts come from the
        disk as they are needed, and `policy` (default: `DecayedFrequency`) says which stay; routing is not
        recorded then. Raises OutOfMemoryError if there is no room for those of one token, or no memory.
        """
        disk = None
        if ram_bytes is not None:
            unread = cls(file, spec, UnreadCpuOps(threads, tier), context_length, kv_type)
            needs = RamNeeds.of(file, spec, unread._cache.num_bytes, unread.activation_bytes)
            disk = disk_tier_within(ram_bytes, needs, file, spec, policy)
        ops: CpuOps
        if disk is not None:
            ops = PooledCpuOps(threads, tier, disk.pool, disk.stacks)
        else:
            ops = RoutingCpuOps(threads, tier) if record_routing else CpuOps(threads, tier)
        runner = cls(file, spec, ops, context_length, kv_type, disk)
        runner._check_file()
        if progress is not None:
            ops.read_ahead(progress, Hardware.measure().ram_available_bytes)
        return runner

    @property
    def reads_file(self) -> bool:
        """Experts and the embedding stay in it."""
        return True

    @property
    def tier(self) -> str:
        """The instruction-set tier that runs."""
        return self._ops.tier

    @property
    def threads(self) -> int:
        """Threads that compute."""
        return self._ops.threads

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._model.warnings

    @property
    def activation_bytes(self) -> int:
        """Memory between the operations of a step."""
        scratch = max(graph.graph.scratch_bytes for graph in (self._trunk, self._head))
        return self._trunk.arena.num_bytes + self._head.arena.num_bytes + scratch

    @property
    def disk(self) -> DiskStatistics | None:
        return self._disk.statistics() if self._disk else None

    def topk_ids(self, count: int) -> Array:
        """Experts of the first `count` rows of the last step: int32 [count, layers, K], a copy.

        Only for a mixture of experts that was loaded with record_routing.
        """
        assert isinstance(self._ops, RoutingCpuOps), "routing is not recorded"
        return np.stack([ids[:count] for ids in self._ops.topk_ids], axis=1)

    def _clear(self) -> None:
        self._cache.reset(0)

    def _compute(self, token_ids: Array, first_position: int) -> None:
        count = len(token_ids)
        self._token_ids[:count] = token_ids
        self._rows.positions[:count] = np.arange(first_position, first_position + count)
        if self._disk is None:
            self._trunk.run(count)
            return
        self._disk.begin_step(count)
        try:
            self._trunk.run(count)
        except BaseException:
            self._disk.forget()
            raise
        self._disk.end_step()

    def _compute_logits(self, first: int, count: int) -> Array:
        self._head_input[:count] = self._trunk.outputs[first : first + count]
        self._head.run(count)
        self._check_file()
        logits: Array = self._head.outputs[:count]
        return logits
