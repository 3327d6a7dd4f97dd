"""Opens the runner that a plan is for."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.experts.executor import ExecutorFactory
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.expert_stacks import shards_of_experts
from coldstream.models.runner import ModelRunner
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.checked_policy import CheckedPolicy
from coldstream.placement.controls import Controls
from coldstream.placement.policies import Policy
from coldstream.placement.run_plan import RunPlan

if TYPE_CHECKING:
    from coldstream.experts.file_lock import FileLock

NOTHING_MOVES: Final = Controls()


def lock_file(file: GGUFFile, spec: ModelSpec) -> "FileLock":
    """Begins to lock all parts of an open file that a GPU may lack. Needs the packages for a GPU."""
    from coldstream.experts.file_lock import FileLock

    return FileLock(file, shards_of_experts(file, spec))


def load_runner(
    file: GGUFFile,
    spec: ModelSpec,
    plan: RunPlan,
    tier: str,
    policy: Policy | None,
    executor: ExecutorFactory | None,
    progress: Callable[[str, int, int], None] | None,
    aux_layers: tuple[int, ...] = (),
    lock: "FileLock | None" = None,
    *,
    is_early: bool = False,
    first_rows: int | None = None,
    controls: Controls = NOTHING_MOVES,
) -> ModelRunner:
    """The model of an open file on the device of `plan`, which then owns the file.

    tier: of a CPU's kernels. policy, executor: the caller's; None: the defaults. progress: called with the
    name of the task, the amount done and the whole amount. aux_layers: layers whose residual streams a
    drafter reads. lock: of `lock_file`, if it was begun; the caller closes it in the end. is_early:
    whether the first steps may be slow. first_rows: of the first prompt, about, if one is known. controls:
    what moves on a GPU. Raises as the runners' `load`; the file stays open then.
    """
    loading = partial(progress, "loading") if progress else None
    checked = CheckedPolicy(policy) if policy else None
    if plan.placement.tier == "ram":
        return CpuRunner.load(
            file, spec, plan, tier=tier, policy=checked, progress=loading, aux_layers=aux_layers
        )
    # Imported here because its kernels need packages that a machine without a GPU does not have.
    from coldstream.models.cuda.runner import CudaRunner

    runner = CudaRunner.load(
        file,
        spec,
        plan,
        policy=checked,
        executor=executor,
        progress=loading,
        compiling=partial(progress, "compiling kernels") if progress else None,
        aux_layers=aux_layers,
        lock=lock,
        is_early=is_early,
        first_rows=first_rows,
    )
    runner.control(controls)
    return runner
