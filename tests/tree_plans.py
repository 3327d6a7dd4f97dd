"""Plans for a GPU with room for draft trees, as a drafter's tests want them."""

from dataclasses import replace

from bench.runners import partial_plan, resident_plan
from coldstream.gguf.reader import GGUFFile
from coldstream.kvcache import CacheSize
from coldstream.models.runner_capacity import NO_DRAFTS, DraftMemory
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.run_plan import RunPlan


def plan_with_trees(
    file: GGUFFile,
    spec: ModelSpec,
    context_length: int,
    size: CacheSize,
    share: float | None,
    draft: DraftMemory = NO_DRAFTS,
    spec_type: str = "none",
    streamed: float = 0.0,
) -> RunPlan:
    """share: of the experts that are in slots; None: all are on the device. size: of caches with trees.
    streamed: what share of missing experts is read over the bus.
    """
    if share is None:
        draft = replace(draft, num_tree_rows=size.num_tree_rows)
        plan = resident_plan(file, spec, context_length, draft=draft)
    else:
        sizes = {"context_length": context_length, "chunk_size": 256, "ring_bytes": 8 * 2**20, "threads": 4}
        plan = partial_plan(file, spec, round(share * spec.num_experts), streamed=streamed, **sizes)
    fixed = replace(plan.placement.fixed, num_tree_rows=size.num_tree_rows)
    return replace(plan, placement=replace(plan.placement, fixed=fixed), spec_type=spec_type)
