"""Steps as CUDA graphs, captured after the first step of their shape, or after the second."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, Self

from coldstream.errors import OutOfMemoryError
from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.cuda.runtime.graphs import Graph, Pieces
from coldstream.models.cuda.capacity import MAX_GRAPHS

# Three graphs a layer took 13 to 21 MB more than one of the whole step would, on an H200 for 40 layers.
GRAPHS_OF_PIECES: Final = 5

Key = tuple[str, object]  # the kind of step, and its shape
Step = Callable[[], Any]
WithoutMemory = Callable[[Any], Any]


@dataclass(frozen=True)
class CapturedStep:
    """A graph, or several. Its outputs are valid until the next step of any kind."""

    graph: Graph | Pieces
    outputs: Any

    @property
    def weight(self) -> int:
        """Its memory on the device, in graphs."""
        return GRAPHS_OF_PIECES if isinstance(self.graph, Pieces) else 1

    @classmethod
    def of(cls, step: Step, without_memory: WithoutMemory) -> Self:
        """Captures the launches of `step` without running them. Raises as `Graph.capture`."""
        graph, outputs = Graph.capture(step)
        return cls(graph, without_memory(outputs))


class CapturedSteps:
    """The graphs that were used last, MAX_GRAPHS at most. A step in pieces counts as GRAPHS_OF_PIECES.

    is_early: whether only the second step of a shape is captured, so that a first token need not wait for it.
    num_captured: steps so far that took longer, as the first one of a shape or for a capture. is_put_off:
    whether nothing is captured yet, because later steps launch something else; the caller sets it.
    """

    def __init__(self, *, is_early: bool = False) -> None:
        self.num_captured = 0
        self.is_put_off = False
        self._is_early = is_early
        self._has_room_for_pieces = True
        self._has_run: dict[Key, None] = {}  # once, without a graph; the last ones
        self._graphs: dict[Key, CapturedStep] = {}  # in order of their last use

    def run(self, key: Key, step: Step, without_memory: WithoutMemory, make_room: Callable[[], bool]) -> Any:
        """What `step` returns, from a graph if there is one for `key`.

        without_memory: returns the outputs as tensors that do not own their memory. make_room: called if a
        capture finds no device memory; returns whether to try again. Raises as `step`, and OutOfMemoryError.
        """
        captured = self._taken(key)
        if captured is not None:
            captured.graph.launch()
            return captured.outputs
        # The first step of a shape runs without a graph and loads its kernels, which a capture may not do.
        outputs = step()
        self.num_captured += 1
        if self.is_put_off:
            return outputs
        if self._is_early and not self._note_run(key):
            return outputs
        self._make_place(1)
        try:
            with device_errors():
                self._graphs[key] = CapturedStep.of(step, without_memory)
        except OutOfMemoryError:
            if not make_room():
                raise
            self._graphs[key] = CapturedStep.of(step, without_memory)
        return outputs

    def run_in_pieces(self, key: Key, form: Hashable, step: Step, without_memory: WithoutMemory) -> Any:
        """As `run`, of a step in which the host acts. The second one for `key` is recorded while it runs.

        form: what its launches depend on besides; those of any form launch the same kernels. Raises as
        `step` and the recording, after which the step has run in part. After a recording that found no memory
        none is tried again.
        """
        of_form = key[0], (key[1], form)
        captured = self._taken(of_form)
        if captured is not None:
            captured.graph.launch()
            return captured.outputs
        self.num_captured += 1
        if self.is_put_off or not self._has_room_for_pieces or key not in self._has_run:
            outputs = step()
            self._note_run(key)
            return outputs
        self._make_place(GRAPHS_OF_PIECES)
        try:
            pieces, outputs = Pieces.record(step)
        except OutOfMemoryError:
            self._has_room_for_pieces = False  # such steps run without graphs from now on
            raise
        self._graphs[of_form] = CapturedStep(pieces, without_memory(outputs))
        return outputs

    def _taken(self, key: Key) -> CapturedStep | None:
        """The graph of a step, as that which was used last."""
        captured = self._graphs.pop(key, None)
        if captured is not None:
            self._graphs[key] = captured
        return captured

    def _note_run(self, key: Key) -> bool:
        """Notes that such a step has run. Returns whether one had before."""
        had_run = key in self._has_run
        if not had_run and len(self._has_run) == MAX_GRAPHS:
            del self._has_run[next(iter(self._has_run))]
        self._has_run[key] = None
        return had_run

    def _make_place(self, weight: int) -> None:
        """Frees graphs until there is room for one more of this weight."""
        while sum(each.weight for each in self._graphs.values()) + weight > MAX_GRAPHS:
            key = next(iter(self._graphs))
            if isinstance(self._graphs.pop(key).graph, Pieces):
                name, of_form = key
                assert isinstance(of_form, tuple), "a shape and a form"
                self._has_run.pop((name, of_form[0]), None)  # so that shapes in turn are not always recorded

    def clear(self) -> None:
        """Frees all graphs."""
        self._graphs.clear()
