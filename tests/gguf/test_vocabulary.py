"""Reliability statement GG13: a tokenizer that contradicts itself is refused, naming the field."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import CONTROL_TOKENS, tokenizer_metadata

from coldstream.errors import DuplicateError, InconsistentError, LimitError, ModelFormatError
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.gguf.vocabulary import BYTE_ALPHABET, MAX_MERGES, MAX_TOKEN_CHARS, TokenKind, Vocabulary

Metadata = dict[str, Any]
PREFIX = "tokenizer.ggml."


def refuse(error: type[ModelFormatError], field: str, damage: Callable[[Metadata], object]) -> None:
    metadata = tokenizer_metadata()
    damage(metadata)
    with pytest.raises(error, match=re.escape(field)) as caught:
        Tokenizer.from_metadata(metadata)
    assert type(caught.value) is error


def setting(field: str, value: object) -> Callable[[Metadata], object]:
    return lambda metadata: metadata.__setitem__(PREFIX + field, value)


@pytest.mark.parametrize("field", ["model", "tokens", "merges"])
def test_gg13_missing_field(field: str) -> None:
    refuse(InconsistentError, PREFIX + field, lambda metadata: metadata.pop(PREFIX + field))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", np.zeros(4, dtype=np.uint8)),
        ("tokens", "a b c"),
        ("tokens", [1, 2]),
        ("merges", np.zeros(4, dtype=np.int32)),
        ("merges", [["a", "b"]]),
        ("token_type", ["1"]),
        ("token_type", 1),
        ("eos_token_id", "2"),
        ("eos_token_id", True),
        ("eos_token_id", 2.0),
        ("add_bos_token", 1),
        ("model", 7),
    ],
)
def test_gg13_wrong_kind_of_value(field: str, value: object) -> None:
    refuse(InconsistentError, PREFIX + field, setting(field, value))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int64, np.float32, np.bool_])
def test_gg13_token_types_of_another_width(dtype: type[np.generic]) -> None:
    def damage(metadata: Metadata) -> None:
        metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"].astype(dtype)

    refuse(InconsistentError, "tokenizer.ggml.token_type", damage)


@pytest.mark.parametrize("difference", [-1, 1])
def test_gg13_lengths_differ(difference: int) -> None:
    def damage(metadata: Metadata) -> None:
        num_types = len(metadata["tokenizer.ggml.tokens"]) + difference
        metadata["tokenizer.ggml.token_type"] = np.ones(num_types, dtype=np.int32)

    refuse(InconsistentError, "tokenizer.ggml.token_type", damage)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scores", [0.0]),
        ("scores", np.zeros(7, np.float32)),
        ("scores", "none"),
        *[(f"{key}_token_id", 1 << 31) for key in ("unknown", "seperator", "mask")],
        ("mask_token_id", -1),
        ("fim_pre_token_id", 2.0),
    ],
)
def test_wrong_statements_that_nothing_depends_on(field: str, value: object) -> None:
    """Each is named in a warning, and changes no token."""
    plain, metadata = tokenizer_metadata(), tokenizer_metadata()
    setting(field, value)(metadata)
    tokenizer, expected = Tokenizer.from_metadata(metadata), Tokenizer.from_metadata(plain)
    (warning,) = tokenizer.vocabulary.warnings
    assert PREFIX + field in warning
    assert "ignored" in warning
    assert replace(tokenizer.vocabulary, warnings=()) == expected.vocabulary
    assert expected.vocabulary.warnings == ()


@pytest.mark.parametrize("kind", [-1, 7, 1 << 30])
def test_gg13_unknown_token_type(kind: int) -> None:
    refuse(
        InconsistentError,
        "tokenizer.ggml.token_type[3]",
        lambda m: m["tokenizer.ggml.token_type"].__setitem__(3, kind),
    )


@pytest.mark.parametrize("merge", ["", "a", "ab", "a b c", " a", "a ", "a  b", "a q\u4e00", "\u4e00 a"])
def test_gg13_malformed_merges(merge: str) -> None:
    refuse(
        InconsistentError,
        "tokenizer.ggml.merges[5]",
        lambda metadata: metadata["tokenizer.ggml.merges"].insert(5, merge),
    )


def test_gg13_a_merge_that_makes_no_token() -> None:
    refuse(
        InconsistentError,
        "tokenizer.ggml.merges[0]",
        lambda m: m["tokenizer.ggml.merges"].insert(0, "\u0120 \u010a"),
    )


def test_gg13_a_merge_twice() -> None:
    refuse(
        DuplicateError,
        "tokenizer.ggml.merges",
        lambda m: m["tokenizer.ggml.merges"].append(m["tokenizer.ggml.merges"][0]),
    )


def test_gg13_too_many_merges() -> None:
    refuse(LimitError, "tokenizer.ggml.merges", setting("merges", ["a b"] * (MAX_MERGES + 1)))


def test_gg13_merges_into_a_control_token() -> None:
    def damage(metadata: Metadata) -> None:
        merged = metadata["tokenizer.ggml.merges"][0].replace(" ", "")
        metadata["tokenizer.ggml.token_type"][metadata["tokenizer.ggml.tokens"].index(merged)] = (
            TokenKind.CONTROL
        )

    refuse(InconsistentError, "tokenizer.ggml.merges", damage)


@pytest.mark.parametrize("key", ["eos", "bos", "eot", "padding", "fim_pad"])
@pytest.mark.parametrize("index", [-1, 1 << 31, 1 << 63])
def test_gg13_ids_out_of_range(key: str, index: int) -> None:
    refuse(InconsistentError, f"tokenizer.ggml.{key}_token_id", setting(f"{key}_token_id", index))


def test_gg13_first_id_out_of_range() -> None:
    refuse(
        InconsistentError,
        "eos_token_id",
        lambda m: setting("eos_token_id", len(m["tokenizer.ggml.tokens"]))(m),
    )


def test_gg13_duplicate_tokens() -> None:
    def damage(metadata: Metadata) -> None:
        metadata["tokenizer.ggml.tokens"][-1] = metadata["tokenizer.ggml.tokens"][300]

    refuse(DuplicateError, "tokenizer.ggml.tokens[300]", damage)


def test_gg13_oversized_token() -> None:
    refuse(
        LimitError,
        "tokenizer.ggml.tokens",
        lambda m: m["tokenizer.ggml.tokens"].__setitem__(-1, "x" * (1 << 20)),
    )
    accepted = tokenizer_metadata()
    accepted["tokenizer.ggml.tokens"][-1] = "x" * MAX_TOKEN_CHARS
    assert Tokenizer.from_metadata(accepted).vocab_size == len(accepted["tokenizer.ggml.tokens"])


def test_gg13_empty_token() -> None:
    refuse(
        InconsistentError, "tokenizer.ggml.tokens", lambda m: m["tokenizer.ggml.tokens"].__setitem__(-1, "")
    )


def test_gg13_no_tokens() -> None:
    refuse(LimitError, "tokenizer.ggml.tokens", setting("tokens", []))


@pytest.mark.parametrize("byte", [0x00, 0x20, 0x61, 0xFF])
def test_gg13_byte_tokens_missing(byte: int) -> None:
    def damage(metadata: Metadata) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        tokens[tokens.index(BYTE_ALPHABET[byte])] = "\u4e00 stands where the byte was"

    refuse(InconsistentError, f"{byte:#04x} of 256 bytes", damage)


@pytest.mark.parametrize("kind", [TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN])
def test_gg13_byte_tokens_that_are_special(kind: TokenKind) -> None:
    def damage(metadata: Metadata) -> None:
        metadata["tokenizer.ggml.token_type"][metadata["tokenizer.ggml.tokens"].index("a")] = kind

    refuse(InconsistentError, "tokenizer.ggml.token_type", damage)


def test_gg13_bos_wanted_but_absent() -> None:
    refuse(InconsistentError, "tokenizer.ggml.add_bos_token", setting("add_bos_token", True))


def test_gg13_too_many_added_tokens() -> None:
    def damage(metadata: Metadata) -> None:
        extra = [f"<|{index}|>" for index in range(20_000)]
        metadata["tokenizer.ggml.tokens"] += extra
        kinds = np.full(len(extra), TokenKind.CONTROL, dtype=np.int32)
        metadata["tokenizer.ggml.token_type"] = np.concatenate([metadata["tokenizer.ggml.token_type"], kinds])

    refuse(LimitError, "tokenizer.ggml.token_type", damage)


ARRAYS = [
    np.zeros(0, np.int32),
    np.ones(3, np.uint8),
    np.full(1600, 3, np.int32),
    np.ones((2, 2), np.float32),
]
VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    *(st.lists(st.text(max_size=5), max_size=5), st.sampled_from(ARRAYS)),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_gg13_any_value_in_any_field_is_a_typed_error_or_a_tokenizer(data: st.DataObject) -> None:
    metadata = tokenizer_metadata()
    fields = [
        *metadata,
        "tokenizer.ggml.scores",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.fim_sep_token_id",
    ]
    for field in data.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3)):
        metadata[field] = data.draw(VALUES)
    try:
        tokenizer = Tokenizer.from_metadata(metadata)
    except ModelFormatError as error:
        message = str(error)
    else:
        message = f"tokenizer.ggml.tokens give {tokenizer.decode(tokenizer.encode('x'))}"
    assert "tokenizer.ggml." in message


def test_absent_token_types_mean_normal_tokens_and_known_control_tokens() -> None:
    metadata = tokenizer_metadata()
    del metadata["tokenizer.ggml.token_type"]
    vocabulary = Vocabulary.from_metadata(metadata)
    unknown = {name for name in CONTROL_TOKENS if any(word in name for word in ("vision", "audio", "tts"))}
    assert set(vocabulary.control_ids) == set(CONTROL_TOKENS) - unknown
    assert not vocabulary.user_defined_ids


def test_turn_tokens_are_control_tokens_whatever_the_file_says() -> None:
    metadata = tokenizer_metadata()
    metadata["tokenizer.ggml.token_type"][:] = 1
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.special_ids["<|im_start|>"] not in tokenizer.encode("<|im_start|>")


def test_the_byte_alphabet_is_one_printable_character_per_byte() -> None:
    assert len(set(BYTE_ALPHABET)) == 256
    assert all(char.isprintable() and not char.isspace() for char in BYTE_ALPHABET)
