"""From the model's file and the tokens to a trained drafter: text, features, training, within given minutes.

A later call with the same folder goes on with the same text where the one before it ended.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from tools.train_demo.drafter_model import DrafterConfig
from tools.train_demo.drafter_train import DrafterTrainConfig, DrafterTrainer, Target
from tools.train_demo.features import Windows, windows_of
from tools.train_demo.model import DemoConfig, DemoModel
from tools.train_demo.own_text import OwnTextConfig, smaller, write_windows
from tools.train_demo.read_back import dequantised_state
from tools.train_demo.train import Tokens, load_tokens

TEXT_FILE, RECORD_FILE = "own_text.npz", "drafter.json"
HELD_OUT_WINDOWS = 512
LAST_SECONDS = 20.0  # for the last evaluation and for writing


@dataclass(frozen=True)
class DrafterRun:
    """What a call does: shapes, text, training, and how long it may take in all.

    max_steps: of training in this call, 0 for as many as there is time for.
    """

    shape: DrafterConfig = field(default_factory=DrafterConfig)
    text: OwnTextConfig = field(default_factory=OwnTextConfig)
    training: DrafterTrainConfig = field(default_factory=DrafterTrainConfig)
    minutes: float = 9.0
    max_steps: int = 0


def load_target(model_file: Path, config: DemoConfig, device: torch.device) -> DemoModel:
    """The model that the file holds, in evaluation mode."""
    model = DemoModel(config).to(device).eval()
    model.load_state_dict(dequantised_state(model_file, config))
    return model.requires_grad_(requires_grad=False)


def own_text(
    model: DemoModel, streams: tuple[Tokens, Tokens], config: OwnTextConfig, path: Path
) -> dict[str, np.ndarray]:
    """Texts of both parts of the corpus by `part_ids` and `part_greedy`: those at `path`, or new ones."""
    if not path.exists():
        arrays: dict[str, np.ndarray] = {}
        held_out = smaller(config, min(HELD_OUT_WINDOWS, config.num_windows))
        for part, tokens, each in zip(("train", "held_out"), streams, (config, held_out), strict=True):
            arrays[f"{part}_ids"], arrays[f"{part}_greedy"] = write_windows(model, tokens, each)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def train_drafter(
    tokens: Path, model_file: Path, folder: Path, run: DrafterRun, target_config: DemoConfig | None = None
) -> dict[str, object]:
    """Train in `folder`, continuing what is there; returns the last figures.

    target_config: the model's shape (default: that of the bundled one).
    """
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(model_file, target_config or DemoConfig(), device)
    text = own_text(target, load_tokens(tokens), run.text, folder / TEXT_FILE)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def windows(part: str) -> Windows:
        ids, greedy = text[f"{part}_ids"], text[f"{part}_greedy"]
        return windows_of(target, ids, greedy, run.text.prompt_length, run.shape.aux_layers, dtype)

    train, held_out = windows("train"), windows("held_out")
    print(json.dumps({"windows": len(train), "seconds": round(time.monotonic() - began, 1)}), flush=True)
    trainer = DrafterTrainer(run.shape, run.training, Target.of(target), folder)
    left = 60 * run.minutes - LAST_SECONDS - (time.monotonic() - began)
    figures = trainer.run(train, held_out, left, run.max_steps or None)
    record = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "figures": figures,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "shape": asdict(run.shape),
        "text": asdict(run.text),
        "training": asdict(run.training),
    }
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n")
    return figures
