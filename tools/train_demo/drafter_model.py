"""A DFlash drafter in PyTorch, as training needs it: many blocks of many windows at once.

It computes what `coldstream.models.cpu.dflash` computes for one block after one context, over the same
tensors under the same names, so that conversion is writing them down. Unit of work: the features of windows
`[b, T, F]` and the anchors in them `[b, A]`, to the states `[b, A, B, E]` that the target's head reads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_demo.model import RMSNorm, rotated


@dataclass(frozen=True)
class DrafterConfig:
    """Shapes of the drafter; the defaults are those of the bundled one.

    Without `selector_rank` it is of the first kind: no convolutions, and no selector.
    """

    hidden_size: int = 256  # of the target too
    vocab_size: int = 6144
    aux_layers: tuple[int, ...] = (1, 3, 5, 7)  # layers of the target after which its residual stream is read
    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    ffn_size: int = 768
    block_size: int = 8  # rows of a block, the anchor included
    mask_id: int = 6141
    window: int = 256  # rows nearer than this are seen
    # Whether a row of a block sees those before it alone, so that fewer rows are the beginning of more.
    is_causal: bool = True
    rope_theta: float = 10_000.0
    conv_kernel: int = 2
    conv_group: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16

    @property
    def is_second(self) -> bool:
        """Whether this is the shape of a DFlash 2 drafter."""
        return self.selector_rank > 0


@dataclass(frozen=True)
class Blocks:
    """Where blocks lie in windows, and what their rows see.

    rotations: cosines and sines of the context's rows and of all blocks' rows. mask: bool
    `[b, 1, A·B, T + A·B]`.
    """

    context_rotations: tuple[Tensor, Tensor]
    block_rotations: tuple[Tensor, Tensor]
    mask: Tensor

    @classmethod
    def at(cls, anchors: Tensor, num_context: int, config: DrafterConfig) -> "Blocks":
        """Of blocks whose anchors are at positions `anchors` `[b, A]` of windows of `num_context` rows."""
        b, A = anchors.shape
        B, device = config.block_size, anchors.device
        offsets = torch.arange(B, device=device)
        context = torch.arange(num_context, device=device)
        positions = anchors[:, :, None] + offsets  # [b, A, B]
        before = context < anchors[:, :, None, None]
        near = positions[..., None] - context < config.window
        own = torch.arange(A, device=device)
        seen = torch.ones(B, B, dtype=torch.bool, device=device)
        same = torch.kron(own[:, None] == own, seen.tril() if config.is_causal else seen)  # [A·B, A·B]
        mask = torch.cat(((before & near).flatten(1, 2), same.expand(b, -1, -1)), dim=-1)
        return cls(_cos_sin(context[None], config), _cos_sin(positions.flatten(1), config), mask[:, None])


def _cos_sin(positions: Tensor, config: DrafterConfig) -> tuple[Tensor, Tensor]:
    """Of positions `[b, n]`: both `[b, n, 1, head_dim / 2]`, float32."""
    half = config.head_dim // 2
    inverse = config.rope_theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angles = positions[..., None, None].float() * inverse
    return angles.cos(), angles.sin()


class Convolution(nn.Module):
    """A short causal convolution of a block's rows with weights that depend on the row, on both sides of a
    sublayer.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        K, E = config.conv_kernel, config.hidden_size
        self.groups = E // config.conv_group
        self.base = nn.Parameter(torch.zeros(2, K, E))
        self.proj = nn.Linear(E, 2 * K * self.groups, bias=False)

    def dynamic(self, x: Tensor) -> Tensor:
        """The weights of normed rows x `[..., B, E]`: `[..., B, 2, K, groups]`."""
        return self.proj(x).unflatten(-1, (2, -1, self.groups))

    def apply_side(self, x: Tensor, dynamic: Tensor, side: int) -> Tensor:
        """Rows `[..., B, E]`, each a weighted sum of rows of x up to its own."""
        result = torch.zeros_like(x)
        for distance in range(self.base.shape[1]):
            repeated = dynamic[..., side, distance, :].repeat_interleave(x.shape[-1] // self.groups, dim=-1)
            earlier = functional.pad(x, (0, 0, distance, 0))[..., : x.shape[-2], :]
            result = result + (self.base[side, distance] + repeated) * earlier
        return result


class DrafterLayer(nn.Module):
    """Attention to the context and the block, and an FFN, each behind its norm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        E, D = config.hidden_size, config.head_dim
        self.attn_norm = RMSNorm(E)
        self.attn_q = nn.Linear(E, config.num_heads * D, bias=False)
        self.attn_k = nn.Linear(E, config.num_kv_heads * D, bias=False)
        self.attn_v = nn.Linear(E, config.num_kv_heads * D, bias=False)
        self.attn_output = nn.Linear(config.num_heads * D, E, bias=False)
        self.attn_q_norm = RMSNorm(D)
        self.attn_k_norm = RMSNorm(D)
        self.ffn_norm = RMSNorm(E)
        self.ffn_gate = nn.Linear(E, config.ffn_size, bias=False)
        self.ffn_up = nn.Linear(E, config.ffn_size, bias=False)
        self.ffn_down = nn.Linear(config.ffn_size, E, bias=False)
        self.attn_conv = Convolution(config) if config.is_second else None
        self.ffn_conv = Convolution(config) if config.is_second else None

    def _keys_values(self, x: Tensor, rotations: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values `[b, n, heads, D]` of rows `[b, n, E]`."""
        heads = (self.config.num_kv_heads, self.config.head_dim)
        keys = rotated(self.attn_k_norm(self.attn_k(x).unflatten(-1, heads)), *rotations)
        return keys, self.attn_v(x).unflatten(-1, heads)

    def _attention(self, x: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        c = self.config
        x = self.attn_norm(x)
        conv, dynamic = self.attn_conv, None
        if conv is not None:
            dynamic = conv.dynamic(x)
            x = conv.apply_side(x, dynamic, 0)
        rows = x.flatten(1, 2)  # [b, A·B, E]
        queries = self.attn_q_norm(self.attn_q(rows).unflatten(-1, (c.num_heads, c.head_dim)))
        queries = rotated(queries, *blocks.block_rotations)
        keys, values = self._keys_values(context, blocks.context_rotations)
        own_keys, own_values = self._keys_values(rows, blocks.block_rotations)
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            torch.cat((keys, own_keys), dim=1).transpose(1, 2),
            torch.cat((values, own_values), dim=1).transpose(1, 2),
            blocks.mask,
            enable_gqa=True,
        )
        result: Tensor = self.attn_output(mixed.transpose(1, 2).flatten(2)).view(x.shape)
        return result if conv is None or dynamic is None else conv.apply_side(result, dynamic, 1)

    def _feed_forward(self, x: Tensor) -> Tensor:
        x = self.ffn_norm(x)
        conv, dynamic = self.ffn_conv, None
        if conv is not None:
            dynamic = conv.dynamic(x)
            x = conv.apply_side(x, dynamic, 0)
        result: Tensor = self.ffn_down(functional.silu(self.ffn_gate(x)) * self.ffn_up(x))
        return result if conv is None or dynamic is None else conv.apply_side(result, dynamic, 1)

    def forward(self, x: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        """x `[b, A, B, E]` after rows `context` `[b, T, E]`."""
        x = x + self._attention(x, context, blocks)
        return x + self._feed_forward(x)


class DrafterModel(nn.Module):
    """The drafter without its target's embedding and head."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        E, R = config.hidden_size, config.selector_rank
        self.fc = nn.Linear(len(config.aux_layers) * E, E, bias=False)
        self.enc = nn.ModuleDict({"output_norm": RMSNorm(E)})
        self.blk = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.output_norm = RMSNorm(E)
        if config.is_second:
            self.selector_predecessor = nn.Embedding(config.vocab_size, R)
            self.selector_successor = nn.Embedding(config.vocab_size, R)
            self.selector_hidden = nn.Linear(E, R, bias=False)
        self.initialise()

    def initialise(self) -> None:
        """Draw the weights from the global generator; convolutions start as the identity, pairs at 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("_conv.base"):
                parameter.data[:, 0] = 1.0
            elif "_conv.proj" in name:
                parameter.data.normal_(std=0.1 * parameter.shape[-1] ** -0.5)
            elif name == "selector_predecessor.weight":
                parameter.data.normal_()
            elif name == "selector_successor.weight":
                parameter.data.zero_()
            elif parameter.ndim >= 2:
                scale = 0.5 if "attn_output" in name or "ffn_down" in name else 1.0
                parameter.data.normal_(std=scale * parameter.shape[-1] ** -0.5)

    def forward(self, features: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """States `[b, A, B, E]` for the target's head.

        features `[b, T, len(aux_layers)·E]`: of all rows of windows; a block sees those before its anchor.
        embedded `[b, A, B, E]`: the target's embedding of each anchor's token, and of the mask.
        anchors `[b, A]`: positions, at least 1.
        """
        blocks = Blocks.at(anchors, features.shape[1], self.config)
        context = self.enc["output_norm"](self.fc(features))
        x = embedded
        for layer in self.blk:
            x = layer(x, context, blocks)
        return self.output_norm(x)

    def pair_scores(self, hidden: Tensor, before: Tensor) -> Tensor:
        """What the selector adds to the logits of rows `hidden` `[..., E]` after tokens `before` `[...]`.

        Over the whole vocabulary, `[..., V]`; a served draft has them for its candidates alone.
        """
        chosen = self.selector_predecessor(before) * self.selector_hidden(hidden)
        return functional.linear(chosen, self.selector_successor.weight)


def gguf_name(name: str) -> str:
    """The name in the file of the parameter called `name` in the model's state dict."""
    return name.replace("_conv.base", "_conv_base").replace("_conv.proj", "_conv_proj")
