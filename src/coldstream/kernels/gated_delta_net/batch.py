"""The gated DeltaNet of a batch of chains and draft trees, in PyTorch: what a row of a tree means.

Its result is that of a chain of its ancestors and itself, run from copies of the sequence's states.
"""

from collections.abc import Callable

import torch

from coldstream.kernels.ops import DeltaNetInputs, DeltaNetWeights, Rows
from coldstream.kernels.sequences import is_tree, parts_of_states, path, sequences

GatedDeltaNet = Callable[..., torch.Tensor]  # as `Ops.gated_delta_net`, for chains


def gated_delta_net_batch(
    chain: GatedDeltaNet,
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """See `Ops.gated_delta_net`. Mutates both states for chains, `inputs.rows.batch.inputs` for trees."""
    rows = inputs.rows
    assert rows.batch is not None

    def run(
        part: slice | list[int], state_id: int, conv_state: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        positions = rows.positions[part]
        qkv, z, alpha, beta = (values[part] for values in (inputs.qkv, inputs.z, inputs.alpha, inputs.beta))
        own_rows = Rows(positions, torch.full_like(positions, state_id))
        return chain(DeltaNetInputs(qkv, z, alpha, beta, own_rows), weights, conv_state, state)

    outputs = [inputs.z[:0]]
    for state_id, part in sequences(rows):
        if not is_tree(rows, part):
            before = state_id
            for state_id, rows_of_state in parts_of_states(rows, part):
                if state_id != before:
                    conv_state[state_id], state[state_id] = conv_state[before].clone(), state[before].clone()
                outputs.append(run(rows_of_state, state_id, conv_state, state))
                before = state_id
            continue
        outputs += [
            run(
                path(rows, row),
                0,
                conv_state[state_id : state_id + 1].clone(),
                state[state_id : state_id + 1].clone(),
            )[-1:]
            for row in range(part.start, part.stop)
        ]
        to, kept = rows.batch.inputs, rows.batch.kept[part].long()
        assert to is not None, "rows of a tree need a place to keep their inputs"
        for values, place in ((inputs.qkv, to.qkv), (inputs.alpha, to.alpha), (inputs.beta, to.beta)):
            place[kept] = values[part]
    return torch.cat(outputs)
