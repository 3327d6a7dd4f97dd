"""Bodies that cost a careless server far more than their length: for `bad_bodies.py`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MIB: Final = 1 << 20
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
AT_ONCE: Final = "24 MB of lists and texts"


@dataclass(frozen=True)
class Kind:
    """A body, made when it is needed, and the status that it is answered with."""

    body: Callable[[], bytes]
    path: str = COMPLETIONS
    status: int = 400


def repeated(entry: str, size: int, before: str = '{"prompt": [', after: str = "]}") -> bytes:
    """`entry` in a list, as often as `size` bytes have room for."""
    count = (size - len(before) - len(after)) // (len(entry.encode()) + 1)
    return f"{before}{','.join([entry] * count)}{after}".encode()


def biases(size: int) -> bytes:
    """A bias for each of many tokens, none of which is a number."""
    entries = ",".join(f'"{i}": "x"' for i in range(size // 14))
    return f'{{"prompt": "a", "logit_bias": {{{entries}}}}}'.encode()


def messages_of_parts() -> bytes:
    """As many parts as are read, the last of which is wrong."""
    parts = ",".join(['{"type": "text"}'] * 1000)
    messages = [f'{{"role": "user", "content": [{parts}]}}'] * 50
    return f'{{"messages": [{",".join(messages)}, {{"role": "user", "content": [1]}}]}}'.encode()


def text_of(size: int, text: str) -> bytes:
    """A prompt of so many bytes of a text."""
    return b'{"prompt": "%s"}' % (text * (size // len(text.encode()))).encode()


def wide_text(size: int) -> bytes:
    """ASCII with one character for which each of the others takes four bytes."""
    return '{"prompt": "😀'.encode() + b"a" * size + b'"}'


def deep_schema() -> bytes:
    """A tool whose parameters are nested too deeply."""
    deep = '{"properties": {"a": ' * 5000 + "{}" + "}}" * 5000
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
    message = json.dumps([{"role": "user", "content": "a"}])
    return f'{{"messages": {message}, "tools": [{tool}]}}'.encode()


KINDS: Final[dict[str, Kind]] = {
    "1.5 MB of lists and texts": Kind(lambda: repeated('[], ""', 3 * MIB // 2)),
    "20 MB of biases": Kind(lambda: biases(20 * MIB)),
    AT_ONCE: Kind(lambda: repeated('[], ""', 24 * MIB)),
    "lists and texts just within the bounds": Kind(lambda: repeated('[], ""', 8 * 60_000)),
    "biases just within the bounds": Kind(lambda: biases(14 * 65_000)),
    "a million token ids and a text": Kind(lambda: repeated("30000", 6 << 20, after=', "a"]}')),
    "16 MB of objects": Kind(lambda: repeated("{}", 16 * MIB)),
    "lists in lists": Kind(lambda: b'{"prompt": ' + b"[" * 16 * MIB),
    "a number of 16 million digits": Kind(lambda: b'{"n": ' + b"1" * 16 * MIB + b"}"),
    "numbers of 4,000 digits": Kind(lambda: repeated("1" * 4000, 16 * MIB)),
    "24 MB of text": Kind(lambda: text_of(24 * MIB, "import os ")),
    "24 MB of escapes": Kind(lambda: text_of(24 * MIB, "\\u0041"), "/tokenize"),
    "24 MB of backslashes": Kind(lambda: text_of(24 * MIB, "\\\\")),
    "24 MB of text with an emoji": Kind(lambda: wide_text(24 * MIB)),
    "halves of surrogate pairs": Kind(lambda: text_of(3 * MIB, "\\ud800"), "/detokenize"),
    "a prompt of 4 MB, too long for the context": Kind(lambda: text_of(4 * MIB - 64, "import os, re ")),
    "64 prompts of 60 KB, too long for the context": Kind(
        lambda: json.dumps({"prompt": ["x = 1\\n" * 10_000] * 64}).encode()
    ),
    "a chat of 8 MB, too long for the context": Kind(
        lambda: json.dumps({"messages": [{"role": "user", "content": "def f(x): " * 2000}] * 400}).encode(),
        CHAT,
    ),
    "a key again and again": Kind(lambda: repeated('"n": 1', 24 * MIB, "{", "}")),
    "messages of many parts": Kind(messages_of_parts, CHAT),
    "messages of wrong parts": Kind(
        lambda: repeated('{"role": "user", "content": [1, {}]}', 2 * MIB, '{"max_tokens": 1, "messages": ['),
        MESSAGES,
    ),
    "tools without names": Kind(lambda: repeated('{"type": "function"}', MIB, '{"tools": ['), CHAT),
    "a schema of 10,000 levels": Kind(deep_schema, CHAT),
    "stop strings of wrong kinds": Kind(lambda: repeated("{}", 8 * MIB, '{"prompt": "a", "stop": [')),
    "wrong items": Kind(lambda: repeated("[{}]", MIB, '{"input": ['), "/v1/responses"),
    "30 MB in two strings": Kind(
        lambda: b'{"a": "%s", "b": "%s"}' % (b"a" * 15 * MIB, b"b" * 15 * MIB), "/detokenize"
    ),
    "8 MB of blanks": Kind(lambda: b" " * 8 * MIB + b"{}"),
    "24 MB of blanks": Kind(lambda: b" " * 24 * MIB),
    "24 MB of quotation marks": Kind(lambda: b'"' * 24 * MIB),
    "24 MB that are no text": Kind(lambda: b'{"prompt": "' + b"\xff" * 24 * MIB + b'"}'),
}
