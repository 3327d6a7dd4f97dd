"""Opens what drafts for a model, as its plan says."""

from coldstream.decoding import Drafter, FixedSizes, SizesByCost, Speculation
from coldstream.decoding.drafters import MtpDrafter, NgramDrafter
from coldstream.models.cpu_runner import CpuRunner
from coldstream.models.runner import ModelRunner
from coldstream.placement.run_plan import RunPlan


def open_speculation(plan: RunPlan, runner: ModelRunner) -> Speculation | None:
    """Drafts for one sequence of the runner; None without.

    Raises as `CpuRunner.load_mtp`.
    """
    drafter: Drafter
    if plan.spec_type == "none":
        return None
    if plan.spec_type == "mtp":
        assert isinstance(runner, CpuRunner), "a plan for a GPU has no drafts by MTP"
        drafter = MtpDrafter(runner.load_mtp().new_sequence())
    else:
        drafter = NgramDrafter()
    sizes = FixedSizes(plan.tree_budget) if plan.tree_budget else SizesByCost(drafter.name)
    return Speculation(drafter, sizes)
