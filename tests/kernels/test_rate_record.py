"""Records of measured rates are read back from a file, and what no machine has is not."""

import json
import math
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from coldstream.kernels.experts.step_rates import StepRates
from coldstream.kernels.mixer_rates import MixerRates
from coldstream.kernels.rate_record import RateRecord

MIXERS = MixerRates(2e-6, 2e-5, 6e9, 6e10, 3e10, 1e10, 2e10)
STEPS = StepRates(2e-6, 1e12, 4e10, 3e10, 4e10, 1e-5, 5e10, 4e10, 1e-5, 1e14)
FIELDS = [(record, each.name) for record in (MIXERS, STEPS) for each in fields(record)]


@pytest.mark.parametrize("record", [MIXERS, STEPS, replace(STEPS, launch_s=None, row_bytes_per_s=None)])
def test_what_was_kept_is_read_back(record: RateRecord) -> None:
    assert record.is_sane
    assert type(record).parsed(json.loads(json.dumps(asdict(record)))) == record


@pytest.mark.parametrize(("record", "name"), FIELDS)
def test_each_field_has_bounds_and_is_a_float(record: RateRecord, name: str) -> None:
    least, most = record.bounds_of.get(name, record.bounds)
    for value in (least, most):
        assert replace(record, **{name: value}).is_sane
    below = math.nextafter(least, -math.inf)
    whole = math.ceil(most)  # as JSON has it, without a point
    wrong: tuple[Any, ...] = (below, math.nextafter(most, math.inf), math.nan, None, whole, True, "1.0", [])
    for value in wrong:
        document = asdict(record) | {name: value}
        assert type(record).parsed(document) is None, value
    lacking = asdict(record)
    del lacking[name]
    assert type(record).parsed(lacking) is None


@pytest.mark.parametrize("record", [MIXERS, STEPS])
def test_what_is_no_record_is_none(record: RateRecord) -> None:
    others: tuple[Any, ...] = (None, [], "rates", 1.0, {}, asdict(record) | {"another": 1e9})
    for document in others:
        assert type(record).parsed(document) is None


def test_seconds_and_rates_have_bounds_of_their_own() -> None:
    """A rate where seconds belong, and seconds where a rate does, are no machine's."""
    records: tuple[tuple[RateRecord, set[str]], ...] = (
        (MIXERS, {"op_s", "call_s"}),
        (STEPS, {"launch_s", "request_s", "queue_s"}),
    )
    for record, seconds in records:
        for each in fields(record):
            other = 1e9 if each.name in seconds else 1e-6
            assert type(record).parsed(asdict(record) | {each.name: other}) is None, each.name
