"""The Triton gated DeltaNet equals the exact reference bit for bit, whatever the cuts into launches."""

from itertools import pairwise

import pytest
import torch
from delta_cases import DeltaCase, check_results, one_slot, weights_on
from guarded import DEVICE, Guarded

from coldstream.kernels.arithmetic.reference import QuantActivations, padded_cols
from coldstream.kernels.gated_delta_net.arguments import DeltaNetInputs, PrefillWorkspace
from coldstream.kernels.gated_delta_net.triton import delta_net
from coldstream.kernels.ops import Rows


def run(case: DeltaCase, cuts: list[int]) -> list[torch.Tensor]:
    """Output, quantised parts and both states after calls on the rows between consecutive `cuts`."""
    states = [state.to(DEVICE) for state in case.states()]
    tensors = [tensor.to(DEVICE) for tensor in (*case.inputs(), case.slots_tensor())]
    weights = weights_on(case.weights(), DEVICE)
    padded, results = padded_cols(case.value_width), []
    for start, stop in pairwise(cuts):
        count = stop - start
        *projections, slots = (tensor[start:stop] for tensor in tensors)
        inputs = DeltaNetInputs(*projections, Rows(torch.zeros_like(slots), slots))
        widths = (2 * case.num_key_heads * case.head_dim, case.value_width, 2 * case.num_value_heads)
        floats = [torch.empty(count, width, device=DEVICE) for width in (*widths, case.value_width)]
        work = PrefillWorkspace(*floats, torch.zeros(case.num_slots, 2, dtype=torch.int32, device=DEVICE))
        guarded = [
            Guarded(count, case.value_width),
            Guarded(count, padded, dtype=torch.int8),
            Guarded(count, padded // 256),
            Guarded(count, padded // 16, dtype=torch.int16),
        ]
        out, *parts = (part.tensor for part in guarded)
        delta_net(inputs, weights, *states, out, QuantActivations(*parts), work)
        assert not work.spans.any()
        results.append([part.checked() for part in guarded])
    return [torch.cat(parts) for parts in zip(*results, strict=True)] + [state.cpu() for state in states]


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_rows_of_one_sequence(head_dim: int) -> None:
    case = DeltaCase(1, 2, head_dim, one_slot(3), num_slots=2)
    check_results(case, run(case, [0, 3]))


@pytest.mark.parametrize("num_taps", [2, 3, 8])
def test_cuts_and_taps(num_taps: int) -> None:
    case = DeltaCase(1, 1, 32, one_slot(9), num_taps, num_slots=2)
    expected = case.expected()
    for cuts in ([0, 9], [0, 1, 2, 9], [0, 4, 9]):
        check_results(case, run(case, cuts), expected)


def test_sequences_do_not_meet() -> None:
    case = DeltaCase(2, 6, 32, (3, 0, 0, 2, 2, 2, 2, 2))
    check_results(case, run(case, [0, 8]))
    check_results(case, run(case, [0, 1, 3, 8]))
