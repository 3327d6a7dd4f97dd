"""What a drafter reads of its target, computed once for many windows and kept on the device.

Features are the residual streams after the auxiliary layers. Beside them is the target's last normed state,
from which its head predicts the next token. The model runs whole windows here, in PyTorch; the
engine, which serves them, rounds its activations, and `agreement` says how far apart the two are.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tools.train_demo.delta_net import CHUNK
from tools.train_demo.model import DemoModel

if TYPE_CHECKING:
    from coldstream.models.cpu.runner import CpuRunner

BATCH_TOKENS = 1 << 16  # that the target computes at once


@dataclass(frozen=True)
class Windows:
    """Texts of equal length with what the target computed of them, all on one device."""

    token_ids: Tensor  # int16 [N, T]; below 2¹⁵
    features: Tensor  # [N, T, len(aux_layers) · E]
    hidden: Tensor  # [N, T, E], what the head reads
    prompt_length: int  # tokens of each that the target did not choose
    greedy: Tensor  # bool [N], whether it chose by the largest logit

    def __len__(self) -> int:
        return len(self.token_ids)


@torch.no_grad()
def features_after(model: DemoModel, token_ids: Tensor, aux_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Features `[b, T, len(aux_layers) · E]` and last normed states `[b, T, E]` of `token_ids [b, T]`.

    T is a multiple of the delta rule's chunk.
    """
    x = model.token_embd(token_ids)
    kept = []
    for layer, block in enumerate(model.blk):
        x, _ = block(x, 0.0)
        if layer in aux_layers:
            kept.append(x)
    return torch.cat(kept, dim=-1), model.output_norm(x)


def windows_of(
    model: DemoModel,
    token_ids: np.ndarray,
    greedy: np.ndarray,
    prompt_length: int,
    aux_layers: tuple[int, ...],
    dtype: torch.dtype,
) -> Windows:
    """Features of windows `[N, T]`, in type `dtype`, on the model's device."""
    device, E = model.output.weight.device, model.config.hidden_size
    num, length = token_ids.shape
    features = torch.empty(num, length, len(aux_layers) * E, dtype=dtype, device=device)
    hidden = torch.empty(num, length, E, dtype=dtype, device=device)
    ids = torch.from_numpy(token_ids.astype(np.int16)).to(device)
    count = max(1, BATCH_TOKENS // length)
    for start in range(0, num, count):
        part = slice(start, start + count)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            features[part], hidden[part] = features_after(model, ids[part].long(), aux_layers)
    return Windows(ids, features, hidden, prompt_length, torch.from_numpy(greedy).to(device))


def agreement(
    model: DemoModel, runner: "CpuRunner", token_ids: np.ndarray, aux_layers: tuple[int, ...]
) -> dict[str, list[float]]:
    """How near the engine's features of a text `[T]` are to PyTorch's: cosine and relative error by layer."""
    length = len(token_ids) // CHUNK * CHUNK
    ids = token_ids[:length].astype(np.int64)
    ours, _ = features_after(model, torch.from_numpy(ids)[None], aux_layers)
    rows: list[np.ndarray] = []
    sequence = runner.new_sequence()
    runner.extend(
        sequence, ids.tolist(), None, lambda chunk, observed: rows.append(observed), runner.features
    )
    runner.release(sequence)
    theirs = torch.from_numpy(np.concatenate(rows)).unflatten(-1, (len(aux_layers), -1))
    ours = ours[0].unflatten(-1, (len(aux_layers), -1))
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1)
    error = (ours - theirs).norm(dim=(0, 2)) / ours.norm(dim=(0, 2))
    return {
        "least_cosine": [round(float(x), 5) for x in cosine.amin(0)],
        "mean_cosine": [round(float(x), 6) for x in cosine.mean(0)],
        "relative_error": [round(float(x), 5) for x in error],
    }
