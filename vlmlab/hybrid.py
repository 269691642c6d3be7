"""The one forward: ViT, merger, prefill and decode of every family, each debatable step as a plan says.

Hybrid          a checkpoint's weights and the forward over them
Cache           keys and values of earlier tokens

In bfloat16 the plan that says "hf" everywhere equals Transformers bit for bit, the one that says "sglang" equals
SGLang. In float64 it is the truth for the same weights, FP8 ones included. The vision tower takes one picture, the
language model one sequence or a batch of equally long ones, whose rows then follow each other: [B * T, D].

Shapes: B sequences of T tokens, S tokens seen so far, P patches, N image tokens, E vision width, D model width, H
heads, K key-value heads, h head_dim, F rotary frequencies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from vlmlab import arithmetic
from vlmlab.causes import Plan
from vlmlab.checkpoint import Checkpoint
from vlmlab.errors import VlmlabError
from vlmlab.fp8_weights import FP8Weights
from vlmlab.hookpoints import block_of
from vlmlab.machine import has_cuda

Record = Callable[[str, Tensor], None]
Begun = tuple[int, Mapping[str, Tensor]]  # layers computed already, and their states of another plan
Read = Tensor | arithmetic.Unsummed  # what a norm reads


_HALVES = ("resid_mid", "mlp_out")  # of a layer, which the next one adds


def _ignore(name: str, tensor: Tensor) -> None:
    pass


@dataclass
class Cache:
    """Keys and values per layer, each [B, K, S, h]."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def copy(self) -> "Cache":
        """One to extend, this one stays: what is appended is new tensors."""
        return Cache(dict(self.keys), dict(self.values))

    def forget(self, layer: int) -> None:
        """Drop a layer's, if there are any."""
        self.keys.pop(layer, None)
        self.values.pop(layer, None)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, K, T, h] of new tokens. Returns: all keys and values of the layer."""
        if layer in self.keys:
            k, v = torch.cat((self.keys[layer], k), -2), torch.cat((self.values[layer], v), -2)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def keep(self, sequences: list[int]) -> None:
        """Forget all other sequences of the batch. Args: sequences: in [0, B)."""
        for kept in (self.keys, self.values):
            kept.update({layer: x[sequences] for layer, x in kept.items()})


@dataclass(frozen=True)
class Seen:
    """What the language model gets of a picture. features: [N, D]. deepstack: one [N, D] per early layer."""

    features: Tensor
    deepstack: tuple[Tensor, ...] = ()


class Hybrid:
    """A checkpoint's weights, loaded once, and the forward over them.

    Args: checkpoint: of a supported family. dtype: compute dtype; None for the checkpoint's own. device: "cuda" or
    "cpu", None for what is here.
    Attributes: family, depth, vision_depth, deepstack_layers.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None, device: str | None = None) -> None:
        config = checkpoint.config
        self.checkpoint, self.family = checkpoint, checkpoint.family
        self.device = device or ("cuda" if has_cuda() else "cpu")
        self.by: Any = arithmetic  # the steps; a control puts something in between
        self.dtype = dtype or getattr(torch, checkpoint.dtype)
        text = config.get("text_config") or config
        rope = text.get("rope_parameters") or {**(text.get("rope_scaling") or {}), "rope_theta": text.get("rope_theta")}
        vision = config["vision_config"]
        self.qwen2 = self.family == "qwen2_vl"
        self.depth, self.vision_depth = text["num_hidden_layers"], vision["depth"]
        self.heads, self.kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
        self.head_dim = text.get("head_dim") or text["hidden_size"] // self.heads
        self.eps, self.theta, self.section = text["rms_norm_eps"], rope["rope_theta"], rope["mrope_section"]
        self.vision_heads = vision["num_heads"]
        self.vision_width = vision["embed_dim"] if self.qwen2 else vision["hidden_size"]
        self.vision_theta = (vision.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        self.merge = vision["spatial_merge_size"]
        self.deepstack_layers = () if self.qwen2 else tuple(vision["deepstack_visual_indexes"])
        self.experts_per_token = text.get("num_experts_per_tok", 0)
        self.depths = {"vision": self.vision_depth, "language": self.depth}
        self.weights = self._load()
        self.fp8 = FP8Weights(config, self.weights, self.dtype)

    def below(self, name: str, layer: int) -> bool:
        """Whether a hook point is made before a layer of its part begins. Args: layer: at least 1."""
        block, (stem, _, rest) = block_of(name), name.partition(".")
        if stem == "layers" and name == f"layers.{layer - 1}.resid_post":
            return False  # the sum stands in the next layer's norm
        if rest.startswith("deepstack."):
            return self.deepstack_layers[int(rest.rpartition(".")[2])] < layer
        return name == "vision.patch_embed" or (block is not None and block[1] < layer)

    def _load(self) -> dict[str, Tensor]:
        """Weights under the hub's Qwen2-VL prefixes (`visual.`, `model.`), expert weights as [X, out, in]."""
        weights: dict[str, Tensor] = {}
        for file in sorted(self.checkpoint.folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  safe_open is not a mapping
                    short = name.removeprefix("model.") if name.startswith("model.visual.") else name
                    short = short.replace("model.language_model.", "model.")
                    weight = tensors.get_tensor(name)
                    if ".experts." in short and weight.dim() == 3:  # the hub stores [X, in, out]
                        weight = weight.transpose(1, 2).contiguous()
                    as_stored = weight.dtype == torch.float8_e4m3fn or short.endswith(("_scale", "_scale_inv"))
                    weights[short] = weight.to(self.device, weight.dtype if as_stored else self.dtype)
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        return weights

    def _weight(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str, plan: Plan, layer: int | None = None) -> Tensor:
        in_fp8 = self.fp8.products(x, [name], plan.how("fp8", layer))
        if in_fp8 is not None:
            return in_fp8[0]
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _linears(self, x: Tensor, names: list[str], how: str, plan: Plan, layer: int) -> list[Tensor]:
        """Linears of one input. Args: x: [T, D]. names: of them. how: see arithmetic.stacked_linear."""
        in_fp8 = self.fp8.products(x, names, plan.how("fp8", layer))
        if in_fp8 is not None:
            return in_fp8
        biases = [self.weights[f"{name}.bias"] for name in names] if f"{names[0]}.bias" in self.weights else None
        return self.by.stacked_linear(x, [self._weight(name) for name in names], biases, how)

    # ------------------------------------------------------------------------------------------------ vision

    def vision(
        self, pixels: Tensor, grid_thw: Tensor, plan: Plan, record: Record = _ignore, begun: Begun | None = None
    ) -> Seen:
        """The vision tower.

        Args: pixels: [P, C * t * p * p]. grid_thw: [1, 3] patches. plan: how. record: gets every hook point's tensor.
        begun: at least one layer that is not to be computed again.
        Returns: Seen. Raises: VlmlabError: several frames.
        """
        frames, rows, columns = grid_thw[0].tolist()
        if frames != 1:
            raise VlmlabError(f"expected one picture, got {frames} frames; videos are not supported")
        first, states = begun or (0, {})
        if begun is None:
            x = self.patch_embed(pixels, plan)
            record("vision.patch_embed", x)
            x = self.add_positions(x, (rows, columns), plan)
            record("vision.0.resid_pre", x)
        else:
            x = states[f"vision.{first - 1}.resid_post"].to(self.device)
        done = sum(i < first for i in self.deepstack_layers)
        deepstack = [states[f"vision.deepstack.{k}"].to(self.device) for k in range(done)]
        rotary = self.vision_rotary((rows, columns))
        for i in range(first, self.vision_depth):
            attn_out = self.vision_attention(i, x, rotary, plan)
            record(f"vision.{i}.attn_out", attn_out)
            x = x + attn_out
            record(f"vision.{i}.resid_mid", x)
            mlp_out = self.vision_mlp(i, x, plan)
            record(f"vision.{i}.mlp_out", mlp_out)
            x = x + mlp_out
            record(f"vision.{i}.resid_post", x)
            if i in self.deepstack_layers:
                deepstack.append(self.deepstack_merger(len(deepstack), x, plan))
                record(f"vision.deepstack.{len(deepstack) - 1}", deepstack[-1])
        features = self.merger(x, plan)
        record("vision.merger", features)
        return Seen(features, tuple(deepstack))

    def patch_embed(self, pixels: Tensor, plan: Plan) -> Tensor:
        """[P, C * t * p * p] to [P, E]."""
        name = "visual.patch_embed.proj"
        pixels = pixels.to(self.device, self.dtype)
        return self.by.patch_embedding(
            pixels, self._weight(name), self.weights.get(f"{name}.bias"), plan.how("patch_embed")
        )

    def add_positions(self, x: Tensor, grid: tuple[int, int], plan: Plan) -> Tensor:
        """Add the learned position table, if the family has one. Args: x: [P, E]. grid: rows, columns of patches."""
        if self.qwen2:
            return x
        table = self._weight("visual.pos_embed")
        formula, precision = plan.how("position_formula"), plan.how("position_precision")
        return x + self.by.blend_positions(table, grid, self.merge, formula, precision)

    def vision_rotary(self, grid: tuple[int, int]) -> dict[str, tuple[Tensor, Tensor]]:
        """Cosine and sine, [P, h / 2] each, for every way of making them."""
        rows, columns = grid
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        blocks = (rows // self.merge, self.merge, columns // self.merge, self.merge)
        places = torch.stack([axis.reshape(blocks).transpose(1, 2).flatten() for axis in (row, column)], 1)
        dim = self.vision_width // self.vision_heads // 2
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        stored = wide if self.qwen2 or self.device.startswith("cuda") else self.dtype  # of SGLang's table
        tables = {}
        for how, dtype in (("hf", wide), ("sglang", stored)):
            cos, sin = self.by.rotary_table(places.to(self.device), dim, self.vision_theta, dtype, how)
            tables[how] = cos.flatten(1), sin.flatten(1)
        return tables

    def _layer_norm(self, x: Tensor, name: str, plan: Plan, layer: int | None = None) -> Tensor:
        eps = 1e-6 if plan.how("vit_norm_eps", layer) == "hf" else self.eps
        return self.by.layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps)

    def vision_attention(self, i: int, x: Tensor, rotary: dict[str, tuple[Tensor, Tensor]], plan: Plan) -> Tensor:
        """Attention half of a ViT block. Args: x: [P, E] stream. rotary: of `vision_rotary`. Returns: [P, E]."""
        block = f"visual.blocks.{i}"
        normed = self._layer_norm(x, f"{block}.norm1", plan, i)
        qkv = self._linear(normed, f"{block}.attn.qkv", plan).view(len(x), 3, self.vision_heads, -1)
        q, k, v = qkv.permute(1, 0, 2, 3).unbind(0)
        cos, sin = rotary[plan.how("vit_rotary", i)]
        q, k = self.by.rotate_vision(q, cos, sin), self.by.rotate_vision(k, cos, sin)
        return self._linear(self.by.full_attention(q, k, v, plan.how("vit_attention", i)), f"{block}.attn.proj", plan)

    def vision_mlp(self, i: int, x: Tensor, plan: Plan) -> Tensor:
        """MLP half of a ViT block. Args: x: [P, E] stream. Returns: [P, E]."""
        block = f"visual.blocks.{i}"
        first, second = ("fc1", "fc2") if self.qwen2 else ("linear_fc1", "linear_fc2")
        normed = self._layer_norm(x, f"{block}.norm2", plan, i)
        h = self._linear(normed, f"{block}.mlp.{first}", plan)
        h = h * torch.sigmoid(1.702 * h) if self.qwen2 else F.gelu(h, approximate="tanh")
        return self._linear(h, f"{block}.mlp.{second}", plan)

    def merger(self, x: Tensor, plan: Plan) -> Tensor:
        """Four patches to one image token. Args: x: [P, E]. Returns: [N, D]."""
        norm, first, second = ("ln_q", "mlp.0", "mlp.2") if self.qwen2 else ("norm", "linear_fc1", "linear_fc2")
        h = self._layer_norm(x, f"visual.merger.{norm}", plan).view(-1, 4 * x.shape[1])
        h = F.gelu(self._linear(h, f"visual.merger.{first}", plan))
        return self._linear(h, f"visual.merger.{second}", plan)

    def deepstack_merger(self, k: int, x: Tensor, plan: Plan) -> Tensor:
        """As `merger`, but normalised after merging. Args: k: which. x: [P, E]. Returns: [N, D]."""
        name = f"visual.deepstack_merger_list.{k}"
        h = self._layer_norm(x.view(-1, 4 * x.shape[1]), f"{name}.norm", plan)
        return self._linear(F.gelu(self._linear(h, f"{name}.linear_fc1", plan)), f"{name}.linear_fc2", plan)

    # ------------------------------------------------------------------------------------------------ language

    def embed(self, input_ids: Tensor, seen: Seen | None = None) -> Tensor:
        """Token embeddings, image features in their places. Args: input_ids: [T] or [B, T]. Returns: [B * T, D]."""
        x = F.embedding(input_ids.flatten().to(self.device), self._weight("model.embed_tokens"))
        if seen is not None:
            x[self.image_rows(input_ids)] = seen.features.to(x)
        return x

    def image_rows(self, input_ids: Tensor) -> Tensor:
        """[B * T] bool: where an image token stands. Args: input_ids: [T] or [B, T]."""
        return input_ids.flatten().to(self.device) == self.checkpoint.config["image_token_id"]

    def positions(self, input_ids: Tensor, grid_thw: Tensor | None) -> Tensor:
        """M-RoPE positions, by definition: text counts on, an image token stands at its row and column, and text after
        the picture goes on past its longer side.

        Args: input_ids: [T]. grid_thw: [1, 3] patches or None. Returns: [3, T] int64: time, height, width.
        Raises: VlmlabError: the image tokens do not stand together, or are not as many as the grid says.
        """
        rows = self.image_rows(input_ids).cpu()
        positions = torch.arange(len(rows)).repeat(3, 1)
        if grid_thw is None or not rows.any():
            return positions
        _, height, width = grid_thw[0].tolist()
        height, width, start = height // self.merge, width // self.merge, int(rows.int().argmax())
        image = slice(start, start + height * width)
        if int(rows.sum()) != height * width or not rows[image].all():
            raise VlmlabError(f"expected {height * width} image tokens in a row, got {int(rows.sum())}")
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        positions[:, image] = torch.stack((torch.zeros_like(row), row, column)).flatten(1) + start
        positions[:, image.stop :] += max(height, width) - height * width
        return positions

    def language(
        self,
        input_ids: Tensor,
        positions: Tensor,
        plan: Plan,
        seen: Seen | None = None,
        cache: Cache | None = None,
        record: Record = _ignore,
        begun: Begun | None = None,
    ) -> Tensor:
        """The language model, prefill or one decode step.

        Args: input_ids: [T] or [B, T]. positions: [3, T] or [3, B, T], M-RoPE. plan: how. seen: in the prefill, of the
        picture or of all, [B * N, D]. cache: earlier tokens; extended in place. record: gets every hook point's tensor.
        begun: at least one layer of a prefill that is not to be computed again; the cache lacks it.
        Returns: [B, V] logits of the last position.
        """
        cache, batch = Cache() if cache is None else cache, len(input_ids) if input_ids.dim() > 1 else 1
        first, states = begun or (0, {})
        rows = self.image_rows(input_ids)
        rotary = self.text_rotary(positions)
        if begun is None:
            residual, pending = self.embed(input_ids, seen), None
        else:
            residual, pending = (states[f"layers.{first - 1}.{half}"].to(self.device) for half in _HALVES)
            if seen is not None and first <= len(seen.deepstack):
                residual, pending = self.add_deepstack(
                    first - 1, residual, pending, seen.deepstack[first - 1], rows, plan
                )
        for i in range(first, self.depth):
            residual, read = self.add(residual, pending, i, plan)
            record("layers.0.resid_pre" if i == 0 else f"layers.{i - 1}.resid_post", residual)
            attn_out = self.attention(i, read, rotary, plan, cache, batch)
            record(f"layers.{i}.attn_out", attn_out)
            residual, read = self.add(residual, attn_out, i, plan)
            record(f"layers.{i}.resid_mid", residual)
            routing = self.router_logits(i, read, plan) if self.sparse else None
            if routing is not None:
                record(f"layers.{i}.router_logits", routing)
            pending = self.mlp(i, read, plan, routing)
            record(f"layers.{i}.mlp_out", pending)
            if i < len(self.deepstack_layers):
                record(f"layers.{i}.before_deepstack", residual + pending)
            if seen is not None and i < len(seen.deepstack):
                residual, pending = self.add_deepstack(i, residual, pending, seen.deepstack[i], rows, plan)
        residual, read = self.add(residual, pending, self.depth, plan)
        record(f"layers.{self.depth - 1}.resid_post", residual)
        normed = self.final_norm(read, plan)
        record("final_norm", normed)
        logits = self.logits(normed, plan, batch)
        record("logits", logits)
        return logits

    def add(self, residual: Tensor, pending: Tensor | None, i: int, plan: Plan) -> tuple[Tensor, Read]:
        """Residual sum before a norm of layer `i`. Returns: stream [T, D], what the norm reads [T, D]."""
        if pending is None:
            return residual, residual
        return self.by.residual_sum(residual, pending, plan.how("residual_sum", i))

    def add_deepstack(
        self, i: int, residual: Tensor, x: Tensor, features: Tensor, rows: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """See arithmetic.deepstack_sum."""
        return self.by.deepstack_sum(residual, x, features.to(x), rows, plan.how("deepstack_order", i))

    def text_rotary(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Cosine and sine, [B * T, h / 2] each, for every way of making them. Args: positions: [3, T] or [3, B, T]."""
        positions, tables = positions.flatten(1).to(self.device), {}
        for how in ("hf", "sglang"):
            axes = self.by.rotary_table(positions, self.head_dim, self.theta, self.dtype, how)
            cos, sin = (self.by.mix_positions(axis, self.section, interleaved=not self.qwen2) for axis in axes)
            tables[how] = cos, sin
        return tables | {"kernel": tables["sglang"]}

    def attention(
        self, i: int, read: Read, rotary: dict[str, tuple[Tensor, Tensor]], plan: Plan, cache: Cache, batch: int = 1
    ) -> Tensor:
        """Attention half of a layer, its norm included. Args: read: [B * T, D] of `add`. Returns: [B * T, D]."""
        layer = f"model.layers.{i}"
        normed = self.by.rms_norm(read, self._weight(f"{layer}.input_layernorm"), self.eps, plan.how("rms_norm", i))
        names = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
        parts = self._linears(normed, names, plan.how("qkv_linear", i), plan, i)
        q, k, v = (part.reshape(len(normed), -1, self.head_dim) for part in parts)
        if not self.qwen2:
            how = plan.how("qk_norm", i)
            q = self.by.rms_norm(q, self._weight(f"{layer}.self_attn.q_norm"), self.eps, how)
            k = self.by.rms_norm(k, self._weight(f"{layer}.self_attn.k_norm"), self.eps, how)
        how = plan.how("rotary", i)
        q, k = (self.by.rotate_text(x, *rotary[how], how).to(v.dtype) for x in (q, k))
        q, k, v = (t.view(batch, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))  # [B, H, T, h]
        k, v = cache.append(i, k, v)
        attended = self.by.causal_attention(q, k, v, plan.how("attention", i))
        return self._linear(attended, f"{layer}.self_attn.o_proj", plan, i)

    def mlp(
        self, i: int, read: Read, plan: Plan, routing: Tensor | None = None, chosen: Tensor | None = None
    ) -> Tensor:
        """MLP half of a layer, its norm included.

        Args: read: [T, D] of `add`. routing: [T, X] of `router_logits`, None for dense decoders. chosen: [T, experts
        per token] experts to use; None: the likeliest.
        Returns: [T, D].
        """
        layer = f"model.layers.{i}"
        normed = self.by.rms_norm(
            read, self._weight(f"{layer}.post_attention_layernorm"), self.eps, plan.how("rms_norm", i)
        )
        if routing is not None:
            return self._experts(i, normed, plan, routing, chosen)
        names = [f"{layer}.mlp.{name}_proj" for name in ("gate", "up")]
        gate, up = self._linears(normed, names, plan.how("gate_up_linear", i), plan, i)
        return self._linear(F.silu(gate) * up, f"{layer}.mlp.down_proj", plan, i)

    @property
    def sparse(self) -> bool:
        """Whether the decoder has experts."""
        return self.experts_per_token > 0

    def router_logits(self, i: int, read: Read, plan: Plan) -> Tensor:
        """What the router of a layer says. Args: read: [T, D] of `add`. Returns: [T, X]."""
        norm = self._weight(f"model.layers.{i}.post_attention_layernorm")
        normed = self.by.rms_norm(read, norm, self.eps, plan.how("rms_norm", i))
        return self._linear(normed, f"model.layers.{i}.mlp.gate", plan, i)

    def _experts(self, i: int, normed: Tensor, plan: Plan, routing: Tensor, chosen: Tensor | None) -> Tensor:
        weights, chosen = self.by.route(routing, self.experts_per_token, plan.how("router_weights", i), chosen)
        order, counts = chosen.flatten().argsort(stable=True), torch.bincount(chosen.flatten()).tolist()
        rows = normed[order // chosen.shape[1]].split(counts)
        parts = {expert: part for expert, part in enumerate(rows) if len(part)}
        halves = {e: x.chunk(2, -1) for e, x in self._expert_linears(parts, "gate_up_proj", plan, i).items()}
        parts = {expert: F.silu(gate) * up for expert, (gate, up) in halves.items()}
        outputs = torch.cat(list(self._expert_linears(parts, "down_proj", plan, i).values()))[order.argsort()]
        return self.by.combine(outputs.view(*chosen.shape, -1), weights, plan.how("expert_combine", i))

    def _expert_linears(self, parts: dict[int, Tensor], name: str, plan: Plan, i: int) -> dict[int, Tensor]:
        """Every expert's product. Args: parts: expert to its rows [R, K]. Returns: expert to [R, N]."""
        name = f"model.layers.{i}.mlp.experts.{name}"
        in_fp8 = self.fp8.expert_products(parts, name, plan.how("fp8", i))
        if in_fp8 is not None:
            return in_fp8
        return {expert: F.linear(part, self.weights[name][expert]) for expert, part in parts.items()}

    def final_norm(self, read: Read, plan: Plan) -> Tensor:
        """[T, D] of `add` to [T, D]."""
        return self.by.rms_norm(read, self._weight("model.norm"), self.eps, plan.how("rms_norm", self.depth))

    def logits(self, normed: Tensor, plan: Plan, batch: int = 1) -> Tensor:
        """[B * T, D] to [B, V]."""
        return self.by.head(normed, self._weight("lm_head"), plan.how("head"), batch)
