"""Runs a model on one GPU. Steps of up to a few thousand rows are captured as CUDA graphs."""

from collections.abc import Collection, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self
from weakref import WeakSet

import numpy as np

from coldstream.errors import ColdstreamError, OutOfMemoryError
from coldstream.experts.cpu.disk_tier import DiskStatistics
from coldstream.experts.cpu.pooled_stacks import PooledStacks
from coldstream.experts.dense_layers import PartialLayers
from coldstream.experts.expert_map import ExpertMap
from coldstream.experts.file_lock import FileLock
from coldstream.experts.gpu_statistics import ExpertTimes, GpuExpertStatistics
from coldstream.experts.partial_experts import PartialExperts
from coldstream.experts.prefill import StreamCounters
from coldstream.experts.ram_pool import RamPool
from coldstream.experts.slots.cache import ExpertCache
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import RawArray, unowned
from coldstream.kernels.cuda.compiler import default_cache
from coldstream.kernels.cuda.device import device_errors, find_gpu
from coldstream.kernels.cuda.kernel_loading import KernelLoading
from coldstream.kernels.cuda.memory import DeviceMemory
from coldstream.kernels.cuda.runtime import allocations, calls, copies, streams
from coldstream.kernels.experts.executor import ExecutorFactory
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, Mailbox
from coldstream.kernels.ngram.reader import NgramReader
from coldstream.kernels.ops import SHORT_CONTEXT
from coldstream.kvcache.batch import BatchLimits, CheckedSegment
from coldstream.kvcache.cache import CacheSize
from coldstream.kvcache.sequence import Sequence
from coldstream.kvcache.sequence_cache import AcceptedPath, WholeOrCleared
from coldstream.models.cuda.capacity import HEAD_ROWS, mailbox_ranks
from coldstream.models.cuda.dflash import CudaDflash
from coldstream.models.cuda.graphs import CapturedSteps
from coldstream.models.cuda.inputs import MAX_DECODE_ROWS, MAX_SEGMENTS, StepShape
from coldstream.models.cuda.kept_counts import kept_count
from coldstream.models.cuda.limits import SMALLEST_PADDED_ROWS, Limits
from coldstream.models.cuda.loaded_model import Loaded
from coldstream.models.cuda.logits import OnDevice, StepLogits, StepOutputs
from coldstream.models.cuda.memory_plan import check_supported, check_types, kernels_of, plan_memory
from coldstream.models.cuda.mtp import CudaMtp
from coldstream.models.dflash.file import DflashFile
from coldstream.models.expert_stacks import expert_stacks, shards_of_experts
from coldstream.models.runner import Array, ModelRunner, MtpBlock, Progress
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.controls import Controls
from coldstream.placement.policies import Policy
from coldstream.placement.run_file import Observed
from coldstream.placement.run_plan import RunPlan

PartialModel = PartialExperts | PartialLayers  # the work around steps of a GPU that lacks a part


class CudaRunner(ModelRunner):
    """See `ModelRunner`. Logits are on the device, valid until the next step.

    If not all experts are resident and another program has taken the device's free memory, a step that needs
    some takes it from slots of experts.
    """

    head_rows = HEAD_ROWS

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        plan: RunPlan,
        limits: Limits,
        policy: Policy | None,
        executor: ExecutorFactory | None,
        progress: Progress | None,
        compiling: Progress | None,
        lock: FileLock | None,
        is_early: bool,
        first_rows: int | None,
    ) -> None:
        spec = spec.for_context(limits.context_length)
        super().__init__(file, spec, limits.context_length)
        self.gpu = find_gpu()
        self.limits, self.cache_size = limits, limits.cache_size
        check_supported(spec)
        check_types(file.tensors)
        self.chunk_size = plan.placement.fixed.chunk_size
        self._limits = BatchLimits(spec.vocab_size, limits.context_length, self.chunk_size, MAX_SEGMENTS)
        self._partial: PartialModel | None = None
        self._ngrams: NgramReader | None = None
        self._in_flight: list[tuple[int, tuple[Sequence, ...]]] = []  # running steps' numbers and sequences
        self._steps = CapturedSteps(is_early=is_early)
        self._outputs = StepOutputs(spec.nextn_state_size if limits.has_mtp else spec.hidden_size)
        self.gives_hidden, self.aux_layers = limits.has_mtp, limits.aux_layers
        self._num_steps, self._can_make_room = 0, False
        self._memory: DeviceMemory | None = None
        self._drafters = WeakSet[CudaDflash]()  # which have memory of their own
        self._lock: FileLock | None = None
        self._first_token: int | None = None  # number of the first step that some rows were wanted of
        try:
            with device_errors():
                shards = _mapped_shards(plan, file, spec)
                # Whether the first token comes before the lock of the file, beside which every call waits.
                has_late_lock = is_early and lock is None and spec.is_moe and bool(shards)
                self._steps.is_put_off = has_late_lock and plan.card is None
                self._lock = lock or FileLock(file, shards, is_late=self._steps.is_put_off)
                self._begin_rest = self._lock.begin
                with ThreadPoolExecutor(1) as beside:
                    allocated = beside.submit(self._allocate_on_host, plan, shards)
                    kernels = kernels_of(file, spec, limits, self.chunk_size, first_rows)
                    self._kernels = KernelLoading(*kernels.groups)  # beside all that follows
                    count = kept_count if is_early else None
                    self.plan = plan_memory(file, spec, limits, self.gpu.free_bytes, self.chunk_size, count)
                    allocated.result()
                self._load(executor, progress)
                self._kernels.wait_for_first(compiling)
                self._warnings = (*self._loaded.model.warnings, *filter(None, [default_cache().problem]))
                if not is_early:
                    self._run_first_steps()
                if self._partial_experts:
                    self._partial_experts.reserve(policy)
                    if not self._steps.is_put_off:
                        self._partial_experts.fill(progress)
        except BaseException:
            self._release()
            raise

    def _allocate_on_host(self, plan: RunPlan, shards: frozenset[int]) -> None:
        """Page-locked memory, for which the operating system takes long, without the interpreter's lock."""
        assert self._lock is not None, "a lock is begun, or will be"
        if self.limits.expert_bytes is not None:
            self._partial = _partial_model(plan, self.file, self.spec)
            self._partial.host.use_lock(self.file, shards, self._lock)
        self._host_logits = allocations.page_locked((HEAD_ROWS, self.spec.vocab_size), "float32")

    def _load(self, executor_factory: ExecutorFactory | None, progress: Progress | None) -> None:
        """Allocates all device memory and copies the weights, without a kernel of this package."""
        memory = self._memory = DeviceMemory(self.plan.weights + self.plan.caches, self.plan.workspace)
        host = self._partial.host if self._partial else None
        sizes = (self.file, self.spec, self.limits, self.chunk_size)
        self._loaded = Loaded.into(memory, *sizes, host=host, own=executor_factory)
        self._sequences, self._ngrams = self._loaded.sequences, self._loaded.ops.ngram_reader
        self._limits = replace(self._limits, num_chosen=self._loaded.sampler.num_results)
        self._loaded.ops.finish_loading(progress)
        if self._partial:
            self._partial.attach(self._loaded.ops.model_executor)
            if self._partial_experts:
                self._partial_experts.load_card(progress)
            if not self._steps.is_put_off:
                self._connect(self._partial)
        self.file.check_unchanged()  # or the copied weights may be of two versions

    def _connect(self, partial: PartialModel) -> None:
        """Lets later steps read the mapped file. Waits until it is locked. Raises as the locking does."""
        partial.connect()
        self.limits = replace(self.limits, shared_rows=partial.shared_rows)

    def _load_the_rest(self, partial: PartialExperts, rows: int) -> None:
        """What was put off in favour of the first token, before a step of `rows` rows.

        When that token is there, a step waits until the file is locked and slots are filled. So does one of
        more rows than the CPU is asked for.
        """
        first = self._first_token
        has_first = first is not None and all(step > first for step, _ in self._in_flight)
        if has_first or rows > MAX_MAILBOX_ROWS or partial.host.is_locked:
            self._settle()
            with device_errors():
                self._connect(partial)
                self._steps.is_put_off = False
                partial.fill()

    def _run_first_steps(self) -> None:
        """Runs the first step of each kind, which is slow, with rows of no sequence."""
        prompt = StepShape.prompt(MAX_MAILBOX_ROWS + 1 if self._partial else SMALLEST_PADDED_ROWS)
        for shape, compute in ((StepShape(1), self._computed_logits), (prompt, self._loaded.step)):
            self._loaded.inputs.on_host(shape.num_rows).pad(0)
            self._loaded.inputs.copy(shape.num_rows)
            self._start_step(shape)
            compute(shape)
            self._ended()

    def _ended(self, event: streams.Event | None = None, step: int | None = None) -> None:
        """Waits for the current stream. Sequences whose rows could not be computed become empty.

        event: what to wait for, behind step number `step`. Work that is queued after it goes on.
        """
        (event or streams.current_stream()).synchronize()
        known, last = self._in_flight, self._num_steps if step is None else step
        self._in_flight = [each for each in known if each[0] > last]
        if self._partial or self._ngrams:
            with WholeOrCleared(self._sequences, [sequence for _, of_step in known for sequence in of_step]):
                if self._ngrams:
                    self._ngrams.ended(len(self._in_flight))
                if self._partial:
                    self._partial.ended(len(self._in_flight))
                self.check_file()

    @classmethod
    def load(
        cls,
        file: GGUFFile,
        spec: ModelSpec,
        plan: RunPlan,
        *,
        policy: Policy | None = None,
        executor: ExecutorFactory | None = None,
        cache_size: CacheSize | None = None,
        progress: Progress | None = None,
        compiling: Progress | None = None,
        aux_layers: tuple[int, ...] = (),
        lock: FileLock | None = None,
        is_early: bool = False,
        first_rows: int | None = None,
    ) -> Self:
        """Carries out `plan` on an open file: copies weights to the current device, fills slots with experts.

        Kernels of long steps are compiled beside the first ones, until `finish_loading`. The runner then
        closes the file. The plan's context bounds a sequence. cache_size bounds what all
        sequences hold together. By default it is the plan's, one context of positions.

        policy, executor: None for the defaults. compiling is called with (done, total) compilations, progress
        with (done, total) bytes. aux_layers: layers after which `features` has the residual stream. lock: of
        all parts of the file with experts, if it was begun before; the caller closes it in the end. is_early:
        whether the first step of a kind may be the caller's, which is slow. first_rows: of a first prompt,
        about, whose kernels are compiled before others; None: no prompt is known.

        Raises DeviceError without a usable GPU, and OutOfMemoryError if the plan doesn't fit, before anything
        is copied. Raises UnsupportedError for sizes and types without kernels, and InconsistentError for
        weights that contradict the format's conventions. The file stays open then.
        """
        limits = Limits.of(plan, spec, cache_size, aux_layers)
        spec = spec.with_window(plan.attention_window)
        shown = (progress, compiling)
        return cls(file, spec, plan, limits, policy, executor, *shown, lock, is_early, first_rows)

    def close(self) -> None:
        """Frees the device's memory and closes the file. The runner cannot be used afterwards."""
        super().close()
        self._release()

    def _release(self) -> None:
        """Frees the device's memory, also if loading failed half-way."""
        if self._kernels is not None:
            self._kernels.close()
        self._outputs.forget()
        self._in_flight.clear()
        if "_sequences" in self.__dict__:
            self._sequences.close()
        self._steps.clear()
        if self._partial:
            calls.synchronize()
            self._partial.close()
            self._partial = None
        if self._ngrams:
            calls.synchronize()
            self._ngrams.close()
            self._ngrams = None
        if self._lock is not None:
            self._lock.close()
        # Drafters, whom a closed model may still have, hold what was loaded.
        for drafter in self._drafters:
            drafter.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        for name in ("_loaded", "_host_logits"):
            self.__dict__.pop(name, None)
        with suppress(ColdstreamError):  # of a device that has failed, or of a forked child
            allocations.trim()

    @property
    def reads_file(self) -> bool:
        """True if some experts are not on the device, or n-grams of tokens are in the file."""
        return self._partial is not None or self._ngrams is not None

    @property
    def _partial_experts(self) -> PartialExperts | None:
        """None if the device holds all experts, or the model has none."""
        return self._partial if isinstance(self._partial, PartialExperts) else None

    @property
    def tier(self) -> str:
        return "cuda"

    @property
    def threads(self) -> int:
        """The thread that launches, and the threads that compute experts."""
        return 1 + (self._partial.host.ops.threads if self._partial else 0)

    @property
    def disk(self) -> DiskStatistics | None:
        return self._partial_experts.disk if self._partial_experts else None

    @property
    def gpu_experts(self) -> GpuExpertStatistics | None:
        with device_errors():
            return self._partial_experts.statistics() if self._partial_experts else None

    @property
    def expert_times(self) -> ExpertTimes | None:
        with device_errors():
            return self._partial_experts.times() if self._partial_experts else None

    @property
    def observed(self) -> Observed | None:
        return self._partial_experts.observed if self._partial_experts else None

    @property
    def locked_bytes(self) -> tuple[int, int] | None:
        found = self._partial.host.locked_bytes if self._partial else (0, 0)
        return found if found[0] else None

    def control(self, controls: Controls) -> None:
        """From now on what `controls` says moves by what steps took. The plan is a beginning."""
        if self._partial_experts:
            self._partial_experts.control(controls)

    @property
    def expert_uses(self) -> tuple[int, int] | None:
        return None if self.expert_cache is None else self.expert_cache.counters.totals

    def expert_map(self) -> ExpertMap | None:
        partial = self._partial_experts
        return partial.expert_map(self.spec.placed_layers) if partial else None

    @property
    def expert_cache(self) -> ExpertCache | None:
        """The experts in the slots, with hits and misses; None if all experts are on the device."""
        return self._partial_experts.cache if self._partial_experts else None

    @property
    def stream_counters(self) -> StreamCounters | None:
        """Counts of experts streamed for long prompts; None if all experts are on the device."""
        return self._partial_experts.stream_counters if self._partial_experts else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """With what could not be locked, which an early start learns behind its first token."""
        problem = self._partial.host.lock_problem if self._partial else None
        return (*self._warnings, problem) if problem else self._warnings

    def _typed_errors(self) -> AbstractContextManager[None]:
        return device_errors()

    def _launch(self, segments: Collection[CheckedSegment]) -> None:
        is_known = all(segment.chosen is None for segment in segments)
        rows = sum(len(segment.token_ids) for segment in segments)
        if self._ngrams and self._in_flight:  # beside which rows of a prompt are read
            for segment in segments:
                if segment.is_prompt:
                    self._ngrams.read_ahead(segment.token_ids)
        if is_known or (self._partial and self._partial.must_wait(rows)):
            self._settle()
        missing = self._partial_experts
        if missing and not missing.is_filled:
            self._load_the_rest(missing, rows)
        self._num_steps += 1
        self._outputs.forget()
        self._sequences.reserve([segment.demand for segment in segments])
        shape = self._shape_of(segments)
        wants_all = all(len(segment.wanted) == len(segment.token_ids) for segment in segments)
        with_head = wants_all and shape.num_rows <= MAX_DECODE_ROWS
        inputs = self._loaded.inputs.on_host(shape.num_rows)
        inputs.pad(inputs.write(segments))
        with device_errors():
            self._loaded.inputs.copy(shape.num_rows)
            if not is_known:
                self._loaded.sampler.admit(segments, self._loaded.inputs.columns(shape.num_rows))
        self._can_make_room = True
        try:
            with device_errors():
                self._run(shape, segments, with_head=with_head)
        except OutOfMemoryError:
            # The failed step may have changed states; only empty ones can be reset.
            if any(segment.sequence.length for segment in segments) or not self._make_room():
                raise
            for segment in segments:
                assert segment.sequence.state is not None
                self._sequences.tensors.reset(segment.sequence.state)
            self._run(shape, segments, with_head=with_head)

    def _settle(self) -> None:
        """Waits for all steps, and ends the ones that are in flight. Raises as `_ended`."""
        if self._in_flight:
            self._ended()
        else:
            streams.current_stream().synchronize()

    def end_steps(self) -> None:
        with device_errors():
            self._settle()

    def take_back(self, sequence: Sequence) -> None:
        """See `ModelRunner`."""
        super().take_back(sequence)
        if self._partial_experts:
            self._partial_experts.left_out()

    def _shape_of(self, segments: Collection[CheckedSegment]) -> StepShape:
        count = sum(len(segment.token_ids) for segment in segments)
        has_prompts = any(segment.is_prompt for segment in segments)
        return StepShape(
            self.limits.rows_of(count, self.chunk_size),
            has_trees=any(segment.parents is not None for segment in segments),
            is_branching=any(segment.is_branching for segment in segments),
            has_prompts=has_prompts,
            has_several=has_prompts and len(segments) > 1,
            is_deep=any(segment.end > SHORT_CONTEXT for segment in segments),
        )

    def _start_step(self, shape: StepShape) -> None:
        if self._ngrams:
            self._ngrams.begin()
        if self._partial:
            self._partial.start_step(shape.num_rows)

    def _run(self, shape: StepShape, segments: Collection[CheckedSegment], *, with_head: bool) -> None:
        """Runs a step on the inputs that have been written, for hidden states or logits."""
        self._start_step(shape)
        outputs, mtp = self._outputs, self._loaded.mtp
        if with_head:
            outputs.logits = self._computed_logits(shape)
        elif self.limits.is_captured(shape.num_rows):
            outputs.hidden = self._steps.run(
                self._key("hidden", shape),
                lambda: self._loaded.kept_step(shape),
                lambda kept: kept,
                self._make_room,
            )
        else:
            outputs.hidden = self._shared_out_by_host(shape)
        if mtp is not None and (with_head or mtp.has_streams):
            outputs.states = mtp.trunk_states[: shape.num_rows]
        if self._first_token is None and any(len(segment.wanted) for segment in segments):
            self._first_token = self._num_steps
        changed = tuple(sequence for segment in segments for sequence in segment.sequences)
        self._in_flight.append((self._num_steps, changed))
        if self._partial:
            self._partial.launched()

    def _computed_logits(self, shape: StepShape) -> Any:
        """Logits [rows, vocab] after each row of the inputs that have been written."""
        logits: Any = self._steps.run(
            self._key("logits", shape), lambda: self._loaded.logits(shape), unowned, self._make_room
        )
        return logits

    def _key(self, what: str, shape: StepShape) -> tuple[str, Hashable]:
        """Of a step that is captured."""
        form = self._partial_experts.decode_form if self._partial_experts else None
        return what, shape if form is None else (shape, form)

    def _shared_out_by_host(self, shape: StepShape) -> Activations:
        """Hidden states of a step too long for a captured graph."""
        try:
            ops = self._loaded.ops
            if not self.limits.is_recorded(shape.num_rows):
                return self._loaded.step(shape)
            if ops.executor is not ops.model_executor:
                return self._loaded.kept_step(shape)
            assert self._partial_experts is not None, "nothing else is shared out by the host"
            step, form = partial(self._loaded.kept_step, shape), self._partial_experts.form
            kept: Activations = self._steps.run_in_pieces(("hidden", shape), form, step, lambda kept: kept)
            return kept
        except ColdstreamError:
            with suppress(ColdstreamError):
                self._ended()
            raise

    def _make_room(self) -> bool:
        """Frees slots of experts, at most once a step. False if none were freed. Raises as `_ended`."""
        if self._partial is None or not self._can_make_room:
            return False
        self._can_make_room = False
        with device_errors():
            self._ended()
            return self._partial_experts is not None and self._partial_experts.shrink() > 0

    def _commit(self, path: AcceptedPath) -> None:
        streams.current_stream().synchronize()
        self._loaded.commits.on_host.write(path)
        self._can_make_room = True
        self._steps.run(("commit", None), self._loaded.commit, lambda nothing: nothing, self._make_room)

    def _logits_of(self, rows: Array) -> StepLogits | Array:
        if len(rows) <= HEAD_ROWS:
            step = self._num_steps
            of_step = OnDevice(
                self._on_device(rows),
                self._loaded.sampler,
                lambda: self._num_steps == step,
                self._download,
                partial(self._ended, step=step),
            )
            return StepLogits(of_step, range(len(rows)))
        parts = [rows[start : start + HEAD_ROWS] for start in range(0, len(rows), HEAD_ROWS)]
        return np.concatenate([self._download([self._on_device(part)]) for part in parts])

    def _on_device(self, rows: Array) -> Any:
        """Logits of at most HEAD_ROWS rows of the last step."""
        if not len(rows):
            return RawArray(0, (0, self.spec.vocab_size), "float32")
        return self._outputs.logits_of(rows, self._loaded.model.logits)

    def _hidden_of(self, rows: Array | slice) -> Any:
        with device_errors():
            return self._outputs.states_of(rows)

    def _features_of(self, rows: Array | slice) -> Any:
        assert self._loaded.features is not None, "a runner with auxiliary layers keeps features"
        return self._loaded.features.of(rows)

    def load_mtp(self) -> MtpBlock:
        if self._loaded.mtp is None:
            return super().load_mtp()
        return CudaMtp(self._loaded, self.context_length, self._steps, self._begin_beside, self._make_room)

    def load_dflash(self, file: DflashFile) -> CudaDflash:
        """A drafter for this model, which was loaded with its auxiliary layers. Raises as `CudaDflash`."""
        assert self.aux_layers == file.spec.aux_layers, "the runner keeps what the drafter reads"
        drafter = CudaDflash(self._loaded, file, self._steps, self._begin_beside, self._make_room)
        self._drafters.add(drafter)
        return drafter

    def _begin_beside(self) -> None:
        """Before a step that is none of the model's, but uses its workspace."""
        self._num_steps += 1
        self._can_make_room = True
        self._outputs.forget()

    def _download(self, parts: Iterable[Any]) -> Array:
        """A host copy [n, vocab] of the parts' rows in order, at most HEAD_ROWS."""
        count = 0
        for part in parts:
            copies.to_host(self._host_logits[count : count + len(part)], part.data_ptr())
            count += len(part)
        self._ended()
        return self._host_logits[:count].copy()


def _partial_model(plan: RunPlan, file: GGUFFile, spec: ModelSpec) -> PartialModel:
    """The part of `plan` that is not on the GPU. Raises MemoryError."""
    # Several blocks read a row that enters several residual streams, so that none of them can mark it.
    is_marked = spec.hyper_connections is None
    ranks, size = mailbox_ranks(spec), spec.hidden_size
    mailbox = Mailbox.create(ranks, size, plan.shared_rows, is_marked=is_marked)
    if spec.is_moe:
        return PartialExperts(mailbox, plan, _ram_pool(plan, file, spec))
    return PartialLayers(mailbox, plan)


def _mapped_shards(plan: RunPlan, file: GGUFFile, spec: ModelSpec) -> frozenset[int]:
    """Parts of the file that the GPU reads by `plan`."""
    if plan.placement.is_all_resident or plan.pool is not None:
        return frozenset()
    return shards_of_experts(file, spec)


def _ram_pool(plan: RunPlan, file: GGUFFile, spec: ModelSpec) -> RamPool | None:
    """The pool of `plan`, empty; None if it has none. Raises MemoryError."""
    if plan.pool is None:
        return None
    sizes = plan.pool.expert_bytes
    missing = [stacks for stacks, size in zip(expert_stacks(file, spec), sizes, strict=True) if size]
    pooled = PooledStacks(file, missing)
    assert pooled.expert_bytes == tuple(filter(None, sizes)), "a plan has the sizes of its slots"
    return RamPool(pooled, plan.pool.slots, spec.num_experts_per_tok)
