"""FP8 as SGLang computes with it, in plain torch: quantisation, the scaled product, and what a checkpoint declares.

Quantized               e4m3 values, and what each is multiplied by to come back
quantize_weight         one scale per tensor, per output channel or per 128 x 128 block
quantize_activation     one scale per token, per 128 of its channels, or a given one
dynamic_scale           the one scale of a whole tensor, as it comes
dequantize              values times scales
stored_weight           a checkpoint's two tensors as Quantized
stack                   several weights as one, as in qkv_proj
scale_convention        whether stored scales multiply or divide
fp8_linear              the scaled product; for a float64 input the truth on the stored weights
Quantization, is_fp8, read_quantization    what a config.json declares
is_skipped              whether a module keeps its weights unquantised

SGLang here means its NVIDIA path. Its formulas differ: a scale is `largest / 448` or `largest * (1 / 448)`, and a value
is divided by it, multiplied by its reciprocal, or multiplied by `448 / largest`, all in float32. The last bit of a
scale and, rarely, a stored value depend on which. Divisions here are IEEE's; the per-group kernel, and on Hopper the
per-token one, are compiled with --use_fast_math, whose divisions may differ in the last bits.

Source: sglang@0.5.23: srt/layers/quantization/fp8.py, srt/layers/quantization/fp8_utils.py; and the CUDA that these
call: kernels/jit/csrc/gemm/per_token_quant_fp8.cuh, kernels/jit/csrc/gemm/per_token_group_quant.cuh.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmlab.errors import VlmlabError
from vlmlab.floats import FORMATS, ulp

BLOCK = 128
E4M3 = FORMATS["e4m3"]
WEIGHT_GRANULARITIES = ("tensor", "channel", "block")
ACTIVATION_GRANULARITIES = ("token", "group", "tensor", "none")
_DTYPE = torch.float8_e4m3fn
_INPUTS = (torch.bfloat16, torch.float16, torch.float32)


# ---------------------------------------------------------------------------------------------------- quantisation


@dataclass(frozen=True)
class Quantized:
    """A matrix in e4m3.

    Attributes: values: [R, C] float8_e4m3fn. scale: float32, what a value is multiplied by: [1, 1] for "tensor", [R, 1]
    for "channel" and "token", [R, ceil(C / 128)] for "group", [ceil(R / 128), ceil(C / 128)] for "block". granularity.
    """

    values: Tensor
    scale: Tensor
    granularity: str


def quantize_weight(weight: Tensor, granularity: str) -> Quantized:
    """A weight to e4m3, saturating.

    "tensor" multiplies by f = 448 / max(largest, 1e-12), stores 1 / f. "channel" stores s = max(largest, 1e-10) / 448
    and multiplies by 1 / s. "block" stores s = max(largest, 1e-4) / 448 and divides by it: so SGLang makes blocks from
    another FP8 format; it makes none from bfloat16. Its per-channel kernel has no floor: a row of zeros gets scale 0
    there, with the same product.

    Args: weight: [N, K] bfloat16, float16 or float32. granularity: of WEIGHT_GRANULARITIES.
    Returns: Quantized. Raises: VlmlabError: no such granularity, no matrix of these dtypes, or NaN or infinity in it.
    Source: sglang@0.5.23: srt/layers/quantization/fp8_utils.py, input_to_float8; srt/layers/quantization/fp8.py,
    Fp8LinearMethod.process_weights_after_loading; kernels/jit/csrc/gemm/per_token_quant_fp8.cuh;
    srt/layers/quantization/mxfp8_block_convert.py, bf16_to_block_fp8_128.
    """
    _check_one_of(granularity, WEIGHT_GRANULARITIES, "weight granularity")
    w = _float32(weight, "weight")
    if not w.isfinite().all():
        raise VlmlabError("expected a finite weight, got NaN or infinity")
    largest = _largest(w, granularity)
    if granularity == "tensor":
        factor = E4M3.largest / largest.clamp(min=1e-12)
        return Quantized(_cast(w * factor), factor.reciprocal(), granularity)
    if granularity == "channel":
        scale = largest.clamp(min=1e-10) / E4M3.largest
        return Quantized(_cast(w * scale.reciprocal()), scale, granularity)
    scale = largest.clamp(min=1e-4) / E4M3.largest
    return Quantized(_cast(w / _spread(scale, granularity, w.shape)), scale, granularity)


def quantize_activation(x: Tensor, granularity: str, static_scale: Tensor | float | None = None) -> Quantized:
    """An activation to e4m3, saturating.

    "token" stores s = max(largest, 1e-10) / 448 and multiplies by 1 / s; "group" stores max(largest, 1e-10) * (1 / 448)
    and multiplies by 448 / largest; "tensor" multiplies by 1 / static_scale. SGLang's per-token kernel has no floor: a
    row of zeros gets scale 0 there, with the same product. Its groups must be full; here the last may be partial.

    NaN never counts for `largest`. Per token it is stored as 448, per group it stays NaN. An infinity makes its scale
    infinite, finite neighbours 0 and itself what NaN becomes, so that the product is NaN or infinite. With a static
    scale infinities saturate and NaN becomes 448, as in sgl_per_tensor_quant_fp8 (Triton's kernel leaves it undefined).

    Args: x: [T, K] bfloat16, float16 or float32. granularity: "token", "group" or "tensor". static_scale: of the
    checkpoint, for "tensor" only; of stacked weights SGLang takes the largest.
    Returns: Quantized. Raises: VlmlabError: no such granularity, no matrix of these dtypes, or a static scale that is
    missing, superfluous or no positive finite number.
    Source: sglang@0.5.23: kernels/jit/csrc/gemm/per_token_quant_fp8.cuh,
    kernels/jit/csrc/gemm/per_token_group_quant.cuh; kernels/ops/quantization/fp8_kernel.py, static_quant_fp8.
    """
    _check_one_of(granularity, ("token", "group", "tensor"), "activation granularity")
    if (granularity == "tensor") != (static_scale is not None):
        raise VlmlabError(f'expected a static scale with "tensor" and with nothing else, got {granularity!r}')
    x = _float32(x, "activation")
    if granularity == "tensor":
        scale = torch.as_tensor(static_scale, dtype=torch.float32, device=x.device).reshape(-1, 1)
        if scale.shape != (1, 1) or not (scale.isfinite() & (scale > 0)).all():
            raise VlmlabError(f"expected one positive finite static scale, got {shown(scale.flatten().tolist())}")
        factor = scale.reciprocal()
    else:
        largest = _largest(x, granularity).clamp(min=1e-10)
        if granularity == "token":
            scale = largest / E4M3.largest
            factor = scale.reciprocal()
        else:
            scale = largest * torch.tensor(1 / E4M3.largest, dtype=torch.float32, device=x.device)
            factor = E4M3.largest / largest
    scaled = x * _spread(factor, granularity, x.shape)
    if granularity != "group":
        scaled = torch.where(scaled.isnan(), E4M3.largest, scaled)
    return Quantized(_cast(scaled), scale, granularity)


def dynamic_scale(x: Tensor) -> Tensor:
    """max(largest, 1e-10) / 448 of a whole tensor: how SGLang scales the activations and weights of experts.

    Its kernel has no floor. NaN does not count, and an infinity counts as the largest float32.

    Args: x: [R, C] bfloat16, float16 or float32. Returns: float32, for quantize_activation.
    Source: sglang@0.5.23: kernels/ops/quantization/fp8_kernel.py, scaled_fp8_quant.
    """
    largest = _largest(_float32(x, "activation"), "tensor")
    return largest.clamp(1e-10, torch.finfo(torch.float32).max) / E4M3.largest


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values times scales. Args: dtype: of the result; float64 is exact, else float32 products are rounded to it.

    Returns: [R, C]. Source: sglang@0.5.23: srt/layers/quantization/fp8_utils.py, block_quant_dequant.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = _spread(quantized.scale.to(wide), quantized.granularity, quantized.values.shape)
    return (quantized.values.to(wide) * scale).to(dtype)


def _check_one_of(name: str, known: Sequence[str], what: str) -> None:
    if name not in known:
        raise VlmlabError(f"expected {what} {', '.join(known)}, got {shown(name)}")


def _float32(x: Tensor, what: str) -> Tensor:
    if x.dim() != 2 or x.numel() == 0 or x.dtype not in _INPUTS:
        raise VlmlabError(
            f"expected a non-empty {what} matrix in bfloat16, float16 or float32, got {list(x.shape)} {x.dtype}"
        )
    return x.float()


def _tile(granularity: str, shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    rows = {"tensor": shape[0], "block": BLOCK}.get(granularity, 1)
    return rows, BLOCK if granularity in ("block", "group") else shape[1]


def _largest(x: Tensor, granularity: str) -> Tensor:
    """The largest magnitude per tile, NaN left out. Args: x: [R, C]. Returns: shape of Quantized.scale."""
    height, width = _tile(granularity, x.shape)
    rows, columns = math.ceil(x.shape[0] / height), math.ceil(x.shape[1] / width)
    magnitude = torch.where(x.isnan(), 0.0, x.abs())
    padded = F.pad(magnitude, (0, columns * width - x.shape[1], 0, rows * height - x.shape[0]))
    return padded.view(rows, height, columns, width).amax((1, 3))


def _spread(scale: Tensor, granularity: str, shape: Sequence[int]) -> Tensor:
    """A scale per tile to what broadcasts over [R, C]."""
    if granularity not in ("block", "group"):
        return scale
    height, width = _tile(granularity, shape)
    return scale.repeat_interleave(height, 0)[: shape[0]].repeat_interleave(width, 1)[:, : shape[1]]


def _cast(x: Tensor) -> Tensor:
    return x.clamp(-E4M3.largest, E4M3.largest).to(_DTYPE)


# ---------------------------------------------------------------------------------------------------- stored weights


def stored_weight(values: Tensor, scale: Tensor, granularity: str) -> Quantized:
    """A checkpoint's weight.

    Args: values: [N, K] float8_e4m3fn. scale: what a value is multiplied by, whatever its name says (`weight_scale`, or
    `weight_scale_inv` in block checkpoints), any float dtype: one number for "tensor", [N] or [N, 1] for "channel",
    [ceil(N / 128), ceil(K / 128)] for "block". granularity: of WEIGHT_GRANULARITIES.
    Returns: Quantized. Raises: VlmlabError: another dtype or shape, NaN, or a scale that is negative or not finite.
    Source: sglang@0.5.23: srt/layers/quantization/fp8.py, Fp8LinearMethod.create_fp8_weight_.
    """
    _check_one_of(granularity, WEIGHT_GRANULARITIES, "weight granularity")
    if values.dim() != 2 or values.numel() == 0 or values.dtype != _DTYPE:
        raise VlmlabError(f"expected a non-empty weight matrix in {_DTYPE}, got {list(values.shape)} {values.dtype}")
    rows, columns = values.shape
    shapes: dict[str, list[tuple[int, ...]]] = {
        "tensor": [(), (1,), (1, 1)],
        "channel": [(rows,), (rows, 1)],
        "block": [(math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))],
    }
    known = shapes[granularity]
    if not scale.is_floating_point() or tuple(scale.shape) not in known:
        raise VlmlabError(
            f"expected a {granularity} scale of shape {' or '.join(str(list(s)) for s in known)} for a weight "
            f"{list(values.shape)}, got {list(scale.shape)} {scale.dtype}"
        )
    scale = scale.float().reshape(known[-1])
    if not (scale.isfinite() & (scale >= 0)).all() or values.float().isnan().any():
        raise VlmlabError("expected finite weights and finite scales of at least 0, got others")
    return Quantized(values, scale, granularity)


def stack(weights: Sequence[Quantized]) -> Quantized:
    """Several weights of one input as one, as in qkv_proj. Scales per tensor become scales per channel.

    Args: weights: each [N_i, K], of one granularity. Returns: Quantized, [sum of N_i, K].
    Raises: VlmlabError: none, several granularities or K, or blocks that do not end with their weight.
    Source: sglang@0.5.23: srt/layers/quantization/utils.py, convert_to_channelwise; srt/layers/quantization/fp8.py,
    Fp8LinearMethod.validate_block_quant_shapes.
    """
    kinds = sorted({(w.granularity, w.values.shape[1]) for w in weights})
    if len(kinds) != 1:
        raise VlmlabError(f"expected weights of one granularity and width to stack, got {kinds}")
    values = torch.cat([w.values for w in weights])
    if weights[0].granularity == "block":
        heights = [len(w.values) for w in weights]
        if len(heights) > 1 and any(height % BLOCK for height in heights):
            raise VlmlabError(f"expected weights of whole {BLOCK}-row blocks to stack, got {heights} rows")
        return Quantized(values, torch.cat([w.scale for w in weights]), "block")
    return Quantized(values, torch.cat([w.scale.expand(len(w.values), 1) for w in weights]), "channel")


def scale_convention(values: Tensor, scale: Tensor, reference: Tensor) -> str:
    """Whether a stored scale multiplies or divides: which of the two comes back to a reference.

    It fits where every value comes back within one step of e4m3, twice what rounding needs.

    Args: values, scale: as in stored_weight, the granularity told by the scale's shape. reference: [N, K], the weight
    before quantisation.
    Returns: "multiply" or "divide". Raises: VlmlabError: neither fits, or both do (scales near 1, or only zeros).
    """
    height = tuple(values.shape[:1])
    if scale.numel() == 1:
        granularity = "tensor"
    else:
        granularity = "channel" if tuple(scale.shape) in (height, (*height, 1)) else "block"
    stored = stored_weight(values, scale, granularity)
    if reference.shape != values.shape:
        raise VlmlabError(f"expected a reference of shape {list(values.shape)}, got {list(reference.shape)}")
    step, wanted = ulp(values.double(), E4M3), reference.double()

    def fits(multiplier: Tensor) -> bool:
        spread = _spread(multiplier, granularity, values.shape)
        return bool(((values.double() * spread - wanted).abs() <= step * spread).all())

    exact = stored.scale.double()
    found = [name for name, s in (("multiply", exact), ("divide", exact.reciprocal())) if fits(s)]
    if len(found) != 1:
        raise VlmlabError(
            f"expected a scale that fits the reference multiplied or divided by, got {'both' if found else 'neither'}"
        )
    return found[0]


# ---------------------------------------------------------------------------------------------------- the product


def fp8_linear(
    x: Tensor,
    weight: Quantized,
    bias: Tensor | None = None,
    activation: str = "token",
    static_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T + bias with both in e4m3.

    Products of e4m3 values are exact in float32 and are summed in it. Weights per tensor or channel:
    round(s_x * (s_w * sum) + bias), as CUTLASS's epilogue. Blocks: each group of 128 channels is summed, multiplied by
    s_x * s_w and added in float32, as DeepGEMM promotes them; the total is rounded, and the bias added to that. Not
    emulated: the order in which a kernel adds, the tensor cores of H100 and H200, which keep fewer bits than float32
    while they add, and fused multiply-adds, which here round twice. With "none" the activation keeps its dtype; the
    weight-only kernels (Marlin) scale elsewhere.

    Args: x: [T, K]; bfloat16, float16 or float32, or float64 for the truth on the stored weights: x is not quantised
    and everything is computed in float64. weight: [N, K] of quantize_weight or stored_weight. bias: [N] or None.
    activation: "group" goes with blocks, "token" and "tensor" with the others, "none" with all. static_scale: for
    "tensor". out_dtype: of the result; None for x's.
    Returns: [T, N]. Raises: VlmlabError: a pairing without a kernel, shapes that do not fit, as quantize_activation.
    Source: sglang@0.5.23: srt/layers/quantization/fp8_utils.py, apply_fp8_linear and
    deepgemm_w8a8_block_fp8_linear_with_fallback; sgl-kernel/csrc/gemm/fp8_gemm_kernel.cu, DeviceGemmFp8RowwiseSm90;
    deep_gemm/include/deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh.
    """
    _check_one_of(activation, ACTIVATION_GRANULARITIES, "activation granularity")
    if weight.granularity not in WEIGHT_GRANULARITIES:
        raise VlmlabError(f"expected a weight per {', '.join(WEIGHT_GRANULARITIES)}, got one per {weight.granularity}")
    rows, width = weight.values.shape
    if x.dim() != 2 or x.shape[1] != width or (bias is not None and bias.shape != (rows,)):
        got = "no bias" if bias is None else f"bias {list(bias.shape)}"
        raise VlmlabError(f"expected [T, {width}] and a bias [{rows}], got {list(x.shape)} and {got}")
    blocks = weight.granularity == "block"
    if activation != "none" and (activation == "group") != blocks:
        raise VlmlabError(f"expected a pairing SGLang has, got activations {activation}, weights {weight.granularity}")
    out_dtype = out_dtype or x.dtype
    if x.dtype == torch.float64:
        return F.linear(x, dequantize(weight), None if bias is None else bias.double()).to(out_dtype)
    if activation == "none":
        q, x_scale = _float32(x, "activation"), torch.ones(1, 1, device=x.device)
    else:
        quantized = quantize_activation(x, activation, static_scale)
        q, x_scale = quantized.values.float(), quantized.scale
    w = weight.values.float()
    if not blocks:
        total = x_scale * (weight.scale.T * (q @ w.T))
        return (total if bias is None else total + bias.float()).to(out_dtype)
    w_scale = weight.scale.repeat_interleave(BLOCK, 0)[:rows].T  # [groups, N]
    x_scale = x_scale.expand(-1, len(w_scale))
    total = torch.zeros(len(x), rows, device=x.device)
    for group, start in enumerate(range(0, width, BLOCK)):
        partial = q[:, start : start + BLOCK] @ w[:, start : start + BLOCK].T
        total = total + x_scale[:, group, None] * w_scale[group] * partial
    out = total.to(out_dtype)
    return out if bias is None else out + bias.to(out_dtype)


# ---------------------------------------------------------------------------------------------------- config.json


@dataclass(frozen=True)
class Quantization:
    """What a config.json declares.

    Attributes: method: "fp8" or "compressed-tensors". fmt: "e4m3". weight: of WEIGHT_GRANULARITIES; blocks are
    128 x 128. activation: "token", "group" or "tensor" (static), as SGLang runs it on CUDA. ignored: modules that keep
    their weights, as declared.
    """

    method: str
    fmt: str
    weight: str
    activation: str
    ignored: tuple[str, ...]


def is_fp8(config: Mapping[str, Any]) -> bool:
    """Whether a config.json declares FP8 weights. Whether in a form that can be read, read_quantization says."""
    declared = config.get("quantization_config")
    if not isinstance(declared, Mapping):
        return False
    method = declared.get("quant_method")
    return method == "fp8" or (method == "compressed-tensors" and declared.get("format") == "float-quantized")


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """The quantization_config of a config.json.

    Two forms: quant_method "fp8" with e4m3 weights per tensor or 128 x 128 block; "compressed-tensors" in the format
    "float-quantized" with weights per channel and dynamic activations per token.

    Args: config: parsed config.json. Returns: Quantization.
    Raises: VlmlabError: none declared, another form, or a malformed one; names what is not supported.
    Source: sglang@0.5.23: srt/layers/quantization/fp8.py, Fp8Config.from_config;
    srt/layers/quantization/compressed_tensors/compressed_tensors.py, CompressedTensorsConfig.
    """
    declared = _mapping(config, "quantization_config")
    _allow(declared, "quant_method", "fp8", "compressed-tensors")
    return _read_fp8(declared) if declared["quant_method"] == "fp8" else _read_compressed(declared)


def _read_fp8(declared: Mapping[str, Any]) -> Quantization:
    _allow(declared, "fmt", None, "e4m3")
    _allow(declared, "weight_block_size", None, [BLOCK, BLOCK])
    for key in ("scale_fmt", "kv_cache_quant_algo", "packed_modules_mapping"):
        _allow(declared, key, None, {})
    blocks = declared.get("weight_block_size") is not None
    _allow(declared, "activation_scheme", "dynamic", *(() if blocks else ("static",)))
    dynamic = "group" if blocks else "token"
    activation = dynamic if declared["activation_scheme"] == "dynamic" else "tensor"
    key = "ignored_layers" if "ignored_layers" in declared else "modules_to_not_convert"
    return Quantization("fp8", "e4m3", "block" if blocks else "tensor", activation, _names(declared, key))


def _read_compressed(declared: Mapping[str, Any]) -> Quantization:
    _allow(declared, "format", "float-quantized")
    for key in ("kv_cache_scheme", "sparsity_config", "packed_modules_mapping"):
        _allow(declared, key, None, {})
    groups = _mapping(declared, "config_groups")
    if len(groups) != 1:
        raise VlmlabError(f"expected one group in config_groups, got {len(groups)}; several are not supported")
    group = _mapping(groups, next(iter(groups)))
    _allow(group, "targets", ["Linear"])
    _allow(group, "format", None, "float-quantized")
    _allow(group, "output_activations", None)
    weights, inputs = _mapping(group, "weights"), _mapping(group, "input_activations")
    for part, strategy, dynamic in ((weights, "channel", (False, None)), (inputs, "token", (True,))):
        _allow(part, "num_bits", 8)
        _allow(part, "type", "float")
        _allow(part, "strategy", strategy)
        _allow(part, "dynamic", *dynamic)
        _allow(part, "symmetric", True)
    ignored = _names(declared, "ignore")
    for entry in ignored:
        _check_pattern(entry)
    return Quantization("compressed-tensors", "e4m3", "channel", "token", ignored)


def _mapping(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = parent.get(key)
    if not isinstance(found, Mapping):
        raise VlmlabError(f"expected an object {shown(key)} in config.json, got {type(found).__name__}")
    return found


def _allow(parent: Mapping[str, Any], key: str, *known: Any) -> None:
    found = parent.get(key)
    if not any(type(found) is type(value) and found == value for value in known):
        wanted = " or ".join("nothing" if value is None else repr(value) for value in known)
        raise VlmlabError(f"quantization with {key} {shown(found)} is not supported: expected {wanted}")


def _names(parent: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = parent.get(key)
    found = [] if found is None else found
    if not isinstance(found, list) or not all(isinstance(name, str) and name.strip(".") for name in found):
        raise VlmlabError(f"expected a list of module names as {key}, got {shown(found)}")
    return tuple(found)


def _check_pattern(entry: str) -> None:
    """Patterns of a few `.*` only: any other can take forever. Raises: VlmlabError."""
    simple = re.fullmatch(r"\^?(?:[\w-]|\\\.|\.\*?)*\$?", entry[3:])
    if entry.startswith("re:") and (not simple or entry.count(".*") > 4):
        raise VlmlabError(f"ignored modules {shown(entry)} are not supported: expected names, dots and up to four .*")


# ---------------------------------------------------------------------------------------------------- skipped modules

_SHARDS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def is_skipped(quantization: Quantization, module: str) -> bool:
    """Whether a module keeps its weights unquantised.

    An entry of an "fp8" list names a module and everything below it, at any depth. One of "compressed-tensors" names a
    module or the end of its name, or after "re:" a pattern from its beginning. A fused module counts as its parts.
    Names mean the same with the hub's prefixes and without. Only linears are quantised at all, and in Qwen3-VL SGLang
    leaves the vision tower and lm_head as they are, whatever the list says.

    Args: module: for example "model.language_model.layers.0.self_attn.qkv_proj", or without "model.language_model.".
    Raises: VlmlabError: some parts of a fused module are ignored and others are not.
    Source: sglang@0.5.23: srt/layers/quantization/utils.py, is_layer_skipped;
    srt/layers/quantization/compressed_tensors/utils.py, should_ignore_layer.
    """
    path, _, last = _hub_name(module).rpartition(".")
    parts = [f"{path}.{part}".strip(".") for part in _SHARDS.get(last, (last,))]
    skipped = {_ignored(quantization, part) for part in parts}
    if len(skipped) > 1:
        raise VlmlabError(f"expected all parts of {shown(module)} quantised or none, got some ignored and others not")
    return skipped.pop()


def _hub_name(name: str) -> str:
    """A module's name in the hub's checkpoints, and in SGLang. Args: name: with or without prefixes."""
    short = re.sub(r"^(?:(?:model|language_model)\.)+(?=.)", "", name.strip("."))
    if short.split(".")[0] == "lm_head":
        return short
    return f"model.{short}" if short.split(".")[0] == "visual" else f"model.language_model.{short}"


def _ignored(quantization: Quantization, name: str) -> bool:
    patterns = [entry[3:] for entry in quantization.ignored if entry.startswith("re:")]
    entries = [entry.strip(".").removeprefix("model.") for entry in quantization.ignored]
    if quantization.method == "compressed-tensors":
        ends = any(f".{name}".endswith(f".{entry}") for entry in entries)
        return ends or any(re.match(pattern, name) for pattern in patterns)
    return any(f".{entry}." in f".{name}." for entry in entries)
