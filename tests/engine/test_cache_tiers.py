"""Which models may share files of prefixes, and that a restarted one goes on from them."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coldstream.assets import demo_model_path
from coldstream.engine import EngineConfig, OpenedModel
from coldstream.engine.cache_tiers import CacheTiers, cache_identity, open_tiers
from coldstream.engine.opened_model import open_model
from coldstream.errors import ConfigError, StorageError
from coldstream.kvcache import PrefixCache
from coldstream.placement.plan_file import save_plan


def opened(path: Path | None = None, kept: int = 0, **settings: object) -> OpenedModel:
    """kept: bytes of RAM for prefixes."""
    config = EngineConfig(str(path or demo_model_path()), ctx_size=2048, threads=2, device="cpu")
    return open_model(replace(config, **settings), prompt_cache_bytes=kept)  # type: ignore[arg-type]


def identity(path: Path | None = None, **settings: object) -> bytes:
    model = opened(path, **settings)
    try:
        return cache_identity(model)
    finally:
        model.close()


def test_what_changes_no_bit_is_not_part_of_the_identity() -> None:
    assert identity() == identity(threads=1, ctx_size=512, spec_type="none")


def test_a_type_of_cache_and_a_window_are_part_of_the_identity() -> None:
    kinds = [identity(), identity(cache_type_k="i8", cache_type_v="i8"), identity(attention_window=300)]
    assert len(set(kinds)) == 3


def test_a_model_with_the_same_header_and_other_weights_is_another(tmp_path: Path) -> None:
    path = Path(shutil.copy2(demo_model_path(), tmp_path / "other name.gguf"))
    assert identity(path) == identity()
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[-4000:] = bytes(4000)
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert identity(path) != identity()


def test_a_file_that_was_written_again_is_another(tmp_path: Path) -> None:
    """A change too small for samples to show is as dangerous."""
    path = Path(shutil.copy2(demo_model_path(), tmp_path / "model.gguf"))
    before = identity(path)
    os.utime(path, ns=(1, 1))
    assert identity(path) != before


def test_a_restarted_model_goes_on_from_its_folder_with_the_same_bits(tmp_path: Path) -> None:
    settings = CacheTiers(ram_bytes=1 << 26, disk_folder=tmp_path, disk_bytes=1 << 28)
    held, logits = [], []
    for _ in range(2):
        model = opened(kept=settings.ram_bytes)
        runner = model.runner
        ids = np.random.default_rng(3).integers(0, runner.spec.vocab_size, 900).tolist()
        cache = PrefixCache(runner, max_states=4, tiers=open_tiers(settings, model))
        assert [tier.name for tier in cache.statistics().tiers] == ["ram", "disk"]
        prefix = cache.begin(ids)
        held.append(prefix.length)
        for end in (*prefix.checkpoints, len(ids)):
            last = runner.extend(prefix.sequence, ids[prefix.sequence.length : end])
            if end < len(ids):
                cache.keep(ids, prefix.sequence)
        logits.append(last.copy())
        runner.release(prefix.sequence)
        cache.close()
        model.close()
    assert held == [0, 899]
    assert np.array_equal(*logits)


def test_without_settings_there_are_no_tiers(tmp_path: Path) -> None:
    model = opened()
    assert open_tiers(CacheTiers(), model) == ()
    tmp_path.joinpath("file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        open_tiers(CacheTiers(disk_folder=tmp_path / "file"), model)
    model.close()


def test_the_tier_in_ram_is_as_large_as_the_plan_says(tmp_path: Path) -> None:
    """Of a plan that is given, too."""
    model = opened(kept=5 << 20, ram=60 << 20)
    assert model.plan.placement.fixed.prompt_cache == 5 << 20
    save_plan(model.plan, tmp_path / "my.plan")
    for settings in (CacheTiers(), CacheTiers(ram_bytes=5 << 20)):
        assert [tier.statistics().budget_bytes for tier in open_tiers(settings, model)] == [5 << 20]
    with pytest.raises(AssertionError, match="opened with the RAM of its tier"):
        open_tiers(CacheTiers(ram_bytes=6 << 20), model)
    model.close()
    model = opened(plan=str(tmp_path / "my.plan"), ctx_size=None)
    assert [tier.statistics().budget_bytes for tier in open_tiers(CacheTiers(), model)] == [5 << 20]
    model.close()


@pytest.mark.parametrize("setting", ["ram_bytes", "disk_bytes"])
@pytest.mark.parametrize("value", [-1, True, 1.5, "8G"])
def test_wrong_settings_are_named(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be a number of bytes"):
        CacheTiers(**{setting: value})  # type: ignore[arg-type]
