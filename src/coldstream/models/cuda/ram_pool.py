"""The pool in RAM of a model on a GPU, as its plan says."""

from coldstream.experts.pooled_stacks import PooledStacks
from coldstream.experts.ram_pool import RamPool
from coldstream.gguf.reader import GGUFFile
from coldstream.models.ram_budget import expert_stacks
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.run_plan import RunPlan


def ram_pool(plan: RunPlan, file: GGUFFile, spec: ModelSpec) -> RamPool | None:
    """The pool of `plan`, empty; None if it has none. Raises MemoryError."""
    if plan.pool is None:
        return None
    sizes = plan.pool.expert_bytes
    partial = [stacks for stacks, size in zip(expert_stacks(file, spec), sizes, strict=True) if size]
    pooled = PooledStacks(file, partial)
    assert pooled.expert_bytes == tuple(filter(None, sizes)), "a plan has the sizes of its slots"
    return RamPool(pooled, plan.pool.slots, spec.num_experts_per_tok)
