"""Hyper-connections: several residual streams in place of one."""
