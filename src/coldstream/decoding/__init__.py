"""Logits to tokens: sampling, stop strings, drafts, and the loops. Knows token ids, not tensors."""

from coldstream.decoding.ahead import generate_tokens_ahead
from coldstream.decoding.autoregressive import Continuation, generate_tokens
from coldstream.decoding.choice import (
    Choice,
    Chosen,
    Outcome,
    StartedChoices,
    TokenChooser,
    begin_choices,
)
from coldstream.decoding.constraints import Grammar, RepetitionStop, Thought
from coldstream.decoding.device_logits import AnyLogits, DeviceChoice, DeviceLogits, DeviceStep
from coldstream.decoding.draft_sizes import FixedSizes, SizesByCost, TriedDraft
from coldstream.decoding.drafters.drafter import Drafter
from coldstream.decoding.logprobs import RankedLogprob
from coldstream.decoding.repetition import RepetitionWatch
from coldstream.decoding.rounds import Rounds, generate_in_rounds
from coldstream.decoding.sampling import SEED_BITS, derived_seed, sample_token
from coldstream.decoding.sampling_params import Logits, LogitsProcessor, SamplingParams
from coldstream.decoding.speculation import (
    MAX_TREE_NODES,
    DraftCounts,
    ExpertUses,
    Speculation,
    SpeculationStatistics,
    StepCosts,
    uses_between,
)
from coldstream.decoding.speculative import (
    Drafts,
    Pick,
    begin_all_picks,
    begin_picks,
    generate_tokens_speculatively,
    verify_draft,
)
from coldstream.decoding.stop import StopMatcher
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.decoding.tree_size import SizeReason

__all__ = [
    "MAX_TREE_NODES",
    "NO_DRAFT",
    "SEED_BITS",
    "AnyLogits",
    "Choice",
    "Chosen",
    "Continuation",
    "DeviceChoice",
    "DeviceLogits",
    "DeviceStep",
    "DraftCounts",
    "Drafter",
    "Drafts",
    "ExpertUses",
    "FixedSizes",
    "Grammar",
    "Logits",
    "LogitsProcessor",
    "Outcome",
    "Pick",
    "RankedLogprob",
    "RepetitionStop",
    "RepetitionWatch",
    "Rounds",
    "SamplingParams",
    "SizeReason",
    "SizesByCost",
    "Speculation",
    "SpeculationStatistics",
    "StartedChoices",
    "StepCosts",
    "StopMatcher",
    "Thought",
    "TokenChooser",
    "TokenTree",
    "TriedDraft",
    "begin_all_picks",
    "begin_choices",
    "begin_picks",
    "derived_seed",
    "generate_in_rounds",
    "generate_tokens",
    "generate_tokens_ahead",
    "generate_tokens_speculatively",
    "sample_token",
    "uses_between",
    "verify_draft",
]
