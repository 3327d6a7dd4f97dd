"""The default of a verb's MODEL argument, the bundled demo model: how to recognise it, and its drafter."""

from dataclasses import replace

from coldstream.assets import demo_drafter_path, demo_model_path
from coldstream.engine import EngineConfig
from coldstream.engine.device_choice import is_for_cpu
from coldstream.errors import ModelNotFoundError
from coldstream.gguf.reader import GGUFFile


def model_or_bundled(model: str | None) -> str:
    """`model`, or the path of the demo model in the package. Raises ModelNotFoundError if that is absent."""
    return str(demo_model_path()) if model is None else model


def with_bundled_drafter(config: EngineConfig) -> EngineConfig:
    """`config` with the bundled drafter, if it is for the bundled model and does not say what drafts.

    Unchanged on a GPU, where such drafts cannot be computed.
    """
    is_asked = config.model_draft is None and config.plan is None and config.spec_type in ("auto", "dflash")
    if not is_asked or not _is_bundled_path(config.model):
        return config
    path = demo_drafter_path()
    if not path.is_file() or not is_for_cpu(config):
        return config
    return replace(config, model_draft=str(path))


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
