"""A model and its drafters on one GPU."""
