"""Why the engines may differ: the catalogue of causes, and the plan that says which way every step goes.

CAUSES          every cause the plan switches, with formulas and source locations in both engines
NOT_SWITCHED    known causes that no plan switches between the engines
causes_of       those that a model family has
Plan            per cause, and per layer where that makes sense: which way to compute
hf_plan, sglang_plan    everything as one engine does it
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vlmlab.hookpoints import FAMILIES

QWEN2, QWEN3, MOE = FAMILIES
VISION, LANGUAGE = "vision", "language"


@dataclass(frozen=True)
class Cause:
    """One step that the engines compute in different ways.

    Attributes: name: key in a Plan. title: a few words. part: "vision" or "language" ("inputs" outside the plan).
    families: that have the step. layered: whether the plan can differ per layer. explanation: one sentence.
    hf, sglang: the formulas. hf_source, sglang_source: "package@version: path, function", several joined by "; ".
    matters: where it can change bits or answers. "CPU" there is x86 with AVX-512 and no AMX.
    """

    name: str
    title: str
    part: str
    families: tuple[str, ...]
    layered: bool
    explanation: str
    hf: str
    sglang: str
    hf_source: str
    sglang_source: str
    matters: str


@dataclass(frozen=True)
class Plan:
    """Which way every step goes.

    Attributes: default: the way of causes not named, "hf" or "sglang". choices: cause to a way, or one way per layer;
    "kernel" is SGLang's own CUDA kernel in the place of the formula. "fp8" is no cause but goes along with any: of
    fp8_weights.SCHEMES, and where it is not named linears compute as the checkpoint stores them; a ViT goes by the
    last layer's.
    """

    default: str
    choices: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)

    def how(self, cause: str, layer: int | None = None) -> str:
        """The way of one step; beyond the last layer the last layer's way holds (the final norm)."""
        choice = self.choices.get(cause, self.default)
        return choice if isinstance(choice, str) else choice[-1 if layer is None else min(layer, len(choice) - 1)]

    def switched(self, cause: str, way: str, layers: Iterable[int] | None = None, depth: int = 0) -> "Plan":
        """This plan with one cause computed another way.

        Args: cause: name. way: "hf", "sglang", "eager", "kernel" or a scheme of "fp8". layers: only there, of
        `depth`; None: everywhere.
        """
        if layers is None:
            return Plan(self.default, {**self.choices, cause: way})
        wanted = set(layers)
        ways = tuple(way if i in wanted else self.how(cause, i) for i in range(depth))
        return Plan(self.default, {**self.choices, cause: ways})

    def agrees(self, other: "Plan", causes: Iterable[Cause], depth: int) -> int:
        """How many layers, from the first, two plans compute alike; 0 where they part before it.

        Args: causes: of one part. depth: its layers.
        """
        if self.choices.get("fp8") != other.choices.get("fp8"):
            return 0
        alike = depth
        for cause in causes:
            if cause.layered:
                ways = (self.how(cause.name, i) == other.how(cause.name, i) for i in range(alike))
                alike = next((i for i, same in enumerate(ways) if not same), alike)
            elif cause.name != "head" and self.how(cause.name) != other.how(cause.name):  # the head comes last
                return 0
        return alike

    def key(self, causes: Iterable[Cause], fp8: bool = True) -> tuple:
        """Equal for plans that compute the given causes, and FP8 where it matters, alike."""
        ways = tuple((cause.name, self.choices.get(cause.name, self.default)) for cause in causes)
        return (*ways, ("fp8", self.choices["fp8"])) if fp8 and "fp8" in self.choices else ways


def causes_of(family: str, part: str | None = None) -> tuple[Cause, ...]:
    """The causes a family has. Args: family: of FAMILIES. part: "vision", "language" or None for both."""
    return tuple(c for c in CAUSES if family in c.families and part in (None, c.part))


def hf_plan(attention: str = "sdpa") -> Plan:
    """Everything as Transformers does it. Args: attention: its implementation, "sdpa" or "eager"."""
    return Plan("hf", {"vit_attention": "eager", "attention": "eager"} if attention == "eager" else {})


def sglang_plan(kernels: Iterable[str] = ()) -> Plan:
    """Everything as SGLang does it. Args: kernels: causes computed by its own kernel, see kernels.available."""
    return Plan("sglang", dict.fromkeys(kernels, "kernel"))


_HF = "transformers@5.19.0: "
_HF2, _HF3 = "models/qwen2_vl/modeling_qwen2_vl.py, ", "models/qwen3_vl/modeling_qwen3_vl.py, "
_HF_MOE = "models/qwen3_vl_moe/modeling_qwen3_vl_moe.py, "
_SGL = "sglang@0.5.23: "
_SGL3 = "srt/models/qwen3_vl.py, "

CAUSES: tuple[Cause, ...] = (
    Cause(
        name="patch_embed",
        title="Patch embedding",
        part=VISION,
        families=FAMILIES,
        layered=False,
        explanation="The same weights project every patch as a 3-D convolution or as one matrix product, which sum in "
        "different orders.",
        hf="conv3d(pixels, w) + b",
        sglang="pixels @ w.reshape(E, -1).T + b",
        hf_source=f"{_HF}{_HF2}PatchEmbed.forward; {_HF3}Qwen3VLVisionPatchEmbed.forward",
        sglang_source=f"{_SGL}srt/layers/conv.py, Conv3dLayer._forward_mulmat",
        matters="Live on CPU in about 0.02 % of the bf16 elements; a picture of few distinct patches hides it.",
    ),
    Cause(
        name="position_formula",
        title="Position-grid formula",
        part=VISION,
        families=(QWEN3, MOE),
        layered=False,
        explanation="The place of every patch on the learned position table, and its four bilinear weights, come from "
        "two formulas that agree only up to float32 rounding.",
        hf="x = i * (side - 1) / (n - 1); weights = hat(y) * hat(x), hat(d) = max(0, 1 - |d|)",
        sglang="x = linspace(0, side - 1, n)[i]; w11 = dy * dx, w10 = dy - w11, w01 = dx - w11, w00 = 1 - dy - w01",
        hf_source=f"{_HF}vision_utils.py, _interpolation_axis_taps_weights; "
        "vision_utils.py, get_vision_interpolation_indices_and_weights",
        sglang_source=f"{_SGL}{_SGL3}Qwen3VLMoeVisionModel.fast_pos_embed_interpolate_from_list",
        matters="Live on CPU on some grids only: with a random 48 x 48 table of 64 channels on 193 of 196 grids while "
        "the weights stay float32, on 45 of them once position_precision rounds the weights.",
    ),
    Cause(
        name="position_precision",
        title="Position-table precision",
        part=VISION,
        families=(QWEN3, MOE),
        layered=False,
        explanation="The four taps of the position table are weighted and summed in float32 and rounded once, or with "
        "weights and every product rounded to bf16.",
        hf="bf16(sum_k table_k * w_k)",
        sglang="bf16(sum_k bf16(table_k * bf16(w_k)))",
        hf_source=f"{_HF}{_HF3}Qwen3VLVisionModel.forward",
        sglang_source=f"{_SGL}{_SGL3}Qwen3VLMoeVisionModel.fast_pos_embed_interpolate_from_list",
        matters="Live on CPU: in 43 % of the elements of a 42 x 52 grid on a random 48 x 48 table.",
    ),
    Cause(
        name="vit_rotary",
        title="ViT rotary table",
        part=VISION,
        families=FAMILIES,
        layered=True,
        explanation="Cosines and sines of the patch positions are computed in float32 per call, or looked up in a "
        "table that may be stored in bf16.",
        hf="cos(position * frequency) in float32",
        sglang="bf16(cos(position * frequency)) from a table, float32 on CUDA (Qwen2-VL: float32 per call)",
        hf_source=f"{_HF}{_HF2}Qwen2VLVisionRotaryEmbedding.forward; {_HF3}Qwen3VLVisionRotaryEmbedding.forward",
        sglang_source=f"{_SGL}srt/layers/rotary_embedding/base.py, RotaryEmbedding.__init__; "
        f"{_SGL3}Qwen3VLMoeVisionModel.rot_pos_emb; srt/models/qwen2_vl.py, Qwen2VisionTransformer.forward",
        matters="Live for Qwen3-VL on CPU only: on CUDA, or with SGLANG_ROPE_CACHE_FP32=1, the table stays float32. "
        "Dead for Qwen2-VL.",
    ),
    Cause(
        name="vit_norm_eps",
        title="ViT LayerNorm eps",
        part=VISION,
        families=FAMILIES,
        layered=True,
        explanation="The ViT's LayerNorms use a fixed eps in Transformers and the language model's rms_norm_eps in "
        "SGLang.",
        hf="(x - mean) / sqrt(var + 1e-6) * w + b",
        sglang="(x - mean) / sqrt(var + rms_norm_eps) * w + b",
        hf_source=f"{_HF}{_HF2}Qwen2VLVisionBlock.__init__; {_HF3}Qwen3VLVisionBlock.__init__",
        sglang_source=f"{_SGL}srt/models/qwen2_vl.py, Qwen2VLForConditionalGeneration.__init__; "
        f"{_SGL3}Qwen3VLForConditionalGeneration.__init__",
        matters="Changes bits only where the config's rms_norm_eps is not 1e-6, on any device. It is then a different "
        "function, not rounding, and shows most where a patch's variance is small.",
    ),
    Cause(
        name="vit_attention",
        title="ViT attention kernel",
        part=VISION,
        families=FAMILIES,
        layered=True,
        explanation="SGLang gives scaled_dot_product_attention a boolean mask that hides nothing within a picture, and "
        "torch then picks its math kernel instead of the flash kernel.",
        hf="sdpa(q, k, v), flash kernel on CPU",
        sglang="sdpa(q, k, v, mask = same picture), math kernel",
        hf_source=f"{_HF}{_HF2}VisionAttention.forward; integrations/sdpa_attention.py, sdpa_attention_forward",
        sglang_source=f"{_SGL}srt/layers/attention/vision.py, VisionSdpaAttention.forward",
        matters="Live on CPU, in a quarter to two fifths of the bf16 elements for 4 to 256 patches. On CUDA SGLang "
        "takes other kernels by default (FA3 on Hopper, FA4 on Blackwell, else Triton).",
    ),
    Cause(
        name="rms_norm",
        title="RMSNorm kernel",
        part=LANGUAGE,
        families=FAMILIES,
        layered=True,
        explanation="The weight multiplies after the normalised value is rounded to bf16, or before the only rounding.",
        hf="bf16(w * bf16(x / rms(x)))",
        sglang="bf16(w * (x / rms(x)))",
        hf_source=f"{_HF}{_HF2}Qwen2VLRMSNorm.forward; {_HF3}Qwen3VLTextRMSNorm.forward",
        sglang_source=f"{_SGL}srt/layers/layernorm.py, RMSNorm.forward_native; "
        "srt/layers/layernorm.py, RMSNorm.forward_cuda",
        matters="Live on CPU and CUDA: on H200 sgl_kernel.rmsnorm differs from HF's formula in 25.9 % of the elements "
        "at [830, 3584], from SGLang's in 0.0006 %. Weights of all ones hide it.",
    ),
    Cause(
        name="residual_sum",
        title="Residual-sum precision",
        part=LANGUAGE,
        families=FAMILIES,
        layered=True,
        explanation="The norm reads the residual sum after or before its rounding to bf16, while the stream that goes "
        "on has the same bits either way.",
        hf="s = bf16(x + residual); norm(s)",
        sglang="norm(float32(x) + float32(residual)); the stream is bf16 of that sum",
        hf_source=f"{_HF}{_HF2}Qwen2VLDecoderLayer.forward; {_HF3}Qwen3VLTextDecoderLayer.forward",
        sglang_source=f"{_SGL}srt/layers/layernorm.py, RMSNorm.forward_native; "
        "srt/layers/layernorm.py, RMSNorm.forward_cuda",
        matters="Live on CPU and CUDA: on H200 the output of sgl_kernel.fused_add_rmsnorm differs from the norm of the "
        "rounded sum in 24.2 % of the elements at [830, 3584]. On CPU this and rms_norm explain all of SGLang's "
        "smaller distance to float64 on normed states.",
    ),
    Cause(
        name="qkv_linear",
        title="QKV and output linears",
        part=LANGUAGE,
        families=FAMILIES,
        layered=True,
        explanation="Query, key and value are three products or one product with stacked weights; the output linear is "
        "one product in both engines.",
        hf="x @ Wq.T, x @ Wk.T, x @ Wv.T",
        sglang="x @ [Wq; Wk; Wv].T, then split",
        hf_source=f"{_HF}{_HF2}Qwen2VLAttention.forward; {_HF3}Qwen3VLTextAttention.forward",
        sglang_source=f"{_SGL}srt/models/qwen2.py, Qwen2Attention.forward; "
        "srt/models/qwen3.py, Qwen3Attention.forward_prepare_native; "
        "srt/models/qwen3_moe.py, Qwen3MoeAttention.forward_prepare_native",
        matters="Dead on CPU (44 of 44 shapes). Live on H200 at the 7B shape (3584 to 3584 + 512 + 512) for few rows, "
        "so in decoding: 0.11 % of the elements at 1 row, 0.18 % at 8, none at 830 or 2880.",
    ),
    Cause(
        name="gate_up_linear",
        title="Gate/up and down linears",
        part=LANGUAGE,
        families=(QWEN2, QWEN3),
        layered=True,
        explanation="Gate and up are two products or one product with stacked weights; the down linear is one product "
        "in both engines.",
        hf="x @ Wg.T, x @ Wu.T",
        sglang="x @ [Wg; Wu].T, then split",
        hf_source=f"{_HF}{_HF2}Qwen2MLP.forward; {_HF3}Qwen3VLTextMLP.forward",
        sglang_source=f"{_SGL}srt/models/qwen2.py, Qwen2MLP.forward",
        matters="Dead on CPU, and on H200 at the 7B shape at every number of rows tried.",
    ),
    Cause(
        name="rotary",
        title="Rotary cache",
        part=LANGUAGE,
        families=FAMILIES,
        layered=True,
        explanation="Cosines and sines of the token positions are computed per call and rounded to bf16, or looked up "
        "in a table of all positions that is rounded to bf16.",
        hf="bf16(cos(position * frequency)), then x * cos + rotate_half(x) * sin in bf16",
        sglang="bf16(table)[position], then x1 * cos - x2 * sin and x2 * cos + x1 * sin in bf16",
        hf_source=f"{_HF}{_HF2}Qwen2VLRotaryEmbedding.forward; {_HF3}Qwen3VLTextRotaryEmbedding.forward",
        sglang_source=f"{_SGL}srt/layers/rotary_embedding/base.py, RotaryEmbedding._compute_cos_sin_cache; "
        "srt/layers/rotary_embedding/mrope.py, MRotaryEmbedding.forward_native",
        matters="Dead on CPU: the tables have equal bits over 4096 positions. On CUDA the table is cast to bf16 as "
        "well, and a Triton kernel rotates.",
    ),
    Cause(
        name="attention",
        title="Attention of the language model",
        part=LANGUAGE,
        families=FAMILIES,
        layered=True,
        explanation="Both engines call scaled_dot_product_attention on CPU, on keys and values that lie differently in "
        "memory, and Transformers has an eager form besides.",
        hf='sdpa(q, k, v, causal); "eager": bf16(softmax(bf16(bf16(q @ k.T) * scale) + mask)) @ v',
        sglang="sdpa(q, k, v, causal) on cached keys and values",
        hf_source=f"{_HF}integrations/sdpa_attention.py, sdpa_attention_forward; {_HF2}eager_attention_forward",
        sglang_source=f"{_SGL}srt/layers/attention/torch_native_backend.py, "
        "TorchNativeAttnBackend._run_sdpa_forward_extend; srt/layers/attention/torch_native_backend.py, "
        "TorchNativeAttnBackend._run_sdpa_forward_decode",
        matters='Dead on CPU between "hf" and "sglang"; "eager" is live. On CUDA SGLang takes another kernel.',
    ),
    Cause(
        name="qk_norm",
        title="Query and key norm",
        part=LANGUAGE,
        families=(QWEN3, MOE),
        layered=True,
        explanation="As the RMSNorm kernel, over each head of queries and keys.",
        hf="bf16(w * bf16(q / rms(q))) per head",
        sglang="bf16(w * (q / rms(q))) per head",
        hf_source=f"{_HF}{_HF3}Qwen3VLTextAttention.forward; {_HF3}Qwen3VLTextRMSNorm.forward",
        sglang_source=f"{_SGL}srt/models/utils.py, apply_qk_norm; srt/layers/layernorm.py, RMSNorm.forward_native",
        matters="Live on CPU. Weights of all ones hide it.",
    ),
    Cause(
        name="deepstack_order",
        title="Deepstack order",
        part=LANGUAGE,
        families=(QWEN3, MOE),
        layered=True,
        explanation="The early layers' picture features join the stream after its residual sum, or join the MLP's "
        "output before it.",
        hf="bf16(bf16(residual + mlp) + features), at image tokens only",
        sglang="residual + bf16(mlp + features), summed by the next norm",
        hf_source=f"{_HF}{_HF3}Qwen3VLTextModel._deepstack_process",
        sglang_source=f"{_SGL}{_SGL3}Qwen3LLMModel.forward; srt/models/qwen3_vl_moe.py, Qwen3MoeLLMModel.forward; "
        "srt/layers/layer_boundary/residual/batch.py, add_to_output",
        matters="Live on CPU: the order alone moves 20 to 59 % of the elements by about one unit in the last place, "
        "worst token cosine 0.99996 after 8 layers. Features dropped or counted twice are a bug of another size.",
    ),
    Cause(
        name="router_weights",
        title="Router-weight precision",
        part=LANGUAGE,
        families=(MOE,),
        layered=True,
        explanation="The renormalised weights of the chosen experts are rounded to bf16 or stay float32; the choice is "
        "made before that and is the same.",
        hf="bf16(p / sum(p)), p = top-k of softmax(logits)",
        sglang="p / sum(p) in float32",
        hf_source=f"{_HF}{_HF_MOE}Qwen3VLMoeTextTopKRouter.forward",
        sglang_source=f"{_SGL}srt/layers/moe/topk.py, fused_topk_torch_native",
        matters='Live on CPU only where expert_combine is "sglang": HF\'s combination rounds the weights anyway.',
    ),
    Cause(
        name="expert_combine",
        title="Expert combination",
        part=LANGUAGE,
        families=(MOE,),
        layered=True,
        explanation="Every weighted expert output is rounded to bf16 before the sum, or products and sum stay float32 "
        "until one rounding.",
        hf="bf16(sum_e bf16(w_e * y_e))",
        sglang="bf16(sum_e w_e * float32(y_e))",
        hf_source=f"{_HF}integrations/moe.py, grouped_mm_experts_forward",
        sglang_source=f"{_SGL}srt/layers/moe/fused_moe_native.py, moe_forward_native",
        matters="Live on CPU. A later router that stood near a tie may then choose another expert, which moves that "
        "token far more than the rounding did. Transformers' eager expert loop is a third way.",
    ),
    Cause(
        name="head",
        title="Last-row head",
        part=LANGUAGE,
        families=FAMILIES,
        layered=False,
        explanation="The last token's logits are a linear layer in Transformers and a matmul with the transposed "
        "weights in SGLang.",
        hf="linear(x[-1:], W)",
        sglang="matmul(x[-1:], W.T)",
        hf_source=f"{_HF}{_HF2}Qwen2VLForConditionalGeneration.forward; {_HF3}Qwen3VLForConditionalGeneration.forward",
        sglang_source=f"{_SGL}srt/layers/logits_processor.py, LogitsProcessor._compute_lm_head",
        matters="Dead on CPU.",
    ),
)

NOT_SWITCHED: tuple[Cause, ...] = (
    Cause(
        name="image_processor",
        title="Image processor",
        part="inputs",
        families=FAMILIES,
        layered=False,
        explanation="The picture is resized by torchvision or by PIL, whose bicubic filters round differently.",
        hf="torchvision bicubic with antialiasing on uint8; PIL on request",
        sglang="the same; PIL with --image-processor-backend pil",
        hf_source=f"{_HF}image_processing_backends.py, TorchvisionBackend.resize; "
        "image_processing_backends.py, PilBackend.resize",
        sglang_source=f"{_SGL}srt/utils/hf_transformers/processor.py, resolve_image_processor_backend",
        matters="Dead by default: on CPU both engines had pixel values of equal bits. PIL against torchvision moves "
        "normalised pixels by up to 0.03.",
    ),
    Cause(
        name="batch_shape",
        title="Batch shape",
        part=LANGUAGE,
        families=FAMILIES,
        layered=False,
        explanation="A row of a product over many rows need not have the bits of the product over that row alone, "
        "because the kernel sums in another order.",
        hf="(x @ W.T)[0] over the rows of this call",
        sglang="(x @ W.T)[0] over the rows the scheduler batched",
        hf_source=f"{_HF}{_HF2}Qwen2VLAttention.forward",
        sglang_source=f"{_SGL}srt/layers/quantization/unquant.py, UnquantizedLinearMethod.apply",
        matters="Live inside one engine too, so decoding and prefill of the same token differ. On CPU in up to 2 "
        "of 1,024 bf16 elements of a row, for K of 1536 and more; on H200 in 0.2 % of the queries at the 7B shape, row "
        "0 alone against a batch of 830.",
    ),
    Cause(
        name="fp8",
        title="FP8 scales",
        part=LANGUAGE,
        families=FAMILIES,
        layered=False,
        explanation="An FP8 model rounds weights and activations to e4m3 after dividing by a scale, and every choice "
        "of scale (per block, per tensor, a power of two) rounds to another grid.",
        hf="e4m3(x / s) * s, s = max|x| / 448 per block of 128",
        sglang="the same blocks, s rounded up to a power of two for some DeepGEMM kernels; one s per channel or tensor "
        "when it quantizes a bf16 checkpoint itself",
        hf_source=f"{_HF}integrations/finegrained_fp8.py, fp8_linear",
        sglang_source=f"{_SGL}srt/layers/quantization/fp8_utils.py, requant_block_scale_ue8m0_for_deepgemm; "
        "srt/layers/quantization/fp8_utils.py, input_to_float8; "
        "srt/layers/quantization/fp8.py, Fp8LinearMethod.process_weights_after_loading",
        matters="Not measured with an engine; fp8_weights emulates SGLang's schemes, and a plan's `fp8` chooses one. "
        "e4m3 has 3 mantissa bits, so one rounding moves a value by up to 1/16 of it, 16 times as far as bf16: FP8 is "
        "a family of its own, to be compared with FP8 only.",
    ),
)
