"""Text ↔ token ids, from the metadata of a GGUF file.

BPE by the `tokenizers` library. Added tokens are split off first. The rest is split by the family's regular
expressions. Each piece is merged by rank, as bytes. With gemma-4's vocabulary it is merged as characters, and
those that are no token are bytes. Unit of work: one prompt.

llama.cpp is the oracle, id for id, but for `gpt-4o` (see docs/text.md). Two choices follow from it:
- No Unicode normalisation. The Hugging Face files of this family apply NFC first; llama.cpp does not, and
  without it `decode(encode(text)) == text` holds for every valid text.
- Contractions ('s, 're, …) are ASCII. A case-insensitive group would also take U+017F (ſ) for an s.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BPETokenizer

from coldstream.errors import ContextFullError, InvalidRequestError, UnsupportedError
from coldstream.gguf.vocabulary import BYTE_ALPHABET, BYTE_NAMES, SPACED, TokenKind, Vocabulary, read_merges

# Beyond 10 million retries, about two per blank in a run of blanks, the regular-expression engine panics.
MAX_TEXT_CHARS = 1 << 22
# Long texts are encoded in blocks: twice as fast, for what the library notes of each token stays in cache.
BLOCK_CHARS = 1 << 14
SPACE = "▁"  # a space in gemma-4's tokens
MARKS = ("\udc80", "\udc81")  # halves of surrogate pairs: no decoded text holds one

# Where a piece of text always ends: no alternative of the expressions matches across, and none that ends here
# looks at what follows.
_BLOCK_END = re.compile(r"[0-9]|[A-Za-z](?= )|\n(?=\S)")
_NUMBERS_BLOCK_END = re.compile(r"[A-Za-z](?= )|\n(?=\S)")  # where a piece may have several digits
_SLASHES_BLOCK_END = re.compile(r"[A-Za-z](?= )|\n(?=[^\s/])")  # and where slashes follow line ends
_LINES_BLOCK_END = re.compile(r"\n(?=[^\n])")

_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LINES = r"[^\n]+|\n+"


@dataclass(frozen=True)
class PreTokenizer:
    """How a family divides text before it is merged."""

    patterns: tuple[str, ...]  # one after the other, each within the pieces of the one before
    block_end: re.Pattern[str] = _BLOCK_END
    ignore_merges: bool = False  # whether a piece that is a token is this token, whatever its merges make


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "qwen2": PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_MARKS}|{_SPACES}",)),
        "qwen35": PreTokenizer(
            (
                rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
            )
        ),
        "laguna": PreTokenizer((_LINES, rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_MARKS}|{_SPACES}")),
        "glm4": PreTokenizer(
            (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}",),
            _NUMBERS_BLOCK_END,
            ignore_merges=True,
        ),
        "gpt-4o": PreTokenizer(
            (
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ANY_CASE}"
                rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ANY_CASE}"
                rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
            ),
            _SLASHES_BLOCK_END,
        ),
    }
)
# gemma-4's: no token has a line end and another character.
_OF_LINES = PreTokenizer((_LINES,), _LINES_BLOCK_END)

# From the byte alphabet to the Latin-1 characters whose encoding is those bytes.
_TO_LATIN_1 = {ord(char): byte for byte, char in enumerate(BYTE_ALPHABET)}

_CONTROL = (TokenKind.CONTROL, TokenKind.UNKNOWN)
_SPELT_AS_TEXT = (*_CONTROL, TokenKind.USER_DEFINED)

# A text, and whether it is a control token.
Segment = tuple[str, bool]


class Tokenizer:
    """Encodes and decodes text. Immutable; may be shared between threads."""

    def __init__(self, vocabulary: Vocabulary, merges: list[tuple[str, str]], pre: PreTokenizer) -> None:
        self.vocabulary = vocabulary
        is_spaced = vocabulary.model == SPACED
        self._bpe = BPETokenizer(
            models.BPE(
                vocab=vocabulary.token_ids.copy(),
                merges=merges,
                byte_fallback=is_spaced,
                ignore_merges=pre.ignore_merges,
            )
        )
        splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in pre.patterns]
        if is_spaced:
            self._bpe.normalizer = normalizers.Replace(" ", SPACE)
            self._bpe.pre_tokenizer = pre_tokenizers.Sequence(splits)
        else:
            of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            self._bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, of_bytes])
        self._block_end = pre.block_end
        self._user_defined = _longest_first(vocabulary.user_defined_ids)
        self._added = _longest_first({**vocabulary.user_defined_ids, **vocabulary.control_ids})
        self._longest_token = max(map(len, vocabulary.tokens))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer a model file describes.

        Raises `UnsupportedError` for a model or pre-tokenizer that this version doesn't know, and
        `InconsistentError`, `DuplicateError` or `LimitError` for one that contradicts itself; all name the
        field.
        """
        vocabulary = Vocabulary.from_metadata(metadata)
        if vocabulary.model == SPACED:
            return cls(vocabulary, read_merges(metadata, vocabulary), _OF_LINES)
        pre = metadata.get("tokenizer.ggml.pre")
        if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            what = "missing" if pre is None else repr(pre)
            raise UnsupportedError(
                f"tokenizer.ggml.pre: {what}, known: {known}; by another one text would be split wrongly: "
                "convert the model again with a current converter, or choose another model"
            )
        return cls(vocabulary, read_merges(metadata, vocabulary), PRE_TOKENIZERS[pre])

    @property
    def vocab_size(self) -> int:
        """Number of tokens, padding tokens included: the rows of the embedding."""
        return len(self.vocabulary.tokens)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends an answer: the stated end tokens and those known by name."""
        return self.vocabulary.eos_ids

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def pad_id(self) -> int | None:
        return self.vocabulary.pad_id

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Id of every added token (control and user-defined) by its text."""
        return {**self.vocabulary.control_ids, **self.vocabulary.user_defined_ids}

    def encode(self, text: str, parse_special: bool = False, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`, led by the BOS only if the file asks for one.

        User-defined tokens are matched in any text, control tokens only if `parse_special`; otherwise their
        spelling is plain text. Raises `InvalidRequestError` for lone surrogates and for a text of more than
        `MAX_TEXT_CHARS` characters, `ContextFullError` for one of more than `max_tokens` tokens; what can't
        fit is refused before any work.
        """
        self._check_text(text, max_tokens)
        return self._within(self._leading_bos() + self._encode(text, parse_special), max_tokens)

    def encode_segments(self, segments: Iterable[Segment], max_tokens: int | None = None) -> list[int]:
        """Token ids of a rendered chat: `(control token, True)` and `(plain text, False)` in order.

        A BOS that the file asks for is added unless the chat begins with it. Raises as `encode` does, and for
        a segment marked as control that is not a control token.
        """
        segments = list(segments)
        self._check_text("".join(text for text, _ in segments), max_tokens)
        ids: list[int] = []
        for text, is_control in segments:
            if not is_control:
                ids += self._encode(text, parse_special=False)
            elif text in self.vocabulary.control_ids:
                ids.append(self.vocabulary.control_ids[text])
            else:
                raise InvalidRequestError(f"{text[:40]!r} is not a control token of this model")
        bos = self._leading_bos()
        return self._within(ids if bos and ids[:1] == bos else bos + ids, max_tokens)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`, without control tokens if `skip_special`. Bytes that aren't UTF-8 become U+FFFD."""
        return b"".join(self._visible_bytes(index, skip_special) for index in ids).decode("utf-8", "replace")

    def token_bytes(self, index: int) -> bytes:
        """The bytes of token `index`; unused ids have none. Raises `InvalidRequestError` if out of range."""
        return self._bytes_of(index, self._kind(index))

    def _bytes_of(self, index: int, kind: int) -> bytes:
        token = self.vocabulary.tokens[index]
        if kind in _SPELT_AS_TEXT:
            return token.encode()
        if self.vocabulary.model == SPACED:
            return _spaced_bytes(token, kind)
        if kind != TokenKind.NORMAL:
            return b""
        try:
            return token.translate(_TO_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:  # spelt outside the byte alphabet, so no text merges into it
            return token.encode()

    def is_control(self, index: int) -> bool:
        """Whether `index` is a token that plain text never becomes and that decoded text leaves out."""
        return self._kind(index) in _CONTROL

    def _kind(self, index: int) -> int:
        if not 0 <= index < self.vocab_size:
            raise InvalidRequestError(f"token id {index} is outside the vocabulary of {self.vocab_size}")
        return self.vocabulary.kinds[index]

    def _visible_bytes(self, index: int, skip_special: bool) -> bytes:
        kind = self._kind(index)
        return b"" if skip_special and kind in _CONTROL else self._bytes_of(index, kind)

    def _leading_bos(self) -> list[int]:
        bos = self.vocabulary.bos_id
        return [bos] if self.vocabulary.add_bos and bos is not None else []

    def _check_text(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is not None:
            limit = max_tokens * self._longest_token  # a token spells at most its own length
            if len(text) > limit:
                raise ContextFullError(
                    f"prompt: {len(text)} characters, at most {limit} can fit into {max_tokens} tokens: "
                    "shorten it, or choose a larger --ctx-size",
                    -(-len(text) // self._longest_token),
                    is_exact=False,
                )
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidRequestError(
                f"prompt: {len(text)} characters, at most {MAX_TEXT_CHARS} can be served"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"prompt: character {error.start} is a lone surrogate") from None

    def _within(self, ids: list[int], max_tokens: int | None) -> list[int]:
        if max_tokens is not None and len(ids) > max_tokens:
            raise ContextFullError(
                f"prompt: {len(ids)} tokens, the limit is {max_tokens}: shorten it, or choose a "
                "larger --ctx-size",
                len(ids),
            )
        return ids

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for fragment in _split_off(text, self._added if parse_special else self._user_defined):
            if isinstance(fragment, int):
                ids.append(fragment)
            elif fragment:
                for block in split_into_blocks(fragment, BLOCK_CHARS, self._block_end):
                    ids += self._bpe.encode(block, add_special_tokens=False).ids
        return ids


class StreamDecoder:
    """Decodes one answer token by token; the pieces, joined, are `decode` of all its ids.

    A character whose bytes are split over tokens is held back until it is complete. With `is_marking`,
    control tokens are in the text, each between the two `MARKS`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, *, is_marking: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._is_marking = is_marking
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, possibly none."""
        if self._is_marking and self._tokenizer.is_control(token_id):
            return self.finish() + marked(self._tokenizer.vocabulary.tokens[token_id])
        return self._decoder.decode(self._tokenizer._visible_bytes(token_id, self._skip_special))

    def finish(self) -> str:
        """The rest at the end: U+FFFD if the answer stops inside a character. Resets the decoder."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def marked(token: str) -> str:
    """A control token as a `StreamDecoder` that marks them writes it."""
    return f"{MARKS[0]}{token}{MARKS[1]}"


def split_into_blocks(text: str, size: int, block_end: re.Pattern[str]) -> Iterator[str]:
    """`text` in blocks of at least `size` characters, the last perhaps of fewer, with the same tokens.

    block_end: where a piece of text always ends, as a `PreTokenizer` has it.
    """
    start = 0
    while end := block_end.search(text, start + size - 1):
        yield text[start : end.end()]
        start = end.end()
    yield text[start:]


def _spaced_bytes(token: str, kind: int) -> bytes:
    """The bytes of a normal token of gemma-4, or of one for a byte."""
    if kind == TokenKind.BYTE:
        return bytes((BYTE_NAMES.index(token),)) if token in BYTE_NAMES else b""
    return token.replace(SPACE, " ").encode() if kind == TokenKind.NORMAL else b""


def _longest_first(token_ids: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(token_ids.items(), key=lambda item: (-len(item[0].encode()), item[1]))


def _split_off(text: str, added: Sequence[tuple[str, int]]) -> list[str | int]:
    """`text` in fragments, added tokens replaced by their ids; longer tokens first, wherever they stand."""
    fragments: list[str | int] = [text]
    for token, index in added:
        if token not in text:
            continue
        split: list[str | int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                split.append(fragment)
                continue
            first, *rest = fragment.split(token)
            split.append(first)
            for part in rest:
                split += (index, part)
        fragments = split
    return fragments
