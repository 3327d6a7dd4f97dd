"""Logits to tokens: sampling, stop strings, drafts. Knows token ids, not tensors; has no loop."""

from coldstream.decoding.choice import (
    Outcome,
    SampledToken,
    StartedChoices,
    TokenChoice,
    TokenChooser,
    begin_choices,
)
from coldstream.decoding.constraints import Grammar, RepetitionStop, Thought
from coldstream.decoding.continuation import Continuation
from coldstream.decoding.device_logits import AnyLogits, DeviceChoice, DeviceLogits, DeviceStep
from coldstream.decoding.draft_sizes import FixedSizes, SizesByCost, TriedDraft
from coldstream.decoding.drafters.drafter import Drafter
from coldstream.decoding.logprobs import RankedLogprob
from coldstream.decoding.picks import Pick, TreeWalk, begin_all_picks
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
from coldstream.decoding.stop import RepetitionWatch, StopMatcher
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.decoding.tree_size import SizeReason

__all__ = [
    "MAX_TREE_NODES",
    "NO_DRAFT",
    "SEED_BITS",
    "AnyLogits",
    "Continuation",
    "DeviceChoice",
    "DeviceLogits",
    "DeviceStep",
    "DraftCounts",
    "Drafter",
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
    "SampledToken",
    "SamplingParams",
    "SizeReason",
    "SizesByCost",
    "Speculation",
    "SpeculationStatistics",
    "StartedChoices",
    "StepCosts",
    "StopMatcher",
    "Thought",
    "TokenChoice",
    "TokenChooser",
    "TokenTree",
    "TreeWalk",
    "TriedDraft",
    "begin_all_picks",
    "begin_choices",
    "derived_seed",
    "sample_token",
    "uses_between",
]
