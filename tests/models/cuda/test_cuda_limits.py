"""What a GPU's runner refuses before it takes memory."""

import pytest

from coldstream.errors import UnsupportedError
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS, INTEGER_CACHE_TYPES
from coldstream.kvcache import CacheSize
from coldstream.models.cuda.limits import Limits


@pytest.mark.parametrize("kv_type", sorted({*CACHE_LAYOUTS} - {*INTEGER_CACHE_TYPES}))
def test_float_types_of_keys_and_values_are_refused(kv_type: str) -> None:
    with pytest.raises(UnsupportedError, match=f"no GPU kernels for keys and values in {kv_type}"):
        Limits(CacheSize.of(1, 1024), 1024, kv_type)


@pytest.mark.parametrize("kv_type", INTEGER_CACHE_TYPES)
def test_other_types_are_not(kv_type: str) -> None:
    assert Limits(CacheSize.of(1, 1024), 1024, kv_type).kv_type == kv_type
