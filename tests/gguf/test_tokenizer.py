"""The tokenizer against llama.cpp and against itself, and reliability statements TK01 to TK04."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from unicodedata import ucd_3_2_0

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vocabularies import (
    CONTROL_TOKENS,
    USER_DEFINED_TOKENS,
    seam_metadata,
    tokenizer_metadata,
    write_vocabulary,
)

from coldstream.errors import InconsistentError, InvalidRequestError, UnsupportedError
from coldstream.gguf.tokenizer import (
    BLOCK_CHARS,
    MARKS,
    MAX_TEXT_CHARS,
    PRE_TOKENIZERS,
    SPACE,
    StreamDecoder,
    Tokenizer,
    marked,
    split_into_blocks,
)
from coldstream.gguf.vocabulary import BYTE_ALPHABET, BYTE_NAMES, SPACED
from tools.llama_cpp import Vocabulary, open_vocabulary

# Text in which the alternatives of the expression meet: letters, marks, digits, contractions, blanks.
AWKWARD = st.sampled_from(
    [
        *(
            "a",
            "Zz",
            "é",
            "e\u0301",
            "\u0301",
            "ß",
            "ſ",
            "汉",
            "字",
            "한",
            "ا",
            "हि",
            "١",
            "²",
            "½",
            "7",
            "42",
        ),
        *(
            "'",
            *("'s", "'T", "'re", "'VE", "'m", "'M", "'ll", "'D", "'l", "'v", "'e"),
            "'LL",
            "'ſ",
            "’s",
            ".",
            ",",
            "(",
            "_",
            "-",
            "€",
            "😀",
            "👩‍👩‍👧",
            "\u200b",
            "\ufeff",
            "\0",
            "\x1c",
        ),
        *(
            " ",
            "  ",
            "\t",
            "\n",
            "\r\n",
            "\r",
            "\u00a0",
            "\u3000",
            "\u2028",
            "\u0085",
            "\x0b",
            "\x0c",
            "\u180e",
        ),
        *(
            "\U0010ffff",
            "\ue000",
            "\u0378",
            *CONTROL_TOKENS[:4],
            *USER_DEFINED_TOKENS,
            "<|im_",
            "end|>",
            "[PAD0]",
        ),
    ]
)
# Newer characters are of another class in llama.cpp's tables than in the library's. Of large scripts and of
# the private-use planes, whose characters are all of one class, one in sixteen will do.
ASSIGNED = [
    char
    for code, char in enumerate(map(chr, range(sys.maxunicode)))
    if (category := ucd_3_2_0.category(char)) not in ("Cn", "Cs")
    and (category not in ("Lo", "Co") or code % 16 == 0)
]
VALID_CHARS = st.characters(exclude_categories=["Cs"])
TEXTS = st.one_of(
    st.text(VALID_CHARS, max_size=60),
    st.lists(AWKWARD, max_size=16).map("".join),
    st.text(st.characters(codec="ascii")),
)


# llama.cpp's expression for gpt-4o is not the one that the model was trained with, see docs/text.md.
O200K = "gpt-4o"
CLEANED = ("glm4", SPACED)  # llama.cpp leaves blanks before punctuation out of the decoded text
BYTE_LEVEL = sorted(PRE_TOKENIZERS.keys() - {O200K})


@pytest.fixture(scope="module", params=[*BYTE_LEVEL, SPACED])
def pre(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(pre: str) -> Tokenizer:
    return Tokenizer.from_metadata(tokenizer_metadata(pre))


@pytest.fixture(scope="module")
def oracle(pre: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    path: Path = tmp_path_factory.mktemp(pre) / "vocabulary.gguf"
    with open_vocabulary(write_vocabulary(path, tokenizer_metadata(pre))) as vocab:
        yield vocab


@pytest.fixture(scope="module", params=BYTE_LEVEL)
def seams(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Tokenizer, Vocabulary]]:
    metadata = seam_metadata(request.param)
    with open_vocabulary(
        write_vocabulary(tmp_path_factory.mktemp(request.param) / "seams.gguf", metadata)
    ) as vocab:
        yield Tokenizer.from_metadata(metadata), vocab


@settings(max_examples=250, deadline=None)
@given(text=TEXTS, parse_special=st.booleans())
def test_ids_equal_llama_cpp(
    tokenizer: Tokenizer, oracle: Vocabulary, text: str, parse_special: bool
) -> None:
    assert tokenizer.encode(text, parse_special=parse_special) == oracle.encode(text, parse_special)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip_special=st.booleans())
def test_decoded_bytes_equal_llama_cpp(
    pre: str, tokenizer: Tokenizer, oracle: Vocabulary, data: st.DataObject, skip_special: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=20))
    if pre in CLEANED:
        shown = [index for index in ids if not (skip_special and tokenizer.is_control(index))]
        expected = b"".join(map(oracle.piece, shown)).decode("utf-8", "replace")
    else:
        expected = oracle.decode(ids, skip_special).decode("utf-8", "replace")
    assert tokenizer.decode(ids, skip_special=skip_special) == expected


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, size=st.integers(1, 8))
def test_blocks_are_split_as_the_whole_is(tokenizer: Tokenizer, text: str, size: int) -> None:
    assert_blocks_are_split_as_the_whole(tokenizer, text, size)


def assert_blocks_are_split_as_the_whole(tokenizer: Tokenizer, text: str, size: int) -> None:
    pieces = tokenizer._bpe.pre_tokenizer.pre_tokenize_str
    blocks = list(split_into_blocks(text, size, tokenizer._block_end))
    assert [piece for block in blocks for piece, _ in pieces(block)] == [piece for piece, _ in pieces(text)]
    assert all(len(block) >= size for block in blocks[:-1])


def test_a_text_of_several_blocks_equals_llama_cpp(tokenizer: Tokenizer, oracle: Vocabulary) -> None:
    text = inspect.getsource(inspect) + "\n\n  \u3000\r\n汉字\n\x1c\n" * 3000
    assert len(list(split_into_blocks(text, BLOCK_CHARS, tokenizer._block_end))) > 5
    assert tokenizer.encode(text) == oracle.encode(text)


@pytest.mark.sharded(of="models on the CPU")
def test_every_character_is_split_as_llama_cpp_does(seams: tuple[Tokenizer, Vocabulary]) -> None:
    tokenizer, oracle = seams
    text = "".join(f"e{c}d.{c}. {c} 7{c}7\n{c}\n'{c}s  {c}{c}\n" for c in ASSIGNED)
    assert tokenizer.encode(text) == oracle.encode(text)


@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.one_of(AWKWARD, st.sampled_from(ASSIGNED)), max_size=20).map("".join))
def test_seams_equal_llama_cpp(seams: tuple[Tokenizer, Vocabulary], text: str) -> None:
    tokenizer, oracle = seams
    assert tokenizer.encode(text) == oracle.encode(text)


def test_end_tokens_equal_llama_cpp(tokenizer: Tokenizer, oracle: Vocabulary) -> None:
    assert tokenizer.eos_ids == oracle.eos_ids()
    named = {"<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}
    assert tokenizer.eos_ids == {tokenizer.special_ids[name] for name in named}


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, parse_special=st.booleans())
@example(text="e\u0301 is not normalised to \u00e9", parse_special=False)
def test_tk04_decode_inverts_encode(tokenizer: Tokenizer, text: str, parse_special: bool) -> None:
    ids = tokenizer.encode(text, parse_special=parse_special)
    if tokenizer.vocabulary.model == SPACED:
        assert ids.pop(0) == tokenizer.bos_id  # which it always begins with
        text = text.replace(SPACE, " ")
    assert tokenizer.decode(ids, skip_special=False) == text


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip_special=st.booleans())
def test_tk04_streamed_pieces_join_to_the_full_text(
    tokenizer: Tokenizer, data: st.DataObject, skip_special: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    decoder = StreamDecoder(tokenizer, skip_special)
    pieces = [decoder.push(index) for index in ids]
    assert "".join([*pieces, decoder.finish()]) == tokenizer.decode(ids, skip_special)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_tk04_split_characters_never_become_replacements(tokenizer: Tokenizer, text: str) -> None:
    decoder = StreamDecoder(tokenizer, skip_special=False)
    bytewise = [byte_token(tokenizer, byte) for byte in text.encode()]
    pieces = [decoder.push(index) for index in bytewise]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert decoder.finish() == ""


def test_tk04_a_truncated_character_ends_as_one_replacement(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    first_byte = byte_token(tokenizer, "汉".encode()[0])
    assert decoder.push(first_byte) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.push(tokenizer.encode("a")[-1]) == "a"


def test_control_tokens_are_marked_for_who_asks(tokenizer: Tokenizer) -> None:
    """In no other text there is a mark, and a character that a control token interrupts is none."""
    decoder = StreamDecoder(tokenizer, is_marking=True)
    end = tokenizer.special_ids["<|im_end|>"]
    ids = [*tokenizer.encode("a<|im_end|>"), end, byte_token(tokenizer, 0xE6), end]
    pieces = [decoder.push(index) for index in ids]
    assert "".join(pieces).endswith(f"a<|im_end|>{marked('<|im_end|>')}\ufffd{marked('<|im_end|>')}")
    assert marked("x") == f"{MARKS[0]}x{MARKS[1]}"


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    names = BYTE_NAMES if tokenizer.vocabulary.model == SPACED else BYTE_ALPHABET
    return tokenizer.vocabulary.token_ids[names[byte]]


MEBIBYTE = 1 << 20
CLASSES = {
    "letters": "a",
    "spaces": " ",
    "spaces and text": " " * 1000 + "x",
    "newlines": "\n",
    "dots": ".",
    "digits": "7",
    "CJK": "汉",
    "combining marks": "\u0301",
    "decomposed": "e\u0301",
    "emoji joined": "👩‍👩‍👧",
    "no-break spaces": "\u00a0",
    "mixed": "def f(x):\n\treturn 'I'll' + 汉字 e\u0301 12\n",
    "unfinished control tokens": "<|im_",
    "control tokens": "<|im_end|>",
}


@pytest.mark.sharded(9)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", CLASSES.values(), ids=CLASSES.keys())
def test_tk01_a_mebibyte_of_one_class_is_encoded_whole(unit: str) -> None:
    tokenizer = Tokenizer.from_metadata(tokenizer_metadata())
    text = unit * (MEBIBYTE // len(unit.encode()))
    assert tokenizer.decode(tokenizer.encode(text, parse_special=True), skip_special=False) == text


@pytest.mark.parametrize("text", ["A" * 43_000, "汉" * 26_000], ids=["43k letters", "26k CJK"])
def test_tk01_runs_that_overflow_recursive_engines(text: str) -> None:
    tokenizer = Tokenizer.from_metadata(tokenizer_metadata())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tk02_ten_million_tokens_are_refused_before_work(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="at most"):
        tokenizer.encode("7" * 10_000_000)
    with pytest.raises(InvalidRequestError, match=str(MAX_TEXT_CHARS)):
        tokenizer.encode(" " * (MAX_TEXT_CHARS + 1))


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.timeout(120)
def test_tk02_the_longest_allowed_run_of_blanks_is_encoded() -> None:
    """It makes the expression engine try again for every blank; far beyond this length, it gives up."""
    ids = Tokenizer.from_metadata(tokenizer_metadata()).encode(" " * (MAX_TEXT_CHARS - 1) + "x")
    assert len(ids) < MAX_TEXT_CHARS


def test_tk02_token_limit_is_exact() -> None:
    tokenizer = Tokenizer.from_metadata(tokenizer_metadata())
    assert len(tokenizer.encode("7" * 100, max_tokens=100)) == 100
    with pytest.raises(InvalidRequestError, match="101 tokens, the limit is 100"):
        tokenizer.encode("7" * 101, max_tokens=100)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "b\udc80", "x" * 50 + "\ud83d"])
def test_tk03_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode(text)


@pytest.mark.parametrize(
    "text", ["\0", "a\0b", "\ufeffstart", "\u202eright to left", "\u0378", "\U0010ffff", "\ufffe"]
)
def test_tk03_odd_but_valid_characters_survive(tokenizer: Tokenizer, oracle: Vocabulary, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == oracle.encode(text)


def test_control_tokens_are_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_ids["<|im_end|>"]
    assert end not in tokenizer.encode("a<|im_end|>b")
    assert tokenizer.encode("a<|im_end|>b", parse_special=True)[-2] == end
    think = tokenizer.special_ids["<think>"]
    assert think in tokenizer.encode("a<think>b")
    assert tokenizer.decode([end, think]) == "<think>"
    assert tokenizer.decode([end, think], skip_special=False) == "<|im_end|><think>"


def test_unused_ids_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size - 1], skip_special=False) == ""


@pytest.mark.parametrize("index", [-1, 1 << 31])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, index: int) -> None:
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        tokenizer.decode([index])


def test_bos_only_when_the_file_asks_for_it() -> None:
    metadata = tokenizer_metadata()
    bos = metadata["tokenizer.ggml.tokens"].index("<|endoftext|>")
    plain = Tokenizer.from_metadata({**metadata, "tokenizer.ggml.bos_token_id": bos})
    asked = Tokenizer.from_metadata(
        {**metadata, "tokenizer.ggml.bos_token_id": bos, "tokenizer.ggml.add_bos_token": True}
    )
    assert plain.encode("x") == asked.encode("x")[1:]
    assert asked.encode("x")[0] == bos
    assert asked.encode_segments([("<|endoftext|>", True), ("x", False)]) == asked.encode("x")
    assert asked.encode_segments([("x", False)]) == asked.encode("x")


def test_segments_must_name_control_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_segments([("<|im_end|>", False)]) == tokenizer.encode("<|im_end|>")
    with pytest.raises(InvalidRequestError, match="not a control token"):
        tokenizer.encode_segments([("<think>", True)])


def test_text_joins_across_plain_segments_of_one_rendering(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_segments([("<|im_start|>", True), ("user\nreturn x", False), ("<|im_end|>", True)])
    assert ids == tokenizer.encode("<|im_start|>user\nreturn x<|im_end|>", parse_special=True)


@pytest.mark.parametrize("pre_name", ["llama-bpe", "", None, 7])
def test_unknown_pre_tokenizer_lists_the_known_ones(pre_name: object) -> None:
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.pre.*qwen2, qwen35"):
        Tokenizer.from_metadata({**tokenizer_metadata(), "tokenizer.ggml.pre": pre_name})


def test_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.model.*gpt2"):
        Tokenizer.from_metadata({**tokenizer_metadata(), "tokenizer.ggml.model": "llama"})


# --- gpt-4o: by the expression of the model's own tokenizer, in another engine ----------------------------

ANY_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")
O200K_PIECES = regex.compile(
    rf"[^\r\n\p{{L}}\p{{N}}]?{WORDS[0]}*{WORDS[1]}+{ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?{WORDS[0]}+{WORDS[1]}*{ANY_CASE}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Between them Python's engine and the library's call other characters blanks.
NO_BLANKS = "\x1c\x1d\x1e\x1f\u180e"


@pytest.fixture(scope="module")
def o200k() -> Tokenizer:
    return Tokenizer.from_metadata(tokenizer_metadata(O200K))


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    pieces = tokenizer._bpe.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@settings(max_examples=400, deadline=None)
@given(text=st.lists(AWKWARD | st.sampled_from("ÀÉzZ/\n"), max_size=16).map("".join))
@example(text="हिन्दी में ÉcolesÀ la CARTE's")
@example(text="*/\n/foo 12345 a/\r\n/")
def test_pieces_of_gpt_4o(o200k: Tokenizer, text: str) -> None:
    text = text.translate(dict.fromkeys(map(ord, NO_BLANKS)))
    assert pieces_of(o200k, text) == O200K_PIECES.findall(text)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, size=st.integers(1, 8))
def test_blocks_of_gpt_4o_are_split_as_the_whole_is(o200k: Tokenizer, text: str, size: int) -> None:
    assert_blocks_are_split_as_the_whole(o200k, text, size)
    assert o200k.decode(o200k.encode(text), skip_special=False) == text


def test_a_message_of_gpt_oss_does_not_end_the_answer() -> None:
    """Whatever the file states: an answer has several messages."""
    metadata = tokenizer_metadata(O200K)
    names = ["<|start|>", "<|end|>", "<|return|>", "<|call|>"]
    first = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *names]
    kinds = np.concatenate((metadata["tokenizer.ggml.token_type"], np.array([4, 4, 3, 3], np.int32)))
    metadata |= {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eot_token_id": first + 1}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert {first + 2, first + 3} <= tokenizer.eos_ids
    assert first + 1 not in tokenizer.eos_ids
    assert first + 1 not in tokenizer.encode("a<|end|>b")  # control, though the file calls it user-defined


# --- gemma-4 ----------------------------------------------------------------------------------------------


def test_bytes_of_gemma_4_must_be_marked_as_such() -> None:
    metadata = tokenizer_metadata(SPACED)
    place = metadata["tokenizer.ggml.tokens"].index("<0x41>")
    metadata["tokenizer.ggml.token_type"][place] = 1
    with pytest.raises(InconsistentError, match="bytes 0x41 are not marked as bytes"):
        Tokenizer.from_metadata(metadata)


def test_tokens_of_gemma_4_are_spelt_with_spaces() -> None:
    tokenizer = Tokenizer.from_metadata(tokenizer_metadata(SPACED))
    ids = tokenizer.encode("  return <0x41> \U0001f9ff")
    assert tokenizer.decode(ids) == "  return <0x41> \U0001f9ff"
    assert [tokenizer.token_bytes(index) for index in ids[-4:]] == [bytes([b]) for b in "\U0001f9ff".encode()]
