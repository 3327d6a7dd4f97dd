"""The layers of a drafter that computes a block of rows at once, between their products."""

# For which there are kernels of a GPU.
HEAD_SIZES = (32, 64, 96, 128, 192, 256)
MAX_CANDIDATES = 16  # of a position
