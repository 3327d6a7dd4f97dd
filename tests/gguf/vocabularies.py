"""Small vocabularies of each kind: trained on Python source, with the added tokens of the Qwen family."""

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import gguf
from coldstream.gguf.tokenizer import PRE_TOKENIZERS, SPACE
from coldstream.gguf.vocabulary import BYTE_ALPHABET, BYTE_NAMES, SPACED

CONTROL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
)
USER_DEFINED_TOKENS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
NUM_PADDING_TOKENS = 3
NEWLINE, LONGEST_RUN = "\n", 40

Metadata = dict[str, Any]


@cache
def _trained(pre: str) -> tuple[list[str], list[str]]:
    """1,500 tokens and their merges, learnt from the standard library and a line of other scripts."""
    bpe = Tokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if pre == SPACED:
        alphabet = [chr(code) for code in range(0x21, 0x7F)] + ["\t", "\n", "\r", SPACE]
        bpe.normalizer = normalizers.Replace(" ", SPACE)
        bpe.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    else:
        bpe.pre_tokenizer = _byte_level(pre)
    limits = {"limit_alphabet": 130} if pre == SPACED else {}
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False, **limits)
    texts = [inspect.getsource(module) for module in (inspect, json, json.decoder, json.encoder)]
    texts += [
        "汉字和漢字 한국어 العربية हिन्दी ñandú e\u0301te\u0301 👩‍👩‍👧 I'll we're 'S ſ \u3000\u2003\t\r\n\n  "
    ] * 40
    bpe.train_from_iterator(texts, trainer)
    model = json.loads(bpe.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in model["merges"]]
    return _with_runs(tokens, merges) if pre == SPACED else (tokens, merges)


def _with_runs(tokens: list[str], merges: list[str]) -> tuple[list[str], list[str]]:
    """With tokens for runs of line ends, as gemma-4 has them: llama.cpp breaks off at a run without one."""
    of_runs = [
        f"{NEWLINE * first} {NEWLINE * (whole - first)}"
        for whole in range(LONGEST_RUN, 1, -1)
        for first in range(whole - 1, 0, -1)
    ]
    runs = [NEWLINE * length for length in range(2, LONGEST_RUN + 1)]
    own = [token for token in tokens if token.strip(NEWLINE) or token == NEWLINE]
    return [*own, *runs], [*of_runs, *(merge for merge in merges if NEWLINE not in merge)]


def _byte_level(pre: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(each), behavior="isolated")
                for each in PRE_TOKENIZERS[pre].patterns
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def tokenizer_metadata(pre: str = "qwen35") -> Metadata:
    """What a reader returns for a file with this tokenizer; a fresh copy that a test may damage."""
    tokens, merges = _trained(pre)
    bytes_ = BYTE_NAMES if pre == SPACED else ()
    added = [*CONTROL_TOKENS, *USER_DEFINED_TOKENS]
    padding = [f"[PAD{index}]" for index in range(NUM_PADDING_TOKENS)]
    kinds = [1] * len(tokens) + [6] * len(bytes_)
    tokens = [*tokens, *bytes_]
    kinds += [3] * len(CONTROL_TOKENS) + [4] * len(USER_DEFINED_TOKENS) + [5] * len(padding)
    all_tokens = [*tokens, *added, *padding]
    return {
        "tokenizer.ggml.model": SPACED if pre == SPACED else "gpt2",
        **({} if pre == SPACED else {"tokenizer.ggml.pre": pre}),
        "tokenizer.ggml.tokens": all_tokens,
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": all_tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": all_tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        **({"tokenizer.ggml.bos_token_id": all_tokens.index("<|vision_start|>")} if pre == SPACED else {}),
    }


def seam_metadata(pre: str) -> Metadata:
    """A vocabulary that shows where text was split: any two bytes at which characters can meet merge.

    So two characters leave a merged token exactly if they are in one piece. A vocabulary trained on split
    text has no such merges, and would hide most mistakes of the splitting.
    """
    letters = "adelmrstvADELMRSTV"
    ends = [*letters, *" .7\n\r\t'", *map(chr, range(0x80, 0xC0))]
    starts = [*letters, *" .7\n\r\t'", *map(chr, range(0xC2, 0xF5))]
    pairs = [(BYTE_ALPHABET[ord(end)], BYTE_ALPHABET[ord(start)]) for end in ends for start in starts]
    tokens = [*BYTE_ALPHABET, *map("".join, pairs), "<|im_end|>", "<think>"]
    kinds = np.ones(len(tokens), dtype=np.int32)
    kinds[-2:] = 3, 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(map(" ".join, pairs)),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


def write_vocabulary(path: Path, metadata: Metadata) -> Path:
    """A GGUF file that holds these tokens and no tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value if isinstance(value, list) else value.tolist())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
