"""Settings: what is refused and how it is said."""

from dataclasses import replace

import pytest

from coldstream.errors import ConfigError
from coldstream.planning.config import EngineConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ctxsize": 1}, "unknown setting ctxsize: did you mean ctx_size?"),
        ({"thread": 1}, "did you mean threads?"),
        ({"zzz": 1}, "unknown setting zzz: there are model, ctx_size"),
        ({"ctx_size": -1}, "ctx_size must be an integer from 0"),
        ({"ctx_size": 2**31}, "ctx_size"),
        ({"ctx_size": "2G"}, "ctx_size must be an integer from 0"),
        ({"ctx_size": "long"}, "ctx_size (--ctx-size) must be a number of tokens such as 8192 or 32k"),
        ({"ctx_size": 1.5}, "ctx_size"),
        ({"ctx_size": True}, "ctx_size"),
        (
            {"vram": "20G,12G"},
            "vram (--vram) is one size, of the memory of the one GPU that computes, not '20G,12G'",
        ),
        ({"devices": "0,1"}, "unknown setting devices: one GPU computes, the first that the driver shows"),
        ({"vram": "6 apples"}, "vram (--vram) must be a size such as 6G, or auto, not '6 apples'"),
        ({"ram": "-1"}, "ram (--ram) must be a size"),
        ({"ram": -1}, "ram (--ram) must be an integer from 0"),
        ({"vram": 1.5}, "vram (--vram) must be an integer"),
        ({"vram": True}, "vram (--vram) must be an integer"),
        ({"vram": None}, "vram (--vram) must be an integer"),
        ({"vram": "9" * 15 + "T"}, "vram (--vram) must be an integer from 0 to"),
        ({"vram": "6G", "device": "cpu"}, "vram is the memory of a GPU, and the device is the CPU"),
        ({"plan": ""}, "plan (--plan) must be the path of a file"),
        ({"plan": 1}, "plan (--plan) must be the path of a file"),
        ({"plan": "p", "vram": "1G"}, "vram (--vram) is part of the plan"),
        ({"plan": "p", "ctx_size": 1}, "ctx_size (--ctx-size) is part of the plan"),
        ({"plan": "p", "cache_type_k": "i8", "cache_type_v": "i8"}, "--cache-type-k) is part of the plan"),
        ({"threads": 0}, "threads"),
        ({"threads": "all"}, "threads"),
        ({"device": "cuda", "tier": "avx2"}, "tier avx2 is one of CPU kernels"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"tier": "sse"}, "tier must be one of auto, generic"),
        ({"tier": 3}, "tier"),
        ({"cache_type_k": "q2_k"}, "cache_type_k must be one of auto, i16, i8, i4, i3, not 'q2_k'"),
        ({"cache_type_v": "q8_0"}, "cache_type_v must be one of auto, i16, i8, i4, i3, not 'q8_0': try i8"),
        ({"cache_type_k": "tq3_0"}, "not 'tq3_0': try i3"),
        ({"cache_type_k": ["q4_0"]}, "cache_type_k must be one of auto, i16"),
        ({"cache_type_k": "i8", "cache_type_v": "i4"}, "must be the same: give one of them"),
        ({"cache_type_k": "f16", "cache_type_v": "f16"}, "not 'f16': try i16"),
        ({"max_model_len": 4096}, "unknown setting max_model_len: use ctx_size"),
        ({"gpu_memory_utilization": 0.9}, "unknown setting gpu_memory_utilization: use vram"),
        ({"n_gpu_layers": -1}, "unknown setting n_gpu_layers: use vram"),
        ({"kv_cache_dtype": "fp8"}, "unknown setting kv_cache_dtype: use cache_type_k"),
        ({"attention_window": 0}, "attention_window must be an integer from 1"),
        ({"attention_window": "8k"}, "attention_window must be an integer from 1"),
        ({"attention_window": 8, "plan": "p"}, "attention_window (--attention-window) is part of the plan"),
        ({"prefetch": 9}, "prefetch must be"),
        ({"prefetch": "some"}, "prefetch must be"),
        ({"prefetch": 1, "device": "cpu"}, "prefetch is over the bus of a GPU"),
        ({"seed": -1}, "seed"),
        ({"offline": "no"}, "offline"),
        ({"model": ""}, "model"),
    ],
)
def test_wrong_settings_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options({"model": "m.gguf", **options})
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_context_may_be_written_as_on_the_command_line() -> None:
    sizes = [EngineConfig.from_options({"model": "m", "ctx_size": text}).ctx_size for text in ("32k", "512")]
    assert sizes == [32768, 512]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("6G", 6 * 2**30),
        ("8GiB", 8 * 2**30),
        ("1.5g", 3 * 2**29),
        ("500M", 500 * 2**20),
        ("0", 0),
        (123, 123),
        ("auto", "auto"),
    ],
)
def test_budgets_are_bytes_or_auto(text: int | str, num_bytes: int | str) -> None:
    config = EngineConfig("m.gguf", vram=text, ram=text)
    assert (config.vram, config.ram) == (num_bytes, num_bytes)
    assert replace(config, seed=1).vram == num_bytes


def test_one_type_of_cache_holds_for_keys_and_values() -> None:
    for given_types in (
        {"cache_type_k": "i8"},
        {"cache_type_v": "i8"},
        {"cache_type_k": "i8", "cache_type_v": "i8"},
    ):
        config = EngineConfig.from_options({"model": "m.gguf", **given_types})
        assert (config.cache_type_k, config.cache_type_v) == ("i8", "i8")
        assert replace(config, seed=1) == replace(config, seed=1, cache_type_k="i8")
    default = EngineConfig("m.gguf")
    assert (default.cache_type_k, default.cache_type_v) == ("i16", "i16")
    assert replace(default, plan="p").cache_type_k == "i16"  # the default is no setting beside a plan
