"""coldstream: Mixture-of-Experts language models larger than the GPU, from GGUF files."""

__version__ = "0.1.0"
