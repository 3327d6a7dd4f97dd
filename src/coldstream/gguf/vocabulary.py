"""The tokens of a GGUF file, checked before anything is built from them.

Unit of work: one metadata mapping → one `Vocabulary`. Knows no regular expression and no text: `tokenizer.py`
encodes with it, `chat_template.py` reads the control tokens from it.

A contradictory vocabulary is refused, not repaired. Contradictions are an array of the wrong kind or length,
an id out of range, a token named twice, and a byte without a token. What nothing depends on is only warned
of. Source of the key names and of the token kinds: the GGUF specification; of the end-token names:
llama.cpp's list, reduced to what the supported families hold.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from operator import add
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from coldstream.errors import DuplicateError, InconsistentError, LimitError, UnsupportedError

MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
MAX_TOKEN_CHARS = 4096
MAX_ADDED_TOKENS = 4096

# Spelt in GPT-2's alphabet of bytes, and spelt in UTF-8, with ▁ for a space and <0x0A> for a byte.
BYTE_LEVEL, SPACED = "gpt2", "gemma4"
SUPPORTED_MODELS = (BYTE_LEVEL, SPACED)

END_TOKEN_NAMES = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<|return|>", "<|call|>"),  # gpt-oss
    *("<turn|>", "<|tool_response>"),  # gemma-4: what follows is the user's, or a tool's
)
# They end a fill-in-the-middle answer: what follows belongs to another file or another repository.
FIM_END_TOKEN_NAMES = ("<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>", "<|file_sep|>")
# These are the structure of a prompt, so plain text must not match them, whatever type a file gives them.
CONTROL_TOKEN_NAMES = (
    *("<|im_start|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    *("<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", '<|"|>'),
    *("<|tool>", "<tool|>", "<|think|>"),
    *(END_TOKEN_NAMES + FIM_END_TOKEN_NAMES),
)
END_TOKEN_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
READ_ID_KEYS = (*END_TOKEN_KEYS, "bos", "padding")
UNREAD_ID_KEYS = ("unknown", "seperator", "mask", "fim_pre", "fim_suf", "fim_mid")

T = TypeVar("T")


class TokenKind(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_alphabet() -> tuple[str, ...]:
    """GPT-2's stand-in for each byte: itself if printable Latin-1, else the next code point from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(substitutes)) for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()
BYTE_NAMES = tuple(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model file, `kinds[i]` being the `TokenKind` of `tokens[i]`.

    The added tokens by text: `control_ids` are matched only on request (those of `CONTROL_TOKEN_NAMES` are
    among them whatever the file says), `user_defined_ids` in any text. `eos_ids` all end an answer.
    """

    model: str  # one of `SUPPORTED_MODELS`
    tokens: Sequence[str]
    token_ids: MappingProxyType[str, int]
    kinds: bytes
    control_ids: Mapping[str, int]
    user_defined_ids: Mapping[str, int]
    eos_ids: frozenset[int]
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    add_bos: bool
    warnings: tuple[str, ...] = ()  # wrong statements that nothing depends on, as text for people

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Vocabulary":
        """Read and check every token statement of a file except its merges.

        Raises `UnsupportedError`, `InconsistentError`, `DuplicateError` or `LimitError` naming the field.
        """
        model = _require(metadata, "tokenizer.ggml.model", str)
        if model not in SUPPORTED_MODELS:
            known = ", ".join(SUPPORTED_MODELS)
            raise UnsupportedError(
                f"tokenizer.ggml.model: {model!r}, known: {known}; choose a model with one of these"
            )
        tokens = _read_tokens(metadata)
        token_ids = {token: index for index, token in enumerate(tokens)}
        if len(token_ids) != len(tokens):
            first = next(index for index, token in enumerate(tokens) if token_ids[token] != index)
            raise DuplicateError(f"tokenizer.ggml.tokens[{first}]: {tokens[first]!r} comes again later")
        kinds = _read_kinds(metadata, token_ids)
        control_ids = _ids_of_kinds(tokens, kinds, TokenKind.CONTROL, TokenKind.UNKNOWN)
        user_defined_ids = _ids_of_kinds(tokens, kinds, TokenKind.USER_DEFINED)
        if len(control_ids) + len(user_defined_ids) > MAX_ADDED_TOKENS:
            raise LimitError(f"tokenizer.ggml.token_type: more than {MAX_ADDED_TOKENS} added tokens")
        _check_byte_tokens(model, token_ids, kinds)
        special = {key: _read_id(metadata, key, len(tokens)) for key in READ_ID_KEYS}
        # gemma-4 can't do without, and first converters said that there is none to add.
        add_bos = bool(_optional(metadata, "tokenizer.ggml.add_bos_token", bool)) or model == SPACED
        if add_bos and special["bos"] is None:
            raise InconsistentError("tokenizer.ggml.add_bos_token: true, but there is no bos_token_id")
        return cls(
            model=model,
            tokens=tokens,
            token_ids=MappingProxyType(token_ids),
            kinds=kinds,
            control_ids=MappingProxyType(control_ids),
            user_defined_ids=MappingProxyType(user_defined_ids),
            eos_ids=frozenset(_end_ids(token_ids, special)),
            eos_id=special["eos"],
            bos_id=special["bos"],
            pad_id=special["padding"],
            add_bos=add_bos,
            warnings=tuple(_unread_problems(metadata, len(tokens))),
        )


def read_merges(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges of a file in order of rank, each a pair of tokens that joins into a token.

    Raises `InconsistentError`, `DuplicateError` or `LimitError` naming `tokenizer.ggml.merges` and the merge.
    """
    field = "tokenizer.ggml.merges"
    merges = _require_strings(metadata, field)
    if len(merges) > MAX_MERGES:
        raise LimitError(f"{field}: {len(merges)} merges, the limit is {MAX_MERGES}")
    malformed = next((index for index, merge in enumerate(merges) if merge.count(" ") != 1), None)
    if malformed is not None:
        raise InconsistentError(f"{field}[{malformed}]: {merges[malformed][:80]!r} is not two tokens")
    if len(set(merges)) != len(merges):
        raise DuplicateError(f"{field}: a merge is listed twice")
    halves = " ".join(merges).split(" ") if merges else []
    lefts, rights = halves[::2], halves[1::2]
    made = list(map(add, lefts, rights))
    # Real files hold 250,000 merges: check in loops that run in C, and look for the wrong one only then.
    is_token = vocabulary.token_ids.__contains__
    if not (all(map(is_token, halves)) and all(map(is_token, made))):
        parts = zip(lefts, rights, made, strict=True)
        wrong = next(index for index, texts in enumerate(parts) if not all(map(is_token, texts)))
        raise InconsistentError(f"{field}[{wrong}]: {merges[wrong][:80]!r} joins or makes what is no token")
    if forged := vocabulary.control_ids.keys() & set(made):
        raise InconsistentError(f"{field}: plain text could merge into the control token {min(forged)!r}")
    return list(zip(lefts, rights, strict=True))


def _end_ids(token_ids: Mapping[str, int], special: Mapping[str, int | None]) -> set[int]:
    """The tokens that end an answer: those known by name, and those that the file states.

    In gpt-oss `<|end|>` ends a message, of which an answer has several, whatever the file states.
    """
    named = {token_ids[name] for name in END_TOKEN_NAMES + FIM_END_TOKEN_NAMES if name in token_ids}
    stated = {index for key in END_TOKEN_KEYS if (index := special[key]) is not None}
    is_harmony = "<|return|>" in token_ids and "<|call|>" in token_ids
    return (named | stated) - ({token_ids["<|end|>"]} if is_harmony and "<|end|>" in token_ids else set())


def _read_tokens(metadata: Mapping[str, Any]) -> list[str]:
    field = "tokenizer.ggml.tokens"
    tokens = _require_strings(metadata, field)
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise LimitError(f"{field}: {len(tokens)} tokens, allowed are 1 to {MAX_TOKENS}")
    longest = max(tokens, key=len)
    if len(longest) > MAX_TOKEN_CHARS:
        index = tokens.index(longest)
        raise LimitError(f"{field}[{index}]: {len(longest)} characters, the limit is {MAX_TOKEN_CHARS}")
    if "" in tokens:
        raise InconsistentError(f"{field}[{tokens.index('')}]: an empty token")
    return tokens


def _read_kinds(metadata: Mapping[str, Any], token_ids: Mapping[str, int]) -> bytes:
    field = "tokenizer.ggml.token_type"
    stated = _optional_numbers(metadata, field, (np.int32, np.uint32), len(token_ids))
    kinds = np.full(len(token_ids), TokenKind.NORMAL) if stated is None else stated.astype(np.int64)
    wrong = np.flatnonzero((kinds < min(TokenKind)) | (kinds > max(TokenKind)))
    if wrong.size:
        raise InconsistentError(f"{field}[{wrong[0]}]: {kinds[wrong[0]]} is not a token type")
    for name in CONTROL_TOKEN_NAMES:
        if name in token_ids:
            kinds[token_ids[name]] = TokenKind.CONTROL
    return kinds.astype(np.uint8).tobytes()


def _ids_of_kinds(tokens: Sequence[str], kinds: bytes, *wanted: TokenKind) -> dict[str, int]:
    indices: list[int] = np.flatnonzero(np.isin(np.frombuffer(kinds, dtype=np.uint8), wanted)).tolist()
    return {tokens[index]: index for index in indices}


def _unread_problems(metadata: Mapping[str, Any], num_tokens: int) -> Iterator[str]:
    """What is wrong with scores, for which byte-level merging has no use, and with ids that nothing uses."""
    scores = "tokenizer.ggml.scores"
    checks: list[Callable[[], object]] = [
        *(partial(_read_id, metadata, key, num_tokens) for key in UNREAD_ID_KEYS),
        partial(_optional_numbers, metadata, scores, (np.float32, np.int32), num_tokens),
    ]
    for check in checks:
        try:
            check()
        except InconsistentError as error:
            yield f"{error}: ignored, as nothing depends on it"


def _check_byte_tokens(model: str, token_ids: Mapping[str, int], kinds: bytes) -> None:
    names = BYTE_ALPHABET if model == BYTE_LEVEL else BYTE_NAMES
    missing = [byte for byte, name in enumerate(names) if name not in token_ids]
    if missing:
        raise InconsistentError(f"tokenizer.ggml.tokens: {_hex_list(missing)} of 256 bytes have no token")
    special = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)
    of_bytes = [TokenKind(kinds[token_ids[name]]) for name in names]
    if model == BYTE_LEVEL:
        wrong = [byte for byte, kind in enumerate(of_bytes) if kind in special]
    else:
        wrong = [byte for byte, kind in enumerate(of_bytes) if kind is not TokenKind.BYTE]
    if wrong and model == BYTE_LEVEL:
        raise InconsistentError(f"tokenizer.ggml.token_type: bytes {_hex_list(wrong)} are marked special")
    if wrong:
        raise InconsistentError(
            f"tokenizer.ggml.token_type: bytes {_hex_list(wrong)} are not marked as bytes"
        )


def _hex_list(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(f"{number:#04x}" for number in numbers[:8]) + more


def _read_id(metadata: Mapping[str, Any], key: str, num_tokens: int) -> int | None:
    field = f"tokenizer.ggml.{key}_token_id"
    index = _optional(metadata, field, int)
    if index is not None and not 0 <= index < num_tokens:
        raise InconsistentError(f"{field}: {index} is outside the vocabulary of {num_tokens}")
    return index


def _optional(metadata: Mapping[str, Any], field: str, kind: type[T]) -> T | None:
    value = metadata.get(field)
    if value is not None and type(value) is not kind:  # bool is an int: an id must not be `true`
        raise InconsistentError(f"{field}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def _require(metadata: Mapping[str, Any], field: str, kind: type[T]) -> T:
    value = _optional(metadata, field, kind)
    if value is None:
        raise InconsistentError(f"{field}: missing: the file is incomplete, convert or download it again")
    return value


def _require_strings(metadata: Mapping[str, Any], field: str) -> list[str]:
    values = _require(metadata, field, list)
    if not {str}.issuperset(map(type, values)):
        raise InconsistentError(f"{field}: expected an array of strings")
    return values


def _optional_numbers(
    metadata: Mapping[str, Any], field: str, dtypes: Sequence[type[np.generic]], length: int
) -> np.ndarray[Any, Any] | None:
    array = metadata.get(field)
    if array is None:
        return None
    if not isinstance(array, np.ndarray) or array.dtype not in dtypes:
        kind = array.dtype.name if isinstance(array, np.ndarray) else type(array).__name__
        wanted = " or ".join(dtype.__name__ for dtype in dtypes)
        raise InconsistentError(f"{field}: expected an array of {wanted}, got {kind}")
    if array.shape != (length,):
        raise InconsistentError(f"{field}: {array.size} entries for {length} tokens")
    return array
