"""Who computes the routed experts of a model on a GPU: a part of its operations that can be exchanged.

Importing this needs no PyTorch, so that public signatures can name what is here.
"""

from typing import TYPE_CHECKING, Protocol

from coldstream.errors import ConfigError, shown
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.ops import ExpertOutputs, ExpertWeights, Routing

if TYPE_CHECKING:
    from coldstream.kernels.cuda.activations import Activations
    from coldstream.kernels.cuda.loader import CudaWeight
    from coldstream.kernels.experts.moe import MoeKernels
    from coldstream.kernels.experts.table import ExpertTable


class Executor(Protocol):
    """Chooses the experts of a layer's tokens, and computes them.

    Both queue work on PyTorch's current stream. Of a step of few rows that is captured, and repeated without
    a call; the weights of a layer are the same objects in every call.
    """

    def route(
        self,
        x: "Activations",
        weight: "CudaWeight",
        shared_gate: "CudaWeight | None",
        num_experts_per_tok: int,
        experts: ExpertWeights,
    ) -> Routing:
        """See `Ops.router`."""

    def compute(self, x: "Activations", routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """See `Ops.experts`."""


class ModelExecutor(Executor, Protocol):
    """The product's own executor of a model, which also decides where stacks of experts lie."""

    def map_stack(self, file: GGUFFile, info: TensorInfo) -> "ExpertTable | None":
        """A stack of experts that need not be in the device's memory; None: it is loaded as any weight is."""

    def finish_step(self) -> None:
        """After the last operation of a step: what runs beside the current stream is waited for there."""


class ExecutorFactory(Protocol):
    """Makes the executor of a model that is loaded; a class with such a constructor is one."""

    def __call__(self, product: Executor, kernels: "MoeKernels", /) -> Executor:
        """product: whom the model has otherwise; kernels: those that it computes with.

        What is made may leave any call to `product`. There is as much workspace as that takes.
        """


class CheckedExecutor:
    """Does what `executor` does, which somebody else wrote. Raises ConfigError if a result is none."""

    def __init__(self, executor: Executor, name: str) -> None:
        self._executor, self._name = executor, name

    def route(
        self,
        x: "Activations",
        weight: "CudaWeight",
        shared_gate: "CudaWeight | None",
        num_experts_per_tok: int,
        experts: ExpertWeights,
    ) -> Routing:
        """See `Executor`."""
        routing = self._executor.route(x, weight, shared_gate, num_experts_per_tok, experts)
        self._check("route", Routing, routing)
        return routing

    def compute(self, x: "Activations", routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """See `Executor`."""
        outputs = self._executor.compute(x, routing, weights)
        self._check("compute", ExpertOutputs, outputs)
        return outputs

    def _check(self, method: str, kind: type, result: object) -> None:
        if not isinstance(result, kind):
            raise ConfigError(
                f"executor {self._name}: {method} must return {kind.__name__}, not {shown(result)}"
            )


def made_executor(make: ExecutorFactory, product: Executor, kernels: "MoeKernels") -> CheckedExecutor:
    """What `make` makes, checked. Raises ConfigError if it raises, or makes what is no executor."""
    name = getattr(make, "__name__", type(make).__name__)
    try:
        executor = make(product, kernels)
    except Exception as error:
        raise ConfigError(f"executor {name}: raised {type(error).__name__}: {error}") from error
    for method in ("route", "compute"):
        if not callable(getattr(executor, method, None)):
            raise ConfigError(f"executor {name}: made {shown(executor)}, which has no method {method}")
    return CheckedExecutor(executor, name)


class ResidentExecutor:
    """Every expert is in the device's memory."""

    def __init__(self, kernels: "MoeKernels") -> None:
        self._kernels = kernels

    def map_stack(self, file: GGUFFile, info: TensorInfo) -> "ExpertTable | None":
        """See `ModelExecutor`."""
        return None

    def route(
        self,
        x: "Activations",
        weight: "CudaWeight",
        shared_gate: "CudaWeight | None",
        num_experts_per_tok: int,
        experts: ExpertWeights,
    ) -> Routing:
        """See `Executor`."""
        return self._kernels.route(x, weight, shared_gate, num_experts_per_tok)

    def compute(self, x: "Activations", routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """See `Executor`."""
        routed, shared = self._kernels.outputs(x, routing.ids, weights)
        return ExpertOutputs(routed, shared, routing)

    def finish_step(self) -> None:
        """Nothing runs beside the stream."""
