"""What stands around the steps of a model whose GPU does not hold all of it."""

from coldstream.experts.partial_experts import PartialExperts
from coldstream.experts.partial_layers import PartialLayers
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.models.cuda.capacity import mailbox_ranks
from coldstream.models.cuda.ram_pool import ram_pool
from coldstream.models.ram_budget import placed_stacks
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
        partial = PartialExperts(mailbox, plan, ram_pool(plan, file, spec))
    else:
        partial = PartialLayers(mailbox, plan)
    stacks = (info for layer in placed_stacks(file, spec) for info in layer)
    partial.host.map_ahead(file, {info.shard for info in stacks})
    return partial
