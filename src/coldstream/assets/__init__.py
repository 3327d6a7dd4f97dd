"""Files that come with the package: the demo model. How it was made: tools/train_demo in the source."""

from importlib import resources
from pathlib import Path

from coldstream.errors import ModelNotFoundError


def demo_model_path() -> Path:
    """Where the bundled model lies. Raises ModelNotFoundError if the installation is without it."""
    path = Path(str(resources.files(__name__) / "demo.gguf"))
    if not path.is_file():
        raise ModelNotFoundError("the demo model is not part of this installation: name a model to run")
    return path
