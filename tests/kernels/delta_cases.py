"""Random gated DeltaNets for tests of its GPU kernels, and the exact reference's results."""

from dataclasses import dataclass

import torch

from coldstream.kernels.arithmetic.quantised import padded_cols
from coldstream.kernels.arithmetic.reference import quantize_activations
from coldstream.kernels.gated_delta_net.exact import gated_delta_net_exact
from coldstream.kernels.ops import DeltaNetGate, DeltaNetInputs, DeltaNetWeights, Rows

NUM_STATES = 6


def random(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class DeltaCase:
    """Random rows of `state_ids`, whose states are full of random numbers."""

    num_key_heads: int
    num_value_heads: int
    head_dim: int
    state_ids: tuple[int, ...]
    num_taps: int = 4
    num_states: int = NUM_STATES
    output_gate: DeltaNetGate = "silu"

    @property
    def num_channels(self) -> int:
        return (2 * self.num_key_heads + self.num_value_heads) * self.head_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.head_dim

    def inputs(self) -> list[torch.Tensor]:
        """qkv, z, alpha, beta."""
        num_rows = len(self.state_ids)
        return [
            random(1, num_rows, self.num_channels),
            random(2, num_rows, self.value_width),
            random(3, num_rows, self.num_value_heads, scale=10),
            random(4, num_rows, self.num_value_heads),
        ]

    def weights(self) -> DeltaNetWeights:
        return DeltaNetWeights(
            conv_taps=random(5, self.num_channels, self.num_taps),
            a=-random(6, self.num_value_heads).abs(),
            dt_bias=random(7, self.num_value_heads),
            norm=random(8, self.head_dim) + 1,
            key_head_ids=torch.arange(self.num_value_heads, dtype=torch.int32) % self.num_key_heads,
            num_key_heads=self.num_key_heads,
            eps=1e-6,
            output_gate=self.output_gate,
        )

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """conv_state, state."""
        shape = (self.num_states, self.num_value_heads, self.head_dim, self.head_dim)
        conv_shape = (self.num_states, self.num_taps - 1, self.num_channels)
        return random(9, *conv_shape), random(10, *shape, scale=0.1)

    def state_ids_tensor(self) -> torch.Tensor:
        return torch.tensor(self.state_ids, dtype=torch.int32)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The exact output and both states afterwards."""
        states, state_ids = self.states(), self.state_ids_tensor()
        rows = Rows(torch.zeros_like(state_ids), state_ids)
        return gated_delta_net_exact(DeltaNetInputs(*self.inputs(), rows), self.weights(), *states), *states


def one_state(num_rows: int, state_id: int = 1) -> tuple[int, ...]:
    return (state_id,) * num_rows


def weights_on(weights: DeltaNetWeights, device: torch.device) -> DeltaNetWeights:
    return DeltaNetWeights(
        **{
            name: part.to(device) if isinstance(part, torch.Tensor) else part
            for name, part in vars(weights).items()
        }
    )


def check_results(
    case: DeltaCase, results: list[torch.Tensor], expected: tuple[torch.Tensor, ...] | None = None
) -> None:
    """Output, its quantised parts and both states, against the exact reference."""
    out, *states = case.expected() if expected is None else expected
    quantized = quantize_activations(
        torch.nn.functional.pad(out, (0, padded_cols(out.shape[1]) - out.shape[1]))
    )
    wanted = (out, quantized.q, quantized.scales, quantized.sums, *states)
    names = ("y", "q", "scales", "sums", "conv_state", "state")
    for name, want, got in zip(names, wanted, results, strict=True):
        assert torch.equal(want, got), f"{name}: {int((want != got).sum())} of {want.numel()} differ"
