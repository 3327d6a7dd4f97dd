"""Sizes of a GPU's runner that plans count before there is one. Needs none of CUDA's packages."""

from typing import Final

from coldstream.models.spec.model_spec import ModelSpec

MAX_GRAPHS: Final = 48
GRAPH_BYTES: Final = MAX_GRAPHS * 4 * 2**20  # memory of the driver for captured graphs
RESERVE_BYTES: Final = 256 * 2**20  # memory of the driver for loaded kernels
HEAD_ROWS: Final = 64  # of one call of the head, whose logits fit into page-locked memory of the host


def mailbox_ranks(spec: ModelSpec) -> int:
    """Experts of a row in a mailbox: the FFN of a dense layer is the only expert of a row."""
    return max(1, spec.num_experts_per_tok)
