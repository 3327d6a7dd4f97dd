"""What the machine has, and what goes where."""

from coldstream.placement.hardware import Hardware

__all__ = ["Hardware"]
