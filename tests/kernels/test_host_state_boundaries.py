"""States that a prompt leaves behind on its way by the GPU's kernels, on the host and on a GPU."""

from collections.abc import Iterator

import pytest
import torch
from delta_cases import DeltaCase, weights_on
from hypothesis import given, settings
from hypothesis import strategies as st
from state_boundaries import Chain, rows_of, separately, some_chains, states_of

from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.gated_delta_net import cuda
from coldstream.kernels.gated_delta_net.arguments import PrefillWorkspace
from coldstream.kernels.ops import MIN_FORK_ROWS, BatchRows, DeltaNetInputs, Rows

NUM_STATES = 8
MIN = MIN_FORK_ROWS


@pytest.fixture
def fast_instances(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Instances that the host compiles in reasonable time."""
    instances = [
        name
        for head_dim, taps in ((32, 4), (64, 8))
        for name in (
            f"delta_prepare<{head_dim}, {taps}>", f"delta_recurrence<{head_dim}>", f"delta_output<{head_dim}>"
        )
    ]  # fmt: skip
    monkeypatch.setattr(cuda, "PREFILL", CudaProgram(cuda.PREFILL.source, instances))
    return


def on(device: str, rows: Rows) -> Rows:
    assert rows.batch is not None
    batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(rows.batch).items()}
    return Rows(rows.positions.to(device), rows.state_ids.to(device), BatchRows(**batch))


def check(heads: tuple[int, int, int, int], chains: list[Chain], device: str = "cpu") -> None:
    key_heads, value_heads, head_dim, num_taps = heads
    case = DeltaCase(key_heads, value_heads, head_dim, states_of(chains), num_taps, NUM_STATES)
    num_rows, widths = len(case.state_ids), (2 * key_heads * head_dim, case.value_width, 2 * value_heads)
    floats = [torch.full((num_rows, width), torch.nan, device=device) for width in widths]
    out, raw = (torch.full((num_rows, case.value_width), torch.nan, device=device) for _ in range(2))
    spans = torch.zeros(len(chains), 2, dtype=torch.int32, device=device)
    states = [state.to(device) for state in case.states()]
    operands = DeltaNetInputs(*(each.to(device) for each in case.inputs()), on(device, rows_of(chains)))
    weights = weights_on(case.weights(), torch.device(device))
    work = PrefillWorkspace(*floats, raw, spans)
    cuda.delta_net_prefill_cuda(operands, weights, *states, out, None, work)
    assert not spans.any()
    for found, expected in zip((out, *states), separately(case, chains), strict=True):
        assert torch.equal(found.cpu(), expected)


SHAPES = [
    [Chain(MIN + 1, (3, 0), (MIN,))],
    [Chain(MIN + 3, (3, 0, 5, 1), (MIN, MIN + 1, MIN + 2)), Chain(5, (2,))],
    [Chain(3, (6,)), Chain(70, (7, 2, 1), (33, 41)), Chain(1, (0,)), Chain(3, (-1,))],
    [Chain(100, (0, 1, 2), (64, 96)), Chain(40, (5, 3), (39,))],
]


@pytest.mark.usefixtures("fast_instances", "host")
@pytest.mark.parametrize("chains", SHAPES)
@pytest.mark.parametrize("heads", [(1, 2, 32, 4), (1, 1, 64, 8)])
def test_prompts_leave_states_behind(heads: tuple[int, int, int, int], chains: list[Chain]) -> None:
    check(heads, chains)


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("fast_instances", "host")
def test_any_boundaries_have_the_bits_of_separate_steps() -> None:
    @settings(max_examples=15, deadline=None)
    @given(chains=some_chains(NUM_STATES))
    def check_all(chains: list[Chain]) -> None:
        check((1, 1, 32, 4), chains)

    check_all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "chains", [*SHAPES, [Chain(1500, (0, 1, 2, 3), (16, 529, 1041)), Chain(40, (5, 4), (20,))]]
)
@pytest.mark.parametrize("heads", [(2, 4, 32, 4), (1, 3, 64, 2), (4, 8, 128, 4)])
def test_a_gpu_leaves_the_same_states(heads: tuple[int, int, int, int], chains: list[Chain]) -> None:
    check(heads, chains, "cuda")


@pytest.mark.gpu
def test_any_boundaries_on_a_gpu() -> None:
    @settings(max_examples=40, deadline=None)
    @given(chains=st.one_of(some_chains(NUM_STATES), some_chains(NUM_STATES, 700)))
    def check_all(chains: list[Chain]) -> None:
        check((1, 2, 128, 4), chains, "cuda")

    check_all()
