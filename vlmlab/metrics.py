"""How different two tensors are.

cosine_similarity   angle per token; blind to length
rel_l2_error        length of the difference over length of the baseline, per token
norm_ratio          length of the target over length of the baseline, per token
max_abs_diff        largest elementwise difference
bit_patterns        the bits of every value as an integer
digest              128 bits that stand for all of them
ulp_diff            largest difference in units in the last place
bitwise_equal       same dtype, shape and bits
dominant_channels   the channels that carry a token's length, so that one of them cannot hide the rest

All measures upcast to float64 before any product, so a cosine never leaves [-1, 1] and a norm never overflows. Tensors
are `[T, D]`: T tokens (or patches), D channels.
"""

import hashlib

import torch
from torch import Tensor


def _float64_pair(baseline: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if baseline.shape != target.shape:
        raise ValueError(
            f"expected equal shapes, got baseline {tuple(baseline.shape)} and target {tuple(target.shape)}; "
            "align the two traces first"
        )
    if baseline.numel() == 0:
        raise ValueError(f"nothing to compare: both tensors are empty {tuple(baseline.shape)}")
    return baseline.double(), target.double()


def cosine_similarity(baseline: Tensor, target: Tensor) -> Tensor:
    """Cosine of the angle between the two vectors of each token, computed in float64.

    Args: baseline: [T, D] float tensor. target: [T, D] float tensor; dtype may differ.
    Returns: [T] float64, unitless, in [-1, 1]. NaN where a vector is zero or not finite. Blind to length: see
    rel_l2_error.
    Raises: ValueError: shapes differ (both are printed) or nothing to compare.
    Source: definition; unlike torch's function, no eps clamp.
    """
    x, y = _float64_pair(baseline, target)
    cosine = torch.linalg.vecdot(x, y) / (x.norm(dim=-1) * y.norm(dim=-1))
    if not cosine.isfinite().all():  # squares of float64 values near 1e300 overflow: scale by the largest element
        x, y = x / x.abs().amax(-1, keepdim=True), y / y.abs().amax(-1, keepdim=True)
        cosine = torch.linalg.vecdot(x, y) / (x.norm(dim=-1) * y.norm(dim=-1))
    # Equal vectors must give exactly 1: the quotient of two roundings can be 1 - 1e-16.
    return torch.where((x == y).all(-1) & cosine.isfinite(), 1.0, cosine).clamp(-1.0, 1.0)


def rel_l2_error(baseline: Tensor, target: Tensor) -> Tensor:
    """Length of `target - baseline` over the length of `baseline`, per token, computed in float64.

    Args: baseline: [T, D]. target: [T, D].
    Returns: [T] float64, unitless, >= 0. NaN where the baseline vector is zero or a value is not finite.
    Raises: ValueError: shapes differ or nothing to compare.
    Source: definition.
    """
    x, y = _float64_pair(baseline, target)
    error = (y - x).norm(dim=-1) / x.norm(dim=-1)
    return torch.where(error.isfinite(), error, torch.nan)


def norm_ratio(baseline: Tensor, target: Tensor) -> Tensor:
    """Length of `target` over length of `baseline`, per token, computed in float64.

    Args: baseline: [T, D]. target: [T, D].
    Returns: [T] float64, unitless. NaN where the baseline vector is zero or a value is not finite.
    Raises: ValueError: shapes differ or nothing to compare.
    Source: definition.
    """
    x, y = _float64_pair(baseline, target)
    length, ratio = x.norm(dim=-1), y.norm(dim=-1) / x.norm(dim=-1)
    return torch.where(length.isfinite() & ratio.isfinite(), ratio, torch.nan)


def max_abs_diff(baseline: Tensor, target: Tensor) -> float:
    """Largest elementwise difference, in the unit of the tensors, computed in float64.

    Args: baseline, target: tensors of one shape. Returns: float >= 0; NaN when a value is not finite.
    Raises: ValueError: shapes differ or nothing to compare.
    Source: definition.
    """
    x, y = _float64_pair(baseline, target)
    return (y - x).abs().max().item()


def bit_patterns(x: Tensor) -> Tensor:
    """The bits of every value as an integer. Args: x: of 2, 4 or 8 bytes a value. Returns: same shape and width."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def digest(x: Tensor) -> str:
    """128 bits of SHA-256 over dtype, shape and every bit: equal for tensors that are identical.

    Args: x: on any device. Returns: 32 hex digits.
    """
    whole = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    whole.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()[:32]


def ulp_diff(baseline: Tensor, target: Tensor) -> int:
    """Largest elementwise difference, counted in representable numbers from one value to the other.

    Args: baseline, target: same shape and dtype, bfloat16, float16, float32 or float64. Returns: count; 0.0 and -0.0
    are 0 apart. Raises: ValueError: shapes or dtypes differ.
    """
    if baseline.shape != target.shape or baseline.dtype != target.dtype:
        raise ValueError(
            f"expected equal shapes and dtypes, got {tuple(baseline.shape)} {baseline.dtype} and "
            f"{tuple(target.shape)} {target.dtype}"
        )

    def place(x: Tensor) -> Tensor:  # numbers in order of size are integers in order of size
        patterns = bit_patterns(x)
        raw = patterns.long()
        return torch.where(raw < 0, torch.iinfo(patterns.dtype).min - raw, raw)

    return int((place(baseline) - place(target)).abs().max()) if baseline.numel() else 0


def bitwise_equal(baseline: Tensor, target: Tensor) -> bool:
    """Whether dtype, shape and every bit agree. NaN equals the same NaN; 0.0 does not equal -0.0.

    Args: baseline, target: any tensors. Returns: bool.
    Source: definition.
    """
    if baseline.dtype != target.dtype or baseline.shape != target.shape:
        return False
    return torch.equal(baseline.reshape(-1).view(torch.uint8), target.reshape(-1).view(torch.uint8))


def dominant_channels(states: Tensor, count: int = 3) -> list[tuple[int, float]]:
    """The channels that carry most of the squared length of all tokens together.

    Args: states: [T, D]. count: how many channels.
    Returns: [(channel, share of the summed squares in [0, 1])], largest first; empty when all values are zero.
    Raises: ValueError: nothing to compare.
    Source: definition.
    """
    if states.numel() == 0:
        raise ValueError(f"nothing to compare: the tensor is empty {tuple(states.shape)}")
    energy = states.double().square().sum(0)
    total = energy.sum()
    if not total > 0:
        return []
    values, channels = energy.topk(min(count, energy.numel()))
    return [(int(c), float(v / total)) for c, v in zip(channels, values, strict=True)]
