"""What the machine has, and what goes where."""

from coldstream.placement.hardware import Hardware
from coldstream.placement.routing_trace import RoutedModel, RoutingTrace

__all__ = ["Hardware", "RoutedModel", "RoutingTrace"]
