"""Answers that lose their memory while they are drafted have the same tokens as without drafts."""

from dataclasses import replace
from pathlib import Path

import pytest
from engine_clients import alone, engine_of
from test_drafts_side_by_side import Oracle, drafting, opened_model, texts_of
from test_engine_core import SAMPLED

from builders import write_gguf
from coldstream.decoding import FixedSizes
from coldstream.engine import LLM
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache import CacheSize


@pytest.mark.sharded
@pytest.mark.parametrize("kind", ["right", "mostly_right", "random"])
def test_sp08_preempted_answers_are_drafted_again_with_the_same_tokens(tmp_path: Path, kind: str) -> None:
    """The second gives its blocks back when the first needs them; both begin with room for neither's end."""
    (path,) = write_gguf(tmp_path / "tiny.gguf")
    prompts = [[token] * (2 * BLOCK_POSITIONS - 12) for token in (1, 2)]
    params = replace(SAMPLED, max_tokens=30)
    with opened_model(path, CacheSize(num_blocks=4, num_states=3)) as opened:
        wanted = [alone(LLM.from_opened(opened), prompt, params) for prompt in prompts]
        texts, vocab_size = texts_of(prompts, wanted), opened.runner.spec.vocab_size
        drafted = drafting(opened, lambda: Oracle(kind, texts, vocab_size), FixedSizes(4))
        with engine_of(drafted) as client:
            ids = [client.add(prompt, params) for prompt in prompts]
            client.drain()
            assert [client.answers(each) for each in ids] == wanted
            statistics = client.engine.statistics()
            assert statistics.preemptions > 0
            assert statistics.accepted_tokens > 0
