"""JSON objects of files that cannot be trusted."""

import json
from pathlib import Path
from typing import Any

from coldstream.errors import DuplicateError, InconsistentError
from coldstream.gguf.messages import DAMAGED, shorten


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `text`; `path` is for messages.

    Raises DuplicateError for a name that appears twice in an object, and InconsistentError for what is not
    JSON, NaN and infinities included, or nested deeper than Python follows.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise DuplicateError(f"{shorten(path)}: {twice:.80} appears twice: {DAMAGED}")
        return values

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is no number")

    try:
        values = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise InconsistentError(f"{shorten(path)} is not valid JSON ({error!s:.80}): {DAMAGED}") from error
    if not isinstance(values, dict):
        raise InconsistentError(f"{shorten(path)} is not a JSON object: {DAMAGED}")
    return values
