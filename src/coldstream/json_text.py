"""JSON that models and clients write, as text that can be encoded.

An escape in JSON may spell half of a surrogate pair, which UTF-8 cannot encode. Such a half is read as
U+FFFD, as in the bodies of requests.
"""

import json
import re
from typing import Any, Final

_HALF: Final = re.compile("[\ud800-\udfff]")


def dumped(value: Any) -> str:
    """A value as JSON that can be encoded. Raises RecursionError if it is nested too deeply."""
    return _HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False))


def mended(text: str, value: Any) -> str:
    """`text`, which is the JSON of `value`; as by `dumped` if half of a pair is in it."""
    has_half = "\\u" in text and _HALF.search(json.dumps(value, ensure_ascii=False))
    return dumped(value) if has_half else text


def loaded(text: str) -> Any:
    """The value of JSON text. Raises ValueError and RecursionError as `json.loads`."""
    value = json.loads(text)
    return json.loads(dumped(value)) if "\\u" in text else value
