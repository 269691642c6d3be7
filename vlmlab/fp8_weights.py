"""The linears of a checkpoint that compute in FP8: stored so or quantised here, once; and their products.

SCHEMES         "weight/activation", the ways a plan can choose as its `fp8`
FP8Weights      a checkpoint's FP8 linears

Quantised is what SGLang quantises on CUDA: in the language model all linears but the router and the head, experts
included; in the ViT those of Qwen2-VL, whose vision tower gets the same configuration, and none of Qwen3-VL. An FP8
checkpoint says itself which of these it left out.

Linears that SGLang fuses (qkv, gate_up) are one weight with its scales: measured over all of it when quantised here,
each part's own when stored. Blocks stay with their part, so a part may end inside a block; SGLang refuses to fuse such
parts ("not divisible by weight quantization block_n"), and experts likewise.

On CUDA, SGLang's own kernels quantise and multiply where kernels.fp8_kernel has one: dynamic activations, no experts.
All else is emulated in plain torch.

Experts have other kernels. Quantised here they get one scale per expert and linear, of gate and up together, also under
"channel", as `--quantization fp8` does while its other linears are "channel/token"; stored ones keep theirs. Their
activations follow the weights: per token with channels, per group with blocks, and with one scale per tensor one scale
for all rows of the call, so that a token's result depends on its batch.

Source: sglang@0.5.23: srt/layers/quantization/fp8.py, Fp8Config.get_quant_method,
Fp8LinearMethod.process_weights_after_loading and Fp8MoEMethod.process_weights_after_loading;
kernels/ops/moe/fused_moe_triton_kernels.py, invoke_fused_moe_kernel; srt/models/qwen3_vl.py,
Qwen3VLForConditionalGeneration.__init__ (quant_config=None); srt/models/qwen2_vl.py,
Qwen2VLForConditionalGeneration.__init__; srt/models/qwen3_moe.py, Qwen3MoeSparseMoeBlock.__init__ (gate).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmlab import kernels
from vlmlab.errors import VlmlabError
from vlmlab.fp8 import (
    Quantization,
    Quantized,
    dequantize,
    dynamic_scale,
    fp8_linear,
    is_skipped,
    quantize_activation,
    quantize_weight,
    read_quantization,
    stack,
    stored_weight,
)

SCHEMES = (
    "tensor/token",
    "tensor/tensor",
    "tensor/none",
    "channel/token",
    "channel/none",
    "block/group",
    "block/none",
)
EMULATED = "emulated"  # in plain torch
_LANGUAGE = r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj|mlp\.experts\.(gate_up|down)_proj)"
_VISION = r"visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.fc[12])|merger\.mlp\.[02])"
_OF_EXPERTS = {"tensor": "tensor", "channel": "token", "block": "group"}


@dataclass(frozen=True)
class _Fused:
    """Linears of one input. weights: Quantized; in float64 dequantised. biases: one each. heights: per linear."""

    weights: Sequence[Quantized | Tensor]
    biases: list[Tensor | None]
    heights: list[int]


class FP8Weights:
    """A checkpoint's FP8 linears.

    Args: config: parsed config.json. weights: all of the checkpoint, as Hybrid names them; FP8 weights and scales move
    out of it. dtype: to compute in; in float64 stored or quantised weights meet unquantised activations.
    Attributes: declared: what the checkpoint declares, or None. in_vision: whether the ViT has any. computed_by: what
    a plan said for "fp8" to what has computed its products so far, EMULATED or kernels.
    Raises: VlmlabError: weights, scales and config.json do not fit each other.
    """

    def __init__(self, config: Mapping[str, Any], weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.declared = None if config.get("quantization_config") is None else read_quantization(config)
        self.in_vision = config["model_type"] == "qwen2_vl"
        self._pattern = re.compile(f"{_LANGUAGE}|{_VISION}" if self.in_vision else _LANGUAGE)
        self._plain, self._exact = weights, dtype == torch.float64
        self._stored: dict[str, list[Quantized]] = {}
        self._static: dict[str, Tensor] = {}
        self._kept: dict[tuple, _Fused] = {}
        self.computed_by: dict[str, set[str]] = {}
        names = [name for name in weights if not name.endswith(("_scale", "_scale_inv"))]
        for name in names:
            self._check(name, weights[name].dtype == torch.float8_e4m3fn)
        for name in names:
            if weights[name].dtype == torch.float8_e4m3fn:
                assert self.declared is not None
                self._take(name, self.declared)
        left = [name for name in weights if name.endswith(("_scale", "_scale_inv"))]
        if left:
            raise VlmlabError(f"expected scales of FP8 weights only, got {left[0]} and {len(left) - 1} more")

    def _check(self, name: str, is_fp8: bool) -> None:
        """Whether a weight should be in FP8. Raises: VlmlabError: it should and is not, or the other way round."""
        module = name.removesuffix(".weight")
        wanted = self.declared is not None and self._is_linear(name, module)
        if wanted and self.declared is not None:
            module = re.sub(r"\.experts\.\w+$", ".experts", module)
            module = re.sub(r"\.[qkv]_proj$", ".qkv_proj", re.sub(r"\.(gate|up)_proj$", ".gate_up_proj", module))
            wanted = not is_skipped(self.declared, module)
        if is_fp8 and not wanted:
            raise VlmlabError(f"expected no FP8 weight {name}: config.json or SGLang leaves it unquantised")
        if wanted and not is_fp8:
            raise VlmlabError(f"expected {name} in float8_e4m3fn, as quantization_config says; list it as ignored")

    def _is_linear(self, name: str, module: str) -> bool:
        return (name != module or ".experts." in name) and self._pattern.fullmatch(module) is not None

    def _take(self, name: str, declared: Quantization) -> None:
        """Move a weight and its scales out of the checkpoint's other weights."""
        scales = [key for key in (f"{name}_scale", f"{name}_scale_inv") if key in self._plain]
        if len(scales) != 1:
            raise VlmlabError(f"expected {name}_scale or {name}_scale_inv beside the FP8 weight, got {len(scales)}")
        values, scale = self._plain.pop(name), self._plain.pop(scales[0])
        module = name.removesuffix(".weight")
        static = self._plain.pop(f"{module}.input_scale", None)
        try:
            if module != name:
                self._stored[module] = [stored_weight(values, scale, declared.weight)]
            else:
                if scale.dim() == 0 or len(scale) != len(values):
                    raise VlmlabError(f"expected scales of {len(values)} experts, got {list(scale.shape)}")
                pairs = zip(values, scale, strict=True)
                self._stored[module] = [stored_weight(v, s, declared.weight) for v, s in pairs]
        except VlmlabError as error:
            raise VlmlabError(f"{name}: {error}") from error
        if declared.activation == "tensor":
            if module == name:
                raise VlmlabError("static activation scales of experts are not supported: expected dynamic ones")
            if static is None or static.numel() != 1 or not (static.isfinite() & (static > 0)).all():
                got = "none" if static is None else static.flatten().tolist()
                raise VlmlabError(f"expected one positive finite {module}.input_scale, got {got}")
            self._static[module] = static.reshape(())

    def _scheme(self, module: str, how: str) -> tuple[str, str] | None:
        """(weight, activation) of a linear, or None where it is not quantised. how: of the plan, see SCHEMES."""
        declared, stored = self.declared, module in self._stored
        if how in ("hf", "sglang"):  # nothing chosen
            return (declared.weight, declared.activation) if stored and declared is not None else None
        if how not in SCHEMES:
            raise VlmlabError(f"expected fp8 as one of {', '.join(SCHEMES)}, got {how!r}")
        weight, activation = how.split("/")
        if declared is not None and weight != declared.weight:
            has = f"{declared.weight}/{declared.activation}"
            raise VlmlabError(f"expected {declared.weight}/..., since the checkpoint is stored as {has}, got {how!r}")
        if activation == "tensor" and not self._static:
            raise VlmlabError(f"{how!r} needs a checkpoint with input scales, which are not made up here")
        return (weight, activation) if stored or (declared is None and self._pattern.fullmatch(module)) else None

    def products(self, x: Tensor, modules: Sequence[str], how: str) -> list[Tensor] | None:
        """Products of one input with linears that SGLang fuses, or with one.

        Args: x: [T, K]. modules: for example ["model.layers.0.self_attn.o_proj"]. how: what a plan says for "fp8".
        Returns: [T, N] each, or None where they are not quantised.
        Raises: VlmlabError: no such scheme, or not one of this checkpoint.
        """
        scheme = self._scheme(modules[0], how)
        if scheme is None:
            return None
        weight, activation = scheme
        static = torch.stack([self._static[module] for module in modules]).max() if activation == "tensor" else None
        fused = self._fused(tuple(modules), weight)
        pairs = zip(fused.weights, fused.biases, strict=True)
        out = [self._product(x, w, b, activation, static, how) for w, b in pairs]
        return list(torch.cat(out, -1).split(fused.heights, -1)) if len(modules) > 1 else out

    def _fused(self, modules: tuple[str, ...], granularity: str) -> _Fused:
        if (modules, granularity) not in self._kept:
            biases = [self._plain.get(f"{module}.bias") for module in modules]
            if modules[0] in self._stored:
                parts = [part for module in modules for part in self._stored[module]]
            else:
                plain = [self._plain[f"{module}.weight"] for module in modules]
                whole = plain if granularity == "block" else [torch.cat(plain)]
                parts = [_quantize(weight, granularity) for weight in whole]
            heights = [len(part.values) for part in parts]
            if len(parts) < len(modules):
                heights = [len(self._plain[f"{module}.weight"]) for module in modules]
            elif granularity != "block" and len(parts) > 1:
                parts = [stack(parts)]
            if len(parts) < len(modules):
                given = [bias for bias in biases if bias is not None]
                biases = [torch.cat(given) if given else None]
            self._kept[modules, granularity] = _Fused(self._ready(parts), biases, heights)
        return self._kept[modules, granularity]

    def expert_products(self, parts: Mapping[int, Tensor], name: str, how: str) -> dict[int, Tensor] | None:
        """Products of every expert with its rows.

        Args: parts: expert to its rows [R, K]; none empty. name: for example "model.layers.0.mlp.experts.down_proj".
        how: as in products. Returns: expert to [R, N], or None where they are not quantised.
        """
        scheme = self._scheme_of_experts(name, how)
        if scheme is None:
            return None
        granularity, activation = scheme
        rows = torch.cat(list(parts.values()))
        static = dynamic_scale(rows) if activation == "tensor" and not self._exact else None
        weights = self._experts(name, granularity).weights
        self.computed_by.setdefault(how, set()).add(EMULATED)
        return {expert: _emulated(part, weights[expert], None, activation, static) for expert, part in parts.items()}

    def mixes_rows(self, how: str) -> bool:
        """Whether all rows of a call share a scale, so that a batch is another function. Args: how: as in products."""
        names = [name for name in (*self._plain, *self._stored) if ".experts." in name]
        shared = any((self._scheme_of_experts(name, how) or ("", ""))[1] == "tensor" for name in names)
        return shared and not self._exact

    def _scheme_of_experts(self, name: str, how: str) -> tuple[str, str] | None:
        scheme = self._scheme(name, how)
        if scheme is None:
            return None
        granularity = "tensor" if scheme[0] == "channel" and self.declared is None else scheme[0]
        return granularity, "none" if scheme[1] == "none" else _OF_EXPERTS[granularity]

    def _experts(self, name: str, granularity: str) -> _Fused:
        if (name, granularity) not in self._kept:
            experts = self._stored.get(name) or [_quantize_expert(w.float(), granularity) for w in self._plain[name]]
            self._kept[name, granularity] = _Fused(self._ready(experts), [], [])
        return self._kept[name, granularity]

    def _product(
        self,
        x: Tensor,
        weight: Quantized | Tensor,
        bias: Tensor | None,
        activation: str,
        static: Tensor | None,
        how: str,
    ) -> Tensor:
        kernel = ""
        if isinstance(weight, Quantized) and activation in ("token", "group"):
            kernel = kernels.fp8_kernel(x, weight.values, weight.granularity == "block")
        self.computed_by.setdefault(how, set()).add(kernel or EMULATED)
        if kernel and isinstance(weight, Quantized):
            return kernels.fp8_linear(x, weight.values, weight.scale, bias, weight.granularity == "block")
        return _emulated(x, weight, bias, activation, static)

    def _ready(self, parts: list[Quantized]) -> Sequence[Quantized | Tensor]:
        return [dequantize(part) for part in parts] if self._exact else parts


def _quantize(weight: Tensor, granularity: str) -> Quantized:
    """As SGLang does when it loads a checkpoint in bfloat16, in whatever dtype it is held. Args: weight: [N, K]."""
    made, narrow = quantize_weight(weight.float(), granularity), weight.bfloat16()
    by_kernel = granularity == "channel" and kernels.fp8_kernel(narrow, made.values, blocks=False)
    if by_kernel and torch.equal(narrow.to(weight.dtype), weight):
        return Quantized(*kernels.quantize_rows(narrow), granularity)
    return made


def _quantize_expert(weight: Tensor, granularity: str) -> Quantized:
    """Per tensor another kernel than for linears. Args: weight: [N, K]."""
    if granularity == "block":
        return quantize_weight(weight, granularity)
    return quantize_activation(weight, "tensor", dynamic_scale(weight))


def _emulated(
    x: Tensor, weight: Quantized | Tensor, bias: Tensor | None, activation: str, static: Tensor | None
) -> Tensor:
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return fp8_linear(x, weight, bias, activation, static)
