"""The terminal: one module per verb. Knows no tensors; generation goes through `coldstream.engine`."""
