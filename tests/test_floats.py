"""Rounding equals torch's casts, bit for bit, where torch has the format."""

import math

import pytest
import torch

from vlmlab.floats import FORMATS, format_of, round_to, ulp


def numbers(seed=0, count=50_000):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-160, 140, (count,), generator=generator)
    near = torch.randint(-30, 18, (count,), generator=generator)
    x = torch.randn(2 * count, dtype=torch.float64, generator=generator) * torch.exp2(
        torch.cat((spread, near)).double()
    )
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, 65504.0, 65520.0, 448.0, 464.0, 480.0])
    return torch.cat((x.float(), special)).double()  # torch casts to narrow formats by way of float32


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.dtype is not None])
def test_rounding_is_torchs_cast(name):
    form, x = FORMATS[name], numbers()
    if name == "fp32":
        x = x + x * 2.0**-30  # not already a float32
    mine, cast = round_to(x, form), x.to(form.dtype).double()
    assert torch.equal(mine.isnan(), cast.isnan())
    assert torch.equal(mine.nan_to_num(7.0), cast.nan_to_num(7.0))
    assert torch.equal(torch.signbit(mine[~mine.isnan()]), torch.signbit(cast[~cast.isnan()]))
    assert name == "fp64" or not torch.equal(mine.nan_to_num(7.0), x.nan_to_num(7.0))
    assert format_of(form.dtype) is form


def test_tf32_has_ten_stored_bits_and_the_range_of_fp32():
    form = FORMATS["tf32"]
    x = torch.tensor([1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 3.0e38], dtype=torch.float64)
    assert round_to(x, form)[:3].tolist() == [1 + 2.0**-10, 1.0, 1 + 2.0**-9]
    assert round_to(x, form)[3].isfinite()


def test_ulp_is_the_distance_to_the_next_value():
    for name in ("fp32", "bf16", "fp16"):
        form = FORMATS[name]
        x = torch.rand(500).to(form.dtype)
        above = torch.nextafter(x, torch.full_like(x, 10.0))
        assert torch.equal(above.double() - x.double(), ulp(x.double(), form))
    assert ulp(torch.tensor([256.0]), FORMATS["bf16"]).item() == 2.0
    assert ulp(torch.tensor([0.0]), FORMATS["fp16"]).item() == 2.0**-24
