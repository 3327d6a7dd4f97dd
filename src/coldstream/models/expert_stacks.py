"""Where a model's file has its experts, and the tier for those that stay on the disk."""

from dataclasses import replace

from coldstream.experts.cpu.disk_tier import DiskTier
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.models.footprint import FFN_MATRICES
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.policies import DecayedFrequency, Policy
from coldstream.placement.run_plan import RunPlan

_STACKS = ("ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def expert_stacks(file: GGUFFile, spec: ModelSpec) -> list[list[TensorInfo]]:
    """The tensors of routed experts of each layer of the trunk that has some."""
    names = [[f"blk.{layer}.{name}.weight" for name in _STACKS] for layer in spec.placed_layers]
    return [[file.tensors[name] for name in layer if name in file.tensors] for layer in names]


def placed_stacks(file: GGUFFile, spec: ModelSpec) -> list[list[TensorInfo]]:
    """What a GPU may lack: `expert_stacks`, or the FFNs of a dense model as stacks of one."""
    if spec.is_moe:
        return expert_stacks(file, spec)
    names = [[f"blk.{layer}.{name}.weight" for name in FFN_MATRICES] for layer in spec.placed_layers]
    infos = [[file.tensors[name] for name in layer] for layer in names]
    return [[replace(info, shape=(1, *info.shape)) for info in layer] for layer in infos]


def placed_bytes(file: GGUFFile, spec: ModelSpec) -> int:
    """Bytes in the file of all that a GPU may lack."""
    return sum(info.num_bytes for layer in placed_stacks(file, spec) for info in layer)


def shards_of_experts(file: GGUFFile, spec: ModelSpec) -> frozenset[int]:
    """Parts of the file with something that a GPU may lack."""
    return frozenset(info.shard for layer in placed_stacks(file, spec) for info in layer)


def disk_tier(file: GGUFFile, spec: ModelSpec, policy: Policy | None = None) -> DiskTier:
    """A tier for the experts of the model in `file`, without slots."""
    return DiskTier(file, expert_stacks(file, spec), spec.num_experts_per_tok, policy)


def disk_tier_of(
    plan: RunPlan, file: GGUFFile, spec: ModelSpec, policy: Policy | None = None
) -> DiskTier | None:
    """A tier with the slots of `plan`, a plan for RAM; None if it leaves nothing on the disk.

    Nothing is loaded yet. Raises MemoryError.
    """
    placement = plan.placement
    if placement.is_all_resident:
        return None
    tier = disk_tier(file, spec, policy or DecayedFrequency(weights=placement.expert_weights))
    assert tier.expert_bytes == placement.expert_bytes, "a plan for RAM has the sizes of its slots"
    tier.allocate(placement.slots, plan.expected_uses, placement.pinned_layers)
    return tier
