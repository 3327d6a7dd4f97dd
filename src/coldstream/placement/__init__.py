"""Hardware, and the placement of a model on it."""

from coldstream.placement.hardware import Hardware
from coldstream.placement.routing_trace import RoutedModel, RoutingTrace

__all__ = ["Hardware", "RoutedModel", "RoutingTrace"]
