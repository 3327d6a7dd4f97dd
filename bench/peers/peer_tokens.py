"""The token sequence both sides of a paired benchmark are fed; plain Python for any interpreter."""

FIRST_TOKEN = 1000  # where generation begins
PROMPT_LENGTH = 64  # of each of several sequences


def random_tokens(count: int, seed: int) -> list[int]:
    """`count` ids in 0 … 255 from a 64-bit linear congruential generator."""
    value, tokens = seed * 2654435761 + 1, []
    for _ in range(count):
        value = (value * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append(value >> 56)
    return tokens
