"""Who computes the routed experts of a model on a GPU: a part of its operations that can be exchanged."""

from typing import Protocol

from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.loader import CudaWeight
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import ExpertOutputs, ExpertWeights, Routing


class Executor(Protocol):
    """What `CudaOps` leaves to who knows where experts lie."""

    def map_stack(self, file: GGUFFile, info: TensorInfo) -> ExpertTable | None:
        """A stack of experts that need not be in the device's memory; None: it is loaded as any weight is."""

    def route(
        self,
        x: Activations,
        weight: CudaWeight,
        shared_gate: CudaWeight | None,
        num_experts_per_tok: int,
        experts: ExpertWeights,
    ) -> Routing:
        """See `Ops.router`."""

    def compute(self, x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """See `Ops.experts`."""

    def finish_step(self) -> None:
        """After the last operation of a step: what runs beside the current stream is waited for there."""


class ResidentExecutor:
    """Every expert is in the device's memory."""

    def __init__(self, kernels: MoeKernels) -> None:
        self._kernels = kernels

    def map_stack(self, file: GGUFFile, info: TensorInfo) -> ExpertTable | None:
        """See `Executor`."""
        return None

    def route(
        self,
        x: Activations,
        weight: CudaWeight,
        shared_gate: CudaWeight | None,
        num_experts_per_tok: int,
        experts: ExpertWeights,
    ) -> Routing:
        """See `Executor`."""
        return self._kernels.route(x, weight, shared_gate, num_experts_per_tok)

    def compute(self, x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """See `Executor`."""
        routed, shared = self._kernels.outputs(x, routing.ids, weights)
        return ExpertOutputs(routed, shared, routing)

    def finish_step(self) -> None:
        """Nothing runs beside the stream."""
