"""Steps of a GPU that lacks layers of a dense model, without a GPU: orders of copies and products."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")


from bench.runners import layers_plan, open_model_file
from builders import Dims, write_gguf
from coldstream.errors import GenerationFault
from coldstream.experts.cpu_share import layers_of_cpu
from coldstream.experts.dense_layers import LayerExecutor, PartialLayers
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, WORDS_PER_LINE, Mailbox
from coldstream.kernels.ops import SWIGLU, Activation, ExpertOutputs, FfnWeights
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.models.read_spec import read_spec
from device_model import ModelDevice, Operation, Violation, range_of
from device_seams import any_schedule, model_device, seeds
from host_device import HostMemory

NUM_LAYERS = 6
TYPES = {"*.ffn_gate.weight": "Q4_K", "blk.[024].ffn_down.weight": "Q6_K"}
FFN = ("ffn_gate", "ffn_up", "ffn_down")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dims = Dims(layers=NUM_LAYERS, hidden=256, ffn=256)
    return write_gguf(tmp_path_factory.mktemp("model") / "dense.gguf", "qwen35", types=TYPES, dims=dims)[0]


class RecordingOps(CudaOps):
    """Products that only read their weights, which must be those of the layer that is computed."""

    device: ModelDevice
    expected: dict[str, bytes]
    layer = 0

    def linear(self, x: Activations, weights: Sequence[Any]) -> tuple[DeviceArray, ...]:
        names = FFN[:2] if len(weights) == 2 else FFN[2:]
        for name, weight in zip(names, weights, strict=True):
            assert isinstance(weight, QuantTensor)
            wanted = self.expected[f"blk.{self.layer}.{name}.weight"]

            def check(operation: Operation, blocks: Any = weight.blocks, wanted: bytes = wanted) -> None:
                assert blocks.numpy().tobytes() == wanted

            self.device.queue(f"{name} {self.layer}", reads=[range_of(weight.blocks)], effect=check)
        return tuple(self.empty(x.shape[0], weight.shape[0]) for weight in weights)

    def glu(self, gate: DeviceArray, up: DeviceArray, activation: Activation = SWIGLU) -> Activations:
        return self.activations(*gate.shape)


class Steps:
    """A model whose layers are only FFNs."""

    def __init__(
        self, device: ModelDevice, path: Path, missing: Sequence[int], streamed: float, num_places: int
    ) -> None:
        device.kernels["partition_experts"] = self._ask
        self.device, self.missing, self.asked = device, sorted(missing), list[int]()
        self.file = GGUFFile.open(path)
        self.spec = spec = read_spec(self.file.metadata, self.file.tensors)
        sizes = {"context_length": 256, "chunk_size": 256, "threads": 1}
        self.plan = layers_plan(self.file, spec, missing, **sizes, streamed=streamed, num_places=num_places)
        self.partial = PartialLayers(Mailbox.create(1, spec.hidden_size), self.plan)
        placement, host = self.plan.placement, self.partial.host
        make = partial(
            LayerExecutor,
            mailbox=host.mailbox,
            host=host,
            whole_layers=placement.pinned_layers,
            ring_bytes=placement.ring_bytes,
        )
        self.ops = RecordingOps(HostMemory(), 256, 512, make)
        self.ops.device = device
        self.ops.expected = {
            name: self.file.read(info).tobytes() for name, info in self.file.tensors.items() if "ffn_" in name
        }
        assert isinstance(self.ops.model_executor, LayerExecutor)
        self.executor = self.ops.model_executor
        self.weights = [self._weights(layer) for layer in range(NUM_LAYERS)]
        self.executor.number_layers(self.weights)
        self.partial.attach(self.executor)
        self.partial.connect()
        self.ops._uploads.clear()
        self._fill_resident()

    def _weights(self, layer: int) -> FfnWeights:
        infos = [self.file.tensors[f"blk.{layer}.{name}.weight"] for name in FFN]
        return FfnWeights(*(self.ops.load_ffn_weight(self.file, info) for info in infos))

    def _fill_resident(self) -> None:
        for layer, weights in enumerate(self.weights):
            for name, weight in zip(FFN, (weights.gate, weights.up, weights.down), strict=True):
                if isinstance(weight, QuantTensor):
                    data = np.frombuffer(self.ops.expected[f"blk.{layer}.{name}.weight"], np.uint8)
                    weight.blocks.numpy()[:] = data.reshape(weight.blocks.shape)

    def _ask(self, *args: Any) -> None:
        self.asked.append(args[-1].request)
        self.device.queue("ask")

    def queue(self, rows: int) -> None:
        """Queues all layers of a step."""
        self.asked.clear()
        x = self.ops.activations(rows, self.spec.hidden_size)
        for layer, weights in enumerate(self.weights):
            self.ops.layer = layer
            out = self.ops.ffn(x, weights)
            is_asked = isinstance(out, ExpertOutputs)
            assert is_asked == (layer in self.of_cpu(rows)), layer
        self.ops.finish_step()

    def of_cpu(self, rows: int) -> list[int]:
        """The layers that the CPU has to compute."""
        assert self.plan.miss_times is not None
        numbers = layers_of_cpu(len(self.missing), rows, self.plan.miss_times)
        return [self.missing[number] for number in sorted(numbers)]

    def close(self) -> None:
        self.device.synchronize()
        self.partial.close()
        self.file.close()


cases = st.tuples(
    st.sets(st.integers(0, NUM_LAYERS - 1), min_size=1),
    st.sampled_from((1e-9, 0.3, 0.5, 1.0)),
    st.integers(1, 3),
    st.lists(st.sampled_from((1, 7, MAX_MAILBOX_ROWS, MAX_MAILBOX_ROWS + 1)), min_size=2, max_size=3),
)


@any_schedule
@given(seed=seeds, case=cases)
def test_ex04_products_of_a_layer_read_its_bytes_and_no_copy_comes_before_they_have(
    path: Path, seed: int, case: tuple[set[int], float, int, list[int]]
) -> None:
    missing, streamed, num_places, all_rows = case
    with model_device(seed) as device:
        steps = Steps(device, path, sorted(missing), streamed, num_places)
        for rows in all_rows:
            steps.queue(rows)
            numbers = [steps.missing.index(layer) for layer in steps.of_cpu(rows)]
            assert steps.asked == [(number + 1) | rows << 16 for number in numbers]
        # What comes behind a step comes behind its copies.
        device.queue("another", writes=[range_of(steps.executor._ring)])
        steps.close()


def test_a_step_that_failed_leaves_nothing_to_the_next_one(path: Path) -> None:
    with model_device(3) as device:
        steps = Steps(device, path, range(NUM_LAYERS), 1.0, 2)
        x = steps.ops.activations(1, steps.spec.hidden_size)
        steps.ops.ffn(x, steps.weights[0])
        steps.ops.finish_step()  # as a runner does it, in any case
        device.queue("another", writes=[range_of(steps.executor._ring)])
        steps.queue(5)
        steps.close()


def test_the_ring_must_have_a_place_for_the_largest_layer(path: Path) -> None:
    with model_device(0) as device, pytest.raises(ValueError, match="a ring of 0"):
        Steps(device, path, [3], 1.0, 0)


def test_the_model_of_a_device_sees_a_product_that_does_not_wait(path: Path) -> None:
    def run() -> None:
        with model_device(3) as device, pytest.MonkeyPatch.context() as patch:
            steps = Steps(device, path, range(NUM_LAYERS), 1.0, 1)
            patch.setattr(type(device.default), "wait_event", lambda stream, event: None)
            steps.queue(1)

    with pytest.raises(Violation):
        run()


class Server:
    """In place of the CPU's threads: notes calls."""

    def __init__(self) -> None:
        self.calls = list[str]()
        self.error: Exception | None = None

    def begin(self) -> None:
        self.calls.append("begin")

    def end(self) -> None:
        self.calls.append("end")

    def check(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[tuple[PartialLayers, Server]]:
    (path,) = write_gguf(tmp_path / "dense.gguf", "qwen35", dims=Dims(layers=2, ffn=256))
    file, spec = open_model_file(path)
    sizes = {"context_length": 64, "chunk_size": 64, "threads": 1, "streamed": 0.5}
    with model_device(0):
        mailbox = Mailbox.create(1, spec.hidden_size)
        partial = PartialLayers(mailbox, layers_plan(file, spec, [0], **sizes))
        server = Server()
        real, partial.host.server = partial.host.server, server
        yield partial, server
        partial.host.server = real
        partial.close()
    file.close()


def test_the_cpu_looks_for_requests_while_a_decode_step_runs(
    layers: tuple[PartialLayers, Server],
) -> None:
    partial, server = layers
    for rows in (1, MAX_MAILBOX_ROWS):
        partial.start_step(rows)
        partial.launched()
    assert partial.must_wait(1)
    assert server.calls == ["begin"] * 2
    partial.ended(num_running=1)
    assert not partial.must_wait(1)
    assert server.calls == ["begin"] * 2
    partial.ended()
    assert server.calls == ["begin"] * 2 + ["end"]


def test_a_prompt_asks_the_cpu_for_nothing(layers: tuple[PartialLayers, Server]) -> None:
    partial, server = layers
    partial.start_step(MAX_MAILBOX_ROWS + 1)
    partial.launched()
    assert server.calls == []


def test_errors_of_the_cpu_and_of_waits_for_it_end_the_step(layers: tuple[PartialLayers, Server]) -> None:
    partial, server = layers
    partial.start_step(1)
    partial.launched()
    server.error = GenerationFault("as from a worker")
    with pytest.raises(GenerationFault, match="worker"):
        partial.ended()
    server.error = None
    words: np.ndarray = partial.host.mailbox.words.numpy()
    words[WORDS_PER_LINE + 1] = 1
    with pytest.raises(GenerationFault, match="in time"):
        partial.ended()
