"""Steps as CUDA graphs, captured after the first step of their shape."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch

from coldstream.errors import OutOfMemoryError
from coldstream.kernels.cuda.device import device_errors
from coldstream.models.cuda.capacity import MAX_GRAPHS

Key = tuple[str, object]  # the kind of step, and its shape
Step = Callable[[], Any]
WithoutMemory = Callable[[Any], Any]


@dataclass(frozen=True)
class CapturedStep:
    """A graph. Its outputs are valid until the next step of any kind."""

    graph: torch.cuda.CUDAGraph
    outputs: Any

    @classmethod
    def of(cls, step: Step, without_memory: WithoutMemory) -> Self:
        """Captures the launches of `step` without running them. Raises torch.OutOfMemoryError."""
        graph = torch.cuda.CUDAGraph()
        with without_collection(), torch.cuda.graph(graph):
            outputs = step()
        return cls(graph, without_memory(outputs))


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage is collected within.

    Garbage may hold page-locked tensors of a closed runner. PyTorch records an event when it frees one. If
    that event becomes part of a graph, page-locked memory can no longer be allocated: "invalid argument".
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CapturedSteps:
    """The graphs that were used last, MAX_GRAPHS at most. num_captured: in all so far."""

    def __init__(self) -> None:
        self.num_captured = 0
        self._graphs: dict[Key, CapturedStep] = {}  # in order of their last use

    def run(self, key: Key, step: Step, without_memory: WithoutMemory, make_room: Callable[[], bool]) -> Any:
        """What `step` returns, from a graph if there is one for `key`.

        without_memory: returns the outputs as tensors that do not own their memory. make_room: called if a
        capture finds no device memory; returns whether to try again. Raises as `step`, and OutOfMemoryError.
        """
        captured = self._graphs.pop(key, None)
        if captured is not None:
            self._graphs[key] = captured
            captured.graph.replay()
            return captured.outputs
        # The first step of a shape runs without a graph and loads its kernels, which a capture may not do.
        outputs = step()
        self.num_captured += 1
        if len(self._graphs) == MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        try:
            with device_errors():
                self._graphs[key] = CapturedStep.of(step, without_memory)
        except OutOfMemoryError:
            if not make_room():
                raise
            self._graphs[key] = CapturedStep.of(step, without_memory)
        return outputs

    def clear(self) -> None:
        """Frees all graphs."""
        self._graphs.clear()
