"""The n-gram embedding that some families add to the residual streams of a layer.

For a row whose token is t_0 and those before it t_1, t_2, …, with C streams X_c of E values:

    r_h    = (m_0·t_0 xor … xor m_{n−1}·t_{n−1}) mod size_h + offset_h     `ngram_ids`: a head of n-grams of n
    e      = the rows r_h of the table side by side                        `ngram_rows`
    k, v   = key · e, value · e;  k and X are normed stream by stream
    a_c    = k_c · X_c / sqrt(E);  s_c = sigmoid(sign(a_c) · sqrt(max(|a_c|, 10⁻⁶)))
    G_c    = s_c · v                                                       `ngram_gate`
    N_c    = RMS norm of G_c
    X     ← X + (G + silu(Σ_j taps[:, j] · N of the row (taps − 1 − j) · dilation rows back))  `ngram_conv`

What comes before an end token, or before a text, counts as that token. Products are of 64 bits without sign.
The state between rows is the last tokens, each as its id plus 1 (0: none), and the last rows N.
"""

from collections.abc import Callable
from functools import partial

import torch

from coldstream.kernels.arithmetic import reference as exact
from coldstream.kernels.dequantize.integer_blocks import grouped
from coldstream.kernels.gated_delta_net.exact import convolve
from coldstream.kernels.gated_delta_net.reference import causal_conv
from coldstream.kernels.ops import CommittedPath, NgramHash, NgramState, Rows
from coldstream.kernels.sequences import is_tree, parts_of_states, path, sequences

SMALLEST_GATE = 1e-6
MASK = 2**64 - 1


def ngram_ids(token_ids: torch.Tensor, hashing: NgramHash, state: NgramState, rows: Rows) -> torch.Tensor:
    """See `Ops.ngram_ids`."""
    context = len(hashing.multipliers) - 1
    out = torch.zeros(len(token_ids), len(hashing.sizes), dtype=torch.int32)

    def run(part: list[int], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        history = torch.cat((before, token_ids[part].to(torch.int32) + 1))
        ids = [_hashed(history[: context + i + 1].tolist(), hashing) for i in range(len(part))]
        return torch.tensor(ids, dtype=torch.int32), history[len(part) :]

    _each_sequence(rows, state.tokens, run, out)
    if rows.batch is not None and state.kept_tokens is not None:
        in_tree = rows.batch.kept >= 0
        state.kept_tokens[rows.batch.kept[in_tree].long()] = token_ids[in_tree].to(torch.int32) + 1
    return out


def _hashed(history: list[int], hashing: NgramHash) -> list[int]:
    """The rows of the last token of a history of ids plus 1."""
    token, *before = reversed(history)
    mixed = (token - 1) * hashing.multipliers[0] & MASK
    ids: list[int] = []
    has_ended = False
    for found, multiplier in zip(before, hashing.multipliers[1:], strict=False):
        has_ended = has_ended or found == 0 or found - 1 == hashing.end_token
        mixed ^= (hashing.end_token if has_ended else found - 1) * multiplier & MASK
        heads = slice(len(ids), len(ids) + hashing.heads_per_order)
        ids += [
            mixed % size + offset
            for size, offset in zip(hashing.sizes[heads], hashing.offsets[heads], strict=True)
        ]
    return ids


def ngram_gate(key: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """See `Ops.ngram_gate`."""
    size = value.shape[-1]
    gate = (grouped(key, -1, size) * grouped(query, -1, size)).sum(dim=-1, keepdim=True) / size**0.5
    logit = gate.abs().clamp_min(SMALLEST_GATE).sqrt() * gate.sign()
    return (torch.sigmoid(logit) * value.unsqueeze(-2)).flatten(-2)


def ngram_gate_exact(key: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`ngram_gate` to the last bit."""
    size = value.shape[-1]
    pairs = zip(grouped(key, -1, size).flatten(0, 1), grouped(query, -1, size).flatten(0, 1), strict=True)
    each = [exact.dot_lanes(one.unsqueeze(0), other.unsqueeze(0)) for one, other in pairs]
    products = torch.cat([*each, value.new_zeros(0, 1)]).reshape(len(key), -1, 1)
    gate = products / _root(exact.constant(size))
    logit = _root(gate.abs().clamp_min(exact.constant(SMALLEST_GATE))) * gate.sign()
    return (exact.sigmoid(logit) * value.unsqueeze(-2)).flatten(-2)


def _root(x: torch.Tensor) -> torch.Tensor:
    """As IEEE 754 rounds it, which PyTorch's float32 root does not always."""
    return x.double().sqrt().float()


def ngram_conv(
    streams: torch.Tensor,
    gated: torch.Tensor,
    normed: torch.Tensor,
    taps: torch.Tensor,
    dilation: int,
    state: NgramState,
    rows: Rows,
    *,
    is_exact: bool = False,
) -> torch.Tensor:
    """See `Ops.ngram_conv`."""
    # What lies between the weights of the dilated convolution is 0, and adds nothing.
    spread = taps.new_zeros(taps.shape[0], (taps.shape[1] - 1) * dilation + 1)
    spread[:, ::dilation] = taps
    out = torch.zeros_like(normed)

    def run(part: list[int], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_exact:
            return causal_conv(normed[part], before, spread)
        history = torch.cat((before, normed[part]))
        return convolve(history, spread), history[len(part) :]

    _each_sequence(rows, state.conv, run, out)
    if rows.batch is not None and state.kept_rows is not None:
        in_tree = rows.batch.kept >= 0
        state.kept_rows[rows.batch.kept[in_tree].long()] = normed[in_tree]
    return streams + (gated + out)


ngram_conv_exact = partial(ngram_conv, is_exact=True)


def _each_sequence(
    rows: Rows,
    states: torch.Tensor,
    run: Callable[[list[int], torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    out: torch.Tensor,
) -> None:
    """Runs rows after what comes before them: (rows, state) → (results, next state). Mutates both."""
    for first_state, part in sequences(rows):
        if is_tree(rows, part):
            for row in range(part.start, part.stop):
                out[row] = run(path(rows, row), states[first_state].clone())[0][-1]
            continue
        before = states[first_state].clone()
        for state_id, of_state in parts_of_states(rows, part):
            out[of_state], before = run(list(range(of_state.start, of_state.stop)), before)
            states[state_id] = before


def commit_ngram(state: NgramState, committed: CommittedPath) -> None:
    """See `Ops.commit_ngram`."""
    kept = committed.kept[: int(committed.count[0])].long()
    for values, rows in ((state.tokens, state.kept_tokens), (state.conv, state.kept_rows)):
        assert rows is not None, "a cache for draft trees keeps their rows"
        before = values[int(committed.state_id[0])]
        after = torch.cat((before, rows[kept]))[len(kept) :]
        before.copy_(after)
