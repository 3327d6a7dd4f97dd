"""What clients call a model whose server was given no other name."""

from pathlib import Path


def name_of(model: str) -> str:
    """A hub name as it is, a file without its folder and ending."""
    return Path(model).name.removesuffix(".gguf") if Path(model).exists() else model
