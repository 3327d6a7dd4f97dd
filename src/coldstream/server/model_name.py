"""What clients call a model whose server was given no other name."""

from pathlib import Path

from coldstream.errors import escape_controls
from coldstream.gguf.hub_files import HubName


def name_of(model: str) -> str:
    """A hub name without the address around it, a file without its folder and ending; what is no text in its
    name is escaped."""
    name = (
        Path(model).name.removesuffix(".gguf") if Path(model).exists() else str(HubName.parse(model) or model)
    )
    return escape_controls(name)
