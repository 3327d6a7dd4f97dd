"""The written softplus against float64."""

import math

import torch

from coldstream.kernels.arithmetic.reference import log1p, softplus


def test_log1p_is_within_three_units_in_the_last_place() -> None:
    t = torch.cat((torch.linspace(0, 1, 100_001), torch.logspace(-37, 0, 100_001)))
    want = torch.log1p(t.double())
    unit = (torch.nextafter(want.float(), torch.tensor(math.inf)) - want.float()).double()
    assert ((log1p(t).double() - want).abs() <= 3 * unit).all()


def test_softplus_at_its_ends() -> None:
    x = torch.tensor([-math.inf, -100.0, -0.0, 0.0, 20.0, 100.0, math.inf])
    smallest = 2.0**-126  # what the written exp gives at its lower end, nearly
    result = softplus(x)
    assert (result[:2] < 1.01 * smallest).all()
    assert (result[:2] >= 0).all()
    assert result[2:4].tolist() == [result[2].item()] * 2
    assert abs(result[2].item() - math.log(2)) < 1e-7
    assert result[4:].tolist() == [20.0, 100.0, math.inf]
    assert softplus(torch.tensor([math.nan])).isnan().all()
