"""Kernels by themselves: their time, their rounding and their bits, and the rates of the machine."""
