"""From a configuration to a model that is ready to compute, with everything around it."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from coldstream.decoding import Logits, Progress, SamplingParams
from coldstream.engine.config import EngineConfig, resolve
from coldstream.engine.device_choice import OpenProgress, choose_device
from coldstream.engine.live_sequence import Runner
from coldstream.engine.machine import hardware_with, measured_hardware
from coldstream.engine.planning import bundled_profile, plan_model
from coldstream.errors import InconsistentError, InvalidRequestError, host_memory_errors
from coldstream.experts.disk_tier import DiskStatistics
from coldstream.experts.gpu_statistics import GpuExpertStatistics
from coldstream.gguf.chat_template import FIELD as CHAT_TEMPLATE_KEY
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.hub import resolve_model
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.cuda.device import Gpu
from coldstream.kernels.experts.prefetching import LAYERS_AHEAD, Prefetching
from coldstream.models.cpu_runner import CpuRunner
from coldstream.models.footprint import dense_bytes, trunk_bytes
from coldstream.models.spec import ModelSpec
from coldstream.placement.cost import PREFETCHED, prefetch_gain, streamed_by_misses
from coldstream.placement.forecast import hit_rates_of
from coldstream.placement.hardware import Hardware
from coldstream.placement.plan import PlacementPlan
from coldstream.placement.rates import Rates

_AUTO_RAM_SHARE = 0.9  # of what is available, where no budget is given

_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
    "general.sampling.penalty_last_n": "repeat_last_n",
}


class ModelHandle(Runner, Protocol):
    """An open model: a runner, facts about how it runs, and a way to close it."""

    @property
    def spec(self) -> ModelSpec:
        """The model's numbers."""

    @property
    def file(self) -> GGUFFile:
        """The open file."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What looks wrong with the file and may be right, for people."""

    @property
    def tier(self) -> str:
        """Of the CPU kernels in use."""

    @property
    def threads(self) -> int:
        """Worker threads in use."""

    @property
    def disk(self) -> DiskStatistics | None:
        """What reading experts from the disk has taken; None if all weights are in memory."""

    @property
    def gpu_experts(self) -> GpuExpertStatistics | None:
        """What became of experts that the GPU does not hold; None if it holds all, or if there is none."""

    def prefill(self, token_ids: Sequence[int], progress: Progress | None) -> Logits:
        """`extend`, with logits in an array of their own."""

    def decode(self, token_id: int) -> Logits:
        """`prefill` of one token."""

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Logits after each token, from an empty state: float32 [T, vocab]. Leaves the state unspecified."""

    def close(self) -> None:
        """Release file and memory."""


@dataclass(frozen=True)
class OpenedModel:
    """A model ready to compute and what belongs to it. `config` has no `auto` left."""

    config: EngineConfig
    runner: ModelHandle
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    has_chat_template: bool  # if not, `chat_template` says so when used
    default_sampling: SamplingParams
    device_warnings: tuple[str, ...] = ()  # why the device is not the one that could be expected

    @property
    def warnings(self) -> tuple[str, ...]:
        """What people should know about the device and about the file."""
        return self.device_warnings + self.runner.warnings

    def close(self) -> None:
        """Release the file, the memory and the process that renders templates."""
        self.chat_template.close()
        self.runner.close()


@host_memory_errors()
def open_model(config: EngineConfig, progress: OpenProgress | None = None) -> OpenedModel:
    """Find, check and load the model that `config` names. Raises as `LLM` says; nothing stays open then."""
    config, gpu, device_warnings = choose_device(config)
    path = resolve_model(config.model, offline=config.offline, progress=progress)
    with ExitStack() as cleanup:
        file = cleanup.enter_context(GGUFFile.open(path))
        spec = ModelSpec.from_gguf(file.metadata, file.tensors)
        if gpu is not None and spec.is_moe:
            config, placed = place_experts(config, file, spec, gpu, progress)
        else:
            config, placed = resolved(config, file, spec, gpu), None
        config = with_prefetch(config, 0)  # unless it was decided with the placement
        tokenizer = Tokenizer.from_metadata(file.metadata)
        default_sampling = sampling_defaults(file.metadata)
        template = ChatTemplate.from_metadata(file.metadata, tokenizer.vocabulary)
        runner = load_runner(config, file, spec, placed, progress)
        cleanup.pop_all()
    return OpenedModel(
        config,
        runner,
        tokenizer,
        template,
        CHAT_TEMPLATE_KEY in file.metadata,
        default_sampling,
        device_warnings,
    )


def resolved(config: EngineConfig, file: GGUFFile, spec: ModelSpec, gpu: Gpu | None) -> EngineConfig:
    """`config` without `auto`, for a model whose weights all lie in the device's memory or are mapped."""
    hardware = Hardware.measure()
    if config.plan is not None:
        config = plan_model(config, file, spec, hardware).config
    if gpu is None and isinstance(config.ram, int):
        # The runner says what a budget has to be. A context that was asked for is not cut to it.
        left = max(0, config.ram - dense_bytes(spec, file.tensors))
        free, weights = 2**62 if config.ctx_size else left, 0
    elif gpu is None:
        free, weights = hardware.ram_available_bytes, dense_bytes(spec, file.tensors)
    else:
        free, weights = gpu.free_bytes, trunk_bytes(spec, file.tensors)
        if isinstance(config.vram, int):
            free = min(free, config.vram)
    return resolve(config, spec, hardware.num_physical_cores, free, weights)


@dataclass(frozen=True)
class PlacedExperts:
    """Where the experts lie on a machine with a GPU, and who computes those that are not on it."""

    plan: PlacementPlan
    streamed: tuple[int, ...]  # see `streamed_by_misses`; empty if all are resident
    threads: int  # that compute experts


def place_experts(
    config: EngineConfig, file: GGUFFile, spec: ModelSpec, gpu: Gpu, progress: OpenProgress | None
) -> tuple[EngineConfig, PlacedExperts]:
    """`config` without `auto`, and what its budget holds. Measures the machine if that was never done and
    matters. Raises as `plan_model`.
    """
    planned = plan_model(config, file, spec, hardware_with(gpu), trace=bundled_profile(file, spec))
    if planned.plan.is_all_resident:
        return planned.config, PlacedExperts(planned.plan, (), 0)
    planned = replace(planned, hardware=measured_hardware(gpu, progress))
    # One core launches, and waits for the GPU.
    num_cores = planned.hardware.num_physical_cores
    threads = max(1, num_cores - 1) if config.threads == "auto" else config.threads
    streamed = streamed_by_misses(
        spec.num_experts_per_tok, max(planned.plan.expert_bytes), Rates.of(planned.hardware)
    )
    config = planned.config
    if config.prefetch == "auto":
        known = planned.known
        gain = prefetch_gain(known.model, known.rates, hit_rates_of(planned.plan, known))
        config = with_prefetch(config, PREFETCHED if gain > 0 else 0)
    return config, PlacedExperts(planned.plan, streamed, threads)


def with_prefetch(config: EngineConfig, count: int) -> EngineConfig:
    """`config` with so many prefetched experts in place of `auto`."""
    return replace(config, prefetch=count) if config.prefetch == "auto" else config


def load_runner(
    config: EngineConfig,
    file: GGUFFile,
    spec: ModelSpec,
    experts: PlacedExperts | None,
    progress: OpenProgress | None,
) -> ModelHandle:
    """The model of an open file on the device of a resolved `config`. Raises as the runners' `load`."""
    assert isinstance(config.threads, int)
    assert isinstance(config.prefetch, int)
    assert config.ctx_size
    kv_type = config.cache_type_k
    loading = partial(progress, "loading") if progress else None
    if config.device == "cuda":
        # Imported here because its kernels need packages that a machine without a GPU does not have.
        from coldstream.models.cuda_runner import CudaRunner, Placed

        placed = None
        if experts is not None:
            ahead = Prefetching(LAYERS_AHEAD, config.prefetch) if config.prefetch else None
            placed = Placed(experts.plan, experts.streamed, experts.threads, prefetching=ahead)
        return CudaRunner.load(
            file,
            spec,
            context_length=config.ctx_size,
            kv_type=kv_type,
            placed=placed,
            progress=loading,
            compiling=partial(progress, "compiling kernels") if progress else None,
        )
    return CpuRunner.load(
        file,
        spec,
        threads=config.threads,
        tier=config.tier,
        context_length=config.ctx_size,
        kv_type=kv_type,
        ram_bytes=ram_budget(config, trunk_bytes(spec, file.tensors)),
        progress=loading,
    )


def ram_budget(config: EngineConfig, weight_bytes: int) -> int | None:
    """Bytes that a model on the CPU may take; None for one that is far from what is free."""
    if isinstance(config.ram, int):
        return config.ram
    budget = int(Hardware.measure().ram_available_bytes * _AUTO_RAM_SHARE)
    return None if weight_bytes < budget // 2 else budget


def sampling_defaults(metadata: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` with what the file's `general.sampling.*` keys recommend.

    Raises InconsistentError if a recommendation is out of its range.
    """
    values = {field: metadata[key] for key, field in _SAMPLING_KEYS.items() if key in metadata}
    if values.get("repeat_last_n") == -1:
        values["repeat_last_n"] = None
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        raise InconsistentError(f"general.sampling: {error}") from error
