"""Text that the model writes itself: what a drafter is asked to foresee.

A drafter's tokens are compared with the target's, so it is trained on texts in which each token is the
target's choice. Windows begin with a piece of the corpus and go on greedily or by drawing, as `run` draws by
default. Many windows are written at once, a token of each in a step, with PyTorch's weights and state.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.train_demo.model import Attention, DeltaNet, DemoModel
from tools.train_demo.train import Tokens

TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 40, 0.95, 0.05


@dataclass(frozen=True)
class OwnTextConfig:
    """How much is written: windows of `length` tokens, which begin with `prompt_length` of the corpus."""

    num_windows: int = 32_768
    length: int = 384
    prompt_length: int = 128
    greedy_share: float = 0.5  # of the windows
    batch_windows: int = 8192  # that are written at once
    seed: int = 20261126


@dataclass
class _State:
    """Of one block, for all windows: keys and values so far, or the delta rule's state and channels."""

    keys: Tensor
    values: Tensor


class Decoder:
    """Runs windows token by token; all have as many tokens so far."""

    def __init__(self, model: DemoModel, num_windows: int, length: int) -> None:
        self.model, self.position = model, 0
        weight = model.output.weight
        c = model.config
        heads, d = c.num_value_heads, c.ssm_state_size
        channels = (2 * c.num_key_heads + heads) * d

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(num_windows, *shape, device=weight.device)

        self._states = [
            _State(zeros(length, c.num_kv_heads, c.head_dim), zeros(length, c.num_kv_heads, c.head_dim))
            if c.is_full_attention(i)
            else _State(zeros(c.conv_kernel - 1, channels), zeros(heads, d, d))
            for i in range(c.num_layers)
        ]

    @torch.no_grad()
    def step(self, token_ids: Tensor) -> Tensor:
        """Logits `[N, V]` after the next token of each window, `[N]`."""
        model = self.model
        x = model.token_embd(token_ids)[:, None]
        for block, state in zip(model.blk, self._states, strict=True):
            x = x + self._mixed(block.mixer, block.attn_norm(x), state)
            x = x + block.ffn(block.post_attention_norm(x))[0]
        self.position += 1
        logits: Tensor = model.output(model.output_norm(x))[:, 0]
        return logits.float()

    def _mixed(self, mixer: Any, x: Tensor, state: _State) -> Tensor:
        t = self.position
        if isinstance(mixer, Attention):
            q, k, v, gate = mixer.projected(x, t)
            state.keys[:, t], state.values[:, t] = k[:, 0], v[:, 0]
            keys, values = (each[:, : t + 1].to(q.dtype) for each in (state.keys, state.values))
            return mixer.attend(q, keys, values, gate, is_causal=False)
        assert isinstance(mixer, DeltaNet)
        raw = torch.cat((state.keys, mixer.attn_qkv(x).float()), dim=1)
        state.keys = raw[:, 1:]
        q, k, v, g, beta = (each[:, 0] for each in mixer.operands(x, raw))
        with torch.autocast(x.device.type, enabled=False):
            state.values.mul_(g.exp()[..., None, None])
            predicted = torch.einsum("bhkv,bhk->bhv", state.values, k)
            delta = beta[..., None] * (v - predicted)
            state.values.add_(k[..., :, None] * delta[..., None, :])
            o = torch.einsum("bhkv,bhk->bhv", state.values, q)
        return mixer.gated(x, o[:, None])


def drawn(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A token of each row of logits `[N, V]`, by the sampling that `run` has by default."""
    values, ids = logits.topk(TOP_K, dim=-1)  # descending
    plain = values.softmax(-1)
    kept = (plain.cumsum(-1) - plain < TOP_P) & (plain >= MIN_P * plain[:, :1])
    chances = (values / TEMPERATURE).masked_fill(~kept, -torch.inf).softmax(-1)
    return ids.gather(1, torch.multinomial(chances, 1, generator=generator))[:, 0]


def prompts(tokens: Tokens, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Pieces of the stream, int64 `[count, length]`, each within a document if that is long enough."""
    ends = np.append(tokens.starts[1:], len(tokens.ids))
    starts = rng.integers(0, len(tokens.ids) - length, count)
    document = np.searchsorted(tokens.starts, starts, side="right") - 1
    last = np.maximum(ends[document] - length, tokens.starts[document])
    starts = np.minimum(np.minimum(starts, last), len(tokens.ids) - length)
    return tokens.ids[starts[:, None] + np.arange(length)].astype(np.int64)


def write_windows(model: DemoModel, tokens: Tokens, config: OwnTextConfig) -> tuple[np.ndarray, np.ndarray]:
    """Windows that begin with pieces of the stream: uint16 `[num_windows, length]`, and which are greedy.

    The model is on the device that it is to run on, in evaluation mode.
    """
    rng = np.random.default_rng(config.seed)
    device = model.output.weight.device
    generator = torch.Generator(device).manual_seed(config.seed)
    ids = prompts(tokens, config.num_windows, config.prompt_length, rng)
    greedy = rng.permutation(np.arange(config.num_windows) < config.greedy_share * config.num_windows)
    written = [
        _write(model, ids[part], greedy[part], config, generator).to(torch.int32).cpu().numpy()
        for start in range(0, config.num_windows, config.batch_windows)
        for part in [slice(start, start + config.batch_windows)]
    ]
    return np.concatenate(written).astype(np.uint16), greedy


def _write(
    model: DemoModel,
    prompt: np.ndarray,
    greedy: np.ndarray,
    config: OwnTextConfig,
    generator: torch.Generator,
) -> Tensor:
    device = model.output.weight.device
    given = torch.from_numpy(prompt).to(device)
    is_greedy = torch.from_numpy(greedy).to(device)
    decoder = Decoder(model, len(prompt), config.length)
    columns: list[Tensor] = []
    logits = None
    for position in range(config.length):
        if position < config.prompt_length:
            columns.append(given[:, position])
        else:
            assert logits is not None
            columns.append(torch.where(is_greedy, logits.argmax(-1), drawn(logits, generator)))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = decoder.step(columns[-1])
    return torch.stack(columns, dim=1)


def smaller(config: OwnTextConfig, num_windows: int) -> OwnTextConfig:
    """The same for fewer windows."""
    return replace(config, num_windows=num_windows, batch_windows=min(config.batch_windows, num_windows))
