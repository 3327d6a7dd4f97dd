"""A model and its drafters on the CPU."""
