"""Trains the drafter: blocks at drawn anchors of texts of the target, against the target's own chances.

Unit of work: a step over `batch_windows` windows with `anchors` blocks in each. Row i of a block foresees the
token i places after the anchor; what it is held against are the target's chances of that token, from the
state that the target has there. The chances before the selector and those after it both count, and near rows
more than far ones, since a row is of use only if all before it are right.

A run is bounded by time and can be continued: its state is a file, and the order of its data a function of
the step.
"""

import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tools.train_demo.drafter_model import DrafterConfig, DrafterModel
from tools.train_demo.features import Windows
from tools.train_demo.model import DemoModel
from tools.train_demo.muon import Muon

STATE_FILE, LOG_FILE = "drafter.pt", "drafter.jsonl"
EVALUATE_EVERY_S = 60.0
ANCHOR_DISTANCE = 8  # of blocks that are evaluated


@dataclass(frozen=True)
class DrafterTrainConfig:
    """How to train; the defaults are for one GPU."""

    batch_windows: int = 96
    anchors: int = 16  # of each window
    learning_rate: float = 4e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    position_decay: float = 4.0  # rows until a row counts 1/e as much
    marginal_weight: float = 0.5  # of the chances before the selector
    seed: int = 20261126
    # Of all runs together; the learning rate falls to 0 by the one that is over first.
    total_seconds: float = 960.0
    total_steps: int = 1_000_000


@dataclass(frozen=True)
class Target:
    """What a drafter has of its target: both matrices `[V, E]`, which are not trained."""

    token_embd: Tensor
    output: Tensor

    @classmethod
    def of(cls, model: DemoModel) -> "Target":
        """Those of a model, on its device."""
        return cls(model.token_embd.weight.detach(), model.output.weight.detach())

    def logits(self, states: Tensor) -> Tensor:
        """Of states `[..., E]`, float32: chances near each other shall not be rounded into one."""
        with torch.autocast(states.device.type, enabled=False):
            return functional.linear(states.float(), self.output)


def block_rows(windows: Windows, chosen: Tensor, anchors: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Of blocks at `anchors [b, A]` of windows `chosen [b]`: their tokens, int64 `[b, A, B]`, and the states
    `[b, A, B − 1, E]` from which the target chose all but the first.
    """
    positions = anchors[..., None] + torch.arange(block_size, device=anchors.device)
    rows = chosen[:, None, None]
    return windows.token_ids[rows, positions].long(), windows.hidden[rows, positions[..., :-1]]


def embedded(token_ids: Tensor, target: Target, config: DrafterConfig) -> Tensor:
    """What blocks `[b, A, B]` begin with: the anchor's embedding, and the mask's in all other rows."""
    ids = torch.full_like(token_ids, config.mask_id)
    ids[..., 0] = token_ids[..., 0]
    return functional.embedding(ids, target.token_embd)


def draft_losses(
    model: DrafterModel, target: Target, windows: Windows, chosen: Tensor, anchors: Tensor
) -> dict[str, Tensor]:
    """Cross entropies in nats by row, `[B − 1]` each, before the selector and, if there is one, after it."""
    c = model.config
    token_ids, states = block_rows(windows, chosen, anchors, c.block_size)
    features = windows.features[chosen]
    hidden = model(features, embedded(token_ids, target, c), anchors)[..., 1:, :]
    chances, logits = target.logits(states).softmax(-1), target.logits(hidden)

    def cross_entropy(scores: Tensor) -> Tensor:
        # log softmax without a second tensor of the scores' size
        nats = scores.logsumexp(-1) - (chances * scores).sum(-1)
        return nats.mean(dim=(0, 1))

    losses = {"marginal": cross_entropy(logits)}
    if c.is_second:
        pairs = model.pair_scores(hidden, token_ids[..., :-1])
        losses["conditional"] = cross_entropy(logits + pairs.float())
    return losses


def total_loss(losses: dict[str, Tensor], config: DrafterTrainConfig) -> Tensor:
    """What is made smaller: the mean over rows, weighted."""
    rows = torch.arange(len(losses["marginal"]), device=losses["marginal"].device)
    weights = torch.exp(-rows / config.position_decay)
    weights = weights / weights.sum()
    if "conditional" not in losses:
        return (weights * losses["marginal"]).sum()
    return (weights * (losses["conditional"] + config.marginal_weight * losses["marginal"])).sum()


@torch.no_grad()
def drafted_line(
    model: DrafterModel, target: Target, hidden: Tensor, anchor_ids: Tensor, has_selector: bool = True
) -> Tensor:
    """The likeliest token after the one before, row by row: `[n, B − 1]` of states `[n, B, E]`."""
    logits = target.logits(hidden[:, 1:])
    if not (model.config.is_second and has_selector):
        return logits.argmax(-1)
    own, candidates = logits.topk(model.config.selector_top_k, dim=-1)
    before, line = anchor_ids, []
    for row in range(logits.shape[1]):
        pairs = model.pair_scores(hidden[:, row + 1], before).float().gather(1, candidates[:, row])
        best = (own[:, row] + pairs).argmax(-1, keepdim=True)
        before = candidates[:, row].gather(1, best)[:, 0]
        line.append(before)
    return torch.stack(line, dim=1)


@torch.no_grad()
def accepted_by_depth(
    model: DrafterModel, target: Target, windows: Windows, *, is_greedy: bool, has_selector: bool = True
) -> list[float]:
    """Shares of drafts of which at least the first 1, 2, … tokens are those of the windows' own text.

    has_selector: without it, drafts are the likeliest token of each row, as those of the first kind.
    """
    c = model.config
    chosen = torch.nonzero(windows.greedy == is_greedy)[:, 0]
    places = torch.arange(
        windows.prompt_length, windows.token_ids.shape[1] - c.block_size + 1, ANCHOR_DISTANCE
    ).to(chosen.device)
    right = torch.zeros(c.block_size - 1, device=chosen.device)
    model.eval()
    for part in chosen.split(64):
        anchors = places.expand(len(part), -1)
        token_ids, _ = block_rows(windows, part, anchors, c.block_size)
        hidden = model(windows.features[part].float(), embedded(token_ids, target, c), anchors)
        flat = token_ids.flatten(0, 1)
        line = drafted_line(model, target, hidden.flatten(0, 1), flat[:, 0], has_selector)
        right += (line == flat[:, 1:]).cumprod(-1).sum(0)
    model.train()
    return [round(float(x), 4) for x in right / (len(chosen) * len(places))]


def make_optimizers(model: DrafterModel, config: DrafterTrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices; AdamW for convolutions, codebooks and vectors."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "conv" not in name and "cessor" not in name:
            matrices.append((parameter, parameter.shape[0]))
        else:
            others.append(parameter)
    adam = torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, config.learning_rate, momentum=0.95, weight_decay=config.weight_decay), adam]


class DrafterTrainer:
    """The drafter, its optimisers, and how far a run is; continues the one in `folder` if there is one."""

    def __init__(
        self,
        shape: DrafterConfig,
        config: DrafterTrainConfig,
        target: Target,
        folder: Path,
    ) -> None:
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        self.config, self.target, self.folder = config, target, folder
        self.device = target.output.device
        self.model = DrafterModel(shape).to(self.device)
        self.optimizers = make_optimizers(self.model, config)
        self.step, self.seconds = 0, 0.0
        if (folder / STATE_FILE).exists():
            self._resume(torch.load(folder / STATE_FILE, map_location=self.device, weights_only=True))

    def _resume(self, saved: dict[str, Any]) -> None:
        if saved["shape"] != _plain(asdict(self.model.config)):
            raise ValueError(f"{self.folder / STATE_FILE} is of another shape: name another folder")
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.seconds = saved["step"], saved["seconds"]

    def save(self) -> None:
        """Write what a further run continues from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f"{STATE_FILE}.unfinished"
        saved = {
            "shape": _plain(asdict(self.model.config)),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(saved, unfinished)
        unfinished.replace(self.folder / STATE_FILE)

    @property
    def progress(self) -> float:
        """Of all runs together, 0 to 1."""
        c = self.config
        return min(1.0, max(self.step / c.total_steps, self.seconds / c.total_seconds))

    def update(self, windows: Windows) -> dict[str, Tensor]:
        """One step; the losses by row."""
        c = self.config
        warm = min(1.0, (self.step + 1) / c.warmup_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = c.learning_rate * warm * (1 - self.progress)
        rng = np.random.default_rng([c.seed, self.step])
        chosen = rng.integers(0, len(windows), c.batch_windows)
        last = windows.token_ids.shape[1] - self.model.config.block_size
        anchors = rng.integers(1, last + 1, (c.batch_windows, c.anchors))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            losses = draft_losses(
                self.model,
                self.target,
                windows,
                torch.from_numpy(chosen).to(self.device),
                torch.from_numpy(anchors).to(self.device),
            )
        total_loss(losses, c).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {name: loss.detach() for name, loss in losses.items()}

    def run(
        self, train: Windows, held_out: Windows, max_seconds: float, max_steps: int | None = None
    ) -> dict[str, Any]:
        """Steps until one of these limits or the end of the schedule; returns the last evaluation."""
        began, before, next_evaluation = time.monotonic(), self.seconds, EVALUATE_EVERY_S
        end = self.config.total_steps if max_steps is None else self.step + max_steps
        losses: dict[str, Tensor] = {}
        while (elapsed := time.monotonic() - began) < max_seconds and self.step < end and self.progress < 1:
            losses = self.update(train)
            self.seconds = before + time.monotonic() - began
            if elapsed >= next_evaluation:
                next_evaluation += EVALUATE_EVERY_S
                self.evaluate(losses, held_out)
                self.save()
        figures = self.evaluate(losses, held_out)
        self.save()
        return figures

    def evaluate(self, losses: dict[str, Tensor], held_out: Windows) -> dict[str, Any]:
        """Figures of now, which are also printed and added to the log."""
        row: dict[str, Any] = {"step": self.step, "seconds": round(self.seconds, 1)}
        row |= {f"{name}_nats": [round(float(x), 3) for x in loss] for name, loss in losses.items()}
        accepted = partial(accepted_by_depth, self.model, self.target, held_out)
        row["accepted_greedy"] = accepted(is_greedy=True)
        row["accepted_drawn"] = accepted(is_greedy=False)
        if self.model.config.is_second:
            row["accepted_greedy_without_selector"] = accepted(is_greedy=True, has_selector=False)
        row["tokens_per_step_greedy"] = round(1 + sum(row["accepted_greedy"]), 3)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOG_FILE).open("a") as log:
            log.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        return row


def _plain(shape: dict[str, Any]) -> dict[str, Any]:
    """With lists for tuples, as files have them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in shape.items()}
