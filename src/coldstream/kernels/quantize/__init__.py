"""Activations as integers with scales."""

# Values of a row that can be quantised: every integer type has blocks of 32 or 256.
COLS_MULTIPLE = 32
