"""Logits and settings for the kernels' sampler, and the results of decoding's sampler."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from guarded import Guarded
from numpy.typing import NDArray

from coldstream.decoding.choice import TokenChoice
from coldstream.decoding.logprobs import RankedLogprob, logprobs_of, token_logprobs
from coldstream.decoding.sampling import sample_token
from coldstream.decoding.sampling_params import SamplingParams
from coldstream.errors import GenerationFault
from coldstream.kernels.sample.cuda import (
    ROW_BYTES,
    SETTINGS_WORDS,
    are_greedy,
    ranked_words,
    read_ranked,
    sample_cuda,
    write_rows,
)
from coldstream.kernels.sample.settings import Bitmask, RowSettings, bitmask_of


@dataclass(frozen=True)
class Case:
    logits: NDArray[np.float32]
    context: Sequence[int]
    params: SamplingParams
    seed: int
    forbidden_ids: Collection[int] = ()
    mask: Bitmask | None = None

    def settings(self, unseen: int | None = None) -> RowSettings:
        """unseen: the device's result that is the last token of the context."""
        known = self.context if unseen is None else self.context[:-1]
        choice = TokenChoice(self.logits, known, self.params, self.seed, self.forbidden_ids, unseen)
        return replace(choice.settings, allowed=self.mask)

    def expected(self) -> "Chosen":
        """As decoding defines it. Raises GenerationFault."""
        forbidden = self.forbidden_ids
        token = sample_token(self.logits, self.context, self.params, self.seed, forbidden, self.mask)
        count = self.params.logprobs
        return Chosen(token, 0, None if count is None else token_logprobs(self.logits, token, count))


@dataclass(frozen=True)
class Chosen:
    token: int
    fault: int
    logprobs: Sequence[RankedLogprob] | None  # None: they are not wanted, or there is no token


def sample_all(cases: Sequence[Case], *args: Any, **options: Any) -> tuple[list[int], list[int]]:
    """Tokens and faults, by `choose_all`."""
    made = choose_all(cases, *args, **options)
    return [each.token for each in made], [each.fault for each in made]


def choose_all(
    cases: Sequence[Case],
    device: torch.device,
    workspace: torch.Tensor | None = None,
    gap: int = 0,
    *,
    ahead: bool = False,
    may_change: bool = False,
) -> list[Chosen]:
    """Of cases with one vocabulary, whose logits lie in any order and must stay unless they `may_change`.

    ahead: only the device knows the last token of each context.
    """
    num_rows, vocab = len(cases), len(cases[0].logits)
    settings = [case.settings(index if ahead else None) for index, case in enumerate(cases)]
    order = np.random.default_rng(num_rows).permutation(num_rows + 1)[:num_rows].tolist()
    to = np.zeros((num_rows, SETTINGS_WORDS), np.int32)
    num_masks = sum(0 if each.allowed is None else len(each.allowed) for each in settings)
    num_others = sum(len(each.recent) + 2 * len(each.biased) for each in settings)
    recent = np.full(num_others + num_masks, -7, np.int32)
    assert write_rows(settings, order, to, recent) == len(recent)
    logits = torch.full((num_rows + 1, vocab + gap), torch.nan, device=device)
    for case, row in zip(cases, order, strict=True):
        logits[row, :vocab] = torch.from_numpy(case.logits)
    before = logits.clone()
    if workspace is None:
        workspace = torch.zeros(num_rows, ROW_BYTES, dtype=torch.uint8, device=device)
    unchanged = Guarded(len(recent), device=device)
    chosen = Guarded(num_rows, 2, dtype=torch.int32, device=device)
    earlier = torch.tensor([[case.context[-1], 0] for case in cases], dtype=torch.int32, device=device)
    ranked = Guarded(sum(map(ranked_words, settings)), dtype=torch.int32, device=device)
    sample_cuda(
        logits[:, :vocab],
        torch.from_numpy(to).to(device),
        torch.from_numpy(recent).to(device),
        unchanged.tensor,
        workspace,
        chosen.tensor,
        earlier,
        ranked.tensor,
        is_greedy=are_greedy(settings),
    )
    unchanged.checked()
    assert may_change or logits.cpu().numpy().tobytes() == before.cpu().numpy().tobytes()
    words, made, end = ranked.checked().numpy(), [], 0
    for each, (token, fault) in zip(settings, chosen.checked().tolist(), strict=True):
        own = words[end : end + ranked_words(each)]
        end += len(own)
        has_ranks = each.logprobs is not None and fault == 0
        logprobs = logprobs_of(token, read_ranked(each, own, vocab)) if has_ranks else None
        made.append(Chosen(token, fault, logprobs))
    return made


def random_logits(rng: np.random.Generator, vocab: int) -> NDArray[np.float32]:
    kind = rng.integers(7)
    x = rng.standard_normal(vocab) * rng.choice([0.05, 0.5, 1, 3, 8, 30])
    if kind == 0:
        x = np.round(x)  # ties everywhere
    elif kind == 1:
        x = np.full(vocab, rng.choice([0.0, -3.5, 1e30]))
    elif kind == 2:
        x[rng.integers(vocab)] = rng.choice([15, 40, 3e38])  # one stands out
    elif kind == 3:
        x = np.where(rng.random(vocab) < 0.5, -0.0, 0.0) * np.ones(vocab)  # zeros of both signs are equal
    elif kind == 4:
        x = np.repeat(x, 2)[:vocab]
    return x.astype(np.float32)


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    has_penalties, has_biases = rng.random() < 0.4, rng.random() < 0.3
    biases = {int(id_): float(rng.choice([-100, 100, rng.normal()])) for id_ in rng.integers(0, vocab, 20)}
    return SamplingParams(
        temperature=float(rng.choice([0, 1e-3, 0.1, 0.8, 1, rng.uniform(0.1, 2), 20, 1e6])),
        top_k=int(rng.choice([0, 0, 1, 2, 40, rng.integers(1, vocab + 1), vocab, -1, 2**31 - 1])),
        top_p=float(rng.choice([1, 1, 0.95, 0.5, 0, rng.random(), 1 - 2**-53])),
        min_p=float(rng.choice([0, 0, 0.05, rng.random(), 1e-13, 1])),
        repetition_penalty=float(rng.choice([1, 1.1, 0.5, 100])) if has_penalties else 1.0,
        presence_penalty=float(rng.choice([0, 0.7, -2])) if has_penalties else 0.0,
        frequency_penalty=float(rng.choice([0, 0.3, -1.9])) if has_penalties else 0.0,
        repeat_last_n=[None, 0, 1, 8, 64][rng.integers(5)],
        logit_bias=biases if has_biases else None,
        logprobs=[None, None, 0, 1, int(rng.integers(1, 60)), 1000][rng.integers(6)],
    )


def random_case(rng: np.random.Generator, vocab: int) -> Case:
    # A small part of the vocabulary, so that tokens repeat.
    context = rng.integers(0, min(vocab, 30), rng.integers(1, 200)).tolist()
    seed = int(rng.integers(0, 2**64, dtype=np.uint64))
    forbidden_ids = rng.permutation(vocab)[: rng.choice([0, 0, 0, 1, 3, vocab - 1, vocab])].tolist()
    mask = random_mask(rng, vocab) if rng.random() < 0.3 else None
    return Case(random_logits(rng, vocab), context, random_params(rng, vocab), seed, forbidden_ids, mask)


def random_mask(rng: np.random.Generator, vocab: int) -> Bitmask:
    """From no token to all."""
    count = int(rng.choice([0, 1, 1, 2, rng.integers(vocab + 1), vocab]))
    return bitmask_of(rng.permutation(vocab)[:count].tolist(), vocab)


def check_choices(
    cases: Sequence[Case],
    device: torch.device,
    workspace: torch.Tensor | None = None,
    gap: int = 0,
    *,
    ahead: bool = False,
) -> None:
    made = choose_all(cases, device, workspace, gap, ahead=ahead)
    for case, each in zip(cases, made, strict=True):
        try:
            expected = case.expected()
        except GenerationFault:
            assert each.fault != 0
        else:
            assert each == expected, case
