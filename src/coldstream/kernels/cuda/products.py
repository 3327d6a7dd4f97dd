"""The common part of operations on a GPU: memory for results, launches, and products with dense weights.

Activations between two operations exist in two forms, float32 and quantised with a scale for each 256; the
kernel that computes them writes both. Products with weights in blocks of 32 need a scale for each 32: GEMV
and most skinny kernels quantise the floats themselves, and a launch before a GEMM quantises its rows.
"""

from collections.abc import Callable, Sequence

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import BLOCK_SIZE, GROUP_SIZE, QuantActivations, activations_from
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.loader import CudaLoader, CudaWeight
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.cuda.skinny_shapes import MAX_GEMV_ROWS
from coldstream.kernels.linear.cuda import divided, fits_skinny, linear_skinny_cuda, needs_block_rows
from coldstream.kernels.linear.cuda_float_gemm import float_linear_gemm
from coldstream.kernels.linear.cuda_gemm import linear_gemm
from coldstream.kernels.linear.integer_types import BLOCK_TYPES, INTEGER_TYPES
from coldstream.kernels.ops import SWIGLU, Activation
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.swiglu.cuda import swiglu_cuda


class CudaProducts(CudaLoader):
    """Over tensors of `memory`, on the current stream.

    Over a `MemoryPlan` nothing runs; with `notes_kernels` launchers are called nevertheless, so that
    `note_kernels` records their choices.

    step_positions: int32 [T] on the device, of the step that began last, negative for rows of no sequence;
    None before any.
    """

    step_positions: DeviceArray | None = None

    def __init__(self, memory: Memory, *, notes_kernels: bool = False, has_host_tables: bool = False) -> None:
        super().__init__(memory, has_host_tables=has_host_tables)
        self._calls_launchers = notes_kernels or not self.planning
        self._zeroes: dict[tuple[str | int, ...], DeviceArray] = {}

    def launch(self, launcher: Callable[..., None], *args: object, **options: object) -> None:
        """Calls `launcher`, unless memory is only counted."""
        if self._calls_launchers:
            launcher(*args, **options)

    def empty(self, *shape: int, dtype: str = "float32") -> DeviceArray:
        """Unwritten workspace."""
        return self.memory.workspace(shape, dtype)

    def zeroed(self, purpose: str, *shape: int) -> DeviceArray:
        """int32 zeros that kernels count in and leave zero: one tensor for all launches of a purpose."""
        key: tuple[str | int, ...] = (purpose, *shape)
        if key not in self._zeroes:
            self._zeroes[key] = self.zeros(shape, "int32")
        return self._zeroes[key]

    def activations(
        self, rows: int, cols: int, *, persistent: bool = False, scale_size: int = GROUP_SIZE
    ) -> Activations:
        """Unwritten activations [rows, cols], with a scale for each `scale_size` of them."""
        empty = self.memory.persistent if persistent else self.memory.workspace
        quantised = activations_from(empty, rows, cols, scale_size)
        return Activations(empty((rows, cols), "float32"), quantised)

    def quantised_for(self, x: Activations, types: Sequence[QuantType]) -> tuple[QuantActivations, ...]:
        """x quantised for GEMM with weights of `types`; queues it for blocks of 32."""
        if BLOCK_TYPES.isdisjoint(types):
            return (x.quantised,) * len(types)
        by_block = activations_from(self.memory.workspace, x.shape[0], x.shape[1], BLOCK_SIZE)
        self.launch(quantize_cuda, x.values, by_block)
        return tuple(by_block if quant_type in BLOCK_TYPES else x.quantised for quant_type in types)

    def linear(self, x: Activations, weights: Sequence[CudaWeight]) -> tuple[DeviceArray, ...]:
        """See `Ops`."""
        matrices = [weight for weight in weights if isinstance(weight, QuantTensor)]
        assert len(matrices) == len(weights), "experts are no operand of a dense product"
        outs = tuple(self.empty(x.shape[0], weight.shape[0]) for weight in matrices)
        for own in divided(matrices, x.values):
            self._products(x, [matrices[i] for i in own], [outs[i] for i in own])
        return outs

    def _products(self, x: Activations, matrices: Sequence[QuantTensor], outs: Sequence[DeviceArray]) -> None:
        """In one launch where that `fits_skinny`, otherwise in one for each matrix."""
        if x.shape[0] <= MAX_GEMV_ROWS or fits_skinny(matrices, x.values):
            block_rows = None
            if needs_block_rows(matrices, x.values):
                (block_rows,) = self.quantised_for(x, (QuantType.Q8_0,))
            self.launch(self._linear_skinny, x, block_rows, matrices, outs)
            return
        rows = self.quantised_for(x, [weight.quant_type for weight in matrices])
        for codes, weight, out in zip(rows, matrices, outs, strict=True):
            if weight.quant_type in INTEGER_TYPES:
                self.launch(linear_gemm, codes, weight, out)
            else:
                self.launch(float_linear_gemm, x.values, weight, out)

    def glu(self, gate: DeviceArray, up: DeviceArray, activation: Activation = SWIGLU) -> Activations:
        """See `Ops`."""
        out = self.activations(*gate.shape)
        self.launch(swiglu_cuda, gate, up, out.values, out.quantised, activation)
        return out

    @staticmethod
    def _linear_skinny(
        x: Activations,
        block_rows: QuantActivations | None,
        weights: Sequence[QuantTensor],
        outs: Sequence[DeviceArray],
    ) -> None:
        linear_skinny_cuda(weights, outs, activations=x.quantised, x=x.values, block_rows=block_rows)
