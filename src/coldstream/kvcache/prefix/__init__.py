"""Prefixes of prompts that are kept, in a model's own memory, in RAM and in files."""
