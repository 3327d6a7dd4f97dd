"""coldstream: Mixture-of-Experts language models larger than the GPU, from GGUF files."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coldstream.decoding import SamplingParams
    from coldstream.engine import LLM, Piece, RequestOutput

__all__ = ["LLM", "Piece", "RequestOutput", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for: the command line's help must not pay for them."""
    if name in __all__:
        from coldstream import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
