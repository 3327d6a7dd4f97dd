"""What the stored model does on the held-out files, measured in PyTorch in float32.

Bits per byte of the file's weights with exact and with 8-bit activations; use of the experts;
agreement of the multi-token-prediction block with the trunk.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tools.train_demo.delta_net import CHUNK
from tools.train_demo.fake_quant import FAKE
from tools.train_demo.file_types import stored_type
from tools.train_demo.held_out import scoring_windows
from tools.train_demo.model import DemoConfig, DemoModel, Output
from tools.train_demo.read_back import dequantised_state
from tools.train_demo.train import Tokens, held_out_bits_per_byte, load_tokens

WINDOW = 2048


def round_int8(x: Tensor, group: int) -> Tensor:
    """`x [..., n]` rounded to 8 bits with one scale per `group` inputs (the last group may be shorter)."""
    pieces = []
    for piece in x.split(group, dim=-1):
        peak = piece.abs().amax(-1, keepdim=True)
        scale = torch.where(peak == 0, 1.0, peak) / 127
        pieces.append((piece / scale).round() * scale)
    return torch.cat(pieces, dim=-1)


@contextmanager
def rounded_activations(model: DemoModel, group: int | None) -> Iterator[None]:
    """Inside, every product with a quantised weight sees its input through `round_int8`; None: as it is."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (round_int8(inputs[0], group), *inputs[1:]) if group else inputs

    handles = [
        module.register_forward_pre_hook(hook)
        for name, module in model.named_modules()
        if name.endswith("expert_input")
        or (isinstance(module, nn.Linear) and stored_type(f"{name}.weight") in FAKE)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Measurement:
    """One set of weights on one device."""

    def __init__(self, state: dict[str, Tensor], config: DemoConfig, device: torch.device) -> None:
        torch.set_float32_matmul_precision("highest")
        self.model = DemoModel(config).to(device).eval()
        self.model.load_state_dict(state)
        self.device = device

    @torch.no_grad()
    def _run(self, inputs: np.ndarray, targets: np.ndarray) -> Output:
        padding = -len(inputs) % CHUNK
        ids = torch.from_numpy(
            np.stack([np.pad(x.astype(np.int64), (0, padding)) for x in (inputs, targets)])
        )
        ids = ids.to(self.device)
        output: Output = self.model(ids[:1], ids[1:])
        return output

    def bits_per_byte(self, tokens: Tokens, group: int | None = None) -> float:
        """Bits per byte of the stream, activations rounded per `group` inputs if given."""
        with rounded_activations(self.model, group):
            return held_out_bits_per_byte(self.model, tokens, WINDOW)

    @torch.no_grad()
    def behaviour(self, tokens: Tokens) -> dict[str, Any]:
        """Expert usage per block (MTP last) and top-1 figures of trunk and MTP block, in disjoint windows."""
        c = self.model.config
        usage = torch.zeros(c.num_layers + 1, c.num_experts, device=self.device)
        counts = {"positions": 0, "trunk_correct": 0, "mtp_correct": 0, "mtp_agrees_with_trunk": 0}
        for window in list(scoring_windows(len(tokens.ids), WINDOW))[::2]:
            inputs, targets = (tokens.ids[window.start + i : window.end + i] for i in (0, 1))
            output = self._run(inputs, targets)
            n = len(inputs) - 1
            for layer, router in enumerate(output.routers):
                chosen = router.topk_ids[: n + 1].flatten()
                usage[layer] += torch.bincount(chosen, minlength=c.num_experts)
            # The trunk after token p + 1 and the MTP block at p both name token p + 2.
            trunk = self.model.output(output.hidden)[0, 1 : n + 1].argmax(-1)
            draft = self.model.output(output.mtp_hidden)[0, :n].argmax(-1)
            truth = torch.from_numpy(targets[1:].astype(np.int64)).to(self.device)
            counts["positions"] += n
            counts["trunk_correct"] += int((trunk == truth).sum())
            counts["mtp_correct"] += int((draft == truth).sum())
            counts["mtp_agrees_with_trunk"] += int((trunk == draft).sum())
        share = usage / usage.sum(-1, keepdim=True)
        entropy = -(share * share.clamp(min=1e-12).log2()).sum(-1)
        total = counts.pop("positions")
        return {
            "positions": total,
            "routing_entropy_bits_per_block": [round(x, 3) for x in entropy.tolist()],
            "routing_entropy_maximum_bits": math.log2(c.num_experts),
            "least_used_expert_share_per_block": [round(x, 4) for x in share.amin(-1).tolist()],
            "most_used_expert_share_per_block": [round(x, 4) for x in share.amax(-1).tolist()],
            "top1": {name: round(count / total, 4) for name, count in counts.items()},
        }


def measure(tokens: Path, gguf_file: Path) -> dict[str, Any]:
    """All figures of the file that need no llama.cpp, on the held-out stream of the token file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = DemoConfig()
    _, held_out = load_tokens(tokens)
    stored = Measurement(dequantised_state(gguf_file, config), config, device)
    return {
        "bits_per_byte": {
            "file": round(stored.bits_per_byte(held_out), 5),
            "file_int8_activations_per_256": round(stored.bits_per_byte(held_out, 256), 5),
            "file_int8_activations_per_32": round(stored.bits_per_byte(held_out, 32), 5),
        },
        "behaviour": stored.behaviour(held_out),
    }
