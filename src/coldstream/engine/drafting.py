"""Opens what drafts for a model, as its plan says."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from coldstream.decoding import Drafter, FixedSizes, SizesByCost, Speculation
from coldstream.decoding.drafters import MtpDrafter, NgramDrafter, with_fused_steps
from coldstream.decoding.drafters.dflash import DflashDrafter
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.runner import ModelRunner, States
from coldstream.placement.run_plan import RunPlan

if TYPE_CHECKING:
    from coldstream.models.cpu.dflash import CpuDflash
    from coldstream.models.cuda.dflash import CudaDflash
    from coldstream.models.dflash.file import DflashFile

_CAPTURE_S: Final = 0.16  # of a step with missing experts, on an H200


def open_speculation(
    plan: RunPlan, runner: ModelRunner, draft: "DflashFile | None" = None, *, is_bounded: bool = False
) -> Speculation | None:
    """Drafts for sequences of the runner; None without.

    draft: an open drafter for the model, which may be closed afterwards. is_bounded: whether what drafts lose
    is bounded, as it should be where nobody asked for any. Raises as `ModelRunner.load_mtp`, `CpuDflash` and
    `CudaDflash`.
    """
    if plan.spec_type == "none":
        return None
    new_drafter = _maker(plan, runner, draft)
    drafter = new_drafter()
    misses = runner.expert_uses is not None
    first_use_s = _CAPTURE_S if misses and runner.tier == "cuda" else 0.0
    by_cost = SizesByCost(drafter.name, is_bounded=is_bounded, misses=misses, first_use_s=first_use_s)
    sizes = FixedSizes(plan.tree_budget) if plan.tree_budget else by_cost
    # A device that runs fused steps has room for those of one sequence.
    more = None if with_fused_steps(drafter) else new_drafter
    return Speculation(drafter, sizes, more)


def states_for(runner: ModelRunner, drafter: Drafter) -> States | None:
    """What the drafter reads of computed rows beside their tokens; None: nothing."""
    if drafter.aux_layers:
        return runner.features
    return runner.hidden if drafter.wants_hidden else None


def _maker(plan: RunPlan, runner: ModelRunner, draft: "DflashFile | None") -> Callable[[], Drafter]:
    """What makes a drafter for a sequence. What all of them share is loaded here."""
    if plan.spec_type == "ngram":
        return NgramDrafter
    if plan.spec_type == "mtp":
        block = runner.load_mtp()
        return lambda: MtpDrafter(block.new_sequence())
    assert draft is not None, "a plan with another model as drafter is made where that is open"
    drafting = _dflash_beside(runner, draft)
    return lambda: DflashDrafter(drafting.new_sequence())


def _dflash_beside(runner: ModelRunner, draft: "DflashFile") -> "CpuDflash | CudaDflash":
    if isinstance(runner, CpuRunner):
        return runner.load_dflash(draft)
    # Imported here because it needs CUDA's packages, which a machine without a GPU need not have.
    from coldstream.models.cuda.runner import CudaRunner

    assert isinstance(runner, CudaRunner), "features are of a runner's device"
    return runner.load_dflash(draft)
