"""The full-size Laguna: its layers are those of the family, and its text walks through the vocabulary."""

from dataclasses import replace
from pathlib import Path

from bench.engine.gpu import WALK_TOKENS, check_walk
from bench.laguna_model import FULL_HEADS, LAGUNA_SHAPE, LagunaWriter
from coldstream.engine import LLM
from coldstream.models.spec.layer_specs import AttentionSpec, DenseFfnSpec

SMALL = replace(LAGUNA_SHAPE, layers=5, hidden=512, experts=16, expert_ffn=256, vocab=4096, context=4096)


def test_a_small_one_walks_and_has_the_layers_of_the_family(tmp_path: Path) -> None:
    path = tmp_path / "laguna.gguf"
    LagunaWriter(path, SMALL, seed=3, threads=2).write()
    with LLM(path, device="cpu", ctx_size=2 * WALK_TOKENS) as llm:
        layers = llm.opened.runner.spec.layers
        mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)]
        assert [mixer.num_heads for mixer in mixers] == [FULL_HEADS, 64, 64, 64, FULL_HEADS]
        assert [mixer.window for mixer in mixers] == [None, 512, 512, 512, None]
        assert [isinstance(layer.ffn, DenseFfnSpec) for layer in layers] == [True, False, False, False, False]
        check_walk(llm)


def test_the_whole_one_has_the_size_of_published_files() -> None:
    writer = LagunaWriter(Path("unwritten.gguf"), replace(LAGUNA_SHAPE, vocab=512), seed=0, threads=1)
    writer.plan()
    tables = {"token_embd.weight", "output.weight"}
    num_bytes = sum(
        tensor.num_bytes * (LAGUNA_SHAPE.vocab // 512 if tensor.name in tables else 1)
        for tensor in writer.tensors
    )
    assert 18 < num_bytes / 2**30 < 20
