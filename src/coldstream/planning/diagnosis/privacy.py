"""Facts without what would say whose machine it is.

Home directories become ~, and a folder with the user's name becomes USER.
"""

import os
import pwd
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def without_names(facts: T) -> T:
    """`facts`, a frozen dataclass, with the text of all its fields changed. What is no text stays."""
    homes, user = _homes(), _user()
    changed: T = _mapped(facts, lambda text: hide(text, homes, user))
    return changed


def hide(text: str, homes: tuple[str, ...], user: str | None) -> str:
    """`text` with paths below `homes` from ~ on, and with no folder called as the user."""
    for home in sorted(homes, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?!\w)", "~", text)
    if user:
        text = re.sub(rf"(?<=/){re.escape(user)}(?!\w)", "USER", text)
    return text


def _homes() -> tuple[str, ...]:
    """The user's home directory by each of its names: of the environment, of the system's list, by links."""
    homes = set()
    with suppress(RuntimeError):
        homes.add(str(Path.home()))
    with suppress(KeyError):
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    homes |= {os.path.realpath(home) for home in homes}
    return tuple(home.rstrip("/") for home in homes if home.rstrip("/"))


def _user() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(each, change) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), change) for f in fields(value)})
    return value
