"""Trained weights on disk: matrices as int8 with one half-precision scale per 32 values, in bounded files.

About 8.5 bits per weight: 1/300 of the error variance that the file's 4-bit types add later, and small enough
to be carried from the machine that trained.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

GROUP = 32
SHARD_BYTES = 14_000_000


def save_checkpoint(folder: Path, state: dict[str, Tensor]) -> None:
    """Write `state` as `weights-N.npz` files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, np.ndarray] = {}
    shards = [shard]
    for name, value in state.items():
        arrays = _pack(name, value.detach().float().cpu())
        used = sum(array.nbytes for array in shard.values())
        if shard and used + sum(array.nbytes for array in arrays.values()) > SHARD_BYTES:
            shard = {}
            shards.append(shard)
        shard.update(arrays)
    for number, arrays in enumerate(shards):
        np.savez(folder / f"weights-{number}.npz", **arrays)


def _pack(name: str, value: Tensor) -> dict[str, np.ndarray]:
    if value.ndim < 2 or value.shape[-1] % GROUP:
        return {name: value.numpy()}
    groups = value.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    levels = (groups / torch.where(scale == 0, 1.0, scale).float()).round().clamp(-127, 127).to(torch.int8)
    return {f"{name}:levels": levels.flatten(-2).numpy(), f"{name}:scale": scale.squeeze(-1).numpy()}


def load_checkpoint(folder: Path) -> dict[str, Tensor]:
    """The state dict saved in `folder`, float32 (FileNotFoundError if there is none)."""
    arrays: dict[str, np.ndarray] = {}
    paths = sorted(folder.glob("weights-*.npz"))
    if not paths:
        raise FileNotFoundError(f"no weights-*.npz in {folder}")
    for path in paths:
        with np.load(path) as shard:
            arrays.update({name: shard[name] for name in shard.files})
    state: dict[str, Tensor] = {}
    for key, array in arrays.items():
        name, _, part = key.partition(":")
        if part == "levels":
            levels = torch.from_numpy(array).float().unflatten(-1, (-1, GROUP))
            state[name] = (levels * torch.from_numpy(arrays[f"{name}:scale"]).float()[..., None]).flatten(-2)
        elif not part:
            state[name] = torch.from_numpy(array)
    return state
