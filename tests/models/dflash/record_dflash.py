"""Records what the drafter's published implementation computes from `dflash_cases`, for test_dflash.py.

The package pins versions of others that exclude ours, so it can't be a requirement of the tests:

    python -m pip install --no-deps --target /tmp/dflash dflash==0.1.0
    PYTHONPATH=/tmp/dflash:.:tests python tests/models/dflash/record_dflash.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _crop_to, _make_cache
from transformers import Qwen3Config

from dflash_cases import (
    ANCHOR,
    CASES,
    CHUNKS,
    NUM_ROWS,
    features,
    hf_name,
    random_tensors,
    spec_of,
    target_tables,
)

RECORD = Path(__file__).parent / "dflash_published.npz"
SAMPLE_SEED = 5


def main() -> None:
    recorded: dict[str, np.ndarray] = {}
    for name, values in CASES.items():
        recorded |= {f"{name}/{key}": value for key, value in record(values).items()}
    np.savez_compressed(RECORD, **recorded)
    print(f"{RECORD}: {RECORD.stat().st_size} bytes")


@torch.inference_mode()
def record(values: dict[str, Any]) -> dict[str, np.ndarray]:
    """hidden: float32 [drafts, NUM_ROWS, E]. Of the second kind also what the last draft selects, by row:
    greedy tokens, sampled tokens, and the candidates with their probabilities after the sampled ones.
    """
    spec = spec_of(values)
    config = Qwen3Config(**{key: value for key, value in values.items() if key != "architectures"})
    config._attn_implementation = "sdpa"
    model = (DFlashDraftModel if spec.second is None else DFlash2DraftModel)(config).eval()
    weights = {hf_name(name): torch.from_numpy(value) for name, value in random_tensors(spec).items()}
    for name in ("predecessor", "successor"):
        codebook = f"candidate_selector.{name}_codebook"
        if codebook in weights:
            weights[f"{codebook}.weight"] = weights.pop(codebook)
    model.load_state_dict(weights)
    embedding, head = (torch.from_numpy(table) for table in target_tables())
    rows = torch.from_numpy(features(spec, sum(CHUNKS)))
    noise = embedding[[ANCHOR] + [spec.mask_id] * (NUM_ROWS - 1)][None]
    cache, length, hidden = _make_cache(config), 0, []
    for count in CHUNKS:
        positions = torch.arange(length, length + count + NUM_ROWS)[None]
        hidden.append(
            model(
                target_hidden=rows[None, length : length + count],
                noise_embedding=noise,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )[0]
        )
        length += count
        _crop_to(cache, length)
    result = {"hidden": torch.stack(hidden).numpy()}
    if spec.second is None:
        return result
    anchor, drafted = torch.tensor([ANCHOR]), hidden[-1][None, 1:]
    greedy, _, _ = model.propose(drafted, anchor, lambda states: states @ head.T, 0.0)
    torch.manual_seed(SAMPLE_SEED)
    sampled, candidates, probs = model.propose(drafted, anchor, lambda states: states @ head.T, 1.0)
    names = ("greedy", "sampled", "candidates", "probs")
    parts = (greedy, sampled, candidates, probs)
    return result | {name: part[0].numpy() for name, part in zip(names, parts, strict=True)}


if __name__ == "__main__":
    main()
