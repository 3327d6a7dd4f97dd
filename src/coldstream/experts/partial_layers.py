"""The state around a model's steps if its GPU does not hold all feed-forward networks of a dense model."""

from coldstream.experts.cpu.disk_tier import DiskStatistics, Progress
from coldstream.experts.dense_layers import LayerExecutor
from coldstream.experts.expert_map import ExpertMap
from coldstream.experts.expert_stream import StreamCounters
from coldstream.experts.gpu_statistics import GpuExpertStatistics
from coldstream.experts.host import HostExperts
from coldstream.experts.slots.cache import ExpertCache
from coldstream.kernels.experts.executor import ModelExecutor
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, Mailbox
from coldstream.placement.policies import Policy
from coldstream.placement.run_plan import RunPlan


class PartialLayers:
    """In place of `PartialExperts`, which has the meaning of the methods: nothing moves between steps.

    mailbox: for one expert of all layers of the model.
    """

    disk: DiskStatistics | None = None
    cache: ExpertCache | None = None
    shared_rows: int = MAX_MAILBOX_ROWS  # most rows of a step in which the CPU computes layers
    stream_counters: StreamCounters | None = None

    def __init__(self, mailbox: Mailbox, plan: RunPlan) -> None:
        self._plan = plan
        # Prompts ask the CPU for nothing, so that the smallest mailbox will do for them.
        bulk = Mailbox.create(1, mailbox.x.shape[1], 1)
        self.host = HostExperts(plan.threads, mailbox, bulk, 1)
        self._num_running = 0

    def attach(self, executor: ModelExecutor) -> None:
        """Call once, before the executor's first step."""
        assert isinstance(executor, LayerExecutor)
        executor.times = self._plan.miss_times

    def fill(self, policy: Policy | None = None, progress: Progress | None = None) -> None:
        """Nothing is left to be filled."""

    def expert_map(self) -> ExpertMap | None:
        """None: no expert is chosen."""
        return None

    def statistics(self) -> GpuExpertStatistics | None:
        """None: no expert is chosen."""
        return None

    def must_wait(self, rows: int) -> bool:
        """Whether no step may begin before `ended` was told of another."""
        return self._num_running > 1

    def start_step(self, rows: int) -> None:
        """Call right before a step of `rows` rows is launched."""
        if rows <= MAX_MAILBOX_ROWS:
            self.host.server.begin()

    def launched(self) -> None:
        """Call right after the launch."""
        self._num_running += 1

    def left_out(self) -> None:
        """Nothing is learnt from any step."""

    def shrink(self) -> int:
        """0: no slots can be freed."""
        return 0

    def ended(self, num_running: int = 0) -> None:
        """Call when all steps have ended but the last `num_running` that were launched.

        Raises ModelChangedError if the file could not be read, and GenerationFault.
        """
        self._num_running = min(self._num_running, num_running)
        if not self._num_running:
            self.host.server.end()
        self.host.server.check()
        self.host.mailbox.check()

    def close(self) -> None:
        """Call when the device is idle; ends threads."""
        self.host.close()
