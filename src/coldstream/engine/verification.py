"""Checks a model on this machine: the same tokens whatever the budget, drafts, threads or device; and speeds.

Each part opens the model's file anew with other settings, and generates by `LLM`. The first part is the
reference. Tokens and perplexities of the others must equal its own, bit for bit. How much is computed follows
from the speed that the reference reaches, so that all parts end in a given time. Knows no terminal.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Final

import numpy as np

from coldstream.assets import verification_text
from coldstream.decoding import SamplingParams
from coldstream.engine.llm import LLM
from coldstream.engine.opened_model import open_model
from coldstream.errors import ConfigError, DeviceError, OutOfMemoryError, UnsupportedError
from coldstream.gguf.hub import resolve_model
from coldstream.placement.forecast import Forecast, forecast
from coldstream.planning.config import EngineConfig
from coldstream.planning.device_choice import OpenProgress, choose_device
from coldstream.planning.draft_file import Target, open_target
from coldstream.planning.gather import plan_by_name
from coldstream.planning.planned import Planned

CTX_SIZE: Final = 1024
WINDOW: Final = 256  # tokens whose logits are computed together, from an empty context
SHORT_PROMPT: Final = 64
DRAFT_TOKENS: Final = 4
SEEDS: Final = (11, 12)  # of the sampled answers, which follow the greedy one
_FRACTIONS: Final = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75)  # of the experts in the largest budget
_SHARE_OF_TIME: Final = 0.6  # that is planned; forecasts of slower parts are rough
_CANNOT_RUN: Final = (OutOfMemoryError, ConfigError, DeviceError, UnsupportedError)
_ROWS: Final = 32  # of logits in float64 at a time


@dataclass(frozen=True)
class Amount:
    """What a part computes: one greedy and two sampled answers, and windows of the text."""

    num_prompt: int  # tokens before the greedy answer; before a sampled one there are at most SHORT_PROMPT
    num_generated: int  # by each answer
    num_windows: int  # of the text
    window: int = WINDOW  # tokens of each

    @property
    def num_answers(self) -> int:
        return 1 + len(SEEDS)

    @property
    def tokens_of_windows(self) -> int:
        return self.num_windows * self.window

    @property
    def tokens_read(self) -> int:
        return self.num_prompt + len(SEEDS) * SHORT_PROMPT + self.tokens_of_windows

    @property
    def tokens_generated(self) -> int:
        return self.num_answers * self.num_generated


AMOUNTS: Final = (
    Amount(512, 128, 5),
    Amount(512, 64, 4),
    Amount(512, 32, 2),
    Amount(168, 32, 1),
    Amount(168, 16, 1),
    Amount(64, 8, 1),
)


@dataclass(frozen=True)
class Part:
    """One way to run the model. Without a configuration it cannot run here, for `reason`."""

    name: str
    config: EngineConfig | None = None
    planned: Planned | None = None
    reason: str = ""
    has_forecast: bool = True  # rates are those of all threads, and no plan says how many drafts are accepted

    @cached_property
    def forecast(self) -> Forecast | None:
        """What its plan expects with all threads and without drafts."""
        if self.planned is None:
            return None
        return forecast(self.planned.plan, self.planned.known, pool=self.planned.run.pool)

    @property
    def expected(self) -> Forecast | None:
        """What its plan expects of it."""
        return self.forecast if self.has_forecast else None


@dataclass(frozen=True)
class Measured:
    """What a part generated until its time was over, and how fast, in tokens per second."""

    answers: tuple[tuple[int, ...], ...]  # token ids
    nats: tuple[float, ...]  # by window: minus the logarithm of the probability of its tokens after the first
    tokens_scored: int
    num_prompt: int  # tokens that `prefill` was measured with
    prefill: float
    decode: float
    tokens_per_step: float | None  # None: nothing was drafted

    @property
    def perplexity(self) -> float | None:
        return math.exp(sum(self.nats) / self.tokens_scored) if self.tokens_scored else None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))


@dataclass(frozen=True)
class Outcome:
    """A part, what it measured, and how that differs from the reference; None: in nothing."""

    part: Part
    measured: Measured | None  # None: it did not run, for the part's reason
    difference: str | None = None
    is_reference: bool = False


@dataclass(frozen=True)
class Verification:
    """All parts in order, the reference first."""

    model_name: str
    model_bytes: int
    amount: Amount
    seconds: float  # that it was allowed to take
    outcomes: tuple[Outcome, ...]

    @property
    def has_passed(self) -> bool:
        """Whether no part differs from the reference."""
        return all(outcome.difference is None for outcome in self.outcomes)


def verify(config: EngineConfig, seconds: float, progress: OpenProgress | None = None) -> Verification:
    """Run all parts for the model of `config`, in about `seconds`; the reference runs in any case.

    Budgets of `config` are the largest that are used. Raises as `open_model` and `LLM.generate`.
    """
    path = resolve_model(config.model, offline=config.offline, progress=progress)
    end = time.monotonic() + seconds
    target = open_target(path, config, progress)
    with target.file as file:
        name = str(file.metadata.readable.get("general.name") or file.paths[0].stem)
        num_bytes = file.num_bytes
    reference, *others = parts_of(replace(target, config=replace(config, model=str(path))), progress)
    runnable = [part for part in others if part.config is not None]
    slowness = 1 + sum(_slowness(part, reference) for part in runnable)
    with _Session(reference, progress) as session:
        left = _SHARE_OF_TIME * (end - time.monotonic()) - session.opened_s * len(runnable)
        amount = session.fitting(amount_for(left / slowness, *session.probe()))
        expected = session.measure(amount, math.inf)
    outcomes = [Outcome(reference, expected, is_reference=True)]
    for part in others:
        if part.config is None:
            outcomes.append(Outcome(part, None))
            continue
        now = time.monotonic()
        share = (end - now) / (len(runnable) - runnable.index(part))
        outcomes.append(_outcome(part, amount, now + share, expected, progress))
    return Verification(name, num_bytes, amount, seconds, tuple(outcomes))


def _outcome(
    part: Part, amount: Amount, deadline: float, expected: Measured, progress: OpenProgress | None
) -> Outcome:
    """The part's own, computed until `deadline`, beside what is expected."""
    if time.monotonic() >= deadline:
        return Outcome(replace(part, config=None, reason="the time is over"), None)
    try:
        with _Session(part, progress) as session:
            measured = session.measure(amount, deadline)
    except _CANNOT_RUN as error:
        return Outcome(replace(part, config=None, reason=str(error)), None)
    return Outcome(part, measured, difference(expected, measured))


def difference(expected: Measured, found: Measured) -> str | None:
    """The first token or window that is not as expected, as text; None without one.

    What one of them did not come to, as the time was over, is not compared.
    """
    for number, (one, other) in enumerate(zip(expected.answers, found.answers, strict=False), start=1):
        for index, (token, given) in enumerate(zip(one, other, strict=False), start=1):
            if token != given:
                return f"answer {number} has token {given} in place {index}, not {token}"
    for number, (nats, given_nats) in enumerate(zip(expected.nats, found.nats, strict=False), start=1):
        if nats != given_nats:
            return f"window {number} of the text has {given_nats!r} nats, not {nats!r}"
    return None


def parts_of(target: Target, progress: OpenProgress | None = None) -> list[Part]:
    """The parts for this machine, each with its plan or the reason why there is none; slow ones last.

    Raises what planning the first one raises.
    """
    config, ctx_size = target.config, min(CTX_SIZE, target.spec.context_length)
    plain = replace(config, ctx_size=ctx_size, spec_type="none", model_draft=None)
    on_cpu = replace(plain, device="cpu", vram="auto")
    no_gpu = ""
    try:
        choose_device(replace(plain, device="cuda"))
        first = replace(plain, device="cuda")
    except DeviceError as error:
        first, no_gpu = on_cpu, str(error)
    device = "GPU" if not no_gpu else "CPU"
    planned = plan_by_name(first, progress=progress)
    plan = partial(_planned_part, progress=progress)
    parts = [
        Part(f"{device}, largest budget", first, planned),
        *_smaller_budgets(device, first, planned, progress),
        replace(plan(f"{device}, drafts", _with_drafts(target, first)), has_forecast=False),
    ]
    if no_gpu:
        parts.append(Part("GPU", reason=no_gpu))
    else:
        parts.append(plan("CPU, all threads", on_cpu))
    one = Part("CPU, one thread", reason="there is one core, so all threads are one")
    if planned.hardware.num_physical_cores > 1 and config.threads != 1:
        one = replace(plan(one.name, replace(on_cpu, threads=1)), has_forecast=False)
    return [*parts, one]


def _with_drafts(target: Target, plain: EngineConfig) -> EngineConfig:
    """`plain` with the drafter that is named, else the model's own block, else n-grams.

    The size is fixed: drafts that do not pay would otherwise not be made, and nothing be checked.
    """
    drafter, is_sidecar = target.config.model_draft, target.has_sidecar or bool(target.warnings)
    if drafter is not None:
        kind = "mtp" if is_sidecar else "dflash"
    else:
        kind = "mtp" if target.spec.drafts_by_mtp else "ngram"
    return replace(plain, spec_type=kind, model_draft=drafter, tree_budget=DRAFT_TOKENS)


def _planned_part(name: str, config: EngineConfig, progress: OpenProgress | None) -> Part:
    try:
        return Part(name, config, plan_by_name(config, progress=progress))
    except _CANNOT_RUN as error:
        return Part(name, reason=str(error))


def _smaller_budgets(
    device: str, config: EngineConfig, planned: Planned, progress: OpenProgress | None
) -> Iterator[Part]:
    """The smallest of the tried budgets with which the model runs, and one between it and the largest."""
    plan = planned.plan
    experts = sum(count * size for size, count in plan.slots.items())
    fixed = plan.total_bytes - experts
    if not experts:
        for name in ("middle", "smallest"):
            yield Part(f"{device}, {name} budget", reason="all of the model has to be in fast memory")
        return

    def at(name: str, fraction: float) -> Part:
        budget = fixed + round(fraction * experts)
        return _planned_part(f"{device}, {name} budget", config.with_budget(plan.tier, budget), progress)

    tried = ((fraction, at("smallest", fraction)) for fraction in _FRACTIONS)
    found = next(((fraction, part) for fraction, part in tried if part.config is not None), None)
    if found is None:
        yield from (at(name, _FRACTIONS[-1]) for name in ("middle", "smallest"))
        return
    fraction, smallest = found
    yield at("middle", (1.0 + fraction) / 2)
    yield smallest


def amount_for(seconds: float, prefill: float, decode: float) -> Amount:
    """The largest amount that takes at most `seconds` at these speeds, in tokens per second; or the least."""
    for amount in AMOUNTS:
        if amount.tokens_read / prefill + amount.tokens_generated / decode <= seconds:
            return amount
    return AMOUNTS[-1]


def _slowness(part: Part, reference: Part) -> float:
    """How many times as long as the reference a part should take, by the plans' forecasts."""
    assert part.forecast is not None, "a part that can run has a plan"
    assert reference.forecast is not None
    assert part.config is not None
    assert part.planned is not None
    cores = part.planned.hardware.num_physical_cores if part.config.threads == 1 else 1
    return max(1.0, reference.forecast.decode / part.forecast.decode) * cores


class _Session:
    """A part's model, open, and the text in its tokens. A context manager."""

    def __init__(self, part: Part, progress: OpenProgress | None) -> None:
        assert part.config is not None, "a part that cannot run is not opened"
        begun = time.monotonic()
        self._llm = LLM.from_opened(open_model(part.config, progress))
        self._ctx_size = self._llm.opened.ctx_size
        ids = self._llm.get_tokenizer().encode(verification_text())
        self._ids = ids * -(-CTX_SIZE // len(ids))
        self._generate(self._ids[:32], 4, None, math.inf)  # compiles kernels and touches memory
        self.opened_s = time.monotonic() - begun

    def __enter__(self) -> "_Session":
        return self

    def __exit__(self, *details: object) -> None:
        self._llm.close()

    def probe(self) -> tuple[float, float]:
        """Tokens per second of a short prompt and a short answer."""
        answer = self._generate(self._ids[: min(SHORT_PROMPT, self._ctx_size // 2)], 8, None, math.inf)
        return answer.prefill, answer.decode

    def fitting(self, amount: Amount) -> Amount:
        """`amount`, or what of it there is context for."""
        return Amount(
            min(amount.num_prompt, self._ctx_size // 2),
            min(amount.num_generated, self._ctx_size // 4),
            min(amount.num_windows, len(self._ids) // WINDOW),
            min(amount.window, self._ctx_size),
        )

    def measure(self, amount: Amount, deadline: float) -> Measured:
        """All of `amount`, or what is there at `deadline`, a time of `time.monotonic`."""
        greedy = self._generate(self._ids[: amount.num_prompt], amount.num_generated, None, deadline)
        answers = [greedy]
        short = min(SHORT_PROMPT, amount.num_prompt)
        for number, seed in enumerate(SEEDS, start=1):
            if time.monotonic() < deadline:
                prompt = self._ids[number * short : (number + 1) * short]
                answers.append(self._generate(prompt, amount.num_generated, seed, deadline))
        nats: list[float] = []
        for begin in range(0, amount.tokens_of_windows, amount.window):
            if time.monotonic() < deadline:
                nats.append(self._nats(self._ids[begin : begin + amount.window]))
        return Measured(
            tuple(answer.token_ids for answer in answers),
            tuple(nats),
            len(nats) * (amount.window - 1),
            amount.num_prompt,
            greedy.prefill,
            greedy.decode,
            greedy.tokens_per_step,
        )

    def _generate(
        self, prompt: Sequence[int], num_tokens: int, seed: int | None, deadline: float
    ) -> "_Answer":
        """An answer from an empty context. seed: None for the likeliest tokens."""
        params = SamplingParams(
            temperature=0 if seed is None else 1, seed=seed or 0, max_tokens=num_tokens, ignore_eos=True
        )
        self._llm.forget()
        ids: list[int] = []
        times, speculation = [time.monotonic()], None
        with self._llm.stream(list(prompt), params) as stream:
            for piece in stream:
                ids += piece.token_ids
                times.append(time.monotonic())
                if piece.statistics is not None:
                    speculation = piece.statistics.speculation
                if times[-1] >= deadline:
                    break
        steps = speculation.tokens_per_step if speculation else None
        generated = max(0, len(ids) - 1) / max(times[-1] - times[1], 1e-9)
        return _Answer(tuple(ids), len(prompt) / max(times[1] - times[0], 1e-9), generated, steps)

    def _nats(self, ids: Sequence[int]) -> float:
        """Minus the logarithm of the probability of all `ids` after the first."""
        logits = self._llm.logits(list(ids))
        return sum(
            _nats_of(logits[begin:end], ids[begin + 1 : end + 1])
            for begin, end in pairwise([*range(0, len(ids) - 1, _ROWS), len(ids) - 1])
        )


@dataclass(frozen=True)
class _Answer:
    token_ids: tuple[int, ...]
    prefill: float
    decode: float
    tokens_per_step: float | None


def _nats_of(logits: np.ndarray, ids: Sequence[int]) -> float:
    """logits: float32 [T, vocab], each row before one of `ids`."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    chosen = rows[np.arange(len(ids)), list(ids)]
    return float((np.log(np.exp(rows).sum(axis=1)) - chosen).sum())
