"""The byte-level BPE tokenizer, trained on the training files, with the `qwen35` pre-tokenizer.

Ids: 256 bytes first, then the merges in order, then the control tokens at the end, as in the models whose
format this is. Documents are separated by `<|endoftext|>`.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train_demo.data import SourceFile

QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT = "<|endoftext|>"
CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(QWEN35_PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids with the control tokens; ValueError if the text gives fewer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text gives {tokenizer.get_vocab_size()} tokens, {vocab_size} were asked for")
    return tokenizer


def merges_of(tokenizer: Tokenizer) -> list[str]:
    """The merges in rank order, each as GGUF writes them: left and right piece separated by one space."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def encode_documents(tokenizer: Tokenizer, files: Iterable[SourceFile]) -> tuple[np.ndarray, np.ndarray]:
    """All files as one uint16 array, `<|endoftext|>` before each, and the int64 start of each file in it."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[np.ndarray] = []
    starts: list[int] = []
    total = 0
    for encoding in tokenizer.encode_batch([file.text for file in files], add_special_tokens=False):
        piece = np.array([end_of_text, *encoding.ids], dtype=np.uint16)
        starts.append(total)
        pieces.append(piece)
        total += len(piece)
    return np.concatenate(pieces), np.array(starts, dtype=np.int64)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer saved at `path`."""
    return Tokenizer.from_file(str(path))
