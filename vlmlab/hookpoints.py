"""The canonical name of every captured tensor, and where each engine produces it.

hook_points     the ordered hook points of one checkpoint, from its config.json
resolve         the captured tensor behind a name (`layers.3.resid_pre` is `layers.2.resid_post`)
block_of        the block a name belongs to
is_stream       whether a name is of the residual stream
read            take a hook point's tensor out of a module's inputs and output

Names: `vision.patch_embed`, `vision.{i}.*`, `vision.merger`, `vision.deepstack.{k}`, `layers.{i}.*`, `final_norm`,
`logits`, with `*` in `resid_pre|attn_out|resid_mid|mlp_out|resid_post`, and in the language model besides
`router_logits` (mixture of experts) and `before_deepstack` (early layers of Qwen3-VL). The stream leaving a block is
the stream entering the next, so `resid_pre` is captured at block 0 only and is another name for the previous block's
`resid_post` elsewhere.

In the language model `resid_post` is read where the next block reads it. For Qwen3-VL it therefore includes that
layer's deepstack addition in both engines, which is not what Transformers' own `output_hidden_states` returns.
`before_deepstack` is the stream before that addition and `after_deepstack` another name of `resid_post`. Transformers
has the stream before it: the layer's output. SGLang never makes it, since it adds the features to what the layer still
owes the stream; there the hook makes it, the sum of both halves in the storage dtype. Where nothing is added (text
alone, decode steps) the two are equal.

Source: transformers@5.19.0: models/qwen2_vl/modeling_qwen2_vl.py, models/qwen3_vl/modeling_qwen3_vl.py;
sglang@0.5.23: srt/models/qwen2_vl.py, srt/models/qwen2.py, srt/models/qwen3_vl.py. SGLang splits the block output into
`hidden` and `residual`; the residual stream is the second output of the next norm, or the first norm's input. Routers:
models/qwen3_vl_moe/modeling_qwen3_vl_moe.py (logits are the first of three outputs), srt/models/qwen3_moe.py (of two).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vlmlab.errors import VlmlabError

FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")


@dataclass(frozen=True)
class HookPoint:
    """One captured tensor.

    Attributes: name: canonical name. part: "vision" or "language". layer: block number, or None outside the blocks.
    hf, sglang: module path in each engine. slot: what to read there, see `read`.
    """

    name: str
    part: str
    layer: int | None
    hf: str
    sglang: str
    slot: str


def family_of(config: Mapping[str, Any]) -> str:
    """The model family a `config.json` describes.

    Args: config: parsed config.json. Returns: one of FAMILIES.
    Raises: VlmlabError: the architecture is not one of FAMILIES.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise VlmlabError(
            f"expected a checkpoint whose model_type is one of {', '.join(FAMILIES)}, got {family!r}; "
            "other architectures have no hook points yet"
        )
    return family


def hook_points(config: Mapping[str, Any]) -> tuple[HookPoint, ...]:
    """All hook points of a checkpoint, in the order the forward pass reaches them.

    Args: config: parsed config.json.
    Returns: ordered hook points. Raises: VlmlabError: unsupported architecture.
    """
    family = family_of(config)
    vision = config["vision_config"]
    text = config.get("text_config") or config  # hub Qwen2-VL configs keep the text fields at the top
    points: list[HookPoint] = []

    def add(name: str, part: str, layer: int | None, hf: str, sglang: str, slot: str) -> None:
        points.append(HookPoint(name, part, layer, hf, sglang, slot))

    def add_vision(name: str, layer: int | None, module: str, slot: str) -> None:
        add(f"vision.{name}", "vision", layer, f"model.visual.{module}", f"visual.{module}", slot)

    def add_language(name: str, layer: int | None, module: str, slot: str) -> None:
        add(name, "language", layer, f"model.language_model.{module}", f"model.{module}", slot)

    deepstack = list(vision.get("deepstack_visual_indexes") or ()) if family != "qwen2_vl" else []
    add_vision("patch_embed", None, "patch_embed", "output")
    for i in range(vision["depth"]):
        if i == 0:
            add_vision("0.resid_pre", 0, "blocks.0.norm1", "input")
        add_vision(f"{i}.attn_out", i, f"blocks.{i}.attn", "output")
        add_vision(f"{i}.resid_mid", i, f"blocks.{i}.norm2", "input")
        add_vision(f"{i}.mlp_out", i, f"blocks.{i}.mlp", "output")
        add_vision(f"{i}.resid_post", i, f"blocks.{i}", "output")
        if i in deepstack:
            k = deepstack.index(i)
            add_vision(f"deepstack.{k}", None, f"deepstack_merger_list.{k}", "output")
    add_vision("merger", None, "merger", "output")

    depth = text["num_hidden_layers"]
    for i in range(depth):
        if i == 0:
            add_language("layers.0.resid_pre", 0, "layers.0.input_layernorm", "stream")
        add_language(f"layers.{i}.attn_out", i, f"layers.{i}.self_attn", "output")
        add_language(f"layers.{i}.resid_mid", i, f"layers.{i}.post_attention_layernorm", "stream")
        if family == "qwen3_vl_moe":
            add_language(f"layers.{i}.router_logits", i, f"layers.{i}.mlp.gate", "output")
        add_language(f"layers.{i}.mlp_out", i, f"layers.{i}.mlp", "output")
        if i < len(deepstack):
            add_language(f"layers.{i}.before_deepstack", i, f"layers.{i}", "sum")
        following = f"layers.{i + 1}.input_layernorm" if i + 1 < depth else "norm"
        add_language(f"layers.{i}.resid_post", i, following, "stream")
    add_language("final_norm", None, "norm", "output")
    add("logits", "language", None, "lm_head", "logits_processor", "logits")
    return tuple(points)


def resolve(name: str) -> str:
    """The name under which a tensor is captured: a block's `resid_pre` is the previous block's `resid_post`, and a
    layer's `after_deepstack` its `resid_post`.

    Args: name: canonical name. Returns: captured name.
    """
    block = block_of(name)
    if block and block[1] > 0 and name.endswith(".resid_pre"):
        return f"{block[0]}.{block[1] - 1}.resid_post"
    if block and name.endswith(".after_deepstack"):
        return f"{block[0]}.{block[1]}.resid_post"
    return name


def block_of(name: str) -> tuple[str, int] | None:
    """The block a name belongs to: ("vision", 3) for `vision.3.mlp_out`, None outside the blocks.

    Args: name: canonical name. Returns: ("vision" or "layers", block number) or None.
    """
    match = re.fullmatch(r"(vision|layers)\.(\d+)\.\w+", name)
    return (match[1], int(match[2])) if match else None


def is_stream(name: str) -> bool:
    """Whether a hook point belongs to the decay curve of its part."""
    return name.endswith((".resid_pre", ".resid_post")) or name in ("vision.merger", "final_norm")


def read(slot: str, inputs: tuple, output: Any) -> Tensor:
    """Take the tensor of a hook point out of one call of its module.

    Args: slot: "input" (first positional input), "output" (output, or the first of several), "stream" (the residual
    stream a norm reads: its second output where the norm also adds, else its input), "sum" (the stream a layer leaves:
    its output, and in SGLang the residual that it left aside added to it, a sum that is made here), "logits" (of the
    last position; in SGLang of each request's).
    inputs: the module's positional inputs. output: its output.
    Returns: [T, D] view of the live tensor; copy it before the engine goes on.
    Source: sglang@0.5.23: srt/layers/layer_boundary/residual/stream.py, ResidualStream.snapshot (the same sum).
    """
    if slot == "input":
        tensor = inputs[0]
    elif slot == "stream":
        tensor = output[1] if isinstance(output, tuple) and len(output) > 1 else inputs[0]
    elif slot == "sum":
        stream = getattr(inputs[2], "residual_stream", None) if len(inputs) > 2 else None  # positions, hidden, batch
        tensor = output if stream is None else output + stream.residual
    elif slot == "logits":
        tensor = getattr(output, "next_token_logits", None)
        tensor = output[..., -1:, :] if tensor is None else tensor
    elif slot == "output":
        tensor = output[0] if isinstance(output, tuple) else output
    else:
        raise ValueError(f"expected a slot input, output, stream, sum or logits, got {slot!r}")
    return tensor.reshape(-1, tensor.shape[-1])
