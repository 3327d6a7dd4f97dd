"""The file of a drafter that a configuration names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from coldstream.errors import ColdstreamError, ModelNotFoundError, StorageError
from coldstream.models.cpu import dflash as cpu_dflash
from coldstream.models.dflash.convert import converted, folder_of
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import check_gpu, check_target
from coldstream.models.runner_capacity import DRAFT_VALUE_BYTES
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.config import EngineConfig
from coldstream.planning.device_choice import OpenProgress
from coldstream.planning.facts import DraftNeeds

NOTHING_IS_DRAFTED: Final = "nothing is drafted: {}"


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
def open_draft(
    config: EngineConfig, target: ModelSpec, progress: OpenProgress | None = None
) -> Iterator[OpenDraft]:
    """Opens the drafter that `config` names, and checks it against the model.

    A folder is converted first, unless that was done before. The configuration is then one for dflash. Raises
    ModelNotFoundError for a drafter that is absent, and StorageError for one that cannot be converted for
    want of a place. A drafter that is damaged or does not fit raises ConfigError or a ModelFormatError if it
    was asked for. If spec_type is auto, the context has no drafter, and a warning.
    """
    if config.model_draft is None:
        yield OpenDraft(config)
        return
    try:
        file = _open(config, Path(config.model_draft), target, progress)
    except (ModelNotFoundError, StorageError):
        raise
    except ColdstreamError as error:
        if config.spec_type != "auto" or config.plan is not None:  # a plan says itself what drafts
            raise
        without = replace(config, model_draft=None, spec_type="none")
        yield OpenDraft(without, warnings=(NOTHING_IS_DRAFTED.format(error),))
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
