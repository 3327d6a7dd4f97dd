"""Rules by which routers choose, logits that are hard for them, and the choice as it is meant, in float64."""

import math

import torch
from hypothesis import strategies as st

from coldstream.kernels.ops import ChoiceRule, RouterSpec

EXPERTS = [4, 7, 31, 32, 33, 64, 200, 256, 300, 512, 1024]
# Of published models, with few experts: Laguna and GLM-4.5, gpt-oss, Qwen1.5-MoE, DeepSeek-V2 to V4, Gemma 4.
PUBLISHED = {
    "laguna": RouterSpec("sigmoid", selection_bias=True, scale=2.5),
    "gpt-oss": RouterSpec("softmax of the chosen", bias=True),
    "qwen2moe": RouterSpec(normalised=False),
    "deepseek-v2": RouterSpec(normalised=False, scale=16.0, num_groups=8, num_used_groups=3),
    "deepseek-v3": RouterSpec("sigmoid", selection_bias=True, scale=2.5, num_groups=8, num_used_groups=4),
    "deepseek-v4": RouterSpec("square root of softplus", selection_bias=True, scale=1.5),
    "gemma4": RouterSpec(expert_scale=True),
}


def logits_of(kind: str, rows: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    """Ties, values that differ by a unit in the last place, and numbers far beyond the range of exp."""
    x = torch.randn(rows, experts, generator=generator)
    return {
        "any": 2 * x,
        "ties": x.round(),
        "near": 1 + (x * 20).round() * 2.0**-23,
        "wide": 100 * x,
        "huge": 1e30 * x,
        "negative": -80 + x,
        "equal": torch.zeros_like(x),
    }[kind]


def rule_of(spec: RouterSpec, experts: int, generator: torch.Generator, disabled: float = 0.0) -> ChoiceRule:
    """Random vectors for a spec, coarse ones, so that scores tie. disabled: share of experts that have −∞."""

    def vector() -> torch.Tensor:
        values = (torch.randn(experts, generator=generator) * 4).round() / 8
        values[torch.rand(experts, generator=generator) < disabled] = -torch.inf
        values[-1] = 0.25
        return values

    scale = 0.5 + torch.rand(experts, generator=generator)
    return ChoiceRule(
        spec,
        bias=vector() if spec.bias else None,
        selection_bias=vector() if spec.selection_bias else None,
        expert_scale=scale if spec.expert_scale else None,
    )


@st.composite
def choices(draw: st.DrawFn) -> tuple[torch.Tensor, int, ChoiceRule]:
    """Logits, how many are chosen, and any rule."""
    experts = draw(st.sampled_from(EXPERTS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    kinds = ["any", "ties", "near", "wide", "huge", "negative", "equal"]
    logits = logits_of(draw(st.sampled_from(kinds)), draw(st.integers(1, 5)), experts, generator)
    groups = draw(st.sampled_from([n for n in (1, 2, 4, 8, 64) if experts % n == 0 and experts >= 2 * n]))
    used = draw(st.integers(1, groups))
    spec = RouterSpec(
        draw(st.sampled_from(["softmax", "sigmoid", "softmax of the chosen", "square root of softplus"])),
        bias=draw(st.booleans()),
        selection_bias=draw(st.booleans()),
        normalised=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        num_groups=groups,
        num_used_groups=used,
        expert_scale=draw(st.booleans()),
    )
    rule = rule_of(spec, experts, generator, draw(st.sampled_from([0.0, 0.3, 0.9])))
    return logits, draw(st.integers(1, min(16, used * experts // groups))), rule


def meant(logits: torch.Tensor, count: int, rule: ChoiceRule) -> tuple[list[int], list[float]]:
    """The choice of one row, an expert at a time, in float64."""
    spec, experts = rule.spec, range(len(logits))
    x = [float(logits[e]) + (0.0 if rule.bias is None else float(rule.bias[e])) for e in experts]
    powers = [math.exp(each - max(x)) for each in x]
    gate = {
        "softmax": lambda e: powers[e] / sum(powers),
        "sigmoid": lambda e: 1 / (1 + math.exp(-x[e])),
        "softmax of the chosen": lambda e: x[e],
        "square root of softplus": lambda e: math.sqrt(math.log1p(math.exp(x[e]))),
    }[spec.gating]
    values = [gate(e) for e in experts]
    score = [
        values[e] + (0.0 if rule.selection_bias is None else float(rule.selection_bias[e])) for e in experts
    ]
    size = len(logits) // spec.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(spec.num_groups)]
    if spec.num_groups > 1:
        groups.sort(key=lambda group: -sum(sorted(score[e] for e in group)[-2:]))
    allowed = sorted(e for group in groups[: spec.num_used_groups] for e in group)
    ids = sorted(allowed, key=lambda e: -score[e])[:count]
    weights = [values[e] for e in ids]
    if spec.gating == "softmax of the chosen":
        weights = [math.exp(each - max(weights)) for each in weights]
    if spec.gating == "softmax of the chosen" or spec.normalised:
        weights = [each / sum(weights) for each in weights]
    own = [1.0 if rule.expert_scale is None else float(rule.expert_scale[e]) for e in ids]
    return ids, [each * spec.scale * scale for each, scale in zip(weights, own, strict=True)]
