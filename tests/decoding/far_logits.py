"""Logits on a device that chooses by `sample_token`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coldstream.decoding.logprobs import ranked_tokens
from coldstream.decoding.sampling import sample_token
from coldstream.decoding.sampling_params import Logits, SamplingParams
from coldstream.errors import GenerationFault
from coldstream.kernels.sample.settings import NO_FINITE, RankedTokens, RowSettings

Result = tuple[int, int]


@dataclass
class FarDevice:
    """All results of a device, in order, of which the host learns when it waits."""

    results: list[Result] = field(default_factory=list)
    num_waits: int = 0
    num_known: int = 0  # of the results
    ranked: dict[int, RankedTokens] = field(default_factory=dict)  # by result


@dataclass(frozen=True)
class FarChoice:
    device: FarDevice
    first: int
    count: int
    has_indices = True

    def index(self, row: int) -> int:
        return self.first + row

    def results(self) -> list[Result]:
        self.device.num_waits += 1
        self.device.num_known = self.first + self.count
        return self.device.results[self.first : self.first + self.count]

    def ranked(self, row: int) -> RankedTokens:
        return self.device.ranked[self.first + row]


class FarStep:
    """Logits of a step that counts what is asked of it."""

    def __init__(self, values: Logits, device: FarDevice | None = None) -> None:
        self.values = values
        self.device = device or FarDevice()
        self.chosen: list[list[int]] = []  # rows of each call
        self.brought: list[list[int]] = []
        self.observed: list[RowSettings] = []

    def __getitem__(self, row: int) -> "FarLogits":
        return FarLogits(self, row)

    def begin(self, rows: Sequence[int], settings: Sequence[RowSettings]) -> FarChoice:
        self.chosen.append(list(rows))
        self.observed += settings
        first = len(self.device.results)
        found = [
            self._choose(self.values[row], each, offset)
            for offset, (row, each) in enumerate(zip(rows, settings, strict=True))
        ]
        self.device.results += found
        return FarChoice(self.device, first, len(rows))

    def _choose(self, logits: Logits, settings: RowSettings, offset: int) -> Result:
        """offset: of the result behind those that there are."""
        observed = dict(vars(settings))
        recent, seed, position = observed.pop("recent"), observed.pop("seed"), observed.pop("position")
        biases = dict(zip(observed.pop("biased"), observed.pop("biases"), strict=True))
        forbidden_ids = [id_ for id_, bias in biases.items() if bias == -np.inf]
        observed["logit_bias"] = {id_: bias for id_, bias in biases.items() if id_ not in forbidden_ids}
        allowed, logprobs = observed.pop("allowed"), observed.pop("logprobs")
        known = [self.device.results[-1 - id_][0] if id_ < 0 else id_ for id_ in recent]
        context = [0] * (position - len(recent)) + known
        if num_bad := int((~np.isfinite(logits)).sum()):
            return 0, num_bad
        try:
            params = SamplingParams(**observed, repeat_last_n=len(recent))
            token = sample_token(logits, context, params, seed, forbidden_ids, allowed)
        except GenerationFault:
            return 0, NO_FINITE
        if logprobs is not None:
            self.device.ranked[len(self.device.results) + offset] = ranked_tokens(logits, token, logprobs)
        return token, 0

    def bring(self, rows: Sequence[int]) -> Logits:
        self.brought.append(list(rows))
        return self.values[list(rows)]


@dataclass(frozen=True)
class FarLogits:
    step: FarStep
    row: int

    def __len__(self) -> int:
        return self.step.values.shape[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Logits:
        return self.step.bring([self.row])[0]
