"""Registrations of memory that are refused beyond a limit, for measurements of what follows."""

import pytest

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver

from bench.engine.locked_memory import locks_at_most

DONE, FULL = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY


def test_what_is_beyond_the_limit_is_refused_until_something_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(driver, "cuMemHostRegister", lambda address, *_: (asked.append(address), (DONE,))[1])
    monkeypatch.setattr(driver, "cuMemHostUnregister", lambda address: (asked.remove(address), (DONE,))[1])
    with locks_at_most(100) as registered:
        assert driver.cuMemHostRegister(1, 60, 0) == (DONE,)
        assert driver.cuMemHostRegister(2, 41, 0) == (FULL,)
        assert driver.cuMemHostRegister(3, 40, 0) == (DONE,)
        assert registered == {1: 60, 3: 40}
        driver.cuMemHostUnregister(1)
        assert driver.cuMemHostRegister(2, 60, 0) == (DONE,)
        assert asked == [3, 2]
    assert driver.cuMemHostRegister(4, 2**40, 0) == (DONE,)
