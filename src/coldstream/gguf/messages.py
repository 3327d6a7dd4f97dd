"""The wording that all errors about a model file share: file, field, byte offset, problem, next step."""

from pathlib import Path
from typing import Final

DAMAGED: Final = "the file is damaged or hostile, download it again"
INCOMPLETE: Final = "the file is incomplete, download it again"
RECONVERT: Final = "convert the model again"

_MAX_PATH_CHARS: Final = 120
_MAX_FIELD_CHARS: Final = 80


def shorten(path: Path) -> str:
    """The path, or its end when it is so long that it would push the rest out of the message."""
    text = str(path)
    return text if len(text) <= _MAX_PATH_CHARS else f"…{text[1 - _MAX_PATH_CHARS :]}"


def describe(path: Path, field: str, offset: int, problem: str) -> str:
    if len(field) > _MAX_FIELD_CHARS:
        field = f"{field[: _MAX_FIELD_CHARS - 1]}…"
    return f"{shorten(path)}: {field} at byte {offset}: {problem}"
