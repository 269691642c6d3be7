"""SGLang's own CUDA kernels, called with the arguments its layers give them, in the place of a formula.

available           the causes for which a kernel can be called here, and which kernel
rms_norm, fused_add_rms_norm    `sgl_kernel`
rotate              the Triton kernel of M-RoPE
full_attention, causal_attention    the Triton kernels of the ViT and of the prefill
fp8_kernel          which kernel multiplies in FP8 here
quantize_rows, fp8_linear           quantisation per row, and the FP8 product with its activations

`sglang` itself is never imported for them: its `__init__` patches Transformers, which would then no longer be the
engine to compare with. Its kernel modules are loaded below a bare package instead. FlashAttention 3, SGLang's default
on Hopper, has no stand-in: run the engine with `attention_backend=triton` and `mm_attention_backend=triton_attn`. Nor
has DeepGEMM, its default there for blocks in FP8: run it with `fp8_gemm_runner_backend=triton`. Experts have none.

Source: sglang@0.5.23: srt/layers/layernorm.py, RMSNorm.forward_cuda; srt/layers/rotary_embedding/mrope.py,
MRotaryEmbedding.forward_triton; srt/layers/attention/vision.py, VisionTritonAttention.forward;
srt/layers/attention/triton_backend.py, TritonAttnBackend.forward_extend; srt/layers/quantization/fp8_utils.py,
apply_fp8_linear and triton_w8a8_block_fp8_linear.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ATTENTION = "sglang.kernels.ops.attention"
_NORM, _FUSED = ("sgl_kernel", "rmsnorm"), ("sgl_kernel", "fused_add_rmsnorm")
_ROTARY = (f"{_ATTENTION}.rotary_triton", "triton_mrope_fused")
_FULL = (f"{_ATTENTION}.prefill_attention", "context_attention_fwd")
_CAUSAL = (f"{_ATTENTION}.extend_attention", "extend_attention_fwd")
_FP8_ROWS, _FP8 = ("sgl_kernel", "sgl_per_token_quant_fp8"), ("sgl_kernel", "fp8_scaled_mm")
_QUANTIZATION = "sglang.kernels.ops.quantization.fp8_kernel"
_FP8_GROUPS = (_QUANTIZATION, "sglang_per_token_group_quant_fp8")
_FP8_BLOCKS = ("sglang.kernels.ops.gemm.fp8_kernel", "w8a8_block_fp8_matmul_triton")
_FP8_BLOCKS_BEFORE = (_QUANTIZATION, "w8a8_block_fp8_matmul_triton")  # of sglang 0.5.16

KERNELS = {
    "rms_norm": _NORM,
    "qk_norm": _NORM,
    "residual_sum": _FUSED,
    "rotary": _ROTARY,
    "vit_attention": _FULL,
    "attention": _CAUSAL,
}
CHOSEN_BY = {"vit_attention": ("mm_attention_backend", "triton_attn"), "attention": ("attention_backend", "triton")}


def available(device: str, flags: Mapping[str, Any]) -> dict[str, str]:
    """The causes for which SGLang's kernel is called on a device.

    Args: device: "cpu", "cuda" or "cuda:N". flags: of SGLang's trace; attention kernels only where they chose them.
    Returns: cause to "distribution version: function"; empty on a CPU, without SGLang, or without a kernel for this
    GPU.
    """
    found = {}
    for cause, (module, function) in KERNELS.items() if device.startswith("cuda") else ():
        flag, value = CHOSEN_BY.get(cause, (None, None))
        if (flag is None or flags.get(flag) == value) and _function(module, function) is not None:
            found[cause] = _named(module, function)
    return found


def _named(module: str, function: str) -> str:
    distribution = "sglang-kernel" if module == "sgl_kernel" else "sglang"
    return f"{distribution} {importlib.metadata.version(distribution)}: {function}"


@contextmanager
def _bare_package(name: str) -> Iterator[None]:
    """Import below a package without running its `__init__`, and forget its modules afterwards."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(name)
    before = {key: module for key, module in sys.modules.items() if key.split(".")[0] == name}
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    for key in before:
        del sys.modules[key]
    sys.modules[name] = package
    try:
        yield
    finally:
        for key in [key for key in sys.modules if key.split(".")[0] == name]:
            del sys.modules[key]
        sys.modules.update(before)


@cache
def _function(module: str, name: str) -> Any:
    """A function of SGLang, or None where it cannot be imported."""
    try:
        if module == "sgl_kernel":
            return getattr(importlib.import_module(module), name)
        with _bare_package("sglang"):
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError):
        return None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Args: x: [..., D]. weight: [D]. Returns: [..., D]."""
    return _function(*_NORM)(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps).view(x.shape)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the unrounded sum. Args: x, residual: [T, D]. weight: [D]. Returns: [T, D]."""
    x, residual = x.clone(), residual.clone()  # the kernel writes into both
    _function(*_FUSED)(x, residual, weight, eps)
    return x


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Args: x: [T, H, h]. cos, sin: [T, h / 2], already of the right axis. Returns: [T, H, h]."""
    tokens, heads, size = x.shape
    rotated = x.reshape(tokens, heads * size).clone()
    table, rows = torch.cat((cos, sin), -1).to(x.dtype).contiguous(), torch.arange(tokens, device=x.device)
    section = [size // 2, 0, 0]  # one axis owns every frequency
    unused = torch.zeros(size // 2, dtype=torch.int32, device=x.device)
    positions = rows.expand(3, -1).contiguous()
    other = torch.zeros(tokens, size, dtype=x.dtype, device=x.device)  # it rotates keys along
    _function(*_ROTARY)(rotated, other, table, positions, section, size, size, False, False, True, unused)
    return rotated.view(x.shape)


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one picture over itself. Args: q, k, v: [P, H, h]. Returns: [P, H * h]."""
    q, k, v = (t.contiguous() for t in (q, k, v))
    out, length = torch.empty_like(q), len(q)
    start, lengths = (torch.tensor(n, dtype=torch.int32, device=q.device) for n in ([0, length], [length]))
    _function(*_FULL)(q, k, v, out, start, lengths, length, is_causal=False, sm_scale=q.shape[-1] ** -0.5)
    return out.flatten(1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a prefill. Args: q: [1, H, T, h]. k, v: [1, K, T, h]. Returns: [T, H * h]."""
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))
    out, length = torch.empty_like(q), len(q)
    ends, none, unused = (
        torch.tensor(values, dtype=dtype, device=q.device)
        for values, dtype in (([0, length], torch.int32), ([0, 0], torch.int32), ([], torch.int64))
    )
    _function(*_CAUSAL)(
        *(q, k, v, out, k[:1], v[:1], ends, none, unused, None, True, None, length, 1.0, 1.0),
        sm_scale=q.shape[-1] ** -0.5,
    )
    return out.flatten(1)


def fp8_kernel(x: Tensor, values: Tensor, blocks: bool) -> str:
    """Which kernel computes an FP8 product, "" where none does.

    Args: x: [T, K]. values: [N, K] e4m3. blocks: whether scales are per 128 x 128 block, else per channel.
    Returns: "distribution version: function"; "" on a CPU and on GPUs without e4m3 (before Ada), without SGLang, and
    for dtypes and widths that the kernel does not take.
    Source: sglang@0.5.23: srt/layers/quantization/fp8_utils.py, cutlass_fp8_supported and apply_fp8_linear.
    """
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or torch.cuda.get_device_capability() < (8, 9):
        return ""
    rows, width = values.shape
    if width % 128 if blocks else (rows % 16 or width % 16):
        return ""
    quantizer, product = (_FP8_GROUPS, _block_product()) if blocks else (_FP8_ROWS, _FP8)
    return "" if None in (_function(*quantizer), _function(*product)) else _named(*product)


def _block_product() -> tuple[str, str]:
    return _FP8_BLOCKS if _function(*_FP8_BLOCKS) is not None else _FP8_BLOCKS_BEFORE


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Args: x: [R, C] bfloat16 or float16. Returns: e4m3 [R, C], and what a row is multiplied by, float32 [R, 1]."""
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scale = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    _function(*_FP8_ROWS)(x.contiguous(), values, scale)
    return values, scale


def fp8_linear(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, blocks: bool) -> Tensor:
    """x @ weight.T + bias, x quantised per token, or per 128 channels with blocks.

    Args: x: [T, K]. values: [N, K] e4m3. scale: float32, [1, 1] or [N, 1], or one per block. bias: [N] or None.
    Returns: [T, N] of x's dtype.
    """
    if not blocks:
        q, x_scale = quantize_rows(x)
        w_scale = scale.expand(len(values), 1).contiguous()
        return _function(*_FP8)(q, values.T, x_scale, w_scale, x.dtype, bias)
    q, x_scale = _function(*_FP8_GROUPS)(x.contiguous(), 128)
    out = _function(*_block_product())(q, values, x_scale, scale, [128, 128], output_dtype=x.dtype)
    return out if bias is None else out + bias
