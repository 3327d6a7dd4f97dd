"""A small vocabulary with the real added tokens of the families whose templates are compared.

Trained on a few modules of the standard library; every control token of every family is in it, those of
Qwen3.5 that hold no bar (`<tts_pad>`) included. Knows nothing of templates.
"""

import inspect
import json
from functools import cache
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from coldstream.gguf.tokenizer import PRE_TOKENIZERS
from coldstream.gguf.vocabulary import TokenKind

PRE = "qwen35"
CONTROL_TOKENS = {
    "Qwen": (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
        *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
        *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<|fim_prefix|>"),
        *("<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
        *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
        *("<tts_text_bos_single>", "<|audio_pad|>"),
    ),
    "GLM": (
        *("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>"),
        *("<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "/nothink"),
    ),
    "gpt-oss": (
        *("<|startoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>"),
        *("<|message|>", "<|call|>", "<|endofprompt|>"),
    ),
    "Laguna": ("〈|EOS|〉", "</assistant>"),
    "gemma-4": (
        *("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>"),
        *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
        *('<|"|>', "<|audio|>", "<|video|>"),
    ),
    "MiniMax": (
        *("]~!b[", "]~b]", "[e~[", "]!p~[", "]<]image[>[", "]<]video[>[", "]<]minimax[>["),
        *("<beginning_of_sentence>", "<end_of_sentence>"),
    ),
    "DeepSeek": (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>"),
        *("<｜tool▁output▁end｜>", "<｜tool▁sep｜>", "｜DSML｜"),
    ),
    "Mistral": (
        *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *(
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[TOOL_CALLS]",
            "[IMG]",
            "[SYSTEM_PROMPT]",
            "[/SYSTEM_PROMPT]",
        ),
        *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
}
USER_DEFINED_TOKENS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
    ),
)
# What the files of a family name as their first, last and padding token.
SPECIAL_TOKENS = {
    "Qwen": {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
    "GLM": {"eos": "<|endoftext|>", "pad": "<|endoftext|>"},
    "Laguna": {"bos": "〈|EOS|〉", "eos": "〈|EOS|〉"},
    "gemma-4": {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>"},
    "gpt-oss": {"bos": "<|startoftext|>", "eos": "<|return|>", "pad": "<|endoftext|>"},
    "MiniMax": {"bos": "]~!b[", "eos": "[e~["},
    "DeepSeek": {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>", "pad": "<｜▁pad▁｜>"},
    "Mistral": {"bos": "<s>", "eos": "</s>", "pad": "<unk>"},
}
ALL_CONTROL_TOKENS = tuple(token for tokens in CONTROL_TOKENS.values() for token in tokens)


@cache
def _trained() -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(each), behavior="isolated")
                for each in PRE_TOKENIZERS[PRE].patterns
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(map(inspect.getsource, (inspect, json, json.decoder, json.encoder)), trainer)
    return bpe


def metadata(family: str, template: str) -> dict[str, Any]:
    """The metadata of a file of `family` with this chat template."""
    model = json.loads(_trained().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    added = [*ALL_CONTROL_TOKENS, *USER_DEFINED_TOKENS]
    kinds = [TokenKind.NORMAL] * len(tokens)
    kinds += [TokenKind.CONTROL] * len(ALL_CONTROL_TOKENS) + [TokenKind.USER_DEFINED] * len(
        USER_DEFINED_TOKENS
    )
    tokens += added
    ids = {name: tokens.index(text) for name, text in SPECIAL_TOKENS[family].items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.chat_template": template,
        **{f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id": ids[name] for name in ids},
    }


def hugging_face_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The same vocabulary in `transformers`."""
    bpe = Tokenizer.from_str(_trained().to_str())
    bpe.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ALL_CONTROL_TOKENS]
    )
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in USER_DEFINED_TOKENS])
    named = {f"{name}_token": text for name, text in SPECIAL_TOKENS[family].items()}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **named)
