"""A model on the CPU: weights mapped, the forward pass captured once and replayed by C++."""

from collections.abc import Collection
from typing import Self

import numpy as np

from coldstream.errors import host_memory_errors
from coldstream.experts.cpu.disk_tier import DiskStatistics, DiskTier
from coldstream.experts.cpu.pooled_ops import PooledCpuOps, UnreadPooledCpuOps
from coldstream.experts.expert_map import ExpertMap, ExpertUses
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cpu_ops import CpuOps, RoutingCpuOps, UnreadCpuOps, UnreadRoutingCpuOps
from coldstream.kernels.ngram.table import check_ngrams
from coldstream.kernels.ops import MAX_TREE_ROWS
from coldstream.kvcache.batch import BatchArrays, BatchLimits, BatchSize, CheckedSegment, PathArrays
from coldstream.kvcache.cache import CacheSize, num_blocks_of
from coldstream.kvcache.sequence_cache import AcceptedPath, SequenceCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.cpu.dflash import CpuDflash
from coldstream.models.cpu.mtp import BRANCHING, CpuMtp
from coldstream.models.dflash.file import DflashFile
from coldstream.models.expert_stacks import disk_tier_of
from coldstream.models.footprint import dense_bytes, ngram_cache_bytes
from coldstream.models.runner import Array, ModelRunner, Progress
from coldstream.models.runner_capacity import RunnerCapacity
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.hardware import Hardware
from coldstream.placement.plan import FixedPart
from coldstream.placement.policies import Policy
from coldstream.placement.run_plan import RunPlan

_HEAD_ROWS = 16  # of a call of the head; more where memory is plentiful and logits take little of it
_MOST_HEAD_ROWS, _HEAD_LOGITS = 64, 1 << 22


class CpuRunner(ModelRunner):
    """See `ModelRunner`."""

    # Rows of the captured graph: enough to keep matrix units busy, few enough for activations to stay small.
    chunk_size = 512
    gives_hidden = True

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        ops: CpuOps,
        context_length: int,
        kv_type: str,
        disk: DiskTier | None = None,
        cache_size: CacheSize | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        """cache_size: None for one that suits the memory, without draft trees. aux_layers: see `features`."""
        spec = spec.for_context(context_length)
        super().__init__(file, spec, context_length)
        assert all(0 <= layer < spec.num_layers for layer in aux_layers), "they are layers of the trunk"
        self.aux_layers = aux_layers
        self._ops = ops
        self._disk = disk
        self._kv_type = kv_type
        self._model = CausalLM.load(file, spec, ops)
        # With slots, the cache takes memory from experts; without, memory is used only once it is written.
        self.cache_size = cache_size or CacheSize.shared(
            spec, context_length, kv_type, is_scarce=disk is not None, num_rows=self.chunk_size
        )
        self._sequences = SequenceCache(spec, ops, self.cache_size, kv_type, self.chunk_size)
        caches, num_blocks = self._sequences.tensors, num_blocks_of(context_length)
        self._limits = BatchLimits(spec.vocab_size, context_length, self.chunk_size, self.chunk_size)
        has_windows = caches.has_windows
        size = BatchSize(self.chunk_size, self.chunk_size, num_blocks, has_windows)
        self._inputs = inputs = BatchArrays(ops.zeros((size.num_values,), "int32"), size)
        num_values = PathArrays.num_values(num_blocks, has_windows=has_windows)
        self._path = PathArrays(ops.zeros((num_values,), "int32"), num_blocks, has_windows=has_windows)
        self._streams: dict[int, Array] = {}  # residual streams [chunk_size, E] by layer

        # With several streams the MTP block reads those before the last mixture.
        self._gives_streams = spec.drafts_by_mtp and spec.hyper_connections is not None

        def keep_stream(layer: int, x: Array) -> None:
            if layer in aux_layers or (self._gives_streams and layer == spec.num_layers - 1):
                self._streams[layer] = x

        self._trunk = ops.capture(
            self.chunk_size, lambda: self._model.forward(inputs.token_ids, inputs.rows, caches, keep_stream)
        )
        self._uses: ExpertUses | None = None
        if spec.is_moe and disk is None:
            self._uses = ExpertUses(len(spec.placed_layers), spec.num_experts)
        self._committed = None
        if self.cache_size.num_tree_rows:
            self._committed = ops.capture(MAX_TREE_ROWS, lambda: self._model.commit(self._path.path, caches))
        self.head_rows = _HEAD_ROWS
        if disk is None:
            self.head_rows = min(max(_HEAD_LOGITS // spec.vocab_size, _HEAD_ROWS), _MOST_HEAD_ROWS)
        self._head_input = ops.zeros((self.head_rows, spec.hidden_size), "float32")
        self._head = ops.capture(self.head_rows, lambda: self._model.logits(self._head_input))

    @classmethod
    @host_memory_errors()
    def load(
        cls,
        file: GGUFFile,
        spec: ModelSpec,
        plan: RunPlan,
        *,
        tier: str = "auto",
        policy: Policy | None = None,
        progress: Progress | None = None,
        cache_size: CacheSize | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> Self:
        """Carries out `plan` on an open file: maps weights, fills slots with experts, captures the forward
        pass.

        The runner then closes the file. The plan's context bounds a sequence. cache_size bounds what all
        sequences hold together. By default it is the plan's, one context of positions. Memory is touched only
        as it fills.

        tier: of the kernels. policy: says which experts stay in slots, by default `DecayedFrequency`.
        progress is called with (done, total) while the file is read. aux_layers: layers after which
        `features` has the residual stream.

        Raises InconsistentError for weights that contradict the format's conventions, UnsupportedError for a
        tier that this machine lacks, and OutOfMemoryError. The file stays open then.
        """
        fixed = plan.placement.fixed
        spec = spec.with_window(plan.attention_window)
        disk = disk_tier_of(plan, file, spec, policy)
        ops: CpuOps
        if disk is not None:
            ops = PooledCpuOps(plan.threads, tier, disk.stacks)
        else:
            ops = RoutingCpuOps(plan.threads, tier)
        cache_size = cache_size or CacheSize.planned(fixed)
        runner = cls(file, spec, ops, fixed.ctx_size, fixed.kv_type, disk, cache_size, aux_layers=aux_layers)
        assert runner.chunk_size == fixed.chunk_size, "a plan for this runner has its steps"
        if disk is not None:
            disk.load(plan.loaded, progress)
        runner.check_file()
        if progress is not None:
            ops.read_ahead(progress, Hardware.measure().ram_available_bytes)
        return runner

    @classmethod
    def count_memory(
        cls,
        file: GGUFFile,
        spec: ModelSpec,
        threads: int,
        tier: str,
        capacity: RunnerCapacity,
        disk: DiskTier | None = None,
    ) -> FixedPart:
        """The RAM that the runner and its drafter would take beside experts. No weights are read.

        disk: a tier for experts in slots. None: all experts are mapped. Raises UnsupportedError for a tier of
        kernels that this machine lacks.
        """
        ops: CpuOps = UnreadRoutingCpuOps(threads, tier)
        if disk is not None:
            ops = UnreadPooledCpuOps(threads, tier, disk.stacks)
        draft, ctx_size = capacity.draft, capacity.ctx_size
        unread = cls(
            file,
            spec,
            ops,
            ctx_size,
            capacity.kv_type,
            disk,
            capacity.cache_size,
            aux_layers=draft.aux_layers,
        )
        drafter = draft.drafter_bytes
        if draft.has_mtp:
            drafter = unread._mtp(UnreadCpuOps.beside(ops), BRANCHING).num_bytes
        host_ngrams = ngram_cache_bytes(spec, file.tensors)
        return FixedPart(
            ctx_size=ctx_size,
            kv_type=capacity.kv_type,
            chunk_size=cls.chunk_size,
            weights=dense_bytes(spec, file.tensors) + host_ngrams,
            caches=unread._sequences.tensors.num_bytes,
            workspace=unread.activation_bytes,
            num_sequences=unread.cache_size.num_states,
            num_tree_rows=unread.cache_size.num_tree_rows,
            num_window_blocks=unread.cache_size.num_window_blocks,
            window_caches=unread.cache_size.window_bytes(unread.spec, capacity.kv_type),
            drafter=drafter,
            host_ngrams=host_ngrams,
        )

    @property
    def reads_file(self) -> bool:
        """True: experts and the embedding stay in the file."""
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
        graphs = [graph for graph in (self._trunk, self._head, self._committed) if graph is not None]
        scratch = max(graph.graph.scratch_bytes for graph in graphs)
        return sum(graph.arena.num_bytes for graph in graphs) + scratch

    @property
    def disk(self) -> DiskStatistics | None:
        return self._disk.statistics() if self._disk else None

    @host_memory_errors()
    def load_mtp(self, branching: int = BRANCHING) -> CpuMtp:
        """Loads the MTP block of the file, with as much room for sequences as this runner has.

        branching: candidates after each row. The block has to be given up before the runner is closed. Raises
        UnsupportedError if the file has no such block, InconsistentError, ModelChangedError and
        OutOfMemoryError.
        """
        mtp = self._mtp(CpuOps.beside(self._ops), branching)
        self.check_file()
        return mtp

    @host_memory_errors()
    def load_dflash(self, file: DflashFile) -> CpuDflash:
        """Loads a drafter, whose file may be closed afterwards.

        It has to be given up before the runner is closed. Raises UnsupportedError for a type of weights that
        no kernel multiplies, ModelChangedError and OutOfMemoryError.
        """
        model, spec = self._model, self.spec
        return CpuDflash(
            file,
            CpuOps.beside(self._ops),
            model.token_embd,
            model.output,
            embedding_scale=spec.embedding_scale,
            logit_softcap=spec.logit_softcap,
        )

    def _mtp(self, ops: CpuOps, branching: int) -> CpuMtp:
        size = CacheSize(self.cache_size.num_blocks, self.cache_size.num_states)
        return CpuMtp(self.file, self._model, ops, self.context_length, self._kv_type, size, branching)

    def topk_ids(self, count: int) -> Array:
        """Experts of the first `count` rows of the last step: int32 [count, layers, K], a copy.

        Only for a mixture of experts of which all are mapped.
        """
        assert isinstance(self._ops, RoutingCpuOps), "routing is not recorded"
        return np.stack([ids[:count] for ids in self._ops.topk_ids], axis=1)

    def expert_map(self) -> ExpertMap | None:
        """Of all experts; None for a model without any."""
        if self._disk is not None:
            return self._disk.expert_map(self.spec.placed_layers)
        return None if self._uses is None else ExpertMap.of(self.spec.placed_layers, self._uses, None)

    def _launch(self, segments: Collection[CheckedSegment]) -> None:
        self._sequences.reserve([segment.demand for segment in segments])
        self._run_trunk(self._inputs.write(segments))

    def _run_trunk(self, count: int) -> None:
        if self._disk is None:
            self._trunk.run(count)
            self._check_ngrams()
            if self._uses is not None and count <= MAX_TREE_ROWS:  # more rows are those of prompts
                assert isinstance(self._ops, RoutingCpuOps), "mapped experts are chosen by ops that keep ids"
                ids = np.concatenate([each[:count] for each in self._ops.topk_ids])
                self._uses.observe_ids(ids.reshape(len(self.spec.placed_layers), -1))
            return
        self._disk.begin_step(count)
        try:
            self._trunk.run(count)
            self._check_ngrams()
            self._disk.end_step()
        except BaseException:
            self._disk.forget()
            raise

    def _check_ngrams(self) -> None:
        """Raises as `check_ngrams`."""
        for table in self._ops.ngram_tables:
            check_ngrams(table, self.file)

    def _logits_of(self, rows: Array) -> Array:
        logits = np.empty((len(rows), self.spec.vocab_size), np.float32)
        for start in range(0, len(rows), self.head_rows):
            part = rows[start : start + self.head_rows]
            self._head_input[: len(part)] = self._trunk.outputs[part]
            self._head.run(len(part))
            logits[start : start + len(part)] = self._head.outputs[: len(part)]
        self.check_file()
        return logits

    def _hidden_of(self, rows: Array | slice) -> Array:
        last = self.spec.num_layers - 1
        hidden: Array = self._streams[last][rows] if self._gives_streams else self._trunk.outputs[rows]
        return hidden

    def _features_of(self, rows: Array | slice) -> Array:
        return np.concatenate([self._streams[layer][rows] for layer in self.aux_layers], axis=1)

    def _commit(self, path: AcceptedPath) -> None:
        assert self._committed is not None, "a cache without rows of trees has none to commit"
        self._path.write(path)
        self._committed.run(len(path.rows))
