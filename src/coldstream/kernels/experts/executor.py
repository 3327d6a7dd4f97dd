"""The executor of a model's routed experts on a GPU, which a caller may exchange.

Importing this needs none of CUDA's packages, so that public signatures can name what is here.
"""

from typing import TYPE_CHECKING, Protocol

from coldstream.errors import ConfigError, shown
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.composed_ops import ffn_of_products
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.ops import ExpertOutputs, ExpertWeights, FfnWeights, RouterWeights, Routing

if TYPE_CHECKING:
    from coldstream.kernels.cuda.activations import Activations
    from coldstream.kernels.experts.moe import MoeKernels
    from coldstream.kernels.experts.table import ExpertTable


class Executor(Protocol):
    """Chooses the experts of a layer's tokens, and computes them.

    Both methods queue work on the current stream (`kernels/cuda/runtime/streams.py`), where the product's
    launchers put it. PyTorch's operations have a current stream of their own: give them this one. In a step
    of decode the work is captured in a graph and replayed without a call. Long steps are not, if the executor
    is a caller's. The weights of a layer are the same objects in every call.
    """

    def route(self, x: "Activations", weights: RouterWeights, experts: ExpertWeights) -> Routing:
        """See `Ops.router`."""

    def compute(self, x: "Activations", routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """See `Ops.experts`."""


class ModelExecutor(Executor, Protocol):
    """The product's own executor of a model, which also decides where stacks of experts lie."""

    def map_stack(self, file: GGUFFile, info: TensorInfo) -> "ExpertTable | None":
        """A table for a stack that need not be in device memory; None: it is loaded like any weight."""

    def map_matrix(self, file: GGUFFile, info: TensorInfo) -> "ExpertTable | None":
        """The same for a matrix of a dense layer's FFN, as a stack of one."""

    def ffn(self, x: "Activations", weights: FfnWeights) -> "DeviceArray | ExpertOutputs":
        """See `Ops.ffn`."""

    def finish_step(self) -> None:
        """Call after the last operation of a step; the current stream then waits for work on others."""


class ExecutorFactory(Protocol):
    """Makes the executor of a model that is loaded; a class with such a constructor is one."""

    def __call__(self, product: Executor, kernels: "MoeKernels", /) -> Executor:
        """product: the executor of the model otherwise; kernels: those that it uses.

        The new executor may pass any call on to `product`. The workspace is as large as `product` needs.
        """


class CheckedExecutor:
    """Passes calls to a caller's `executor`. Raises ConfigError if a result has the wrong type."""

    def __init__(self, executor: Executor, name: str) -> None:
        self._executor, self._name = executor, name

    def route(self, x: "Activations", weights: RouterWeights, experts: ExpertWeights) -> Routing:
        """See `Executor`."""
        routing = self._executor.route(x, weights, experts)
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
    """The result of `make`, checked. Raises ConfigError if it raises or returns no executor."""
    name = getattr(make, "__name__", type(make).__name__)
    try:
        executor = make(product, kernels)
    except Exception as error:
        raise ConfigError(f"executor {name}: raised {type(error).__name__}: {error}") from error
    for method in ("route", "compute"):
        if not callable(getattr(executor, method, None)):
            raise ConfigError(f"executor {name}: made {shown(executor)}, which has no method {method}")
    return CheckedExecutor(executor, name)


class WithWholeFfns:
    """The part of a `ModelExecutor` for dense layers whose FFNs are in the device's memory."""

    def __init__(self, kernels: "MoeKernels") -> None:
        self._kernels = kernels

    def map_matrix(self, file: GGUFFile, info: TensorInfo) -> "ExpertTable | None":
        """See `ModelExecutor`."""
        return None

    def ffn(self, x: "Activations", weights: FfnWeights) -> "DeviceArray | ExpertOutputs":
        """See `ModelExecutor`."""
        out: DeviceArray = ffn_of_products(self._kernels.device, x, weights)
        return out


class ResidentExecutor(WithWholeFfns):
    """A `ModelExecutor` with every expert in the device's memory."""

    def map_stack(self, file: GGUFFile, info: TensorInfo) -> "ExpertTable | None":
        """See `ModelExecutor`."""
        return None

    def route(self, x: "Activations", weights: RouterWeights, experts: ExpertWeights) -> Routing:
        """See `Executor`."""
        return self._kernels.route(x, weights)

    def compute(self, x: "Activations", routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """See `Executor`."""
        routed, shared = self._kernels.outputs(x, routing.ids, weights)
        return ExpertOutputs(routed, shared, routing, bias=weights.down_bias)

    def finish_step(self) -> None:
        """Nothing runs beside the stream."""
