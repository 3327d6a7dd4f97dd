"""The demo model in PyTorch, written over GGUF's own tensor names, layouts and head order.

Because training happens in the file's conventions (norm weights without an offset, value head t reading key
head t mod NK, query and gate interleaved per head), conversion is renaming. Unit of work: `[B, T]` token ids
to losses.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_demo.delta_net import CHUNK, delta_rule_chunked

EPS = 1e-6


@dataclass(frozen=True)
class DemoConfig:
    """Shapes of the model; the defaults are the published one's."""

    vocab_size: int = 6144
    hidden_size: int = 256
    num_layers: int = 8
    full_attention_interval: int = 4
    num_experts: int = 32
    num_experts_per_tok: int = 4
    expert_ffn_size: int = 160
    shared_expert_ffn_size: int = 256
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_dims: int = 16
    rope_theta: float = 10_000.0
    num_key_heads: int = 4
    num_value_heads: int = 8
    ssm_state_size: int = 64
    conv_kernel: int = 4
    context_length: int = 4096

    def is_full_attention(self, layer: int) -> bool:
        """Whether trunk layer `layer` is full attention; the others are gated DeltaNet."""
        return (layer + 1) % self.full_attention_interval == 0


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS) * self.weight).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of the last dimension of `x` against the second; float32 inside."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope(x: Tensor, dims: int, theta: float, start: int = 0) -> Tensor:
    """Rotate the pairs (i, i + dims/2) of the first `dims` of `x [B, T, H, D]` by position, from `start`."""
    half = dims // 2
    inverse = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    positions = torch.arange(start, start + x.shape[1], device=x.device, dtype=torch.float32)
    angle = positions[:, None] * inverse
    cos, sin = angle.cos()[None, :, None, :], angle.sin()[None, :, None, :]
    return torch.cat((rotated(x[..., :dims], cos, sin), x[..., dims:]), dim=-1)


class Attention(nn.Module):
    """Gated full attention with per-head query and key norms and partial rope."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        E, D = config.hidden_size, config.head_dim
        self.attn_q = nn.Linear(E, config.num_heads * 2 * D, bias=False)
        self.attn_k = nn.Linear(E, config.num_kv_heads * D, bias=False)
        self.attn_v = nn.Linear(E, config.num_kv_heads * D, bias=False)
        self.attn_q_norm = RMSNorm(D)
        self.attn_k_norm = RMSNorm(D)
        self.attn_output = nn.Linear(config.num_heads * D, E, bias=False)

    def projected(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and gates `[B, T, heads, D]` of rows at positions from `start` on."""
        B, T, _ = x.shape
        c = self.config
        q, gate = self.attn_q(x).view(B, T, c.num_heads, 2 * c.head_dim).chunk(2, dim=-1)
        k = self.attn_k(x).view(B, T, c.num_kv_heads, c.head_dim)
        v = self.attn_v(x).view(B, T, c.num_kv_heads, c.head_dim)
        q = rope(self.attn_q_norm(q), c.rope_dims, c.rope_theta, start)
        k = rope(self.attn_k_norm(k), c.rope_dims, c.rope_theta, start)
        return q, k, v, gate

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, is_causal: bool) -> Tensor:
        """Output of queries and gates `[B, T, heads, D]` over keys and values `[B, L, heads, D]`."""
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=is_causal, enable_gqa=True
        )
        mixed = mixed.transpose(1, 2) * gate.sigmoid()
        out: Tensor = self.attn_output(mixed.flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.projected(x), is_causal=True)


class DeltaNet(nn.Module):
    """Gated DeltaNet: short convolution, delta rule with decay, gated norm."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        E, d = config.hidden_size, config.ssm_state_size
        NK, NV = config.num_key_heads, config.num_value_heads
        self.attn_qkv = nn.Linear(E, (2 * NK + NV) * d, bias=False)
        self.attn_gate = nn.Linear(E, NV * d, bias=False)
        self.ssm_alpha = nn.Linear(E, NV, bias=False)
        self.ssm_beta = nn.Linear(E, NV, bias=False)
        self.ssm_conv1d = nn.Parameter(torch.empty((2 * NK + NV) * d, config.conv_kernel))
        self.ssm_a_log = nn.Parameter(torch.empty(NV))
        self.ssm_dt = nn.Parameter(torch.empty(NV))
        self.ssm_norm = RMSNorm(d)
        self.ssm_out = nn.Linear(NV * d, E, bias=False)

    def operands(self, x: Tensor, raw: Tensor) -> tuple[Tensor, ...]:
        """What the delta rule takes, q, k, v, g and beta, for rows `x [B, T, E]`.

        raw `[B, conv_kernel − 1 + T, channels]`: `attn_qkv` of these rows and of those before them.
        """
        B, T, _ = x.shape
        c = self.config
        NK, NV, d = c.num_key_heads, c.num_value_heads, c.ssm_state_size
        mixed = sum(
            (raw[:, j : j + T].float() * self.ssm_conv1d[:, j] for j in range(c.conv_kernel)), start=0.0
        )
        q, k, v = functional.silu(torch.as_tensor(mixed)).split((NK * d, NK * d, NV * d), dim=-1)
        q, k = (u.reshape(B, T, NK, d) for u in (q, k))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + EPS) * d**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + EPS)
        beta = self.ssm_beta(x).float().sigmoid()
        g = -self.ssm_a_log.exp() * functional.softplus(self.ssm_alpha(x).float() + self.ssm_dt)
        tiles = NV // NK
        return q.repeat(1, 1, tiles, 1), k.repeat(1, 1, tiles, 1), v.reshape(B, T, NV, d), g, beta

    def gated(self, x: Tensor, o: Tensor) -> Tensor:
        """The output of rows `x [B, T, E]` from what the delta rule gave, `[B, T, heads, d]`."""
        z = self.attn_gate(x).view(o.shape)
        out: Tensor = self.ssm_out((self.ssm_norm(o) * functional.silu(z.float())).to(z.dtype).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        raw = functional.pad(self.attn_qkv(x), (0, 0, self.config.conv_kernel - 1, 0))
        operands = self.operands(x, raw)
        with torch.autocast(x.device.type, enabled=False):
            o = delta_rule_chunked(*operands)
        return self.gated(x, o)


class _Dispatch(torch.autograd.Function):
    """A row of `x [N, E]` per (token, expert) pair, sorted by expert; the gradient is a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse].view(-1, ctx.top_k, grads[0].shape[-1]).sum(1), None, None, None


class _Unsort(torch.autograd.Function):
    """`y[inverse]`, whose gradient is `g[order]`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y[inverse]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0][order], None, None


@dataclass(frozen=True)
class RouterStatistics:
    """Of one router over one batch: the two auxiliary losses and the chosen experts `topk_ids [N, K]`."""

    balance_loss: Tensor
    z_loss: Tensor
    topk_ids: Tensor


class MoE(nn.Module):
    """Routed experts (softmax, top-k, renormalised) plus a gated shared expert."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        E, X = config.hidden_size, config.num_experts
        f, s = config.expert_ffn_size, config.shared_expert_ffn_size
        self.ffn_gate_inp = nn.Linear(E, X, bias=False)
        self.expert_input = nn.Identity()  # what the experts' matrices multiply passes here, for measurements
        self.ffn_gate_up_exps = nn.Parameter(torch.empty(X, 2 * f, E))
        self.ffn_down_exps = nn.Parameter(torch.empty(X, E, f))
        self.ffn_gate_inp_shexp = nn.Linear(E, 1, bias=False)
        self.ffn_gate_shexp = nn.Linear(E, s, bias=False)
        self.ffn_up_shexp = nn.Linear(E, s, bias=False)
        self.ffn_down_shexp = nn.Linear(s, E, bias=False)

    def route(self, x: Tensor) -> tuple[Tensor, RouterStatistics]:
        """Weights `[N, K]` of the chosen experts of `x [N, E]`, and the statistics (with their ids)."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            logits = self.ffn_gate_inp(x.float())
            probabilities = logits.softmax(-1)
        weights, topk_ids = probabilities.topk(c.num_experts_per_tok, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        share = functional.one_hot(topk_ids, c.num_experts).float().sum(1).mean(0) / c.num_experts_per_tok
        balance_loss = c.num_experts * (share * probabilities.mean(0)).sum()
        z_loss = logits.logsumexp(-1).square().mean()
        return weights, RouterStatistics(balance_loss, z_loss, topk_ids)

    def forward(self, x: Tensor) -> tuple[Tensor, RouterStatistics]:
        shape, c = x.shape, self.config
        x = x.reshape(-1, c.hidden_size)
        weights, statistics = self.route(x)
        flat_ids = statistics.topk_ids.reshape(-1)
        order = flat_ids.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        ends = functional.one_hot(flat_ids, c.num_experts).sum(0).cumsum(0).to(torch.int32)
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
        rows = _Dispatch.apply(x.to(dtype), order, inverse, c.num_experts_per_tok)
        gate_up = functional.grouped_mm(
            self.expert_input(rows), self.ffn_gate_up_exps.to(dtype).transpose(-1, -2), offs=ends
        )
        gate, up = gate_up.chunk(2, dim=-1)
        inner = self.expert_input(functional.silu(gate) * up)
        down = functional.grouped_mm(inner, self.ffn_down_exps.to(dtype).transpose(-1, -2), offs=ends)
        pairs = _Unsort.apply(down, order, inverse).view(-1, c.num_experts_per_tok, c.hidden_size)
        routed = (pairs.float() * weights[..., None]).sum(1)
        shared = self.ffn_down_shexp(functional.silu(self.ffn_gate_shexp(x)) * self.ffn_up_shexp(x))
        out = routed + self.ffn_gate_inp_shexp(x).float().sigmoid() * shared.float()
        return out.to(x.dtype).view(shape), statistics


class Block(nn.Module):
    """Mixer and FFN, each behind its norm, each added to the residual stream."""

    def __init__(self, config: DemoConfig, full_attention: bool) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size)
        self.mixer: nn.Module = Attention(config) if full_attention else DeltaNet(config)
        self.post_attention_norm = RMSNorm(config.hidden_size)
        self.ffn = MoE(config)

    def forward(self, x: Tensor, dropout: float) -> tuple[Tensor, RouterStatistics]:
        x = x + functional.dropout(self.mixer(self.attn_norm(x)), dropout, self.training)
        y, statistics = self.ffn(self.post_attention_norm(x))
        return x + functional.dropout(y, dropout, self.training), statistics


@dataclass(frozen=True)
class Output:
    """`hidden` and `mtp_hidden` `[B, T, E]` feed the head; in `routers` the MTP block is last."""

    hidden: Tensor
    mtp_hidden: Tensor
    routers: list[RouterStatistics]


class DemoModel(nn.Module):
    """Trunk, head and one multi-token-prediction block."""

    def __init__(self, config: DemoConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config, self.dropout = config, dropout
        E = config.hidden_size
        self.token_embd = nn.Embedding(config.vocab_size, E)
        self.blk = nn.ModuleList(Block(config, config.is_full_attention(i)) for i in range(config.num_layers))
        self.output_norm = RMSNorm(E)
        self.output = nn.Linear(E, config.vocab_size, bias=False)
        self.nextn_enorm = RMSNorm(E)
        self.nextn_hnorm = RMSNorm(E)
        self.nextn_eh_proj = nn.Linear(2 * E, E, bias=False)
        self.nextn_block = Block(config, full_attention=True)
        self.nextn_shared_head_norm = RMSNorm(E)
        self.initialise()

    def initialise(self) -> None:
        """Draw the weights from the global generator; projections back into the residual start small."""
        residual = (2 * self.config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith("ssm_a_log"):
                parameter.data.uniform_(1, 16).log_()
            elif name.endswith("ssm_dt"):
                step = torch.empty_like(parameter).uniform_(-6.9, -2.3).exp()
                parameter.data.copy_(step + torch.log(-torch.expm1(-step)))
            elif name.endswith("ssm_conv1d"):
                parameter.data.uniform_(-0.5, 0.5)
            elif name == "token_embd.weight":
                parameter.data.normal_(std=0.5)
            elif parameter.ndim >= 2:
                scale = residual if any(part in name for part in ("attn_output", "ssm_out", "down")) else 1.0
                parameter.data.normal_(std=0.5 * scale * parameter.shape[-1] ** -0.5)

    def forward(self, tokens: Tensor, next_tokens: Tensor) -> Output:
        """Run `tokens [B, T]`; `next_tokens`, one position later, are the MTP block's input."""
        x = self.token_embd(tokens)
        length = x.shape[1]
        if length % CHUNK:
            raise ValueError(f"sequences must be multiples of {CHUNK} tokens, not {length}")
        x = functional.dropout(x, self.dropout, self.training)
        routers = []
        for block in self.blk:
            x, statistics = block(x, self.dropout)
            routers.append(statistics)
        hidden = self.output_norm(x)
        pair = torch.cat((self.nextn_enorm(self.token_embd(next_tokens)), self.nextn_hnorm(hidden)), dim=-1)
        y, statistics = self.nextn_block(self.nextn_eh_proj(pair).to(x.dtype), self.dropout)
        routers.append(statistics)
        return Output(hidden, self.nextn_shared_head_norm(y), routers)

    def losses(self, window: Tensor) -> dict[str, Tensor]:
        """The training losses (nats per token, unweighted) of `window [B, T + 2]`."""
        tokens, targets, after = window[:, :-2], window[:, 1:-1], window[:, 2:]
        result = self(tokens, targets)

        def cross_entropy(hidden: Tensor, expected: Tensor) -> Tensor:
            return functional.cross_entropy(self.output(hidden).flatten(0, 1).float(), expected.flatten())

        return {
            "next": cross_entropy(result.hidden, targets),
            "mtp": cross_entropy(result.mtp_hidden, after),
            "balance": torch.stack([r.balance_loss for r in result.routers]).mean(),
            "z": torch.stack([r.z_loss for r in result.routers]).mean(),
        }
