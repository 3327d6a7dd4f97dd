"""The files of a configuration: the model's, and that of a drafter that it names.

A drafter is known by its contents. A sidecar joins the model's file where that is opened. Any other drafter
is a model of its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from coldstream.errors import ColdstreamError, ConfigError, ModelNotFoundError, StorageError
from coldstream.gguf.hub import resolve_sidecar
from coldstream.gguf.reader import GGUFFile
from coldstream.models.cpu import dflash as cpu_dflash
from coldstream.models.dflash.convert import converted, folder_of
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import check_gpu, check_target
from coldstream.models.mtp.sidecar import join_sidecar, sidecar_blocks
from coldstream.models.read_spec import read_spec
from coldstream.models.runner_capacity import DRAFT_VALUE_BYTES
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.config import EngineConfig
from coldstream.planning.device_choice import OpenProgress
from coldstream.planning.facts import DraftNeeds

NOTHING_IS_DRAFTED: Final = "nothing is drafted: {}"


@dataclass(frozen=True)
class Target:
    """The model of `config`, open; its file is the caller's to close.

    has_sidecar: whether the drafter of `config` is a sidecar, whose block the file then has.
    """

    config: EngineConfig
    file: GGUFFile
    spec: ModelSpec
    has_sidecar: bool = False
    warnings: tuple[str, ...] = ()


def open_target(path: Path, config: EngineConfig, progress: OpenProgress | None = None) -> Target:
    """Opens the model of `config`, whose first file is at `path`, and joins the sidecar that is named.

    The configuration is then one for mtp. If that is asked for and no drafter is named, the sidecar beside a
    model of the hub is taken, and downloaded unless it is cached. Raises as `GGUFFile.open`, `read_spec`,
    `resolve_sidecar` and `join_sidecar`. If spec_type is auto, a sidecar that cannot be joined is left out,
    with a warning.
    """
    with ExitStack() as cleanup:
        file = cleanup.enter_context(GGUFFile.open(path))
        target = Target(config, file, read_spec(file.metadata, file.tensors))
        if config.spec_type == "mtp" and config.model_draft is None and not target.spec.num_nextn_layers:
            beside = resolve_sidecar(config.model, offline=config.offline, progress=progress)
            target = replace(
                target, config=replace(config, model_draft=None if beside is None else str(beside))
            )
        target = _with_sidecar(target)
        cleanup.pop_all()
        return target


def _with_sidecar(target: Target) -> Target:
    config, drafter = target.config, target.config.model_draft
    with ExitStack() as cleanup:
        try:
            sidecar = None if drafter is None else _open_sidecar(config, Path(drafter), cleanup)
            if sidecar is not None:
                if config.spec_type == "dflash":
                    problem = "holds a block for multi-token prediction: leave --spec-type out"
                    raise ConfigError(f"spec_type dflash: {drafter} {problem}")
                spec = join_sidecar(target.file, target.spec, sidecar)
                spec_type = "mtp" if config.plan is None else config.spec_type
                return replace(
                    target, config=replace(config, spec_type=spec_type), spec=spec, has_sidecar=True
                )
        except ColdstreamError as error:
            if config.spec_type != "auto" or config.plan is not None:  # a plan says itself what drafts
                raise
            return replace(target, config=_without_drafts(config), warnings=_why_none(error))
    if drafter is not None and config.spec_type == "mtp":
        problem = "holds no block for multi-token prediction: leave --spec-type out"
        raise ConfigError(f"spec_type mtp: {drafter} {problem}")
    return target


def _open_sidecar(config: EngineConfig, path: Path, cleanup: ExitStack) -> GGUFFile | None:
    """The file at `path`, which `cleanup` closes unless it is joined, if it is a sidecar.

    What is wrong with a drafter of another kind is found where that is opened. Raises as `sidecar_blocks`,
    and as `GGUFFile.open` where nothing but a sidecar is asked for.
    """
    try:
        file = cleanup.enter_context(GGUFFile.open(path))
    except ColdstreamError:
        if config.spec_type == "mtp":
            raise
        return None
    return file if sidecar_blocks(file) else None


def _without_drafts(config: EngineConfig) -> EngineConfig:
    return replace(config, model_draft=None, spec_type="none")


def _why_none(error: ColdstreamError) -> tuple[str, ...]:
    return (NOTHING_IS_DRAFTED.format(error),)


@dataclass(frozen=True)
class OpenDraft:
    """The drafter of `config`, if there is one that fits."""

    config: EngineConfig
    file: DflashFile | None = None
    needs: DraftNeeds | None = None
    warnings: tuple[str, ...] = ()

    def aux_layers(self, plan: RunPlan) -> tuple[int, ...]:
        """Layers whose residual streams it reads, where `plan` has it draft."""
        return self.needs.aux_layers if self.needs and plan.spec_type == "dflash" else ()


@contextmanager
def open_draft(target: Target, progress: OpenProgress | None = None) -> Iterator[OpenDraft]:
    """Opens the drafter that is named and no sidecar, and checks it against the model.

    A folder is converted first, unless that was done before. The configuration is then one for dflash. Raises
    ModelNotFoundError for a drafter that is absent, and StorageError for one that cannot be converted for
    want of a place. A drafter that is damaged or does not fit raises ConfigError or a ModelFormatError if it
    was asked for. If spec_type is auto, the context has no drafter, and a warning.
    """
    config = target.config
    if config.model_draft is None or target.has_sidecar:
        yield OpenDraft(config, warnings=target.warnings)
        return
    try:
        file = _open(config, Path(config.model_draft), target.spec, progress)
    except (ModelNotFoundError, StorageError):
        raise
    except ColdstreamError as error:
        if config.spec_type != "auto" or config.plan is not None:  # a plan says itself what drafts
            raise
        yield OpenDraft(_without_drafts(config), warnings=_why_none(error))
        return
    with file:
        if config.plan is None:
            config = replace(config, spec_type="dflash")
        yield OpenDraft(config, file, _needs(file, config.device))


def _needs(file: DflashFile, device: str) -> DraftNeeds:
    """On a resolved device."""
    value_bytes = DRAFT_VALUE_BYTES[device]
    if device == "cpu":
        return DraftNeeds(file.spec, cpu_dflash.weight_bytes(file), value_bytes)
    from coldstream.models.cuda.dflash_block import BlockMemory  # only here, as it imports CUDA's packages

    return DraftNeeds(file.spec, BlockMemory.of(file).total, value_bytes)


def _open(config: EngineConfig, path: Path, target: ModelSpec, progress: OpenProgress | None) -> DflashFile:
    folder = folder_of(path)
    if folder is not None:
        path = converted(folder, partial(progress, "converting the drafter") if progress else None)
    file = DflashFile.open(path)
    try:
        check_target(file.spec, target)
        if config.device == "cuda":
            check_gpu(file.spec)
    except BaseException:
        file.close()
        raise
    return file
