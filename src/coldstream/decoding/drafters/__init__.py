"""Drafters, which propose tokens for the model to verify."""
