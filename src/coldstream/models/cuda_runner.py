"""Runs a model on one GPU: few rows and short prompts as captured CUDA graphs, long prompts in chunks."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from coldstream.errors import ColdstreamError, OutOfMemoryError
from coldstream.experts.cache import ExpertCache
from coldstream.experts.gpu_statistics import GpuExpertStatistics
from coldstream.experts.hybrid_ops import HybridOps
from coldstream.experts.partial_experts import PartialExperts
from coldstream.experts.prefetching import LAYERS_AHEAD, Prefetching
from coldstream.experts.streaming import StreamCounters
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.compiler import default_cache
from coldstream.kernels.cuda.device import Gpu, device_errors, find_gpu
from coldstream.kernels.cuda.memory import DeviceMemory, unowned
from coldstream.kernels.cuda.program import load_kernels
from coldstream.kernels.experts.mailbox import MAX_ROWS, Mailbox
from coldstream.models.captured_steps import CapturedSteps
from coldstream.models.cuda_logits import CudaLogits
from coldstream.models.cuda_model import (
    HEAD_ROWS,
    MAX_DECODE_ROWS,
    SMALLEST_PADDED_ROWS,
    Limits,
    Loaded,
    check_supported,
    check_types,
    kernels_of,
    padded_rows,
    plan_memory,
)
from coldstream.models.fixed_part import chosen_chunk_size
from coldstream.models.runner import Array, ModelRunner, Progress
from coldstream.models.spec import ModelSpec
from coldstream.placement.policies import Policy
from coldstream.placement.run_plan import RunPlan

NO_SLOT = -1


def no_progress(done: int, total: int) -> None:
    """For callers that show no progress."""


@dataclass(frozen=True)
class Placed:
    """Where the experts of a model lie, who computes those that are not on the device, and with what."""

    plan: RunPlan
    tier: str = "auto"  # of the CPU's kernels
    policy: Policy | None = None  # None: the product's
    layers_ahead: int = LAYERS_AHEAD  # that experts are guessed, if the plan has some fetched

    @property
    def prefetching(self) -> Prefetching | None:
        return Prefetching(self.layers_ahead, self.plan.prefetch) if self.plan.prefetch else None


class CudaRunner(ModelRunner):
    """See `ModelRunner`; besides, `decode_rows` advances several sequences at once.

    Where not all experts are on the device, a step that finds no memory there, because another program has
    taken it, gets some that slots of experts give back.
    """

    head_rows = HEAD_ROWS

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        limits: Limits,
        gpu: Gpu,
        progress: Progress | None,
        compiling: Progress | None,
        placed: Placed | None = None,
    ) -> None:
        super().__init__(file, spec, limits.context_length)
        self.gpu = gpu
        self.limits = limits
        check_supported(spec)
        check_types(file.tensors)
        if placed is None:
            chunk_size = chosen_chunk_size(file, spec, limits.context_length, limits.kv_type, gpu.free_bytes)
        else:
            chunk_size = placed.plan.placement.fixed.chunk_size
        self.plan = plan_memory(file, spec, limits, gpu.free_bytes, chunk_size)
        self.chunk_size = self.plan.chunk_size
        self._placed = placed
        self._partial: PartialExperts | None = None
        self._num_steps = 0
        self._hidden: Activations | None = None
        self._steps = CapturedSteps()
        self._logits_on_device: torch.Tensor | None = None
        self._can_make_room = False
        try:
            with device_errors():
                load_kernels(kernels_of(file, spec, limits, self.chunk_size), compiling or no_progress)
                if placed is not None and limits.expert_bytes is not None:
                    mailbox = Mailbox.create(spec.num_layers, spec.num_experts_per_tok, spec.hidden_size)
                    self._partial = PartialExperts(mailbox, placed.plan.threads, placed.tier, self.chunk_size)
                self._load(progress)
        except BaseException:
            self._release()
            raise

    def _load(self, progress: Progress | None) -> None:
        """Everything that takes device memory, and the first step."""
        memory = DeviceMemory(self.plan.weights + self.plan.caches, self.plan.workspace)
        host = self._partial.host if self._partial else None
        self._loaded = Loaded.into(memory, self.file, self.spec, self.limits, self.chunk_size, host=host)
        if self._partial:
            assert isinstance(self._loaded.ops, HybridOps)
            self._partial.attach(self._loaded.ops)
        problem = default_cache().problem
        self._warnings = self._loaded.model.warnings + ((problem,) if problem else ())
        self._loaded.ops.finish_loading(progress)
        self.file.check_unchanged()  # or what was copied is of two files
        host_logits = torch.empty((HEAD_ROWS, self.spec.vocab_size), dtype=torch.float32)
        self._host_logits = host_logits.pin_memory()
        self._start_step(1)
        self._decode(1)
        self._ended()
        many = MAX_ROWS + 1 if self._partial else SMALLEST_PADDED_ROWS
        self._start_step(many)
        self._loaded.step(many)  # so that no prompt pays for the first step of its kind
        self._ended()
        if self._partial and self._placed:
            self._partial.fill(self._placed.plan, self._placed.policy)
        self._clear()

    def _start_step(self, rows: int) -> None:
        if self._partial:
            self._partial.start_step(rows)

    def _launched(self) -> None:
        if self._partial:
            self._partial.launched()

    def _ended(self) -> None:
        """The current stream has done everything. What could not be computed leaves an empty state."""
        torch.cuda.current_stream().synchronize()
        if self._partial:
            with self._whole_or_empty():
                self._partial.ended()
                self._check_file()

    @classmethod
    def load(
        cls,
        file: GGUFFile,
        spec: ModelSpec,
        *,
        context_length: int,
        kv_type: str,
        num_slots: int = 1,
        placed: Placed | None = None,
        progress: Progress | None = None,
        compiling: Progress | None = None,
    ) -> Self:
        """Copies the weights of an open file to the current device; the runner then closes the file.

        placed: which experts lie where; None: all of them are on the device, as far as that has the memory.
        compiling is called with (done, total) kernels, progress with (done, total) bytes. Raises DeviceError
        without a usable GPU, OutOfMemoryError before anything is copied if it doesn't fit, UnsupportedError
        for sizes and types without kernels, InconsistentError for weights that contradict the format's
        conventions; the file stays open then.
        """
        limits = Limits(num_slots, context_length, kv_type)
        if placed is not None and not placed.plan.placement.is_all_resident:
            plan = placed.plan.placement
            whole = sum(plan.model.num_experts * plan.expert_bytes[layer] for layer in plan.pinned_layers)
            limits = replace(
                limits,
                expert_bytes=plan.resident_bytes - whole,
                whole_layers=frozenset(plan.pinned_layers),
                ring_bytes=plan.ring_bytes,
                prefetching=placed.prefetching,
            )
        return cls(file, spec, limits, find_gpu(), progress, compiling, placed)

    def close(self) -> None:
        """Gives the device's memory back and closes the file; the runner cannot be used afterwards."""
        super().close()
        self._release()

    def _release(self) -> None:
        """Gives the device's memory back."""
        self._forget_outputs()
        self._steps.clear()
        if self._partial:
            torch.cuda.synchronize()
            self._partial.close()
            self._partial = None
        self.__dict__.pop("_loaded", None)
        torch.cuda.empty_cache()

    @property
    def reads_file(self) -> bool:
        """Only for experts that are not on the device."""
        return self._partial is not None

    @property
    def tier(self) -> str:
        return "cuda"

    @property
    def threads(self) -> int:
        """The one that launches, and those that compute experts."""
        return 1 + (self._placed.plan.threads if self._partial and self._placed else 0)

    @property
    def gpu_experts(self) -> GpuExpertStatistics | None:
        with device_errors():
            return self._partial.statistics() if self._partial else None

    @property
    def expert_uses(self) -> tuple[int, int] | None:
        if self.expert_cache is None:
            return None
        counters = self.expert_cache.counters
        return int(counters.hits.sum()), int(counters.misses.sum())

    @property
    def expert_cache(self) -> ExpertCache | None:
        """What the slots hold and how often that helped; None if all experts are on the device."""
        return self._partial.cache if self._partial else None

    @property
    def stream_counters(self) -> StreamCounters | None:
        """What became of experts that long prompts missed; None if all experts are on the device."""
        return self._partial.stream_counters if self._partial else None

    @property
    def cpu_work(self) -> list[tuple[int, int, float]]:
        """What the CPU was asked for, by layer that may miss: requests, (token, expert) pairs, seconds."""
        return self._partial.host.server.work() if self._partial else []

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._warnings

    def decode_rows(self, token_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> Array:
        """One token of each of several sequences: float32 logits [rows, vocab].

        Row i puts token_ids[i] at positions[i] of the sequence in slots[i]; slots are distinct. ValueError
        for more than MAX_DECODE_ROWS rows.
        """
        count = len(token_ids)
        if not 0 < count <= MAX_DECODE_ROWS:
            raise ValueError(f"a step decodes 1 to {MAX_DECODE_ROWS} rows, not {count}")
        with device_errors():
            self._next_inputs(count)[:] = token_ids, positions, slots
            self._start_step(count)
            logits = self._decode(count)
            self._launched()
            return self._download(logits).copy()

    def reset_slot(self, slot: int) -> None:
        """Makes `slot` the beginning of a sequence."""
        with device_errors():
            self._loaded.cache.reset(slot)

    def _clear(self) -> None:
        self.reset_slot(0)

    def prefill_slot(self, slot: int, token_ids: Sequence[int], first_position: int) -> Array:
        """Puts at most `chunk_size` tokens into the sequence in `slot`.

        Returns float32 logits [vocab] after the last.
        """
        self._compute_in(slot, np.asarray(token_ids, np.int32), first_position)
        logits: Array = self._compute_logits(len(token_ids) - 1, 1)[0].copy()
        return logits

    def _compute(self, token_ids: Array, first_position: int) -> None:
        self._compute_in(0, token_ids, first_position)

    def _compute_in(self, slot: int, token_ids: Array, first_position: int) -> None:
        count = len(token_ids)
        rows = padded_rows(count) if self.limits.is_captured(count) else count
        with device_errors():
            inputs = self._next_inputs(rows)
            self._num_steps += 1
            self._forget_outputs()
        inputs[0, :count] = token_ids
        inputs[1, :count] = np.arange(first_position, first_position + count)
        inputs[2, :count] = slot
        inputs[:, count:] = [[0], [0], [NO_SLOT]]
        try:
            with device_errors():
                self._launch(count, rows)
        except OutOfMemoryError:
            # What it has left of any other state than an empty one is not known.
            if first_position != 0 or not self._make_room():
                raise
            with device_errors():
                self._loaded.cache.reset(slot)
                self._launch(count, rows)

    def _launch(self, count: int, rows: int) -> None:
        """A step of the inputs that are set, `count` of its `rows` rows being of the sequence."""
        self._start_step(rows)
        if count == 1:
            self._logits_on_device = self._decode(1)
        elif self.limits.is_captured(rows):
            self._hidden = self._prefill(rows)
        else:
            self._hidden = self._uncaptured(rows)
        self._launched()

    def _make_room(self) -> bool:
        """Whether slots of experts gave memory back, which they do once a step. Raises as `_ended`."""
        if self._partial is None or not self._can_make_room:
            return False
        self._can_make_room = False
        with device_errors():
            self._ended()
            return self._partial.shrink() > 0

    def _uncaptured(self, count: int) -> Activations:
        """The hidden states of more inputs than a graph has. After an error the state is empty."""
        try:
            return self._loaded.step(count)
        except ColdstreamError:
            with suppress(ColdstreamError):
                self._ended()
            self.reset()
            raise

    def _compute_logits(self, first: int, count: int) -> Array:
        with device_errors():
            return self._download(self._logits_of(first, count))

    def _last_logits(self, row: int) -> CudaLogits:
        with device_errors():
            values = self._logits_of(row, 1)
        step = self._num_steps
        return CudaLogits(
            values=values,
            sampler=self._loaded.sampler,
            position=self.position - 1,
            is_current=lambda: self._num_steps == step,
            download=self._download,
            ended=self._ended,
        )

    def _logits_of(self, first: int, count: int) -> torch.Tensor:
        """Of rows of the last step, on the device."""
        if self._logits_on_device is not None:
            return self._logits_on_device[first : first + count]
        assert self._hidden is not None, "logits belong to a step"
        logits: torch.Tensor = self._loaded.model.logits(self._hidden.rows(first, count))
        return logits

    def _next_inputs(self, rows: int) -> Array:
        """Where the inputs of the next step belong, int32 [3, rows], when the last one has ended."""
        torch.cuda.current_stream().synchronize()
        self._can_make_room = True
        return self._loaded.inputs.on_host(rows)

    def _forget_outputs(self) -> None:
        """Gives the memory of the last step's outputs back before it is needed again."""
        self._hidden = self._logits_on_device = None

    def _decode(self, count: int) -> torch.Tensor:
        """The logits [count, vocab] after each of the first `count` inputs."""
        logits: torch.Tensor = self._steps.run(
            ("logits", count), lambda: self._loaded.logits(count), unowned, self._make_room
        )
        return logits

    def _prefill(self, count: int) -> Activations:
        """The hidden states of the first `count` inputs."""
        hidden: Activations = self._steps.run(
            ("hidden", count), lambda: self._loaded.kept_step(count), lambda hidden: hidden, self._make_room
        )
        return hidden

    def _download(self, logits: torch.Tensor) -> Array:
        host = self._host_logits[: len(logits)]
        host.copy_(logits, non_blocking=True)
        self._ended()
        result: Array = host.numpy()
        return result
