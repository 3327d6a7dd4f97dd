"""Fused speculative steps: drafting, verifying and accepting on the device, one step after another."""
