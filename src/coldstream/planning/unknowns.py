"""What a choice may depend on and does not know yet: counts and rates, which cost time.

Counting a model's memory takes a part of a start, and measuring the machine takes seconds. So neither is done
before a choice asks for it. Each kind is a record, the key under which `Facts` has the answer.
"""

from dataclasses import dataclass

from coldstream.models.runner_capacity import NO_DRAFTS, DraftMemory, RunnerCapacity
from coldstream.placement.plan import FixedPart

# Of a runner on the CPU with experts mapped, and with some in slots; the latter is None for a dense model.
RamParts = tuple[FixedPart, FixedPart | None]


@dataclass(frozen=True)
class GpuShape:
    """The memory of a runner on a GPU beside experts."""

    capacity: RunnerCapacity
    chunk_size: int  # tokens of a step of prefill
    attention_window: int | None = None


@dataclass(frozen=True)
class RamShape:
    """The RAM of a runner on the CPU beside experts, with its experts mapped and with some in slots."""

    threads: int
    tier: str  # of kernels
    ctx_size: int
    kv_type: str
    num_contexts: int = 1
    draft: DraftMemory = NO_DRAFTS
    attention_window: int | None = None


@dataclass(frozen=True)
class WorkspaceShape:
    """The RAM of activations of CPU threads that compute experts beside a GPU."""

    threads: int
    num_rows: int  # most rows of a step


@dataclass(frozen=True)
class MachineRates:
    """Bytes and operations per second of the machine."""


Unknown = GpuShape | RamShape | WorkspaceShape | MachineRates


@dataclass(frozen=True)
class Missing:
    """The answer of a choice that has to know something first."""

    what: Unknown


class NotKnownError(Exception):
    """Ends a choice that has to know something first. It never leaves this room."""

    def __init__(self, what: Unknown) -> None:
        super().__init__(what)
        self.what = what
