"""Q2_0, which llama.cpp's packages do not quantise, by its definition."""

import numpy as np


def q2_0_blocks(values: np.ndarray) -> np.ndarray:
    """Blocks of Q2_0: uint8 [..., columns / 64 · 18].

    The scale is the root of a block's mean square, so that the codes −1, 0 and 1 are about as frequent.
    """
    groups = values.reshape(-1, 64).astype(np.float32)
    d = np.sqrt((groups**2).mean(-1, keepdims=True)).astype(np.float16)
    codes = np.clip(np.round(groups / np.where(d > 0, d, 1)), -1, 2).astype(np.uint8) + np.uint8(1)
    packed = (codes.reshape(-1, 16, 4) << np.arange(0, 8, 2, dtype=np.uint8)).sum(-1).astype(np.uint8)
    blocks: np.ndarray = np.concatenate([d.view(np.uint8), packed], axis=-1)
    return blocks.reshape(*values.shape[:-1], -1)
