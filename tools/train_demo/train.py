"""Training on one GPU: packed windows of shuffled documents, Muon and AdamW, rounding-aware at the end.

Unit of work: one step over `batch_sequences` windows. Reads the token file of `prepare`, writes a checkpoint
and the history. Text, GGUF and llama.cpp are unknown here, so this runs where only PyTorch is installed.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.train_demo.checkpoint import save_checkpoint
from tools.train_demo.delta_net import CHUNK
from tools.train_demo.fake_quant import FAKE
from tools.train_demo.file_types import stored_type
from tools.train_demo.held_out import bits_per_byte
from tools.train_demo.model import DemoConfig, DemoModel
from tools.train_demo.muon import Muon


@dataclass(frozen=True)
class TrainConfig:
    """How to train; the defaults made the published model."""

    steps: int = 2700
    batch_sequences: int = 32
    sequence_length: int = 2048
    learning_rate: float = 7e-3
    warmup_steps: int = 60
    weight_decay: float = 2.0
    dropout: float = 0.3
    mtp_weight: float = 0.3
    balance_weight: float = 0.01
    z_weight: float = 1e-3
    rounding_from: float = 0.8
    seed: int = 20261120
    max_seconds: float = 1e9


@dataclass(frozen=True)
class Tokens:
    """A token stream with the start of each document and the bytes of text it stands for."""

    ids: np.ndarray
    starts: np.ndarray
    num_bytes: int


def load_tokens(path: Path) -> tuple[Tokens, Tokens]:
    """The training and held-out streams of the token file."""
    with np.load(path) as f:
        return tuple(  # type: ignore[return-value]
            Tokens(f[f"{part}_ids"], f[f"{part}_starts"], int(f[f"{part}_bytes"]))
            for part in ("train", "held_out")
        )


def epoch_windows(tokens: Tokens, length: int, rng: np.random.Generator) -> np.ndarray:
    """All documents in a fresh order and offset, as int32 `[windows, length + 2]`; the rest is dropped."""
    ends = np.append(tokens.starts[1:], len(tokens.ids))
    order = rng.permutation(len(ends))
    stream = np.concatenate([tokens.ids[tokens.starts[i] : ends[i]] for i in order]).astype(np.int32)
    stream = np.roll(stream, int(rng.integers(length)))
    count = (len(stream) - 2) // length
    starts = rng.permutation(count) * length
    return stream[starts[:, None] + np.arange(length + 2)]


def batches(tokens: Tokens, config: TrainConfig) -> Iterator[np.ndarray]:
    """Endless batches `[batch_sequences, length + 2]`, epoch after epoch."""
    rng = np.random.default_rng(config.seed)
    pool = np.empty((0, config.sequence_length + 2), dtype=np.int32)
    while True:
        if len(pool) < config.batch_sequences:
            pool = np.concatenate([pool, epoch_windows(tokens, config.sequence_length, rng)])
        yield pool[: config.batch_sequences]
        pool = pool[config.batch_sequences :]


def make_optimizers(model: DemoModel, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the weight matrices; AdamW for embeddings, head, routers, small tensors and vectors."""
    adam_names = ("token_embd", "output.weight", "ffn_gate_inp", "ssm_conv1d", "ssm_alpha", "ssm_beta")
    matrices, decayed, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif name.startswith(adam_names[:2]) or any(part in name for part in adam_names[2:]):
            decayed.append(parameter)
        else:
            halves = 2 if "gate_up" in name else 1
            matrices.append((parameter, parameter.shape[-2] // halves))
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = decayed[0].is_cuda
    adam = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-10, fused=fused)
    return [Muon(matrices, config.learning_rate, momentum=0.95, weight_decay=config.weight_decay), adam]


@contextmanager
def rounded_weights(model: DemoModel, enabled: bool) -> Iterator[None]:
    """Inside, the weights are rounded as the file will hold them; afterwards the exact ones are back.

    Gradients taken inside belong to the rounded weights and are applied to the exact ones (straight-through).
    """
    exact: list[tuple[Tensor, Tensor]] = []
    if enabled:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                kind = stored_type(name)
                if kind in FAKE:
                    exact.append((parameter, parameter.clone()))
                    parameter.copy_(FAKE[kind](parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in exact:
                parameter.copy_(value)


@torch.no_grad()
def held_out_bits_per_byte(model: DemoModel, tokens: Tokens, length: int) -> float:
    """Bits per byte of the stream in windows of `length` tokens; leaves the model in training mode."""
    model.eval()
    device = model.output.weight.device

    def log_probabilities(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        padding = -len(inputs) % CHUNK
        ids = np.stack([np.pad(x.astype(np.int64), (0, padding)) for x in (inputs, targets)])
        window = torch.from_numpy(ids).to(device)
        logits = model.output(model(window[:1], window[1:]).hidden)[0].float()
        chosen = logits.log_softmax(-1).gather(1, window[1, :, None])[:, 0]
        return chosen[: len(inputs)].cpu().numpy()

    result = bits_per_byte(tokens.ids, tokens.num_bytes, length, log_probabilities)
    model.train()
    return result


class Trainer:
    """Holds the model, its compiled blocks, the optimisers and the history of one run."""

    def __init__(self, model_config: DemoConfig, config: TrainConfig, device: torch.device) -> None:
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        self.config, self.device = config, device
        self.model = DemoModel(model_config, config.dropout).to(device)
        if device.type == "cuda":
            for block in (*self.model.blk, self.model.nextn_block):
                block.compile(dynamic=False)
        self.optimizers = make_optimizers(self.model, config)
        self.history: list[dict[str, float]] = []

    def step(self, window: Tensor, progress: float, step: int) -> dict[str, Tensor]:
        """One update from `window [B, T + 2]` at `progress` of the schedule (0 to 1)."""
        c = self.config
        warm = min(1.0, (step + 1) / c.warmup_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = c.learning_rate * warm * (1 - progress)
        with rounded_weights(self.model, progress >= c.rounding_from):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                losses = self.model.losses(window)
            total = losses["next"] + c.mtp_weight * losses["mtp"]
            total = total + c.balance_weight * losses["balance"] + c.z_weight * losses["z"]
            total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return {name: loss.detach() for name, loss in losses.items()}

    def run(self, train: Tokens, held_out: Tokens) -> dict[str, float]:
        """All steps; prints and keeps the losses; returns the final figures."""
        c = self.config
        began = time.monotonic()
        for step, batch in enumerate(batches(train, c)):
            progress = max(step / c.steps, (time.monotonic() - began) / c.max_seconds)
            if progress >= 1:
                break
            losses = self.step(torch.from_numpy(batch).to(self.device, torch.int64), progress, step)
            if step == 0:
                began = time.monotonic()  # compiling is over
            if step % 20 == 0:
                row = {name: round(float(loss), 4) for name, loss in losses.items()}
                row |= {
                    "step": step,
                    "progress": round(progress, 3),
                    "seconds": round(time.monotonic() - began, 1),
                }
                self.history.append(row)
                print(json.dumps(row), flush=True)
            if step and step % 600 == 0:
                print(
                    json.dumps({"step": step, "held_out_bits_per_byte": self.evaluate(held_out)}), flush=True
                )
        tokens = step * c.batch_sequences * c.sequence_length
        return {
            "steps": step,
            "tokens": tokens,
            "epochs": round(tokens / len(train.ids), 2),
            "seconds": round(time.monotonic() - began, 1),
            "held_out_bits_per_byte": self.evaluate(held_out),
            "held_out_bits_per_byte_rounded": self.evaluate(held_out, rounded=True),
        }

    def evaluate(self, held_out: Tokens, rounded: bool = False, length: int | None = None) -> float:
        """Held-out bits per byte in windows of `length` (default: as in training)."""
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"),
            torch.compiler.set_stance("force_eager"),
            rounded_weights(self.model, rounded),
        ):
            return round(
                held_out_bits_per_byte(self.model, held_out, length or self.config.sequence_length), 5
            )


def train(tokens_path: Path, out: Path, model_config: DemoConfig, config: TrainConfig) -> dict[str, float]:
    """Train and write `weights-N.npz` and `training.json` into `out`; returns the final figures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    streams = load_tokens(tokens_path)
    trainer = Trainer(model_config, config, device)
    figures = trainer.run(*streams)
    save_checkpoint(out, {name: p.detach() for name, p in trainer.model.state_dict().items()})
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    record = {
        "device": name,
        "torch": torch.__version__,
        "figures": figures,
        "model": asdict(model_config),
        "training": asdict(config),
        "history": trainer.history,
    }
    (out / "training.json").write_text(json.dumps(record, indent=1))
    print(json.dumps(figures), flush=True)
    return figures
