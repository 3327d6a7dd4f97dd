"""Trees that tiny drafters of every kind and revision propose, and how they are recorded.

Recorded from the drafters' safetensors by the drafter in PyTorch (`dflash_reference.py`):

    PYTHONPATH=tests:. python tests/dflash_trees.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from coldstream.decoding.drafters.dflash import DflashContext, DflashDrafter
from dflash_cases import (
    ANCHOR,
    CASES,
    CHUNKS,
    REVISIONS,
    VOCAB,
    features,
    hf_name,
    open_model,
    random_tensors,
    spec_of,
    write_folder,
)

RECORD = Path(__file__).parent / "models" / "dflash" / "dflash_trees.json"
# By name: what config.json says, and the type of all weights.
DRAFTERS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    **{name: (values, torch.float32) for name, values in CASES.items()},
    **{name: (values, torch.bfloat16) for name, values in REVISIONS.items()},
    "35B, July, float16": (REVISIONS["35B, July"], torch.float16),
    "35B, DFlash 2, float16": (REVISIONS["35B, DFlash 2"], torch.float16),
}
BUDGETS = (3, 12, 24)  # nodes, by chunk


def write_drafter(folder: Path, name: str) -> Path:
    """A folder with one of `DRAFTERS`, of random weights."""
    values, dtype = DRAFTERS[name]
    return write_folder(folder, values, random_tensors(spec_of(values)), dtype=dtype)


def proposed(context: DflashContext) -> list[dict[str, Any]]:
    """The trees after each chunk of a text: token ids, parents and log-probabilities of nodes."""
    drafter, found, text = DflashDrafter(context), [], []
    rows = features(context.spec, sum(CHUNKS))
    for count, budget in zip(CHUNKS, BUDGETS, strict=True):
        ids = [(7 * position + 1) % VOCAB for position in range(len(text), len(text) + count)]
        drafter.extend(ids, rows[len(text) : len(text) + count])
        text += ids
        tree = drafter.propose([*text, ANCHOR], budget)
        found.append(
            {
                "token_ids": list(tree.token_ids),
                "parents": list(tree.parents),
                "log_probs": [round(value, 4) for value in tree.log_probs],
            }
        )
    return found


def main() -> None:
    record = {}
    for name, (values, _) in DRAFTERS.items():
        with tempfile.TemporaryDirectory() as folder:
            stored = load_file(write_drafter(Path(folder), name) / "model.safetensors")
        tensors = {each: stored[hf_name(each)].float().numpy() for each in random_tensors(spec_of(values))}
        record[name] = proposed(open_model(values, tensors=tensors).new_sequence())
    lines = (f" {json.dumps(name)}: {json.dumps(trees)}" for name, trees in record.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
