"""Added tokens that overlap, and texts at the limit of what so many tokens can spell."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import Metadata, tokenizer_metadata, write_vocabulary

from coldstream.errors import InvalidRequestError
from coldstream.gguf.tokenizer import MAX_TEXT_CHARS, Tokenizer
from tools.llama_cpp import open_vocabulary

USER_DEFINED = 4


def with_added(*tokens: str) -> Metadata:
    """A vocabulary with these user-defined tokens, whose ids rise in this order."""
    metadata = tokenizer_metadata()
    kinds = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *tokens]
    metadata["tokenizer.ggml.token_type"] = np.append(kinds, np.int32([USER_DEFINED] * len(tokens)))
    return metadata


@pytest.mark.parametrize(
    ("tokens", "text", "first"),
    [
        (("[a]", "[a][b]"), "[a][b]", "[a][b]"),
        (("[a][b]", "[a]"), "[a][b]", "[a][b]"),
        (("字ab", "汉字"), "汉字ab", "汉字"),  # six bytes in two characters before five in three
        (("汉字", "字ab"), "汉字ab", "汉字"),
    ],
)
def test_of_added_tokens_that_overlap_the_one_with_more_bytes_is_split_off_as_in_llama_cpp(
    tmp_path: Path, tokens: tuple[str, str], text: str, first: str
) -> None:
    metadata = with_added(*tokens)
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode(text)
    assert tokenizer.special_ids[first] in ids
    with open_vocabulary(write_vocabulary(tmp_path / "added.gguf", metadata)) as oracle:
        assert ids == oracle.encode(text)


@pytest.mark.parametrize("tokens", [("=yz", "xy="), ("xy=", "=yz")])
def test_of_added_tokens_as_long_as_each_other_the_lower_id_is_split_off(tokens: tuple[str, str]) -> None:
    tokenizer = Tokenizer.from_metadata(with_added(*tokens))
    ids = tokenizer.encode("xy=yz")
    assert tokenizer.special_ids[tokens[0]] in ids
    assert tokenizer.special_ids[tokens[1]] not in ids


@given(max_tokens=st.integers(0, 5))
def test_a_text_is_refused_unread_if_so_many_of_the_longest_token_are_shorter(max_tokens: int) -> None:
    longest = "=" * 60
    tokenizer = Tokenizer.from_metadata(with_added(longest))
    assert tokenizer.encode(longest * max_tokens, max_tokens=max_tokens) == (
        [tokenizer.special_ids[longest]] * max_tokens
    )
    message = f"{60 * max_tokens + 1} characters, at most {60 * max_tokens} can fit into {max_tokens} tokens"
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.encode(longest * max_tokens + "x", max_tokens=max_tokens)
    if max_tokens:
        with pytest.raises(InvalidRequestError, match=f"{max_tokens + 1} tokens, the limit is {max_tokens}"):
            tokenizer.encode(longest * (max_tokens - 1) + "x=", max_tokens=max_tokens)


def test_a_large_context_does_not_lift_the_limit_of_a_text() -> None:
    tokenizer = Tokenizer.from_metadata(tokenizer_metadata())
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_TEXT_CHARS} can be served"):
        tokenizer.encode("7" * (MAX_TEXT_CHARS + 1), max_tokens=1 << 40)
