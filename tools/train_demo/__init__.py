"""Builds the bundled demo model: data, tokenizer, training, conversion to GGUF and its evaluation.

`python -m tools.train_demo build` does everything; the README beside this file says what it needs.
"""
