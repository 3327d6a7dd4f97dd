"""What a verb's MODEL argument means when it is left out."""

from coldstream.assets import demo_model_path


def model_or_bundled(model: str | None) -> str:
    """`model`, or the path of the demo model in the package. Raises ModelNotFoundError if that is absent."""
    return str(demo_model_path()) if model is None else model
