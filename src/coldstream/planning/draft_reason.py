"""Whether drafts are planned, and why, in a line for people."""

from coldstream.placement.run_plan import RunPlan
from coldstream.planning.choose import MOST_DRAFTED_SHARE
from coldstream.planning.config import EngineConfig
from coldstream.planning.facts import Facts

_NAME = "the block for multi-token prediction"


def draft_reason(config: EngineConfig, run: RunPlan, facts: Facts) -> str:
    """config: what was asked for, with a concrete device. run: what came of it."""
    if config.spec_type != "auto" or config.plan is not None:
        return f"{run.spec_type}, as asked for"
    share, is_gpu = facts.model.drafted_share, config.device == "cuda"
    if share is None:
        return f"none: the file has no {_NAME.removeprefix('the ')}"
    read = f"a token that {_NAME} drafts reads {share:.0%} of the bytes of a plain one"
    if run.spec_type == "mtp":
        return "mtp: the GPU holds all of the model" if is_gpu else f"mtp, as far as they pay: {read}"
    if not is_gpu and share > MOST_DRAFTED_SHARE:
        return f"none: {read}, and more than {MOST_DRAFTED_SHARE:.0%} pays on no CPU"
    return f"none: {_NAME} has no room beside all of the model, or cannot be used"
