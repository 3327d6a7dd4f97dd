"""Parts of the engine that a caller replaces: objects, which a configuration cannot hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from coldstream.errors import ConfigError, shown
from coldstream.kernels.experts.executor import ExecutorFactory
from coldstream.placement.policies import Policy


@dataclass(frozen=True)
class OwnParts:
    """The caller's parts, None for the product's. Creation raises ConfigError for objects of a wrong kind."""

    policy: Policy | None = None  # for one model at a time, as it has state
    executor: ExecutorFactory | None = None

    def __post_init__(self) -> None:
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise ConfigError(f"policy must be an object of a subclass of Policy, not {shown(self.policy)}")
        if self.executor is not None and not callable(self.executor):
            raise ConfigError(
                f"executor must be a function or class that makes one, not {shown(self.executor)}"
            )

    def check(self, device: str, layer_weights: Sequence[float]) -> None:
        """Raises ConfigError for parts that a device, and a plan with these weights, would not use."""
        if self.executor is not None and device == "cpu":
            raise ConfigError("executor is for a GPU, and the device is the CPU: leave it out")
        if self.policy is not None and layer_weights:
            raise ConfigError(
                "policy: the plan weighs layers, which the product's policy does: leave policy out, or make "
                "the plan without --layer-weights"
            )
