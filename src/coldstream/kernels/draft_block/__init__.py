"""The layers of a drafter that computes a block of rows at once, between their products."""

HEAD_SIZES = (32, 64, 96, 128, 192, 256)  # for which there are kernels of a GPU
