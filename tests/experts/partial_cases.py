"""Steps of a GPU that holds some experts, as its runner queues them, on the model of a device."""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.runners import partial_plan
from coldstream.experts.executor import PartialExecutor
from coldstream.experts.partial_experts import PartialExperts
from coldstream.experts.prefetch import Prefetching
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray, HostArray
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, Mailbox
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.ops import ExpertWeights, RouterWeights
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.models.read_spec import read_spec
from device_model import ModelDevice, Operation, range_of
from host_device import HostMemory

RING_BYTES = 2**22
CHUNK = 80


class _Ops(CudaOps):
    """Without the products of a prefill's routers."""

    def linear(self, x: Activations, weights: Sequence[Any]) -> tuple[DeviceArray, ...]:
        return tuple(self.empty(x.shape[0], weight.shape[0]) for weight in weights)


class DecodeSteps:
    """Routers and experts of decode steps, with prefetching; records the accesses of each launch."""

    def __init__(
        self,
        device: ModelDevice,
        path: Path,
        seed: int,
        prefetching: Prefetching,
        whole_layers: Collection[int] = (),
        mailbox_rows: int = MAX_MAILBOX_ROWS,
    ) -> None:
        self.device, self.rng = device, np.random.default_rng(seed)
        device.kernels |= {
            "router_gemv": self._route,
            "partition_experts": self._share_out,
            "ask_for_experts": self._ask,
            "router_choose": lambda *args: None,
            "prefetch_experts": self._fetch,
            "expect_experts": self._expect,
            "stage_experts": self._stage,
        }
        self.file = GGUFFile.open(path)
        self.spec = read_spec(self.file.metadata, self.file.tensors)
        mailbox = Mailbox.create(self.spec.num_experts_per_tok, self.spec.hidden_size, mailbox_rows)
        sizes = {"context_length": CHUNK, "chunk_size": CHUNK, "ring_bytes": RING_BYTES}
        plan = partial_plan(self.file, self.spec, 0, **sizes, threads=1)
        self.partial = PartialExperts(mailbox, plan)
        host = self.partial.host
        executor = partial(
            PartialExecutor,
            num_layers=self.spec.num_layers,
            mailbox=host.mailbox,
            host=host,
            whole_layers=whole_layers,
            ring_bytes=RING_BYTES,
            prefetching=prefetching,
        )
        self.ops = _Ops(HostMemory(), 256, 512, executor)
        assert isinstance(self.ops.executor, PartialExecutor)
        self.executor = self.ops.executor
        self.weights = [self._layer(layer) for layer in range(self.spec.num_layers)]
        routers = [self._router() for _ in self.weights]
        self.executor.number_layers(zip(routers, self.weights, strict=True))
        self.partial.attach(self.executor)
        self.partial.connect()
        self.cap_bytes = prefetching.cap_bytes
        self.fetches: dict[int, Operation] = {}  # of the running step, by layer
        self.expected: list[int] = []  # layers at which the CPU got hints by a launch of their own
        self.sharing: Any = None
        self.num_asked = 0  # times that the CPU was asked by a launch of its own
        self.staged = b""  # the last staging into which experts were copied
        self._guessed: list[tuple[int, int]] = []  # by the router that ran last

    def _layer(self, layer: int) -> ExpertWeights:
        names = ("gate", "up", "down")
        routed = [self.file.tensors[f"blk.{layer}.ffn_{name}_exps.weight"] for name in names]
        stacks = [self.ops.map_weight(self.file, info) for info in routed]
        return ExpertWeights(*stacks, None, None, None)

    def _router(self) -> RouterWeights:
        gate, shared_gate = self._floats(self.spec.num_experts), self._floats(1)
        return RouterWeights(gate, shared_gate, self.spec.num_experts_per_tok)

    def _floats(self, rows: int) -> QuantTensor:
        data = HostArray.of(np.zeros(4 * rows * self.spec.hidden_size, np.uint8))
        return QuantTensor.from_bytes(data, QuantType.F32, (rows, self.spec.hidden_size))

    def queue(self, rows: int) -> None:
        """Queues all layers of a step."""
        self.fetches.clear()
        self.expected.clear()
        for layer in range(len(self.weights)):
            self.route(layer, rows)
            room = self.sharing.prefetched.room
            if room.count and layer in self.fetches and self.rng.random() < 0.6:
                # A key that a kernel has read orders its reads after the copy; otherwise it does not wait.
                place = (room.data, room.count * room.place_bytes)
                self.device.queue(f"experts {layer}", reads=[place], after=[self.fetches[layer]])
            if rows > 1:
                room = self.sharing.staging.room
                assert self.staged == bytes(self.sharing.staging), "of this layer"
                self.device.queue(f"staged {layer}", reads=[(room.data, room.count * room.place_bytes)])
        self.ops.finish_step()

    def route(self, layer: int, rows: int) -> None:
        """Queues the router of a layer."""
        x = self.ops.activations(rows, self.spec.hidden_size)
        self.ops.router(x, self._router(), self.weights[layer])

    def step(self, rows: int) -> None:
        """A step as a runner queues it."""
        self.device.current.synchronize()
        self.partial.start_step(rows)
        self.queue(rows)
        self.partial.launched()
        self.device.current.synchronize()
        self.partial.ended()

    def _route(self, *args: Any) -> None:
        """Like router.cu: guesses at a later layer's experts. Kernels synchronise by keys: no race."""
        _, _, shares, *_, sharing, ahead, _, _ = args
        num_guesses = shares.num_tokens * self.spec.num_experts_per_tok
        self._guessed = [(ahead.ids, 4 * num_guesses)] if ahead.ids else []
        self.device.queue("router", writes=self._guessed)
        if shares.num_tokens == 1:
            self._note(sharing)
        else:
            assert not sharing.request, "a launch behind this one shares out"

    def _share_out(self, *args: Any) -> None:
        """Like partition.cu, for several rows."""
        self.device.queue("partition")
        self._note(args[-1])

    def _ask(self, *args: Any) -> None:
        """Like partition.cu, for more rows than the mailbox has."""
        assert bytes(args[-1]) == bytes(self.sharing), "of this layer"
        self.num_asked += 1

    def _stage(self, target: Any) -> None:
        """Like stage.cu, as if every place got an expert."""
        room, (first, num_bytes) = target.staging.room, range_of(self.executor.ring)
        prefetch, size = self.executor.prefetch, room.count * room.place_bytes
        assert prefetch is not None
        assert room.count == 0 or first + prefetch.num_bytes <= room.data
        assert room.count == 0 or room.data + size <= first + num_bytes
        assert sum(-(-target.bytes[m] // 256) * 256 for m in range(MATRICES)) <= room.place_bytes
        self.staged = bytes(target.staging)
        self.device.queue(
            "stage", reads=[(target.staging.list, 4 * (1 + room.count))], writes=[(room.data, size)]
        )

    def _note(self, sharing: Any) -> None:
        assert sharing.notes.emptied or not self._guessed, (
            "keys are emptied where a later layer is guessed at"
        )
        self.sharing = sharing

    def _fetch(self, target: Any) -> None:
        """Like prefetch.cu: fills places with guessed experts."""
        places, (first, num_bytes) = target.places.room, range_of(self.executor.ring)
        size = places.count * places.place_bytes
        cap = num_bytes if self.cap_bytes is None else self.cap_bytes
        assert first <= places.data
        assert places.data + size <= first + cap
        assert sum(-(-target.bytes[m] // 256) * 256 for m in range(MATRICES)) <= places.place_bytes
        guesses = [(target.guesses, 4 * target.num_guesses)]
        assert guesses == self._guessed, "those of this step, for this layer"
        self.fetches[target.layer] = self.device.queue(
            f"fetch {target.layer}",
            reads=guesses,
            writes=[(places.data, size), (target.arrivals, 4)],
        )

    def _expect(self, target: Any, *_: Any) -> None:
        """Like prefetch.cu: reads guesses, those of a router before."""
        assert target.guesses == self.executor.decode.chosen.guessed[target.layer].data_ptr()
        self.expected.append(target.layer)
        self.device.queue(f"expect {target.layer}", reads=[(target.guesses, 4 * target.num_guesses)])

    def close(self) -> None:
        self.device.synchronize()
        self.partial.close()
        self.file.close()
