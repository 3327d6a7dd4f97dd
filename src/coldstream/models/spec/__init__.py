"""The numbers and tensors of a model, read from its file and checked; the layers as records."""
