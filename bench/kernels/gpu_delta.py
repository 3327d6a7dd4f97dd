"""Speed of the gated DeltaNet on the GPU, at the sizes of the 35B shape.

    python -m bench.kernels.gpu_delta [--fla]

Launches are captured in a graph over states that together exceed the L2 cache; the figure is the median over
replays, per call. The floor is what must be moved, at the measured copy bandwidth, or the four float
instructions per state element and token, at the peak of all multiprocessors, whichever is longer. `--fla`
compares with the chunked kernel of flash-linear-attention (rule alone), where that is installed, in time and
in its distance from float64.
"""

import argparse
from collections.abc import Callable

import torch

from bench.device import graph_seconds, measure_bandwidth
from coldstream.kernels.arithmetic.reference import empty_activations
from coldstream.kernels.gated_delta_net.arguments import PrefillWorkspace
from coldstream.kernels.gated_delta_net.cuda import (
    DecodeWorkspace,
    arrival_count,
    delta_net_decode_cuda,
    delta_net_prefill_cuda,
)
from coldstream.kernels.gated_delta_net.reference import recurrent
from coldstream.kernels.ops import DeltaNetInputs, DeltaNetWeights, Rows

KEY_HEADS, VALUE_HEADS, SIZE, TAPS = 16, 32, 128, 4
CHANNELS, WIDTH = (2 * KEY_HEADS + VALUE_HEADS) * SIZE, VALUE_HEADS * SIZE
LAYERS = 40  # states of 2 MB each
LANES = 128  # float32 lanes of a multiprocessor


def random_weights() -> DeltaNetWeights:
    return DeltaNetWeights(
        conv_taps=torch.randn(CHANNELS, TAPS, device="cuda"),
        a=-torch.rand(VALUE_HEADS, device="cuda"),
        dt_bias=torch.randn(VALUE_HEADS, device="cuda"),
        norm=torch.rand(SIZE, device="cuda") + 0.5,
        key_head_ids=torch.arange(VALUE_HEADS, dtype=torch.int32, device="cuda") % KEY_HEADS,
        num_key_heads=KEY_HEADS,
        eps=1e-6,
    )


def random_inputs(num_sequences: int, rows_each: int) -> DeltaNetInputs:
    state_ids = torch.arange(num_sequences, dtype=torch.int32, device="cuda").repeat_interleave(rows_each)
    widths = (CHANNELS, WIDTH, VALUE_HEADS, VALUE_HEADS)
    projections = (torch.randn(len(state_ids), width, device="cuda") for width in widths)
    return DeltaNetInputs(*projections, Rows(torch.zeros_like(state_ids), state_ids))


def random_states(num_layers: int, num_states: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    shape, conv_shape = (num_states, VALUE_HEADS, SIZE, SIZE), (num_states, TAPS - 1, CHANNELS)
    return [
        (torch.randn(conv_shape, device="cuda"), 0.1 * torch.randn(shape, device="cuda"))
        for _ in range(num_layers)
    ]


def decode_time(num_sequences: int, rows_each: int) -> float:
    inputs, weights = random_inputs(num_sequences, rows_each), random_weights()
    states = random_states(max(2, LAYERS // num_sequences), num_sequences)
    num_rows = inputs.qkv.shape[0]
    quantized = empty_activations(num_rows, WIDTH, torch.device("cuda"))
    arrivals = torch.zeros(arrival_count(num_rows, KEY_HEADS, WIDTH), dtype=torch.int32, device="cuda")
    work = DecodeWorkspace(torch.empty(num_rows, WIDTH, device="cuda"), arrivals)
    return graph_seconds(
        [lambda s=s: delta_net_decode_cuda(inputs, weights, *s, None, quantized, work) for s in states]
    )


def prefill_time(
    num_sequences: int, rows_each: int, launch: Callable[..., None] = delta_net_prefill_cuda
) -> float:
    inputs, weights = random_inputs(num_sequences, rows_each), random_weights()
    num_rows = inputs.qkv.shape[0]
    states = random_states(3 if num_rows > 64 else LAYERS, num_sequences)
    quantized = empty_activations(num_rows, WIDTH, torch.device("cuda"))
    widths = (2 * KEY_HEADS * SIZE, WIDTH, 2 * VALUE_HEADS, WIDTH)
    floats = (torch.empty(num_rows, width, device="cuda") for width in widths)
    work = PrefillWorkspace(*floats, torch.zeros(num_sequences, 2, dtype=torch.int32, device="cuda"))
    return graph_seconds([lambda s=s: launch(inputs, weights, *s, None, quantized, work) for s in states])


def floor_of(num_sequences: int, rows_each: int, bandwidth: float) -> float:
    """Seconds that a call takes at least."""
    state_elements = num_sequences * VALUE_HEADS * SIZE * SIZE
    per_row = CHANNELS * 4 + WIDTH * 4 + 2 * VALUE_HEADS * 4 + WIDTH + WIDTH // 64
    moved = 2 * state_elements * 4 + num_sequences * rows_each * per_row
    properties = torch.cuda.get_device_properties(0)
    clock_hz = properties.clock_rate * 1e3
    lanes = LANES * properties.multi_processor_count
    return max(moved / bandwidth, 4 * state_elements * rows_each / lanes / clock_hz)


def compare_with_fla(num_rows: int) -> None:
    """The rule alone: time of their chunked kernel, and errors of both against float64 over 512 rows."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    torch.manual_seed(1)
    vectors = torch.randn(3, 1, num_rows, VALUE_HEADS, SIZE, device="cuda")
    query, key, value = vectors.unbind()
    query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
    log_decay = -torch.rand(1, num_rows, VALUE_HEADS, device="cuda")
    strength = torch.rand(1, num_rows, VALUE_HEADS, device="cuda")
    state = torch.zeros(1, VALUE_HEADS, SIZE, SIZE, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(dtype) for x in (query, key, value)]

        def call(
            inputs: list[torch.Tensor] = inputs, rows: int = num_rows
        ) -> tuple[torch.Tensor, torch.Tensor]:
            parts = (x[:, :rows] for x in (*inputs, log_decay, strength))
            return chunk_gated_delta_rule(*parts, initial_state=state, output_final_state=True, scale=1.0)

        seconds = graph_seconds([call] * 3)
        compared = 512
        exact = (x[0, :compared].double().cpu() for x in (*inputs, log_decay, strength))
        want, _ = recurrent(*exact, state[0].double().cpu())
        single = (x[0, :compared].float().cpu() for x in (*inputs, log_decay, strength))
        ours, _ = recurrent(*single, state[0].cpu())
        theirs = call(rows=compared)[0][0].double().cpu()
        errors = [float((x.double() - want).norm() / want.norm()) for x in (ours, theirs)]
        print(
            f"fla chunked {dtype}, {num_rows} rows: {seconds * 1e6:.0f} µs; error over {compared} rows "
            f"{errors[1]:.1e}, token by token in float32 {errors[0]:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fla", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = measure_bandwidth("cuda", 0)
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s")
    print(f"{'case':24} {'sequences':>9} {'rows':>6} {'µs':>9} {'floor':>9} {'share':>6} {'ns a row':>9}")
    short = ((1, 1), (8, 1), (64, 1), (1, 2), (1, 8), (1, 64))
    long = ((1, 8), (1, 64), (1, 168), (1, 512), (1, 2048), (1, 8192), (4, 512), (8, 1024))
    cases = [("decode", decode_time, *case) for case in short]
    cases += [("prefill", prefill_time, *case) for case in long]
    for name, measure, sequences, rows in cases:
        seconds, floor = measure(sequences, rows), floor_of(sequences, rows, bandwidth)
        print(
            f"{name:24} {sequences:9} {rows:6} {seconds * 1e6:9.1f} {floor * 1e6:9.1f} "
            f"{floor / seconds:6.0%} {seconds / rows * 1e9:9.0f}"
        )
    if arguments.fla:
        compare_with_fla(2048)


if __name__ == "__main__":
    main()
