"""The definition of what `one_token.cu` computes, layer by layer in plain PyTorch.

It stands for a DeltaNet layer with experts in its shapes, its bytes and its dependencies. Weights are signed
four-bit numbers, inputs bytes, and everything else integers modulo 2^32. Products are exact in float64.
"""

from dataclasses import dataclass

import torch

from bench.kernels.one_token_shapes import HEAD_SIZE, STATE_COLUMNS, LayerShape, Matrix

PIECES = HEAD_SIZE // STATE_COLUMNS  # of a head's state
FIRST_SHIFT, SECOND_SHIFT = 16, 13  # of a word's mixture
SHARED_WEIGHT = 4


def wrapped(values: torch.Tensor) -> torch.Tensor:
    """int64 modulo 2^32, as signed numbers."""
    return ((values + 2**31) & 0xFFFFFFFF) - 2**31


def words_at(first: int, count: int, device: str) -> torch.Tensor:
    """Words of the weights from the first on, as `fill_weights` writes them."""
    index = torch.arange(first, first + count, dtype=torch.int64, device=device)
    x = (index * 0x9E3779B1 & 0xFFFFFFFF) ^ index >> 32
    x = (x ^ x >> FIRST_SHIFT) * 0x85EBCA6B & 0xFFFFFFFF
    return x ^ x >> SECOND_SHIFT


def quantised(values: torch.Tensor) -> torch.Tensor:
    """int64 [..., n] shifted to bytes, each row by what its greatest magnitude needs."""
    greatest = (values ^ values >> 63).amax(dim=-1, keepdim=True)
    shift = torch.zeros_like(greatest)
    while (late := (greatest >> shift) >= 128).any():
        shift += late.long()
    return values >> shift


@dataclass(frozen=True)
class TokenState:
    """What a token leaves: the stream, int64 [hidden], and states, int64 [layers, heads, rows, columns]."""

    stream: torch.Tensor
    states: torch.Tensor


class Reference:
    """Layers of `shape` whose weights begin at the first word, as many as the states have."""

    def __init__(self, shape: LayerShape, device: str) -> None:
        self.shape, self.device = shape, device

    def run(self, begin: TokenState, tokens: int) -> TokenState:
        """Every token's stream is the end of the token before."""
        stream, states = begin.stream.to(self.device), begin.states.to(self.device).clone()
        for _ in range(tokens):
            for layer in range(len(states)):
                stream, states[layer] = self.layer(layer, stream, states[layer])
        return TokenState(stream, states)

    def layer(
        self, layer: int, stream: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream and the state behind a layer."""
        x = quantised(stream)
        projected = torch.cat([self.product(layer, matrix, x) for matrix in self.shape.projected])
        mixed, state = self.mix(projected, state)
        out = self.product(layer, self.shape.matrix("ssm_out"), quantised(mixed))
        middle = wrapped((stream >> 1) + (out >> 6))
        x = quantised(middle)
        logits = self.product(layer, self.shape.matrix("ffn_gate_inp"), x)
        return self.experts(layer, middle, x, logits), state

    def product(self, layer: int, matrix: Matrix, x: torch.Tensor, expert: int = 0) -> torch.Tensor:
        """Sixteen times the products of all rows with bytes x, int64 [rows]."""
        begin = layer * self.shape.layer_bytes + matrix.offset + expert * matrix.expert_bytes
        words = words_at(begin // 4, matrix.expert_bytes // 4, self.device)
        as_bytes = torch.stack([words >> shift & 255 for shift in (0, 8, 16, 24)], dim=-1)
        as_bytes = as_bytes.view(matrix.rows, matrix.row_bytes)
        places = torch.arange(matrix.row_bytes, device=self.device) % (matrix.cols // 2)
        low, high = (x[part * (matrix.cols // 2) :][places].double() for part in range(2))
        signed = [((as_bytes >> shift & 15 ^ 8) - 8).double() for shift in (0, 4)]
        return 16 * (signed[0] @ low + signed[1] @ high).long()

    def mix(self, projected: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrence of all heads: outputs [heads · size], states [heads, rows, columns]."""
        shape, size = self.shape, HEAD_SIZE
        sizes = (*(shape.key_heads * size,) * 2, *(shape.value_heads * size,) * 2, *(shape.value_heads,) * 2)
        query, key, value, gate, alpha, beta = projected.split(sizes)
        ratio = shape.value_heads // shape.key_heads
        query, key = (x.view(-1, size).repeat_interleave(ratio, dim=0) >> 12 for x in (query, key))
        value, gate = value.view(-1, size), gate.view(-1, size)
        state = wrapped((state >> 1) + key.unsqueeze(2) * (value >> 12).unsqueeze(1))
        sums = ((state >> 8) * query.unsqueeze(2)).sum(dim=1)
        gated = (gate >> 6) * (alpha >> 12 | 1).unsqueeze(1)
        return wrapped(sums + gated + beta.unsqueeze(1)).view(-1), state

    def experts(
        self, layer: int, middle: torch.Tensor, x: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """The stream behind the chosen experts and the shared one; equal logits go to the lower id."""
        units, down = self.shape.matrix("ffn_gate_exps"), self.shape.matrix("ffn_down_exps")
        order = torch.sort(logits, descending=True, stable=True)
        chosen = order.indices[: self.shape.chosen].tolist()
        weights = [1 + (value >> 8 & 7) for value in order.values[: self.shape.chosen].tolist()]
        total = torch.zeros_like(middle)
        ranked = zip([*chosen, self.shape.experts], [*weights, SHARED_WEIGHT], strict=True)
        for rank, (chosen_expert, weight) in enumerate(ranked):
            expert = self.shape.place_of(rank, chosen_expert)
            gate, up = self.product(layer, units, x, expert).view(-1, 2).unbind(dim=1)
            unit = wrapped((gate >> 11) * (up >> 11))
            total += weight * (self.product(layer, down, quantised(unit), expert) >> 6)
        return wrapped((middle >> 1) + (total >> 5))


def states_of_pieces(pieces: torch.Tensor, shape: LayerShape) -> torch.Tensor:
    """States as the kernel has them, [layers, pieces · rows · columns], as [layers, heads, rows, columns]."""
    parts = pieces.view(-1, shape.value_heads, PIECES, HEAD_SIZE, STATE_COLUMNS)
    return parts.transpose(2, 3).reshape(-1, shape.value_heads, HEAD_SIZE, HEAD_SIZE)
