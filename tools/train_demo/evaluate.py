"""The published figures: what `measure` finds, llama.cpp on the same file, the baseline, samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tools.llama_cpp import open_session
from tools.train_demo.held_out import bits_per_byte
from tools.train_demo.measure import WINDOW, measure
from tools.train_demo.tokenizer import load_tokenizer
from tools.train_demo.train import Tokens, load_tokens

PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import unittest\n\nclass TestParser(unittest.TestCase):\n",
    "def read_lines(path):\n    with open(path) as f:\n",
)
SAMPLE_TOKENS = 96


def llama_cpp_figures(gguf_file: Path, tokenizer: Tokenizer, held_out: Tokens) -> dict[str, Any]:
    """Bits per byte and greedy samples through llama.cpp with its default cache and attention."""
    with open_session(gguf_file, WINDOW, float32_attention=False) as session:

        def log_probabilities(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
            session.clear()
            logits = session.feed(inputs.tolist()).astype(np.float64)
            logits -= logits.max(-1, keepdims=True)
            chosen: np.ndarray = logits[np.arange(len(targets)), targets]
            return chosen - np.log(np.exp(logits).sum(-1))

        bits = bits_per_byte(held_out.ids, held_out.num_bytes, WINDOW, log_probabilities)
        samples = {}
        for prompt in PROMPTS:
            session.clear()
            ids = session.vocabulary.encode(prompt, add_special=False)
            samples[prompt] = tokenizer.decode(session.greedy(ids, SAMPLE_TOKENS))
    return {"bits_per_byte": round(bits, 5), "greedy_samples": samples}


def evaluate(work: Path, gguf_file: Path, results: Path) -> None:
    """Write every figure to `results`; what was already measured elsewhere is taken from `work`."""
    measured = work / "measured.json"
    if not measured.exists():
        measured.write_text(json.dumps(measure(work / "tokens.npz", gguf_file)))
    tokenizer = load_tokenizer(work / "tokenizer.json")
    _, held_out = load_tokens(work / "tokens.npz")
    training = json.loads((work / "weights" / "training.json").read_text())
    history = training.pop("history")
    figures = json.loads(measured.read_text())
    trained = training["figures"]
    figures["bits_per_byte"] = {
        "trained_weights_float_bf16_products": trained["held_out_bits_per_byte"],
        "trained_weights_rounded_in_training": trained["held_out_bits_per_byte_rounded"],
        **figures["bits_per_byte"],
    }
    record = {
        "command": "python -m tools.train_demo build",
        "file": {"path": gguf_file.as_posix(), "bytes": gguf_file.stat().st_size},
        "corpus": json.loads((work / "corpus.json").read_text()),
        "training": training,
        "training_loss_every_100_steps": [row for row in history if row["step"] % 100 == 0],
        "held_out": figures,
        "llama_cpp": llama_cpp_figures(gguf_file, tokenizer, held_out),
        "window_tokens": WINDOW,
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(record["held_out"], indent=1))
