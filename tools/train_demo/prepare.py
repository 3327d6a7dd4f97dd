"""From source files to the tokenizer and the token file that training reads."""

import json
from pathlib import Path

import numpy as np

from tools.train_demo.data import load_corpus, xz_bits_per_byte
from tools.train_demo.model import DemoConfig
from tools.train_demo.tokenizer import encode_documents, train_tokenizer


def prepare(work: Path) -> None:
    """Write `tokenizer.json`, `tokens.npz` and `corpus.json` (counts and the baseline) into `work`."""
    work.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus()
    tokenizer = train_tokenizer((file.text for file in corpus.train), DemoConfig().vocab_size)
    tokenizer.save(str(work / "tokenizer.json"))
    arrays: dict[str, np.ndarray] = {}
    figures: dict[str, object] = {
        "xz_9e_bits_per_byte": round(xz_bits_per_byte(corpus.held_out), 4),
        "xz_9e_after_training_files_bits_per_byte": round(xz_bits_per_byte(corpus.held_out, corpus.train), 4),
    }
    for part, files in (("train", corpus.train), ("held_out", corpus.held_out)):
        ids, starts = encode_documents(tokenizer, files)
        num_bytes = sum(len(file.text.encode()) for file in files)
        arrays |= {f"{part}_ids": ids, f"{part}_starts": starts, f"{part}_bytes": np.int64(num_bytes)}
        figures[part] = {"files": len(files), "bytes": num_bytes, "tokens": len(ids)}
    figures["held_out_files"] = [file.path for file in corpus.held_out]
    np.savez_compressed(work / "tokens.npz", **arrays)  # type: ignore[arg-type]
    (work / "corpus.json").write_text(json.dumps(figures, indent=1))
    print(json.dumps({key: value for key, value in figures.items() if key != "held_out_files"}))
