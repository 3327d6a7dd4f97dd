"""Opens what drafts for a model, as its plan says."""

from typing import TYPE_CHECKING

from coldstream.decoding import Drafter, FixedSizes, SizesByCost, Speculation
from coldstream.decoding.drafters import MtpDrafter, NgramDrafter
from coldstream.models.cpu_runner import CpuRunner
from coldstream.models.runner import ModelRunner, States
from coldstream.placement.run_plan import RunPlan

if TYPE_CHECKING:
    from coldstream.models.dflash_file import DflashFile


def open_speculation(
    plan: RunPlan, runner: ModelRunner, draft: "DflashFile | None" = None
) -> Speculation | None:
    """Drafts for one sequence of the runner; None without.

    draft: an open drafter for the model, which may be closed afterwards. Raises as `ModelRunner.load_mtp` and
    `DflashModel.load`.
    """
    if plan.spec_type == "none":
        return None
    drafter = _drafter(plan, runner, draft)
    sizes = FixedSizes(plan.tree_budget) if plan.tree_budget else SizesByCost(drafter.name)
    return Speculation(drafter, sizes)


def told_states(runner: ModelRunner, drafter: Drafter) -> States | None:
    """What the drafter is told of rows beside their tokens; None: nothing."""
    if drafter.taps:
        return runner.features
    return runner.hidden if drafter.wants_hidden else None


def _drafter(plan: RunPlan, runner: ModelRunner, draft: "DflashFile | None") -> Drafter:
    if plan.spec_type == "ngram":
        return NgramDrafter()
    if plan.spec_type == "mtp":
        return MtpDrafter(runner.load_mtp().new_sequence())
    assert isinstance(runner, CpuRunner), "a plan for a GPU has no drafts by another model"
    # Imported here because they need PyTorch, which a machine without a GPU does not have.
    from coldstream.decoding.drafters.dflash import DflashDrafter
    from coldstream.models.dflash import DflashModel

    assert draft is not None, "a plan with another model as drafter is made where that is open"
    return DflashDrafter(DflashModel.load(draft, runner.embed, runner.head).new_sequence())
