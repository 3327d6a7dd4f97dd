"""Fused steps whose drafts are written beforehand: for tests, and for models whose weights are random."""

from coldstream.kernels.cuda.contents import CudaArray, clear, new
from coldstream.kernels.cuda.copy_values import copy_values_cuda
from coldstream.kernels.fused.cuda import FusedKernels
from coldstream.models.cuda.dflash import CudaDflash
from coldstream.models.cuda.fused_draft import CudaFusedSteps, FusedShape
from coldstream.models.cuda.mtp import CudaMtp


class ScriptedSteps(CudaFusedSteps):
    """The block runs with all that it costs; its tokens are replaced by those of `script`.

    script: int32 [positions, depths] on the device, the draft after a root at a position.
    """

    kind = "scripted"

    def __init__(self, fused: CudaFusedSteps, script: CudaArray) -> None:
        super().__init__(fused.loaded, fused.block, fused._steps, fused._begin, fused._make_room)
        self.script = script

    def draft(self, kernels: FusedKernels, shape: FusedShape) -> None:
        """See `CudaFusedSteps`."""
        super().draft(kernels, shape)
        arrays, num_nodes = self.memory.arrays, shape.num_rows - 1
        if num_nodes:  # those of the root's position
            target = arrays.model_columns[1 : shape.num_rows].reshape(1, num_nodes)
            copy_values_cuda(self.script[:, :num_nodes], target, arrays.state[:1])


def script_fused_steps(block: CudaMtp | CudaDflash, num_positions: int, num_depths: int) -> CudaArray:
    """Makes the block's fused steps scripted ones; the script, to be written before each text."""
    assert block.fused is not None, "fused steps need all experts on the device"
    script = new((num_positions, num_depths), "int32")
    clear(script)
    block.fused = ScriptedSteps(block.fused, script)
    return script
