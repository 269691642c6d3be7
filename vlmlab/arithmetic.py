"""Every step on which the engines may differ, once per way of doing it, as pure functions.

residual_sum        the two halves of a residual addition: the stream that goes on and what the next norm reads
rms_norm            RMSNorm, weight applied before or after rounding
layer_norm          LayerNorm with the eps given
patch_embedding     the first projection as a 3-D convolution or as one product
full_attention      attention of one picture over itself
causal_attention    attention of the last queries over all keys
rotary_table        cosines and sines of positions, computed per call or looked up in a stored table
rotate_vision, rotate_text  the rotation itself
position_taps, blend_positions  a learned position table stretched over a grid
stacked_linear      several products one by one, or as one product with stacked weights
deepstack_sum       a residual addition and a deepstack addition, in one order or the other
route, combine      choice and weighting of experts

`how` names the way: "hf" and "sglang" throughout, "eager" besides where Transformers has two, and "kernel" where
SGLang's own CUDA kernel can be called instead of its formula. Everything but the choice is shared, so two ways differ
by nothing else. In float64 all ways are the same function up to float64 rounding; kernels do not read float64.

Source: transformers@5.19.0: models/qwen2_vl/modeling_qwen2_vl.py, models/qwen3_vl/modeling_qwen3_vl.py,
integrations/sdpa_attention.py, integrations/moe.py, vision_utils.py; sglang@0.5.23: srt/layers/layernorm.py,
srt/layers/rotary_embedding, srt/layers/attention/vision.py, srt/layers/attention/torch_native_backend.py,
srt/layers/moe/fused_moe_native.py, srt/models/qwen2_vl.py, srt/models/qwen3_vl.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vlmlab import kernels


def wide(x: Tensor) -> Tensor:
    """float32, in which the engines compute what they do not compute in the storage dtype; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


# ---------------------------------------------------------------------------------------------------- norms, residual


@dataclass(frozen=True)
class Unsummed:
    """A residual sum that SGLang's fused kernel carries out within the norm. residual, x: [T, D]."""

    residual: Tensor
    x: Tensor

    def sum(self) -> Tensor:
        """[T, D], unrounded."""
        return wide(self.x) + wide(self.residual)


def residual_sum(residual: Tensor, x: Tensor, how: str) -> tuple[Tensor, Tensor | Unsummed]:
    """Add a half-block's output to the stream.

    Args: residual, x: [T, D]. how: "hf" normalises the rounded sum, "sglang" the unrounded one, "kernel" leaves it to
    the norm; "wide" is as "sglang" and never rounds the stream, see vlmlab.on_policy.
    Returns: (stream [T, D] in the storage dtype, what the norm reads [T, D]). The stream has the same bits either way.
    """
    if how == "hf":
        stream = (residual + x).to(residual.dtype)
        return stream, stream
    unsummed = Unsummed(residual, x)
    total = unsummed.sum()
    if how == "wide":
        return total, total
    return total.to(residual.dtype), unsummed if how == "kernel" else total


def rms_norm(x: Tensor | Unsummed, weight: Tensor, eps: float, how: str) -> Tensor:
    """RMSNorm over the last axis.

    Args: x: [..., D], storage dtype or wider. weight: [D]. how: "hf" rounds, then multiplies by the weight in the
    storage dtype; "sglang" multiplies in float32 and rounds once; "kernel" is SGLang's kernel, which reads no float32;
    "wide" rounds as "hf" does and not again, see vlmlab.on_policy.
    Returns: [..., D] in the weight's dtype, float32 for "wide".
    """
    if isinstance(x, Unsummed):
        if how == "kernel":
            return kernels.fused_add_rms_norm(x.x, x.residual, weight, eps)
        x = x.sum()
    elif how == "kernel" and x.dtype == weight.dtype:
        return kernels.rms_norm(x, weight, eps)
    h = wide(x)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if how == "wide":
        return wide(weight) * h.to(weight.dtype)
    return weight * h.to(weight.dtype) if how == "hf" else (h * weight).to(weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis. Args: x: [..., D]. weight, bias: [D]. Returns: [..., D]."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


# ---------------------------------------------------------------------------------------------------- linear


def patch_embedding(pixels: Tensor, weight: Tensor, bias: Tensor | None, how: str) -> Tensor:
    """Project patches.

    Args: pixels: [P, C * t * p * p]. weight: [E, C, t, p, p]. how: "hf" is a 3-D convolution, "sglang" one product.
    Returns: [P, E].
    """
    if how == "hf":
        return F.conv3d(pixels.view(-1, *weight.shape[1:]), weight, bias, stride=weight.shape[2:]).view(len(pixels), -1)
    return F.linear(pixels, weight.reshape(len(weight), -1), bias)


def stacked_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, how: str) -> list[Tensor]:
    """Several products of one input. Args: x: [T, D]. weights: each [N_i, D]. how: "hf" one by one, "sglang" stacked.

    Returns: list of [T, N_i].
    """
    if how == "hf":
        return [F.linear(x, w, None if biases is None else biases[i]) for i, w in enumerate(weights)]
    bias = None if biases is None else torch.cat(list(biases))
    return list(F.linear(x, torch.cat(list(weights)), bias).split([len(w) for w in weights], -1))


def head(x: Tensor, weight: Tensor, how: str, batch: int = 1) -> Tensor:
    """Logits of the last position of every sequence. Args: x: [B * T, D]. weight: [V, D]. Returns: [B, V]."""
    last = x[len(x) // batch - 1 :: len(x) // batch]
    return F.linear(last, weight) if how == "hf" else torch.matmul(last, weight.T)


# ---------------------------------------------------------------------------------------------------- attention


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (k, v))
    weights = torch.matmul(q, k.transpose(2, 3)) * scale
    if mask is not None:
        weights = weights + mask
    weights = F.softmax(weights, dim=-1, dtype=wide(q).dtype).to(q.dtype)
    return torch.matmul(weights, v)


def full_attention(q: Tensor, k: Tensor, v: Tensor, how: str) -> Tensor:
    """Attention of one picture over itself.

    Args: q, k, v: [P, H, h]. how: "hf" is SDPA without a mask, which on a CPU is a flash kernel; "eager" is
    Transformers' own; "sglang" is SDPA with a boolean mask of ones, for which torch takes its math kernel; "kernel" is
    Triton.
    Returns: [P, H * h].
    """
    if how == "kernel":
        return kernels.full_attention(q, k, v)
    scale = q.shape[-1] ** -0.5
    if how == "sglang":
        q, k, v = (t.contiguous().unsqueeze(0).transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH):  # asked for by name: the mask adds zeros, a tenth of the time and no bit
            out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    else:
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out = _eager(q, k, v, None, scale) if how == "eager" else F.scaled_dot_product_attention(q, k, v, scale=scale)
    return out[0].transpose(0, 1).reshape(out.shape[2], -1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, how: str) -> Tensor:
    """Attention of the last T of S tokens over all of them.

    Args: q: [B, H, T, h]. k, v: [B, K, S, h]; T == S, or T == 1. how: "hf" and "sglang" are SDPA on differently laid
    out memory; "eager" is Transformers' own; "kernel" is Triton in a prefill, and "sglang" in a decode step.
    Returns: [B * T, H * h].
    """
    if how == "kernel" and q.shape[2] == k.shape[2]:
        return torch.cat([kernels.causal_attention(*(x[None] for x in one)) for one in zip(q, k, v, strict=True)])
    scale, tokens = q.shape[-1] ** -0.5, q.shape[2]
    if how == "eager":
        mask = torch.zeros(tokens, k.shape[2], dtype=q.dtype, device=q.device)
        if tokens > 1:
            above = torch.ones_like(mask, dtype=torch.bool).triu(1)
            mask = mask.masked_fill(above, torch.finfo(q.dtype).min)
        out = _eager(q, k, v, mask, scale)
    else:
        if how != "hf":  # one token after the other in memory, as its cache holds them
            q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).reshape(len(out) * tokens, -1)


# ---------------------------------------------------------------------------------------------------- positions


def rotary_table(positions: Tensor, dim: int, theta: float, dtype: torch.dtype, how: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position at every frequency.

    Args: positions: [...] int64. dim: rotated channels, 2 * frequencies. theta: base. dtype: of the result, float64
    computes everything in it. how: "hf" per call, "sglang" from a table over all positions stored in `dtype`.
    Returns: cos, sin, each [..., dim / 2].
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    frequency = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=compute, device=positions.device) / dim))
    if how == "hf":
        angle = positions[..., None].to(compute) * frequency
        return angle.cos().to(dtype), angle.sin().to(dtype)
    rows = torch.arange(int(positions.max()) + 1, dtype=compute, device=positions.device)
    angle = torch.einsum("i,j -> ij", rows, frequency)
    return angle.cos().to(dtype)[positions], angle.sin().to(dtype)[positions]


def mix_positions(axes: Tensor, section: Sequence[int], interleaved: bool) -> Tensor:
    """Pick for every frequency the axis that owns it.

    Args: axes: [3, T, F] by time, height, width. section: frequencies per axis, sums to F. interleaved: Qwen3-VL's
    layout thw thw ... t t, else Qwen2-VL's t ... h ... w ...
    Returns: [T, F].
    """
    if not interleaved:
        return torch.cat([part[i % 3] for i, part in enumerate(axes.split(list(section), dim=-1))], dim=-1)
    mixed = axes[0].clone()
    for axis in (1, 2):
        places = slice(axis, section[axis] * 3, 3)
        mixed[..., places] = axes[axis][..., places]
    return mixed


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * torch.cat((cos, cos), -1) + turned * torch.cat((sin, sin), -1)


def rotate_vision(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in float32, round once. Args: x: [P, H, h]. cos, sin: [P, h / 2]. Returns: [P, H, h]."""
    return _turn(wide(x), wide(cos)[:, None], wide(sin)[:, None]).to(x.dtype)


def rotate_text(x: Tensor, cos: Tensor, sin: Tensor, how: str) -> Tensor:
    """Rotate in the storage dtype.

    Args: x: [T, H, h]. cos, sin: [T, h / 2]. how: all but "kernel", which is Triton, are the same. Returns: [T, H, h].
    """
    if how == "kernel":
        return kernels.rotate(x, cos, sin)
    return _turn(x, cos[:, None], sin[:, None])


def position_taps(cells: int, side: int, how: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Where `cells` evenly spaced points fall on an axis of `side` entries, first on first and last on last.

    Args: how: "hf" by a ratio of indices, "sglang" by linspace. dtype: float32 or float64.
    Returns: entry below, entry above ([cells] int64), distance from the lower one ([cells]).
    """
    if how == "hf":
        where = torch.arange(cells, dtype=dtype) * (side - 1) / max(cells - 1, 1)
    else:
        where = torch.linspace(0, side - 1, cells, dtype=dtype)
    below = where.floor().long()
    return below, (below + 1).clamp(max=side - 1), where - below


def blend_positions(table: Tensor, grid: tuple[int, int], merge: int, formula: str, precision: str) -> Tensor:
    """Stretch a learned position table over a picture, bilinearly.

    Args: table: [side * side, E]. grid: rows, columns of patches. merge: patches per merged token and side. formula:
    "hf" multiplies hat weights, "sglang" takes differences; both also place the taps. precision: "hf" weights the table
    in float32 and rounds once, "sglang" rounds the weights and every product to the table's dtype.
    Returns: [P, E] in the table's dtype, patches in merged order.
    """
    side, (rows, columns) = round(len(table) ** 0.5), grid
    compute = torch.float64 if table.dtype == torch.float64 else torch.float32
    top, bottom, down = position_taps(rows, side, formula, compute)
    left, right, across = position_taps(columns, side, formula, compute)
    taps = torch.stack([a[:, None] * side + b for a in (top, bottom) for b in (left, right)])  # [4, rows, columns]
    if formula == "hf":
        vertical = ((1 - down).clamp(min=0), (1 - (down - 1).abs()).clamp(min=0))
        horizontal = ((1 - across).clamp(min=0), (1 - (across - 1).abs()).clamp(min=0))
        weights = torch.stack([a[:, None] * b for a in vertical for b in horizontal])
    else:
        down, across = down[:, None].expand(rows, columns), across[None].expand(rows, columns)
        both = down * across
        weights = torch.stack([1 - down - (across - both), across - both, down - both, both])

    def merged(x: Tensor) -> Tensor:  # [4, rows, columns] -> [4, P] in merged order
        return x.view(4, rows // merge, merge, columns // merge, merge).transpose(2, 3).reshape(4, -1)

    taps, weights = merged(taps).to(table.device), merged(weights).to(table.device)
    if precision == "hf":
        return (table[taps.T] * weights.T[..., None]).sum(1).to(table.dtype)
    return (table[taps] * weights.to(table.dtype)[..., None]).sum(0)


def deepstack_sum(residual: Tensor, x: Tensor, features: Tensor, rows: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Add an MLP's output and deepstack features to the stream.

    Args: residual, x: [T, D]. features: [N, D]. rows: [T] bool, the N image tokens. how: "hf" adds the features to the
    rounded sum; "sglang" adds them to the MLP's output first and leaves the sum to the next norm; "residual_first" adds
    them to the residual first and leaves the sum, too; "once" adds all three and rounds once; "in_norm" adds all three
    and leaves the rounding to the next norm, see vlmlab.on_policy. The sum of every other token is left to the next
    norm whatever the order, so that an order alone changes image tokens alone.
    Returns: (residual [T, D], what is still to be added [T, D]). Negative zero, which keeps all bits, stands where one
    of the two holds everything.
    Source: sglang@0.5.16: srt/layers/communicator.py, post_residual_addition (the residual first, on CUDA).
    """
    if how in ("hf", "once", "in_norm"):
        stream, pending = residual.clone(), x.clone()
        total = (residual if how == "hf" else wide(residual))[rows] + x[rows] + features
        if how == "in_norm":
            pending = wide(pending)
            stream[rows], pending[rows] = -0.0, total
        else:
            stream[rows], pending[rows] = total.to(residual.dtype), -0.0
        return stream, pending
    everywhere = torch.zeros_like(x)
    everywhere[rows] = features
    return (residual + everywhere, x) if how == "residual_first" else (residual, x + everywhere)


# ---------------------------------------------------------------------------------------------------- experts


def route(logits: Tensor, count: int, how: str, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts, renormalised.

    Args: logits: [T, X]. count: experts per token. how: "hf" rounds the weights to the storage dtype, "sglang" keeps
    float32. chosen: [T, count] experts to weight; None: the likeliest.
    Returns: weights [T, count], indices [T, count].
    """
    probabilities = F.softmax(logits, dim=-1, dtype=wide(logits).dtype)
    if chosen is None:
        weights, chosen = torch.topk(probabilities, count, dim=-1)
    else:
        weights = probabilities.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype) if how == "hf" else weights, chosen


def combine(outputs: Tensor, weights: Tensor, how: str) -> Tensor:
    """Weighted sum over a token's experts.

    Args: outputs: [T, count, D]. weights: [T, count]. how: "hf" rounds every product to the storage dtype, "sglang"
    multiplies and sums in float32 and rounds once. Returns: [T, D] in the outputs' dtype.
    """
    if how == "hf":
        return (outputs * weights.to(outputs.dtype)[..., None]).sum(1)
    return (wide(outputs) * wide(weights)[..., None]).sum(1).to(outputs.dtype)
