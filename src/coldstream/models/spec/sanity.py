"""Checks of values: of small tensors, to find wrongly converted models before they run, and of logits.

A wrong convention leaves shapes intact and makes fluent garbage. Two conventions show in the values
themselves: norm weights are stored with the 1 added, and `ssm_a` is stored as −exp(A_log). The check of
`ssm_a` is certain, and raises. The check of norms is a likelihood, and only warns.

Weights of experts are not checked: there are too many, and a NaN among them shows in the logits of tokens
that use them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coldstream.errors import InconsistentError, NotFiniteError
from coldstream.models.spec.layer_tensors import ROPE_FACTORS
from coldstream.models.spec.model_spec import ModelSpec

# Halfway to the values that a norm weight is centred on when the 1 was never added (0) or was added twice
# (2), with room for what training does to it.
_LOWEST_NORM_MEAN = 0.25
_HIGHEST_NORM_MEAN = 1.75


def check_small_tensors(
    spec: ModelSpec, tensors: Mapping[str, np.ndarray], named: Callable[[str], str] = str
) -> tuple[str, ...]:
    """Warnings for people; InconsistentError with the likely cause when values contradict the conventions of
    GGUF.

    `tensors` maps names to float32 arrays in the shapes of the table; only those present are judged:
    the first norms of the trunk's layers together, and each `ssm_a`. Every given tensor must be finite. Only
    biases of routers may be −∞, by which files disable experts. named: what errors call a tensor.
    """
    for name, values in tensors.items():
        is_bias = name.endswith((".exp_probs_b.bias", ".ffn_gate_inp.bias"))
        if not (np.isfinite(values) | (is_bias & (values == -np.inf))).all():
            raise InconsistentError(
                f"{named(name)} holds a NaN or an infinity: the file is damaged, download it again"
            )
        if name.endswith(".ssm_a") and (values >= 0).any():
            raise InconsistentError(
                f"{named(name)} holds {values.max():.3g}, expected values below 0: the converter seems to "
                "have stored A_log instead of -exp(A_log). Convert the model with a current converter"
            )
    norm = "attn_norm" if spec.hyper_connections is None else "hc_attn_norm"
    names = (f"blk.{layer}.{norm}.weight" for layer in range(spec.num_layers))
    means = [float(tensors[name].mean()) for name in names if name in tensors]
    if means and not _LOWEST_NORM_MEAN <= (center := _median(means)) <= _HIGHEST_NORM_MEAN:
        cause = "never added 1 to" if center < 1 else "added 1 twice to"
        return (
            f"the {norm} weights are centred on {center:.2f}, expected about 1: the converter "
            f"may have {cause} the norm weights. If the text is garbled, convert the checkpoint again",
        )
    return ()


def check_rope_factors(factors: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """What frequencies are multiplied by, of the numbers of the file that divide them.

    Raises InconsistentError unless these are positive; a very great one stops its pair.
    """
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise InconsistentError(
            f"{ROPE_FACTORS} holds {factors.min():.3g}, expected values above 0: the file is damaged, "
            "download it again"
        )
    return tuple(1 / float(factor) for factor in factors)


def _median(values: Sequence[float]) -> float:
    """Of some finite values. That of numpy would import its masked arrays, which takes 8 ms of a start."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def check_logits(logits: np.ndarray[Any, Any], position: int) -> None:
    """Raises GenerationFault unless all float32 logits [vocab], or [rows, vocab], are finite.

    position: of the token that the (first row of) logits are for, as the error names it.
    """
    finite = np.isfinite(logits)
    if finite.all():
        return
    rows, finite = np.atleast_2d(logits), np.atleast_2d(finite)
    row = int(np.argmin(finite.all(axis=1)))
    raise damaged_logits(int((~finite[row]).sum()), rows.shape[1], position + row)


def damaged_logits(num_bad: int, vocab_size: int, position: int) -> NotFiniteError:
    """The error for logits after which no token can be chosen, as they are not finite."""
    return NotFiniteError(
        f"{num_bad} of {vocab_size} logits at position {position} are not finite; the model's "
        "weights or its state are damaged. The next request starts from an empty state; if it fails too, "
        "download the model again"
    )
