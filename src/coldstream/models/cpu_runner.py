"""A model on the CPU: weights mapped, the forward pass captured once and replayed by C++."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np

from coldstream.errors import host_memory_errors
from coldstream.experts.disk_tier import DiskStatistics, DiskTier
from coldstream.experts.pooled_cpu_ops import PooledCpuOps, UnreadPooledCpuOps
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cpu_ops import CpuOps, RoutingCpuOps, UnreadCpuOps
from coldstream.kvcache.batch import Batch, BatchInputs, BatchLimits, CheckedSegment, check_batch
from coldstream.kvcache.cache import CacheSize
from coldstream.kvcache.sequence import Checkpoint, Sequence
from coldstream.kvcache.sequence_cache import SequenceCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.footprint import dense_bytes
from coldstream.models.ram_budget import RamNeeds, disk_tier_of
from coldstream.models.runner import Array, ModelRunner, Progress
from coldstream.models.spec import ModelSpec
from coldstream.placement.hardware import Hardware
from coldstream.placement.plan import FixedPart, PlanOptions
from coldstream.placement.policies import Policy
from coldstream.placement.run_plan import RunPlan

ALL_BYTES = 2**62  # a budget that bounds nothing


class CpuRunner(ModelRunner):
    """See `ModelRunner`, whose one sequence is among those that `step` takes.

    After an exception from the middle of a step or a commit the sequences that took part are empty.
    """

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
        cache_size: CacheSize | None = None,
    ) -> None:
        super().__init__(file, spec, context_length)
        self._ops = ops
        self._disk = disk
        self._model = CausalLM.load(file, spec, ops)
        # What a cache of slots' memory has, experts have not; without slots unwritten memory is not taken.
        self.cache_size = cache_size or CacheSize.shared(
            spec, context_length, kv_type, is_scarce=disk is not None
        )
        self._sequences = SequenceCache(spec, ops, self.cache_size, kv_type)
        self._cache = self._sequences.tensors
        self._own = self._sequences.new()
        self._limits = BatchLimits(spec.vocab_size, context_length, self.chunk_size)
        self._inputs = inputs = BatchInputs(ops, self._limits)
        self._trunk = ops.capture(
            self.chunk_size, lambda: self._model.forward(inputs.token_ids, inputs.rows, self._cache)
        )
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
        cache_size: CacheSize | None = None,
        attention_window: int | None = None,
    ) -> Self:
        """`load` of the model at `path`, within ram_bytes if they are given, nothing being known of uses.

        Raises ModelNotFoundError, ModelFormatError and OutOfMemoryError besides.
        """
        file = GGUFFile.open(path)
        try:
            spec = ModelSpec.from_gguf(file.metadata, file.tensors).with_window(attention_window)
            needs = cls.needs(file, spec, threads, tier, context_length, kv_type, cache_size=cache_size)
            placement = needs.place(ALL_BYTES if ram_bytes is None else ram_bytes, None, PlanOptions())
            return cls.load(
                file,
                spec,
                RunPlan(placement, threads),
                tier=tier,
                record_routing=record_routing,
                policy=policy,
                progress=progress,
                cache_size=cache_size,
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
        plan: RunPlan,
        *,
        tier: str = "auto",
        record_routing: bool = False,
        policy: Policy | None = None,
        progress: Progress | None = None,
        cache_size: CacheSize | None = None,
    ) -> Self:
        """Does what `plan` says with an open file: maps weights, makes slots for experts and fills them,
        captures the forward pass. The runner then closes the file.

        The plan's context bounds a sequence, and cache_size what all of them hold together (default:
        `CacheSize.shared`); memory is touched only as it fills. tier: of the kernels. With
        record_routing, `topk_ids` has what each step's routers chose, if all experts are mapped. `policy`
        says which experts stay in slots (default: `DecayedFrequency`). progress is called with (done, total)
        while the file is read.

        Raises InconsistentError for weights that contradict the format's conventions, UnsupportedError
        for a tier this machine lacks, OutOfMemoryError; the file stays open then.
        """
        fixed = plan.placement.fixed
        disk = disk_tier_of(plan, file, spec, policy)
        ops: CpuOps
        if disk is not None:
            ops = PooledCpuOps(plan.threads, tier, disk.pool, disk.stacks)
        else:
            ops = RoutingCpuOps(plan.threads, tier) if record_routing else CpuOps(plan.threads, tier)
        runner = cls(file, spec, ops, fixed.ctx_size, fixed.kv_type, disk, cache_size)
        assert runner.chunk_size == fixed.chunk_size, "a plan for this runner has its steps"
        if disk is not None:
            disk.load(plan.loaded, progress)
        runner._check_file()
        if progress is not None:
            ops.read_ahead(progress, Hardware.measure().ram_available_bytes)
        return runner

    @classmethod
    def needs(
        cls,
        file: GGUFFile,
        spec: ModelSpec,
        threads: int,
        tier: str,
        context_length: int,
        kv_type: str,
        kv_token_bytes: int = 0,
        cache_size: CacheSize | None = None,
    ) -> RamNeeds:
        """What the runner would take of RAM, counted by runners that read no weights.

        Raises UnsupportedError for a tier this machine lacks.
        """

        def count(disk: DiskTier | None) -> FixedPart:
            ops: CpuOps = UnreadCpuOps(threads, tier)
            if disk is not None:
                ops = UnreadPooledCpuOps(threads, tier, disk.pool, disk.stacks)
            unread = cls(file, spec, ops, context_length, kv_type, disk, cache_size)
            return FixedPart(
                ctx_size=context_length,
                kv_type=kv_type,
                chunk_size=cls.chunk_size,
                weights=dense_bytes(spec, file.tensors),
                caches=unread._cache.num_bytes,
                workspace=unread.activation_bytes,
            )

        return RamNeeds.of(file, spec, kv_token_bytes, count)

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

    def new_sequence(self) -> Sequence:
        """An empty sequence. It takes no memory before its first step."""
        return self._sequences.new()

    def branch(self, sequence: Sequence) -> Sequence:
        """A sequence of its own with the same tokens; what they share is copied when it is first written to.

        Raises InvalidRequestError, as all methods that take a sequence do, if it has been released or is of
        another runner, and where no tree may be pending if one is.
        """
        return self._sequences.branch(sequence)

    def release(self, sequence: Sequence) -> None:
        """Gives back all that the sequence has; it can't be used afterwards."""
        self._sequences.release(sequence)

    def detach(self) -> Sequence:
        """The runner's one sequence, for `step` and its like; the runner begins another."""
        sequence, self._own = self._own, self._sequences.new()
        self.position = 0
        return sequence

    def attach(self, sequence: Sequence) -> None:
        """Makes `sequence`, of which no tree may be pending, the runner's one, in place of the one it has."""
        self._sequences.check(sequence)
        self._sequences.release(self._own)
        self._own = sequence
        self.position = sequence.length

    def checkpoint(self, sequence: Sequence) -> Checkpoint:
        """What `restore` goes back to. It takes a recurrent state as soon as the sequence goes on."""
        return self._sequences.checkpoint(sequence)

    def restore(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        """Cuts the sequence back to its checkpoint, which stays; those made after it are dropped."""
        self._sequences.restore(sequence, checkpoint)

    def drop(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        """Forgets a checkpoint of the sequence."""
        self._sequences.drop(sequence, checkpoint)

    @host_memory_errors()
    def step(self, batch: Batch) -> tuple[Array, ...]:
        """Computes the rows of a batch. For each segment float32 logits [wanted rows, vocab], its own array.

        Chains are committed, trees wait for `commit`. Raises InvalidRequestError for what cannot be computed
        and OutOfMemoryError for what there is no room for, both before anything changes, and
        ModelChangedError.
        """
        segments = check_batch(batch, self._sequences, self._limits)
        self._check_file()
        self._run(segments)
        with self._whole_or_cleared([segment.sequence for segment in segments]):
            logits = self._wanted_logits(segments)
        for segment in segments:
            if segment.parents is None:
                self._sequences.append(segment.sequence, len(segment.token_ids))
        return logits

    @host_memory_errors()
    def commit(self, sequence: Sequence, rows: Collection[int]) -> None:
        """Keeps a path of the sequence's pending tree, each row the parent of the next, and forgets the rest.

        No rows forget all. Raises InvalidRequestError if rows is no path or no tree is pending, and
        OutOfMemoryError if the sequence shares its recurrent state and there is no room for another; nothing
        has changed then.
        """
        kept = self._sequences.accept(sequence, rows)
        if kept:
            assert sequence.state is not None
            with self._whole_or_cleared([sequence]):
                self._model.replay(kept, sequence.state, self._cache)
        self._sequences.settle(sequence, len(kept))

    def _clear(self) -> None:
        self._sequences.clear(self._own)

    def _compute(self, token_ids: Array, first_position: int) -> None:
        self._run([CheckedSegment.chain(self._own, token_ids)])
        self._sequences.append(self._own, len(token_ids))

    @contextmanager
    def _whole_or_cleared(self, sequences: Collection[Sequence]) -> Iterator[None]:
        """What is interrupted inside leaves empty sequences."""
        try:
            yield
        except BaseException:
            for sequence in sequences:
                self._sequences.clear(sequence)
            raise

    def _run(self, segments: list[CheckedSegment]) -> None:
        """Computes the rows of the segments. Chains are still to be committed."""
        demands = [segment.demand for segment in segments]
        self._sequences.check_room(demands)
        with self._whole_or_cleared([segment.sequence for segment in segments]):
            self._sequences.reserve(demands)
            self._run_trunk(self._inputs.write(segments))

    def _run_trunk(self, count: int) -> None:
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

    def _wanted_logits(self, segments: list[CheckedSegment]) -> tuple[Array, ...]:
        counts = [len(segment.token_ids) for segment in segments]
        starts = np.cumsum(counts) - counts
        rows = np.concatenate([start + each.wanted for start, each in zip(starts, segments, strict=True)])
        logits = np.empty((len(rows), self.spec.vocab_size), np.float32)
        for start in range(0, len(rows), self.head_rows):
            part = rows[start : start + self.head_rows]
            self._head_input[: len(part)] = self._trunk.outputs[part]
            logits[start : start + len(part)] = self._run_head(len(part))
        self._check_file()
        return tuple(np.split(logits, np.cumsum([len(segment.wanted) for segment in segments])[:-1]))

    def _compute_logits(self, first: int, count: int) -> Array:
        self._head_input[:count] = self._trunk.outputs[first : first + count]
        logits = self._run_head(count)
        self._check_file()
        return logits

    def _run_head(self, count: int) -> Array:
        """Logits of the first `count` rows of its input, valid until the next call."""
        self._head.run(count)
        logits: Array = self._head.outputs[:count]
        return logits
