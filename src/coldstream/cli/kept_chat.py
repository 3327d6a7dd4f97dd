"""What the terminal's chat keeps for the next one: typed lines, and the last conversation with each model.

Unit of work: one file in a folder that only its owner can read. Knows no model and no terminal.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coldstream.errors import InvalidRequestError, StorageError
from coldstream.files import write_file

_VERSION: Final = 1
_MAX_BYTES: Final = 64 * 2**20
_ROLES: Final = ("user", "assistant")
_AGAIN: Final = "start afresh, which replaces it"


@dataclass(frozen=True)
class Conversation:
    """A system prompt, or none, and messages of user and assistant in turn."""

    system_prompt: str | None
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class KeptChat:
    """The files of chats with one model in `folder`.

    name: of the model's file, whatever it is called: its fingerprint.
    """

    folder: Path
    name: str

    @property
    def typed_lines(self) -> Path:
        """The lines that were typed in chats with any model."""
        return self.folder / "history"

    @property
    def path(self) -> Path:
        """The last conversation with this model."""
        return self.folder / "chats" / f"{self.name}.json"

    def prepare(self) -> bool:
        """Make the folder and the file of typed lines, for their owner alone; whether they can be used."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            self.typed_lines.touch(mode=0o600)
        except OSError:
            return False
        return os.access(self.typed_lines, os.R_OK | os.W_OK) and os.access(self.path.parent, os.W_OK)

    def write(self, system_prompt: str | None, messages: Sequence[dict[str, str]]) -> None:
        """Replace the last conversation. Raises StorageError."""
        content = {"version": _VERSION, "system_prompt": system_prompt, "messages": list(messages)}
        try:
            self.path.touch(mode=0o600)  # a new file gets its mode before its content
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {error.strerror}") from error
        write_file(self.path, json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass"))

    def read(self) -> Conversation:
        """The last conversation. Raises InvalidRequestError if there is none that can be read."""
        try:
            with open(self.path, "rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            raise InvalidRequestError("no conversation with this model is kept") from None
        except OSError as error:
            raise InvalidRequestError(f"{self.path}: {error.strerror}; {_AGAIN}") from error
        try:
            content = json.loads(data.decode("utf-8", "surrogatepass")) if len(data) <= _MAX_BYTES else None
        except (ValueError, RecursionError):
            content = None
        return _checked(content, self.path)


def _checked(content: Any, path: Path) -> Conversation:
    if isinstance(content, dict) and content.get("version") == _VERSION:
        system_prompt, messages = content.get("system_prompt"), content.get("messages")
        if isinstance(system_prompt, str | None) and isinstance(messages, list) and len(messages) % 2 == 0:
            texts = [_text(message, _ROLES[index % 2]) for index, message in enumerate(messages)]
            if None not in texts:
                return Conversation(system_prompt, tuple(messages))
    raise InvalidRequestError(f"{path} is no conversation that this version can read: {_AGAIN}")


def _text(message: Any, role: str) -> str | None:
    """The text of a message of `role`; None for anything else."""
    if not isinstance(message, dict) or set(message) != {"role", "content"} or message["role"] != role:
        return None
    content = message["content"]
    return content if isinstance(content, str) else None
