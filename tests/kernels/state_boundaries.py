"""Batches of chains that leave a state behind at boundaries, and the same rows in calls that end there."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from delta_cases import DeltaCase
from hypothesis import strategies as st

from coldstream.kernels.gated_delta_net.exact import gated_delta_net_exact
from coldstream.kernels.ops import MIN_FORK_ROWS, BatchRows, DeltaNetInputs, Rows


@dataclass(frozen=True)
class Chain:
    """Rows of one sequence. state_ids: of the first rows, and of those after each of `boundaries`."""

    num_rows: int
    state_ids: tuple[int, ...]
    boundaries: tuple[int, ...] = ()

    @property
    def ends(self) -> list[tuple[int, int, int]]:
        """(first row, row behind, state) of each part."""
        starts = pairwise((0, *self.boundaries, self.num_rows))
        return [(*part, state_id) for part, state_id in zip(starts, self.state_ids, strict=True)]


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def states_of(chains: list[Chain]) -> tuple[int, ...]:
    """The state of each row."""
    return tuple(
        state_id for chain in chains for first, end, state_id in chain.ends for _ in range(first, end)
    )


def rows_of(chains: list[Chain]) -> Rows:
    """The batch, a segment for each chain; a chain of state −1 belongs to no sequence."""
    segments, parents = [], []
    for number, chain in enumerate(chains):
        start = len(segments)
        segments += [number] * chain.num_rows
        parents += [-1, *range(start, start + chain.num_rows - 1)]
    zeros, none = torch.zeros(len(segments), dtype=torch.int32), torch.full((len(segments),), -1)
    tables = torch.zeros(len(chains), 1, dtype=torch.int32)
    batch = BatchRows(ints(segments), tables, zeros, ints(parents), none.int(), has_trees=False)
    return Rows(zeros, ints(list(states_of(chains))), batch)


def separately(case: DeltaCase, chains: list[Chain]) -> tuple[torch.Tensor, ...]:
    """Outputs and both states of calls that end at the boundaries, where the state is copied on."""
    conv_state, state = case.states()
    out, start = torch.zeros(len(case.state_ids), case.value_width), 0
    for chain in chains:
        before = chain.state_ids[0]
        for first, end, state_id in chain.ends if before >= 0 else []:
            if first:
                for each in (conv_state, state):
                    each[state_id] = each[before]
            part = slice(start + first, start + end)
            rows = Rows(torch.zeros(end - first, dtype=torch.int32), ints([state_id] * (end - first)))
            inputs = DeltaNetInputs(*(each[part] for each in case.inputs()), rows)
            out[part] = gated_delta_net_exact(inputs, case.weights(), conv_state, state)
            before = state_id
        start += chain.num_rows
    return out, conv_state, state


@st.composite
def some_chains(draw: st.DrawFn, num_states: int, most_rows: int = 40) -> list[Chain]:
    """Chains with boundaries, short and long ones without, in any order; no two have a state in common."""
    chains, free = [], draw(st.permutations(range(num_states)))
    while free and len(chains) < 4:
        num_rows = draw(st.one_of(st.integers(1, 3), st.integers(MIN_FORK_ROWS + 1, most_rows)))
        most = min(3, len(free) - 1) if num_rows > MIN_FORK_ROWS else 0
        places = st.integers(MIN_FORK_ROWS, max(MIN_FORK_ROWS, num_rows - 1))
        boundaries = sorted(draw(st.sets(places, max_size=most)))
        chains.append(Chain(num_rows, tuple(free[: len(boundaries) + 1]), tuple(boundaries)))
        free = free[len(boundaries) + 1 :]
        if draw(st.booleans()):
            break
    return chains
