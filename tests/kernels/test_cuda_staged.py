"""Values that the host sets before a step reads them."""

import pytest
import torch

pytest.importorskip("cuda.bindings")

from coldstream.kernels.cuda.runtime import copies
from coldstream.kernels.cuda.runtime.graphs import Graph
from coldstream.kernels.cuda.staged import StagedMemory


def test_what_is_only_planned_takes_no_host_memory_and_is_not_copied() -> None:
    staged = StagedMemory(torch.empty(6, dtype=torch.int32, device="meta"))
    staged.copy(6)
    assert staged.on_host.size == 0


@pytest.mark.gpu
def test_a_graph_brings_what_the_host_has_when_it_runs() -> None:
    staged = StagedMemory(torch.zeros(6, dtype=torch.int32, device="cuda"))
    seen = torch.zeros(6, dtype=torch.int32, device="cuda")

    def step() -> None:
        staged.copy(4)
        copies.within_device(seen.data_ptr(), staged.values.data_ptr(), staged.values.nbytes)

    graph, _ = Graph.capture(step)
    for step in range(5):
        staged.on_host[:] = range(step, step + 6)
        graph.launch()
        torch.cuda.synchronize()
        assert seen.tolist() == [*range(step, step + 4), 0, 0]
    staged.copy(6)
    torch.cuda.synchronize()
    assert staged.values.tolist() == list(range(4, 10))
