"""A handful of numbers per cause, computed both ways and exactly, here and now.

micro_demo      the table of one cause

| column | meaning |
|---|---|
| what   | which element |
| hf     | as Transformers computes it, in bf16 |
| sglang | as SGLang computes it, on the same inputs |
| exact  | Transformers' formula with everything in float64, on the same bf16 inputs |
| ulps   | hf - sglang in units in the last place of the larger one as bf16; 0 where they are equal |

Inputs are random with fixed seeds, at small shapes. Of eight seeds the first that shows a difference is taken, and the
first four elements that differ are shown besides others at even distances. So a table says that a cause is live, not
how often; its `attrs["differ"]` and `attrs["elements"]` count that. Where a cause is dead every row is equal.

Causes outside the plan: `image_processor` has torchvision as hf and PIL as sglang, `batch_shape` one row alone and the
same row among 64, `fp8` one scale per block of 128 and one per tensor. `vit_norm_eps` takes 1e-5 for rms_norm_eps.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tvF

from vlmlab import arithmetic as by

SEEDS, ROWS, DIFFERING = 8, 8, 4  # seeds to try, rows to show, and how many of them may be chosen for differing
EPS, TEXT_EPS = 1e-6, 1e-5

Draw = Callable[..., Tensor]


def micro_demo(name: str) -> pd.DataFrame:
    """One cause in numbers.

    Args: name: of a cause in causes.CAUSES or causes.NOT_SWITCHED.
    Returns: at most 8 rows with columns what, hf, sglang, exact, ulps. Raises: KeyError: no such cause.
    """
    axes, step = _DEMOS[name]
    for seed in range(SEEDS):
        ways = [step(_drawing(seed, torch.bfloat16), how) for how in ("hf", "sglang")]
        if not torch.equal(*(way.double() for way in ways)):
            break
    exact = step(_drawing(seed, torch.float64), "hf").double()
    hf, sglang = (way.double() for way in ways)
    differ = (hf != sglang).flatten()
    chosen = differ.nonzero().flatten()[:DIFFERING]
    others = torch.linspace(0, differ.numel() - 1, ROWS + DIFFERING).long()
    others = others[~torch.isin(others, chosen)][: ROWS - len(chosen)]
    places = torch.cat((chosen, others)).sort().values
    indices = np.stack(np.unravel_index(places.numpy(), tuple(hf.shape)), 1).tolist()
    hf, sglang, exact = (x.flatten()[places] for x in (hf, sglang, exact))
    frame = pd.DataFrame(
        {
            "what": [", ".join(f"{axis} {i}" for axis, i in zip(axes, index, strict=True)) for index in indices],
            "hf": hf.numpy(),
            "sglang": sglang.numpy(),
            "exact": exact.numpy(),
            "ulps": ((hf - sglang) / _last_place(torch.maximum(hf.abs(), sglang.abs()))).numpy(),
        }
    )
    frame.attrs.update(differ=int(differ.sum()), elements=differ.numel())
    return frame


def _drawing(seed: int, dtype: torch.dtype) -> Draw:
    """Normal numbers, rounded to bf16, then in `dtype`: the same inputs for every way."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale + mean).bfloat16().to(dtype)

    return draw


def _last_place(x: Tensor) -> Tensor:
    """Distance of neighbouring bf16 values (8 significant bits) at x >= 0."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 8)


# Every step below draws the same inputs whatever `how` is, and holds every other step at one way.


def _patch_embed(draw: Draw, how: str) -> Tensor:
    return by.patch_embedding(draw(64, 1176), draw(64, 3, 2, 14, 14, scale=0.03), draw(64), how)


def _positions(draw: Draw, how: str, formula: str | None = None, precision: str | None = None) -> Tensor:
    return by.blend_positions(draw(48 * 48, 32), (42, 52), 2, formula or how, precision or how)


def _vit_rotary(draw: Draw, how: str) -> Tensor:
    x = draw(60, 2, 32)
    stored = by.wide(x).dtype if how == "hf" else x.dtype
    return by.rotate_vision(x, *by.rotary_table(torch.arange(60), 32, 10000.0, stored, how))


def _vit_norm_eps(draw: Draw, how: str) -> Tensor:
    x, weight, bias = draw(16, 64, scale=0.1), draw(64, mean=1.0, scale=0.3), draw(64, scale=0.1)
    return by.layer_norm(x, weight, bias, EPS if how == "hf" else TEXT_EPS)


def _vit_attention(draw: Draw, how: str) -> Tensor:
    return by.full_attention(draw(64, 2, 32), draw(64, 2, 32), draw(64, 2, 32), how).view(64, 2, 32)


def _rms_norm(draw: Draw, how: str, shape: tuple[int, ...]) -> Tensor:
    return by.rms_norm(draw(*shape, scale=4.0), draw(shape[-1], mean=1.0, scale=0.3), EPS, how)


def _residual_sum(draw: Draw, how: str) -> Tensor:
    _, read = by.residual_sum(draw(8, 256, scale=10.0), draw(8, 256), how)
    return by.rms_norm(read, draw(256, mean=1.0, scale=0.3), EPS, "sglang")


def _stacked(draw: Draw, how: str, widths: tuple[int, ...]) -> Tensor:
    x, weights = draw(8, 2048), [draw(width, 2048, scale=0.02) for width in widths]
    return torch.cat(by.stacked_linear(x, weights, None, how), -1)


def _rotary(draw: Draw, how: str) -> Tensor:
    x = draw(64, 4, 32)
    return by.rotate_text(x, *by.rotary_table(torch.arange(0, 4096, 64), 32, 1e6, x.dtype, how), how)


def _attention(draw: Draw, how: str) -> Tensor:
    q, k, v = draw(1, 4, 16, 32), draw(1, 2, 16, 32), draw(1, 2, 16, 32)
    return by.causal_attention(q, k, v, how).view(16, 4, 32)


def _deepstack_order(draw: Draw, how: str) -> Tensor:
    residual, x, features = draw(8, 256, scale=4.0), draw(8, 256), draw(8, 256)
    stream, pending = by.deepstack_sum(residual, x, features, torch.ones(8, dtype=torch.bool), how)
    return stream + pending


def _experts(draw: Draw, how: str, weighting: str | None = None, combination: str | None = None) -> Tensor:
    weights, _ = by.route(draw(16, 32), 4, weighting or how)
    return by.combine(draw(16, 4, 64), weights, combination or how)


def _head(draw: Draw, how: str) -> Tensor:
    return by.head(draw(4, 2048), draw(512, 2048, scale=0.02), how)[0]


def _image_processor(draw: Draw, how: str) -> Tensor:
    blobs = draw(1, 3, 9, 11)
    smooth = F.interpolate(blobs.double(), size=(50, 60), mode="bicubic", align_corners=False)
    picture = (128 + 48 * smooth).round().clamp(0, 255).to(torch.uint8)[0]
    if blobs.dtype == torch.float64:
        resized = F.interpolate(picture[None].double(), size=(28, 42), mode="bicubic", antialias=True)
        return resized[0].clamp(0, 255)
    if how == "hf":
        return tvF.resize(picture, [28, 42], interpolation=InterpolationMode.BICUBIC, antialias=True)
    image = Image.fromarray(picture.permute(1, 2, 0).numpy())
    return torch.from_numpy(np.array(image.resize((42, 28), resample=Image.Resampling.BICUBIC))).permute(2, 0, 1)


def _batch_shape(draw: Draw, how: str) -> Tensor:
    x, weight = draw(64, 2048), draw(1024, 2048, scale=0.02)
    return F.linear(x[:1] if how == "hf" else x, weight)[0]


def _fp8(draw: Draw, how: str) -> Tensor:
    x = torch.cat((draw(4, 128), draw(4, 128, scale=0.05)), -1)
    if x.dtype == torch.float64:
        return x
    blocks = x.float().view(4, 2, 128)
    largest = blocks.abs().amax(-1, keepdim=True) if how == "hf" else blocks.abs().amax()
    scale = largest / torch.finfo(torch.float8_e4m3fn).max
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype).view(4, 256)


_TOKEN, _HEADS = ("token", "channel"), ("token", "head", "channel")
_DEMOS: dict[str, tuple[tuple[str, ...], Callable[[Draw, str], Tensor]]] = {
    "patch_embed": (("patch", "channel"), _patch_embed),
    "position_formula": (("patch", "channel"), partial(_positions, precision="hf")),
    "position_precision": (("patch", "channel"), partial(_positions, formula="hf")),
    "vit_rotary": (("patch", "head", "channel"), _vit_rotary),
    "vit_norm_eps": (("patch", "channel"), _vit_norm_eps),
    "vit_attention": (("patch", "head", "channel"), _vit_attention),
    "rms_norm": (_TOKEN, partial(_rms_norm, shape=(8, 256))),
    "residual_sum": (_TOKEN, _residual_sum),
    "qkv_linear": (_TOKEN, partial(_stacked, widths=(256, 64, 64))),
    "gate_up_linear": (_TOKEN, partial(_stacked, widths=(256, 256))),
    "rotary": (_HEADS, _rotary),
    "attention": (_HEADS, _attention),
    "qk_norm": (_HEADS, partial(_rms_norm, shape=(8, 4, 32))),
    "deepstack_order": (_TOKEN, _deepstack_order),
    "router_weights": (_TOKEN, partial(_experts, combination="sglang")),
    "expert_combine": (_TOKEN, partial(_experts, weighting="hf")),
    "head": (("logit",), _head),
    "image_processor": (("colour", "row", "column"), _image_processor),
    "batch_shape": (("channel",), _batch_shape),
    "fp8": (_TOKEN, _fp8),
}
