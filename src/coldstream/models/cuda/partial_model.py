"""What stands around the steps of a model whose GPU does not hold all of it."""

from coldstream.experts.cpu.pooled_stacks import PooledStacks
from coldstream.experts.dense_layers import PartialLayers
from coldstream.experts.partial_experts import PartialExperts
from coldstream.experts.ram_pool import RamPool
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.models.cuda.capacity import mailbox_ranks
from coldstream.models.expert_stacks import expert_stacks, placed_stacks
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.run_plan import RunPlan

PartialModel = PartialExperts | PartialLayers


def partial_model(plan: RunPlan, file: GGUFFile, spec: ModelSpec) -> PartialModel:
    """The part of `plan` that is not on the GPU; begins to map the file, beside what comes next.

    Raises MemoryError.
    """
    mailbox = Mailbox.create(mailbox_ranks(spec), spec.hidden_size, plan.shared_rows)
    partial: PartialModel
    if spec.is_moe:
        partial = PartialExperts(mailbox, plan, _ram_pool(plan, file, spec))
    else:
        partial = PartialLayers(mailbox, plan)
    stacks = (info for layer in placed_stacks(file, spec) for info in layer)
    partial.host.map_ahead(file, {info.shard for info in stacks})
    return partial


def _ram_pool(plan: RunPlan, file: GGUFFile, spec: ModelSpec) -> RamPool | None:
    """The pool of `plan`, empty; None if it has none. Raises MemoryError."""
    if plan.pool is None:
        return None
    sizes = plan.pool.expert_bytes
    partial = [stacks for stacks, size in zip(expert_stacks(file, spec), sizes, strict=True) if size]
    pooled = PooledStacks(file, partial)
    assert pooled.expert_bytes == tuple(filter(None, sizes)), "a plan has the sizes of its slots"
    return RamPool(pooled, plan.pool.slots, spec.num_experts_per_tok)
