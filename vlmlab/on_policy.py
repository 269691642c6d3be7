"""What SGLang's argument `rl_on_policy_target` changes for Qwen3-VL, one row a change, and what stands for each alone.

CHANGES         the rows
separable       a plan and hypotheses for all rows of a family that have one
ON_CPU          environment of an engine that SGLang would refuse the argument without an accelerator

The argument also turns `enable_deterministic_inference` on, whose changes are rows, too. A row is separable when a way
of the plan or a hypothesis makes that change and no other; "" is none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vlmlab.causes import Plan, sglang_plan
from vlmlab.hookpoints import FAMILIES

_, DENSE, MOE = FAMILIES
BOTH = (DENSE, MOE)

ON_CPU = {"VLMLAB_ON_POLICY_ON_CPU": "1"}  # see the stand-in for sgl_kernel in vlmlab/cpu_standin


@dataclass(frozen=True)
class Change:
    """One change. For a table: pandas.DataFrame(CHANGES).

    Attributes: title: a few words. families: that have it. what: one sentence. cause, way: plan entry that makes it
    alone, or "". hypothesis: of hypotheses.HYPOTHESES, or "". source: "package@version: path, function", several joined
    by "; ".
    """

    title: str
    families: tuple[str, ...]
    what: str
    source: str
    cause: str = ""
    way: str = ""
    hypothesis: str = ""


def _srt(*places: str) -> str:
    return "sglang@0.5.23: " + "; ".join(f"srt/{place}" for place in places)


CHANGES: tuple[Change, ...] = (
    Change(
        title="Deepstack order",
        families=(DENSE,),
        what="Features join after the sum, (h + r) + d, in float32 since the stream is.",
        source=_srt("models/qwen3_vl.py, Qwen3LLMModel.forward", "layers/layernorm.py, RMSNorm.forward_native"),
        cause="deepstack_order",
        way="hf",
    ),
    Change(
        title="Deepstack order",
        families=(MOE,),
        what="All three are added in float32 within the next norm, which reads the unrounded sum; the stream is "
        "rounded once.",
        source=_srt("models/qwen3_vl_moe.py, Qwen3MoeLLMModel.forward", "layers/layernorm.py, RMSNorm.forward_native"),
        cause="deepstack_order",
        way="in_norm",
    ),
    Change(
        title="1-D positions",
        families=BOTH,
        what="Image tokens count on as text does; rows and columns of the picture are lost.",
        source=_srt(
            "model_executor/forward_batch_info.py, ForwardBatch._compute_mrope_positions_extend",
            "model_executor/forward_batch_info.py, ForwardBatch._compute_mrope_positions_decode",
        ),
        hypothesis="1-D positions",
    ),
    Change(
        title="Residual stream in float32",
        families=(DENSE,),
        what="The stream is never rounded to bf16.",
        source=_srt("models/qwen3.py, Qwen3DecoderLayer.__init__", "models/qwen2.py, Qwen2Model.__init__"),
        cause="residual_sum",
        way="wide",
    ),
    Change(
        title="Embedding table in float32",
        families=(DENSE,),
        what="A bf16 checkpoint keeps its values; vision and deepstack features are stored wider beside them.",
        source=_srt("models/qwen2.py, Qwen2Model.__init__", "managers/mm_utils.py, embed_mm_inputs"),
    ),
    Change(
        title="RMSNorm in torch",
        families=BOTH,
        what="No CUDA kernel; weights multiply in float32 and the one rounding comes before the next product, so its "
        "input has the bits of SGLang's formula (the final norm's own output stays float32 in the dense model).",
        source=_srt(
            "models/qwen3.py, Qwen3DecoderLayer.__init__",
            "models/qwen3.py, Qwen3Attention.forward",
            "models/qwen2.py, Qwen2MLP.forward",
            "layers/layernorm.py, RMSNorm.forward_cuda",
        ),
        cause="rms_norm",
        way="sglang",
    ),
    Change(
        title="QK norm",
        families=(DENSE,),
        what="Rounded before the float32 weight multiplies and then not before the rotation, which is in float32.",
        source=_srt("models/qwen3.py, Qwen3Attention.__init__", "models/qwen3.py, Qwen3Attention.forward"),
        cause="qk_norm",
        way="wide",
    ),
    Change(
        title="QK norm not fused",
        families=(MOE,),
        what="On CUDA the formula instead of the fused kernel.",
        source=_srt("models/utils.py, apply_qk_norm"),
        cause="qk_norm",
        way="sglang",
    ),
    Change(
        title="Text rotary in torch",
        families=BOTH,
        what="Rotated in torch instead of by a kernel, with frequencies computed on the CPU.",
        source=_srt(
            "layers/rotary_embedding/base.py, RotaryEmbedding._compute_inv_freq",
            "layers/rotary_embedding/mrope.py, MRotaryEmbedding.forward_native",
        ),
        cause="rotary",
        way="sglang",
    ),
    Change(
        title="SiLU in torch",
        families=BOTH,
        what="silu(gate) * up in torch, rounded after each step, instead of by a kernel that rounds once.",
        source=_srt("layers/activation.py, SiluAndMul.__init__"),
    ),
    Change(
        title="Logits",
        families=BOTH,
        what="Hidden states and head are cast to bf16; a bf16 head stays what it is.",
        source=_srt("layers/logits_processor.py, LogitsProcessor._compute_lm_head"),
        cause="head",
        way="sglang",
    ),
    Change(
        title="ViT rotary table in bf16",
        families=BOTH,
        what="Cosines and sines are rounded to bf16, as they are on CPU anyhow.",
        source=_srt("layers/attention/vision.py, VisionAttention.forward"),
        cause="vit_rotary",
        way="sglang",
    ),
    Change(
        title="Image processor on the CPU",
        families=BOTH,
        what="Pictures are resized on the CPU, not on the GPU.",
        source=_srt("multimodal/processors/base_processor.py, BaseMultimodalProcessor._fast_image_processor_device"),
    ),
    Change(
        title="Batch-invariant kernels",
        families=BOTH,
        what="Matrix products, means, norms and log-softmax by Triton kernels that add in one order at any batch size.",
        source=_srt(
            "model_executor/model_runner.py, ModelRunner.maybe_enable_batch_invariant_mode",
            "batch_invariant_ops/batch_invariant_ops.py, enable_batch_invariant_mode",
        ),
    ),
    Change(
        title="Attention backend",
        families=BOTH,
        what="One of fa3, fa4, flashinfer, triton or a vendor's own, keys split in a fixed way; others are refused.",
        source=_srt(
            "arg_groups/overrides.py, _deterministic_attention_backend",
            "layers/attention/flashattention_backend.py, FlashAttentionBackend.__init__",
            "layers/attention/triton_backend.py, TritonAttnBackend.__init__",
        ),
    ),
    Change(
        title="Sampling",
        families=BOTH,
        what="In torch, from log-softmax of bf16(logits / temperature), with one seed a request and position; greedy "
        "choices stay.",
        source=_srt(
            "layers/sampler.py, Sampler.forward",
            "sampling/sampling_batch_info.py, SamplingBatchInfo.from_schedule_batch",
            "arg_groups/overrides.py, _deterministic_sampling_backend",
        ),
    ),
    Change(
        title="Log-probabilities of the prompt",
        families=BOTH,
        what="By log-softmax, not from logits and their logsumexp.",
        source=_srt("layers/logprob_processor.py, InputLogprobProcessor.__init__"),
    ),
    Change(
        title="Caches and chunks",
        families=BOTH,
        what="No prefix cache with flashinfer, no cache of vision output, and with flashinfer chunks of whole tiles.",
        source=_srt(
            "arg_groups/attention_hook.py, handle_deterministic_inference",
            "managers/scheduler.py, Scheduler.init_deterministic_inference_config",
        ),
    ),
    Change(
        title="Sums over ranks",
        families=BOTH,
        what="With tensor parallelism NCCL's tree on fixed channels, no custom and no fused all-reduce.",
        source=_srt(
            "arg_groups/attention_hook.py, handle_deterministic_inference",
            "arg_groups/overrides.py, _deterministic_allreduce_fusion_disable",
        ),
    ),
    Change(
        title="Kernel choice",
        families=BOTH,
        what="No tuned or shape-dependent kernels: no autotuning, no CuTe product on Blackwell.",
        source=_srt(
            "model_executor/runner/flashinfer_autotune.py, should_run_flashinfer_autotune",
            "layers/quantization/unquant.py, initialize_bf16_gemm_config",
        ),
    ),
    Change(
        title="Expert kernel",
        families=(MOE,),
        what="One block shape for every number of tokens, and no compiled sum over a token's experts.",
        source=_srt(
            "layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py, get_default_config",
            "layers/moe/moe_runner/triton_utils/fused_moe.py, _use_moe_sum_reduce_torch_compile",
        ),
    ),
    Change(
        title="FP8",
        families=BOTH,
        what="No activation fused with its quantization, and no bf16 expansion of block-scaled weights.",
        source=_srt(
            "layers/quantization/fp8_activation.py, DenseSiluAndMulQuant.forward_decode",
            "layers/quantization/fp8.py, Fp8LinearMethod.process_weights_after_loading",
        ),
    ),
)


def separable(family: str, plan: Plan | None = None) -> tuple[Plan, tuple[str, ...]]:
    """Everything at once that the rows can make one by one.

    Args: family: of FAMILIES. plan: to change, sglang_plan() unless given.
    Returns: plan with every row's way, names of HYPOTHESES to apply.
    """
    mine = [change for change in CHANGES if family in change.families]
    ways: Mapping[str, str] = {change.cause: change.way for change in mine if change.cause}
    plan = plan or sglang_plan()
    return Plan(plan.default, {**plan.choices, **ways}), tuple(c.hypothesis for c in mine if c.hypothesis)
