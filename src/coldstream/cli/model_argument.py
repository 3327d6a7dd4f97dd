"""A verb's MODEL argument: how a shell completes it, and its default, the bundled demo model."""

from dataclasses import replace

import click
from click.shell_completion import CompletionItem

from coldstream.assets import demo_drafter_path, demo_model_path
from coldstream.engine import EngineConfig
from coldstream.errors import ModelNotFoundError
from coldstream.gguf.reader import GGUFFile


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of downloaded models that begin with `incomplete`; without any, the shell's own file names."""
    from coldstream.gguf import hub

    names = [model.name for model in hub.list_cached() if model.name.startswith(incomplete)]
    if incomplete and names:
        return [CompletionItem(name) for name in names]
    return [CompletionItem(incomplete, type="file")]


def model_or_bundled(model: str | None) -> str:
    """`model`, or the path of the demo model in the package. Raises ModelNotFoundError if that is absent."""
    return str(demo_model_path()) if model is None else model


def with_bundled_drafter(config: EngineConfig) -> EngineConfig:
    """`config` with the bundled drafter, if it asks for drafts by a DFlash drafter for the bundled model and
    names none.

    Unchanged if it leaves open what drafts: on two cores nothing does, as no drafts of so small a model pay.
    """
    is_asked = config.spec_type == "dflash" and config.model_draft is None and config.plan is None
    if not is_asked or not _is_bundled_path(config.model):
        return config
    path = demo_drafter_path()
    return replace(config, model_draft=str(path)) if path.is_file() else config


def _is_bundled_path(model: str) -> bool:
    try:
        return model == str(demo_model_path())
    except ModelNotFoundError:
        return False


def is_bundled(file: GGUFFile) -> bool:
    """Whether this is the demo model, wherever it lies. It completes code, though it has a chat template."""
    try:
        path = demo_model_path()
    except ModelNotFoundError:
        return False
    if path.stat().st_size != file.num_bytes:
        return False
    with GGUFFile.open(path) as demo:
        return demo.fingerprint == file.fingerprint
