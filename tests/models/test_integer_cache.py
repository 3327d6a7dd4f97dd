"""The effect of attention over integers on the demo model."""

import argparse
from pathlib import Path

import pytest
import torch

from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.attention.exact import attention_exact
from coldstream.kernels.ops import Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache.cache import ModelCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec

TOKENS = 160
# RMS distances of logits, a little above what docs/notes/accuracy.md has of its windows.
LARGEST_DISTANCES = {"i16": 0.0001, "i8": 0.0143}


def logits(model: CausalLM, token_ids: torch.Tensor, kv_type: str) -> torch.Tensor:
    count = len(token_ids)
    cache = ModelCache(model.spec, model.ops, num_states=1, context_length=count, kv_type=kv_type)
    rows = Rows(torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32))
    result: torch.Tensor = model.logits(model.forward(token_ids, rows, cache))
    return result


@pytest.mark.sharded(of="models on the CPU")
@torch.no_grad()
def test_logits_are_as_close_to_floats_as_the_log_says() -> None:
    """Everything but attention in float32, so that nothing else rounds."""
    ops = ReferenceOps()
    with GGUFFile.open(demo_model_path()) as file:
        model = CausalLM.load(file, read_spec(file.metadata, file.tensors), ops)
        tokenizer = Tokenizer.from_metadata(file.metadata)
    text = Path(argparse.__file__).read_text()
    token_ids = torch.tensor(tokenizer.encode(text)[:TOKENS], dtype=torch.int32)
    floats = logits(model, token_ids, "f32")
    ops._attention = attention_exact
    distances = {}
    for kv_type in LARGEST_DISTANCES:
        difference = (logits(model, token_ids, kv_type) - floats).double()
        distances[kv_type] = float(difference.var(dim=-1, correction=0).mean().sqrt())
    assert distances["i16"] < LARGEST_DISTANCES["i16"]
    assert 20 * distances["i16"] < distances["i8"] < LARGEST_DISTANCES["i8"]
