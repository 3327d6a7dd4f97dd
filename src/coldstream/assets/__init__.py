"""Files that come with the package: the demo model, its drafter, and which experts Python's source uses.

How they were made: tools/train_demo and tools/demo_profile.py in the source. The text that
`coldstream verify` measures with was written for it.
"""

from importlib import resources
from pathlib import Path

from coldstream.errors import ModelNotFoundError


def demo_model_path() -> Path:
    """Where the bundled model lies. Raises ModelNotFoundError if the installation is without it."""
    path = Path(str(resources.files(__name__) / "demo.gguf"))
    if not path.is_file():
        raise ModelNotFoundError("the demo model is not part of this installation: name a model to run")
    return path


def demo_drafter_path() -> Path:
    """Where the drafter of the demo model lies, if the installation has it."""
    return Path(str(resources.files(__name__) / "demo-drafter.gguf"))


def demo_profile_path() -> Path:
    """Where the routing trace of the demo model lies, if the installation has it."""
    return Path(str(resources.files(__name__) / "demo.routing"))


def verification_text() -> str:
    """Prose and code, 4 KB, that no model was trained on when it was written."""
    return (resources.files(__name__) / "verification.txt").read_text(encoding="utf-8")
