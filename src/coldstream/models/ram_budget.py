"""What a model takes of RAM, and what of it may be left on the disk."""

from dataclasses import dataclass
from typing import Self

from coldstream.errors import OutOfMemoryError
from coldstream.experts.disk_tier import DiskTier
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.models.footprint import dense_bytes, trunk_bytes
from coldstream.models.spec import ModelSpec
from coldstream.placement.policies import Policy

_STACKS = ("ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def expert_stacks(file: GGUFFile, spec: ModelSpec) -> list[list[TensorInfo]]:
    """The tensors of routed experts of each layer of the trunk."""
    names = [[f"blk.{layer}.{name}.weight" for name in _STACKS] for layer in range(spec.num_layers)]
    return [[file.tensors[name] for name in layer if name in file.tensors] for layer in names]


@dataclass(frozen=True)
class RamNeeds:
    """Bytes of a model on the CPU. What lies between the three and `all_bytes` may come from the disk."""

    dense_bytes: int  # weights that every token reads
    cache_bytes: int  # of the whole context
    activation_bytes: int
    all_bytes: int  # with all weights

    @classmethod
    def of(cls, file: GGUFFile, spec: ModelSpec, cache_bytes: int, activation_bytes: int) -> Self:
        """Of the model in `file`."""
        return cls(
            dense_bytes=dense_bytes(spec, file.tensors),
            cache_bytes=cache_bytes,
            activation_bytes=activation_bytes,
            all_bytes=trunk_bytes(spec, file.tensors) + cache_bytes + activation_bytes,
        )

    @property
    def fixed_bytes(self) -> int:
        """All but routed experts."""
        return self.dense_bytes + self.cache_bytes + self.activation_bytes

    def too_much(self, ram_bytes: int, min_expert_bytes: int) -> OutOfMemoryError:
        """The error for a budget that leaves less than `min_expert_bytes` for experts."""
        need = self.fixed_bytes + min_expert_bytes
        return OutOfMemoryError(
            f"this model needs {_mebibytes(need)} of RAM and may take {_mebibytes(ram_bytes)}: "
            f"{_mebibytes(self.dense_bytes)} for weights that every token reads, "
            f"{_mebibytes(self.cache_bytes)} for the context, {_mebibytes(self.activation_bytes)} for "
            f"activations, {_mebibytes(min_expert_bytes)} for the experts of one token in a layer; try "
            f"--ram {-(-need // 2**20)}M or a smaller --ctx-size"
        )


def disk_tier_within(
    ram_bytes: int, needs: RamNeeds, file: GGUFFile, spec: ModelSpec, policy: Policy | None = None
) -> DiskTier | None:
    """A tier for the experts that `ram_bytes` has no room for, with its memory; None if there is for all.

    Raises OutOfMemoryError if there is none for what each token needs.
    """
    if needs.all_bytes <= ram_bytes:
        return None
    if not spec.is_moe:
        raise needs.too_much(ram_bytes, 0)
    tier = DiskTier(file, expert_stacks(file, spec), spec.num_experts_per_tok, policy)
    if ram_bytes - needs.fixed_bytes < tier.min_bytes:
        raise needs.too_much(ram_bytes, tier.min_bytes)
    tier.allocate(ram_bytes - needs.fixed_bytes)
    return tier


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
