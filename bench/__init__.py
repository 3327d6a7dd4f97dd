"""Benchmarks, and what they share. Each runs as a module, from the root of the checkout."""
