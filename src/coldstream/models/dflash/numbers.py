"""Checks of a DFlash drafter's numbers that the readers of all file formats share."""

from coldstream.errors import InconsistentError, LimitError
from coldstream.gguf.metadata import Metadata
from coldstream.models.dflash import spec as limits
from coldstream.models.dflash.spec import Dflash2Spec, DflashSpec


def check_numbers(spec: DflashSpec, keys: Metadata, *, taps: str, num_kv_heads: str, head_dim: str) -> None:
    """Raises InconsistentError or LimitError for numbers that fit no drafter together, naming the key.

    taps, num_kv_heads, head_dim: what the file calls them.
    """
    if spec.num_heads % spec.num_kv_heads:
        problem = f"{spec.num_kv_heads} heads of keys do not divide {spec.num_heads} of queries"
        raise keys.error(InconsistentError, num_kv_heads, problem)
    if spec.head_dim % 2:
        raise keys.error(InconsistentError, head_dim, f"{spec.head_dim} is odd, and halves are rotated")
    if not spec.taps or list(spec.taps) != sorted(set(spec.taps)):
        problem = f"{list(spec.taps)!s:.60}: expected layers in ascending order"
        raise keys.error(InconsistentError, taps, problem)
    if len(spec.taps) > limits.MAX_TAPS:
        raise keys.error(LimitError, taps, f"{len(spec.taps)} layers, the limit is {limits.MAX_TAPS}")
    if spec.num_target_layers is not None and spec.taps[-1] >= spec.num_target_layers:
        problem = f"layer {spec.taps[-1]} of a model with {spec.num_target_layers} layers"
        raise keys.error(InconsistentError, taps, problem)


def read_second(
    keys: Metadata, names: tuple[str, str, str, str], hidden_size: int, vocab_size: int
) -> Dflash2Spec | None:
    """The numbers of the second kind; None if the file has none of them.

    names: what it calls the rows of a convolution, its groups, the selector's rank and its candidates.
    """
    if not any(name in keys for name in names):
        return None
    kernel, group, rank, top_k = names
    second = Dflash2Spec(
        conv_kernel=keys.integer(kernel, 1, limits.MAX_CONV_KERNEL),
        conv_group=keys.integer(group, 1, hidden_size),
        selector_rank=keys.integer(rank, 1, limits.MAX_SELECTOR_RANK),
        selector_top_k=keys.integer(top_k, 1, min(limits.MAX_SELECTOR_TOP_K, vocab_size)),
    )
    if hidden_size % second.conv_group:
        problem = f"{second.conv_group} does not divide the hidden size {hidden_size}"
        raise keys.error(InconsistentError, group, problem)
    return second
