"""The default of a verb's MODEL argument, the bundled demo model, and how to recognise it."""

from coldstream.assets import demo_model_path
from coldstream.errors import ModelNotFoundError
from coldstream.gguf.reader import GGUFFile


def model_or_bundled(model: str | None) -> str:
    """`model`, or the path of the demo model in the package. Raises ModelNotFoundError if that is absent."""
    return str(demo_model_path()) if model is None else model


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
