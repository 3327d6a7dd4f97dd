"""Steps of some numbers of rows as CUDA graphs, captured when they come for the second time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from coldstream.errors import OutOfMemoryError
from coldstream.kernels.cuda.device import device_errors
from coldstream.models.fixed_part import MAX_GRAPHS

Key = tuple[str, object]  # what is computed, and of what shape
Step = Callable[[], Any]
WithoutMemory = Callable[[Any], Any]


@dataclass(frozen=True)
class CapturedStep:
    """A graph; its outputs are valid until the next step of any kind."""

    graph: torch.cuda.CUDAGraph
    outputs: Any

    @classmethod
    def of(cls, step: Step, without_memory: WithoutMemory) -> Self:
        """What `step` launches, of which nothing is computed. The device's memory may run out."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step()
        return cls(graph, without_memory(outputs))


class CapturedSteps:
    """The graphs that were used last, MAX_GRAPHS at most."""

    def __init__(self) -> None:
        self._graphs: dict[Key, CapturedStep] = {}  # the one used last is the last

    def run(self, key: Key, step: Step, without_memory: WithoutMemory, make_room: Callable[[], bool]) -> Any:
        """What `step` returns, from a graph once it has run before.

        without_memory: the same outputs, not keeping what they lie in. make_room: called where a capture
        finds no memory on the device; whether it is worth another attempt. Raises as `step`, and
        OutOfMemoryError.
        """
        captured = self._graphs.pop(key, None)
        if captured is not None:
            self._graphs[key] = captured
            captured.graph.replay()
            return captured.outputs
        # The first step of a kind runs plainly, which also loads its kernels; a capture may not.
        outputs = step()
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
        """Gives their memory back."""
        self._graphs.clear()
