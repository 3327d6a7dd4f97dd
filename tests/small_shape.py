"""The shape of the full-size model, made small for tests."""

from bench.engine.gpu import FIRST_ID
from bench.random_model import Shape

SMALL = Shape(
    hidden=512,
    layers=4,
    experts=16,
    experts_per_token=4,
    expert_ffn=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    key_heads=2,
    value_heads=4,
    state_dim=64,
    vocab=FIRST_ID + 200,
    context=1024,
)
