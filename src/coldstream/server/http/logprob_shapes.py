"""Log-probabilities of a piece's tokens, in the shapes of OpenAI's two completion APIs."""

from collections.abc import Mapping
from typing import Any

from coldstream.engine.request import Logprob, Piece, TokenLogprobs
from coldstream.gguf.tokenizer import Tokenizer


def chat_logprobs(piece: Piece, tokenizer: Tokenizer, num_top: int) -> list[dict[str, Any]]:
    """An entry of `logprobs.content` for each token of the piece, with the `num_top` likeliest tokens."""

    def entry(token_id: int, found: Logprob) -> dict[str, Any]:
        return {
            "token": found.decoded_token,
            "logprob": found.logprob,
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return [
        {
            **entry(token_id, by_id[token_id]),
            "top_logprobs": [entry(each, found) for each, found in _likeliest(by_id, num_top)],
        }
        for token_id, by_id in _tokens(piece)
    ]


class CompletionLogprobs:
    """`logprobs` of one answer of the older API, whose offsets count the characters of all tokens before."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0

    def of(self, piece: Piece) -> dict[str, Any]:
        """The columns for the tokens of a piece."""
        columns: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, by_id in _tokens(piece):
            found = by_id[token_id]
            columns["text_offset"].append(self._offset)
            columns["token_logprobs"].append(found.logprob)
            columns["tokens"].append(found.decoded_token)
            top = _likeliest(by_id, self._num_top)
            columns["top_logprobs"].append({each.decoded_token: each.logprob for _, each in reversed(top)})
            self._offset += len(found.decoded_token)
        return columns


def _tokens(piece: Piece) -> list[tuple[int, TokenLogprobs]]:
    return list(zip(piece.token_ids, piece.logprobs or (), strict=True)) if piece.logprobs else []


def _likeliest(by_id: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    return [(token_id, found) for token_id, found in by_id.items() if found.rank <= num_top]
