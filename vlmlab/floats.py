"""Floating-point formats, and rounding to them, exactly: every format lives inside float64.

FORMATS         fp64, fp32, tf32, bf16, fp16, e4m3, e5m2
round_to        nearest, ties to even, subnormals and overflow included
ulp             the spacing of a format at a value
fused_multiply_add  a product and a sum, rounded once
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes: name. precision: significant bits, the hidden one included. least: exponent of the smallest normal.
    largest: finite value. overflow: what lies beyond: infinity, or the largest itself in e4m3, which has no infinity
    and which torch casts with saturation. dtype: torch's, or None.
    """

    name: str
    precision: int
    least: int
    largest: float
    overflow: float
    dtype: torch.dtype | None


_INF = float("inf")

FORMATS = {
    f.name: f
    for f in (
        Format("fp64", 53, -1022, torch.finfo(torch.float64).max, _INF, torch.float64),
        Format("fp32", 24, -126, torch.finfo(torch.float32).max, _INF, torch.float32),
        Format("tf32", 11, -126, (2 - 2.0**-10) * 2.0**127, _INF, None),
        Format("bf16", 8, -126, torch.finfo(torch.bfloat16).max, _INF, torch.bfloat16),
        Format("fp16", 11, -14, 65504.0, _INF, torch.float16),
        Format("e4m3", 4, -6, 448.0, 448.0, torch.float8_e4m3fn),
        Format("e5m2", 3, -14, 57344.0, _INF, torch.float8_e5m2),
    )
}


def format_of(dtype: torch.dtype) -> Format:
    """The format of a torch dtype. Raises: KeyError: none of FORMATS."""
    return next(f for f in FORMATS.values() if f.dtype == dtype)


def ulp(x: Tensor, form: Format) -> Tensor:
    """The spacing of a format at |x|; at a power of two, of the values above it.

    Args: x: float64, any shape. form: format. Returns: float64, same shape.
    """
    _, exponent = torch.frexp(x.double())
    exponent = torch.where(x == 0, form.least, (exponent - 1).clamp(min=form.least))
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - (form.precision - 1))


def round_to(x: Tensor, form: Format) -> Tensor:
    """The nearest value of a format, ties to even. Args: x: float64, any shape. form: format. Returns: float64."""
    x = x.double()
    if form.name == "fp64":
        return x
    spacing = ulp(x, form)
    rounded = (x / spacing).round() * spacing  # a power of two, so both are exact
    rounded = torch.where(rounded == 0, torch.copysign(torch.zeros_like(x), x), rounded)
    beyond = torch.copysign(torch.full_like(x, form.overflow), x)
    return torch.where(x.isnan(), x, torch.where(rounded.abs() <= form.largest, rounded, beyond))


def fused_multiply_add(x: Tensor, y: Tensor, z: Tensor, form: Format) -> Tensor:
    """x * y + z, rounded once to a format of at most 24 significant bits.

    The product is exact in float64. Their sum is rounded to odd there, so that rounding it once more changes nothing.

    Args: x, y, z: float64, values of the format, broadcast. form: format. Returns: float64.
    Source: Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
    odd".
    """
    product = x * y
    total = product + z
    seen = total - product
    lost = (product - (total - seen)) + (z - seen)  # Knuth's TwoSum
    bits = total.contiguous().view(torch.int64)
    beyond = (lost != 0) & ((lost < 0) == (total > 0))  # total is further from zero than the exact sum
    odd = torch.where(lost != 0, (bits - beyond.long()) | 1, bits)
    return round_to(odd.view(torch.float64), form)
