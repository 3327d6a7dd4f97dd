"""How fast a GPU's own kernels are: what a launch takes, and experts in its memory and over the bus.

The bus is also measured while the CPU computes experts, as both share the missing experts of a layer. All is
measured with launches of a step, in a captured graph: a layer's experts, and the norm of what they add, each
of which waits for the one before. A prompt's dense product is measured beside them.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.contents import CudaArray, clear, write
from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.cuda.memory import DeviceMemory, MemoryPlan, aligned
from coldstream.kernels.cuda.program import Noted, note_kernels
from coldstream.kernels.cuda.runtime import allocations, calls, streams
from coldstream.kernels.cuda.runtime.graphs import Graph
from coldstream.kernels.cuda.skinny_shapes import instance_for
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts import cuda as experts_gemv
from coldstream.kernels.experts import stage
from coldstream.kernels.experts.cpu_rates import Codes, random_experts, write_random_codes
from coldstream.kernels.experts.partition import ExpertPlaces, Staging
from coldstream.kernels.experts.request_rates import ExpertRequests
from coldstream.kernels.experts.shapes import MATRICES, MEASURED_TYPE
from coldstream.kernels.experts.step_rates import StepRates
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import ExpertWeights, Routing
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.rms_norm import cuda as rms_norm

Array = np.ndarray[Any, Any]

LAUNCHES: Final = 3  # of a layer: gate and up, down, and the norm
LEAST, MOST = 2, 8  # experts of a token: what the further ones take is their bytes
MISSING: Final = 4  # experts of a layer that are read over the bus, or that the CPU computes
_OF_ONE_ROW: Final = (
    (experts_gemv.PROGRAM, instance_for(experts_gemv.GATE_UP, {MEASURED_TYPE})),
    (experts_gemv.PROGRAM, instance_for(experts_gemv.DOWN, {MEASURED_TYPE})),
    (
        rms_norm.ALONE_PROGRAM,
        rms_norm.ALONE[rms_norm.COMBINE.format("{}", rms_norm.NO_SHARED)].format("true"),
    ),
    (stage.PROGRAM, "stage_experts"),
)

_WORKSPACE_BYTES: Final = 4 << 20
_SMALL_BYTES: Final = 8 << 20  # of persistent memory, for all that is no expert
_WARM_S: Final = 0.02  # of work before a measurement: an idle GPU runs at a fraction of its clock
_WINDOW_S: Final = 0.02  # in which the bus and the CPU are measured together
_NUM_RUNS: Final = 5
_NUM_WINDOWS: Final = 3
_QUEUED_LAYERS: Final = 8  # few enough that no queue is full
_LAYERS_OF_PAUSE: Final = 3  # measured layers that take as long as what is between two requests
_POLL_S: Final = 2e-4
_EPS: Final = 1e-6


@dataclass(frozen=True)
class LayerShape:
    """Of the layers that are measured, by default those of Qwen3.5-35B-A3B."""

    hidden: int = 2048
    feed_forward: int = 512
    num_experts: int = 96  # in each memory, at most: more bytes than caches hold
    fewest_experts: int = 16
    cpu_experts: int = 384  # that the CPU computes, at most
    num_layers: int = 32  # of a graph
    bus_layers: int = 16  # of a graph that reads over the bus, which takes ten times as long
    prompt_rows: int = 2048

    @property
    def matrix_bytes(self) -> int:
        """Of gate, of up, and of down."""
        return MEASURED_TYPE.row_bytes(self.hidden) * self.feed_forward

    @property
    def expert_bytes(self) -> int:
        return MATRICES * self.matrix_bytes

    @property
    def dense_rows(self) -> int:
        """Of the weight that a prompt is multiplied with: gates of several experts, one behind the other."""
        return self.fewest_experts * self.feed_forward


def needed_kernels() -> Noted:
    """Of `measure_step_rates`, on this device."""
    return {*_OF_ONE_ROW, *_planned_prompt(LayerShape(), notes_kernels=True)[1]}


def measure_step_rates(num_threads: int, codes: Codes, shape: LayerShape | None = None) -> StepRates:
    """Rates of steps, in half a second. codes: `written_codes` for the CPU's weights; page-locked RAM may
    take as many bytes.

    Raises DeviceError, OutOfMemoryError.
    """
    with device_errors(), closing(MeasuredLayers(codes, shape or LayerShape())) as layers:
        return _rates_of(layers, num_threads)


def _rates_of(layers: "MeasuredLayers", num_threads: int) -> StepRates:
    size, bus_bytes = layers.shape.expert_bytes, layers.shape.bus_layers * MISSING * layers.shape.expert_bytes
    least, most = (layers.graph(layers.resident, number, layers.shape.num_layers) for number in (LEAST, MOST))
    warm(least)
    least_s, most_s = (best_graph_seconds(graph) / layers.shape.num_layers for graph in (least, most))
    launch_s, row_bytes_per_s = _fixed_and_rate(least_s, most_s, size, LAUNCHES)
    over_bus = layers.graph(layers.mapped, MISSING, layers.shape.bus_layers)
    staged = layers.staging_graph(MISSING, layers.shape.bus_layers)
    alone_s, staged_s = best_graph_seconds(over_bus), best_graph_seconds(staged)
    norms_s = layers.shape.bus_layers * (launch_s or 0.0)
    queue_s, prompt_ops_per_s = layers.queue_seconds(), layers.prompt_ops_per_s()
    with layers.requests(num_threads, most_s) as requests:
        least_asked_s, most_asked_s = (requests.best_seconds(number) for number in (LEAST, MOST))
        beside_s, _ = best_beside(over_bus, alone_s, bus_bytes, requests, size)
        staged_beside_s, most_asked_beside_s = best_beside(staged, staged_s, bus_bytes, requests, size)
    request_s, misses_alone = _fixed_and_rate(least_asked_s, most_asked_s, size, 1)
    if request_s is None or misses_alone is None:
        request_s, misses_alone = 0.0, MOST * size / most_asked_s
    return StepRates(
        launch_s,
        row_bytes_per_s,
        bus_bytes / (alone_s - norms_s),
        bus_bytes / (beside_s - norms_s),
        bus_bytes / staged_beside_s,
        request_s,
        misses_alone,
        MOST * size / (max(most_asked_s, most_asked_beside_s) - request_s),
        queue_s,
        prompt_ops_per_s,
    )


def _fixed_and_rate(
    least_s: float, most_s: float, expert_bytes: int, parts: int
) -> tuple[float | None, float | None]:
    """What each of a number of parts takes beside bytes, and bytes a second, by the seconds with LEAST
    experts and with MOST; None if times do not say it.
    """
    expert_s = (most_s - least_s) / (MOST - LEAST)
    fixed_s = (least_s - LEAST * expert_s) / parts
    if expert_s <= 0 or fixed_s <= 0:
        return None, None
    return fixed_s, expert_bytes / expert_s


class MeasuredLayers:
    """Layers of random experts in the GPU's memory (`resident`) and in page-locked RAM (`mapped`).

    The CPU computes others. codes: of all experts, alike for each of their matrices. places: where experts
    are staged. last_total: what the last layers of `step` have added up to. Raises DeviceError,
    OutOfMemoryError.
    """

    def __init__(self, codes: Codes, shape: LayerShape) -> None:
        self.shape, self._cpu_codes = shape, codes
        room = min(len(codes), calls.free_memory()[0] // 4) // shape.expert_bytes
        self.num_experts = max(shape.fewest_experts, min(shape.num_experts, room))
        stack_bytes = self.num_experts * shape.matrix_bytes
        self._ram = [allocations.page_locked((stack_bytes,), "uint8") for _ in range(MATRICES)]
        places_bytes = MOST * MATRICES * aligned(shape.matrix_bytes)
        persistent_bytes = MATRICES * aligned(stack_bytes) + places_bytes + _SMALL_BYTES
        self._memory = DeviceMemory(persistent_bytes, _planned_prompt(shape)[0])
        self._ops = CudaOps(self._memory, max_positions=1, max_rows=shape.prompt_rows)
        on_device = [self._memory.persistent((stack_bytes,), "uint8") for _ in range(MATRICES)]
        for ram, part in zip(self._ram, on_device, strict=True):
            write_random_codes(MEASURED_TYPE, ram)
            write(part, ram)
        self.resident, self._dense = self._stacks(on_device), _dense_weight(shape, on_device[0])
        self.mapped = self._stacks([CudaArray(ram.ctypes.data, ram.shape, "uint8", ram) for ram in self._ram])
        self.places = self._memory.persistent((places_bytes,), "uint8")
        self._total = self._memory.persistent((1, shape.hidden), "float32")
        self._norm = self._memory.persistent((shape.hidden,), "float32")
        generator = np.random.default_rng(1)
        write(self._total, generator.standard_normal((1, shape.hidden), np.float32))
        write(self._norm, np.ones(shape.hidden, np.float32))
        self._x = self._ops.activations(1, shape.hidden, persistent=True)
        self.last_total = self._total
        for part in (self._x.values, *vars(self._x.quantised).values()):
            clear(part)

    @property
    def codes(self) -> Array:
        return self._ram[0]

    def close(self) -> None:
        """Frees the device's memory. No graph may be launched afterwards."""
        self._memory.close()

    def _stacks(self, parts: Sequence[DeviceArray]) -> tuple[ExpertTable, ...]:
        experts, ffn, hidden = self.num_experts, self.shape.feed_forward, self.shape.hidden
        shapes = ((experts, ffn, hidden), (experts, ffn, hidden), (experts, hidden, ffn))
        tables = (
            self._ops.stack(part, MEASURED_TYPE, of_part) for part, of_part in zip(parts, shapes, strict=True)
        )
        return tuple(replace(table, mapped=table.first) for table in tables)

    def graph(self, stacks: Sequence[ExpertTable], number: int, num_layers: int) -> Graph:
        """Layers of so many experts, each with other ones."""
        return self._captured(self.step(stacks, number, num_layers))

    def step(self, stacks: Sequence[ExpertTable], number: int, num_layers: int) -> Callable[[], None]:
        """What queues the layers of `graph`."""
        gate, up, down = stacks
        weights, ops = ExpertWeights(gate, up, down), self._ops
        chosen = [self._written(self._choice(layer, number)[None]) for layer in range(num_layers)]
        shares = self._written(np.full((1, number), 1 / number, np.float32))

        def step() -> None:
            total, x = self._total, self._x
            for ids in chosen:
                outputs = ops.experts(x, Routing(ids, shares, None), weights)
                total, x = ops.add_norm(total, outputs, self._norm, _EPS)
            self.last_total = total

        return step

    def queue_seconds(self) -> float:
        """What a launch takes the thread that queues it, beside the arrays that it writes."""
        step, stream = self.step(self.resident, 1, _QUEUED_LAYERS), streams.current_stream()
        times = []
        for _ in range(_NUM_RUNS):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
            stream.synchronize()
        return min(times) / (LAUNCHES * _QUEUED_LAYERS)

    def prompt_ops_per_s(self) -> float:
        """Int8 multiplications and additions of a prompt's dense product, a second."""
        self._memory.start_step()
        x = self._ops.activations(self.shape.prompt_rows, self.shape.hidden)
        for part in (x.values, *vars(x.quantised).values()):
            clear(part)

        def step() -> None:
            self._ops.linear(x, (self._dense,))

        seconds = best_graph_seconds(self._captured(step))
        return 2 * self.shape.prompt_rows * self.shape.dense_rows * self.shape.hidden / seconds

    def staging_graph(self, number: int, num_layers: int) -> Graph:
        """Launches that each copy so many experts over the bus."""
        room = ExpertPlaces.of(self.places, self.mapped, number)
        lists = [np.concatenate([[number], self._choice(layer, number)]) for layer in range(num_layers)]
        stagings = [Staging(self._written(each.astype(np.int32)), room) for each in lists]

        def step() -> None:
            for staging in stagings:
                stage.stage_experts_cuda(self.mapped, staging)

        return self._captured(step)

    def requests(self, num_threads: int, layer_s: float) -> AbstractContextManager[ExpertRequests]:
        """A client that asks the CPU for experts, as a model's layers do. These are more than caches hold.

        num_threads: of the machine; the client takes one, as the thread that waits for the GPU does. layer_s:
        of a layer of `graph`. A model's has three times its launches.
        """
        shape = self.shape
        most = min(shape.cpu_experts, len(self._cpu_codes) // shape.expert_bytes)
        num_experts = max(shape.fewest_experts, most)
        weights = random_experts(self._cpu_codes, num_experts, shape.hidden, shape.feed_forward)
        return ExpertRequests.running(max(1, num_threads - 1), weights, MOST, _LAYERS_OF_PAUSE * layer_s)

    def _choice(self, turn: int, number: int) -> Array:
        return ((turn * number + np.arange(number)) % self.num_experts).astype(np.int32)

    def _written(self, values: Array) -> Any:
        array = self._memory.persistent(values.shape, values.dtype.name)
        write(array, values)
        return array

    @staticmethod
    def _captured(step: Callable[[], None]) -> Graph:
        step()  # loads the kernels
        streams.current_stream().synchronize()
        return Graph.capture(step)[0]


def _dense_weight(shape: LayerShape, stack: DeviceArray) -> QuantTensor:
    """The gates of the first experts of a stack, as one weight."""
    size = shape.dense_rows * MEASURED_TYPE.row_bytes(shape.hidden)
    return QuantTensor.from_bytes(stack[:size], MEASURED_TYPE, (shape.dense_rows, shape.hidden))


def _planned_prompt(shape: LayerShape, *, notes_kernels: bool = False) -> tuple[int, Noted]:
    """Bytes of workspace for a prompt's dense product, which are enough for a layer too; and its kernels, if
    they are to be noted.
    """
    memory = MemoryPlan()
    ops = CudaOps(memory, max_positions=1, max_rows=shape.prompt_rows, notes_kernels=notes_kernels)
    stack = memory.persistent((shape.dense_rows * MEASURED_TYPE.row_bytes(shape.hidden),), "uint8")
    with note_kernels() as noted:
        x = ops.activations(shape.prompt_rows, shape.hidden)
        ops.linear(x, (_dense_weight(shape, stack),))
    return max(memory.workspace_bytes, _WORKSPACE_BYTES), noted


def warm(graph: Graph) -> None:
    """Runs it until the device has its clock."""
    until = time.perf_counter() + _WARM_S
    while time.perf_counter() < until:
        graph_seconds(graph)


def best_graph_seconds(graph: Graph) -> float:
    """Of several runs, after one that fills caches."""
    graph_seconds(graph)
    return min(graph_seconds(graph) for _ in range(_NUM_RUNS))


def graph_seconds(graph: Graph, num_runs: int = 1) -> float:
    """The device's time for so many runs. Waits without a core, which may be the CPU's experts'."""
    begin, end = (streams.Event(has_time=True) for _ in range(2))
    begin.record()
    for _ in range(num_runs):
        graph.launch()
    end.record()
    while not end.query():
        time.sleep(_POLL_S)
    return end.milliseconds_since(begin) / 1e3


def best_beside(
    graph: Graph, alone_s: float, run_bytes: int, requests: ExpertRequests, expert_bytes: int
) -> tuple[float, float]:
    """Seconds of a run of the graph, and of a request for MOST experts meanwhile: of the window with most
    bytes.

    alone_s, run_bytes: of a run of the graph without the CPU.
    """
    num_runs = max(1, round(_WINDOW_S / alone_s))
    found = []
    for _ in range(_NUM_WINDOWS):
        begin, end = (streams.Event(has_time=True) for _ in range(2))
        begin.record()
        for _ in range(num_runs):
            graph.launch()
        end.record()
        request_s = requests.window(MOST, end.query)
        end.synchronize()
        run_s = end.milliseconds_since(begin) / 1e3 / num_runs
        found.append((run_bytes / run_s + MOST * expert_bytes / request_s, run_s, request_s))
    return max(found)[1:]
