"""The forward pass of the three families as plain functions over a dict of weights, for training.

Same functions as the Transformers models (a test holds the logits together), but batched over pictures of one size,
with the language-model head applied to the last positions only and without a cache. Weight names are the hub's.

Shapes: B pictures, P patches and N = P / 4 image tokens per picture, S tokens per sequence, A last positions that get
logits, V vocabulary, E vision width, D model width, H heads, K key-value heads, h head_dim, X experts, I expert width.
"""

import math

import torch
import torch.nn.functional as F

from data.shapes import send


def prefixes(arch):
    """Returns: how weight names start in the vision and in the language part, as the hub's checkpoints have it."""
    return ("visual.", "model.") if arch.is_qwen2 else ("model.visual.", "model.language_model.")


# ---------------------------------------------------------------------------------------------------- parameters


def parameter_table(arch, vocab):
    """Every weight of the model in the order of the flat training buffer.

    Returns: list of (name, shape, initial value, rule). The initial value is a standard deviation for matrices and a
        constant for vectors. Rules: "muon" (a matrix, or a stack of matrices), "qkv" (three matrices stacked in rows),
        "adam" (embeddings, the patch projection, the router), "vector" (norms and biases), "position".
    """
    vision, text = prefixes(arch)
    width, mlp, patch_pixels = arch.vision_width, arch.vision_mlp, 3 * arch.temporal_patch * arch.patch**2
    rows = []

    def matrix(name, out, into, gain=1.0, rule="muon"):
        rows.append((name + ".weight", (out, into), gain / math.sqrt(into), rule))

    def linear(name, out, into, gain=1.0, rule="muon"):
        matrix(name, out, into, gain, rule)
        rows.append((name + ".bias", (out,), 0.0, "vector"))

    def norm(name, size, bias):
        rows.append((name + ".weight", (size,), 1.0, "vector"))
        if bias:
            rows.append((name + ".bias", (size,), 0.0, "vector"))

    def merger(name, norm_name, norm_size, first, second, gain=1.0):
        norm(name + norm_name, norm_size, bias=True)
        linear(name + first, 4 * width, 4 * width)
        linear(name + second, arch.width, 4 * width, gain)

    # Only the sum over the two temporal halves of the patch projection acts on a still picture.
    patch_shape = (width, 3, arch.temporal_patch, arch.patch, arch.patch)
    rows.append((vision + "patch_embed.proj.weight", patch_shape, 1 / math.sqrt(patch_pixels), "adam"))
    if not arch.is_qwen2:
        rows.append((vision + "patch_embed.proj.bias", (width,), 0.0, "vector"))
        rows.append((vision + "pos_embed.weight", (arch.positions_per_side**2, width), 0.0, "position"))
    first, second = ("fc1", "fc2") if arch.is_qwen2 else ("linear_fc1", "linear_fc2")
    residual_gain = 1 / math.sqrt(2 * arch.vision_depth)
    for i in range(arch.vision_depth):
        block = f"{vision}blocks.{i}."
        norm(block + "norm1", width, bias=True)
        linear(block + "attn.qkv", 3 * width, width, rule="qkv")
        linear(block + "attn.proj", width, width, residual_gain)
        norm(block + "norm2", width, bias=True)
        linear(block + "mlp." + first, mlp, width)
        linear(block + "mlp." + second, width, mlp, residual_gain)
    if arch.is_qwen2:
        merger(vision + "merger.", "ln_q", width, "mlp.0", "mlp.2")
    else:
        # The main merger starts at 0.3 of the usual scale, so that the deepstack features carry more of the picture.
        merger(vision + "merger.", "norm", width, "linear_fc1", "linear_fc2", gain=0.3)
        for i in range(len(arch.deepstack_layers)):
            merger(f"{vision}deepstack_merger_list.{i}.", "norm", 4 * width, "linear_fc1", "linear_fc2")

    rows.append((text + "embed_tokens.weight", (vocab, arch.width), 0.5, "adam"))
    residual_gain = 1 / math.sqrt(2 * arch.depth)
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    for i in range(arch.depth):
        layer = f"{text}layers.{i}."
        norm(layer + "input_layernorm", arch.width, bias=False)
        project = linear if arch.is_qwen2 else matrix
        project(layer + "self_attn.q_proj", queries, arch.width)
        project(layer + "self_attn.k_proj", keys, arch.width)
        project(layer + "self_attn.v_proj", keys, arch.width)
        matrix(layer + "self_attn.o_proj", arch.width, queries, residual_gain)
        if not arch.is_qwen2:
            norm(layer + "self_attn.q_norm", arch.head_dim, bias=False)
            norm(layer + "self_attn.k_norm", arch.head_dim, bias=False)
        norm(layer + "post_attention_layernorm", arch.width, bias=False)
        if arch.experts:
            matrix(layer + "mlp.gate", arch.experts, arch.width, rule="adam")
            gate_up, down = (arch.experts, arch.width, 2 * arch.text_mlp), (arch.experts, arch.text_mlp, arch.width)
            rows.append((layer + "mlp.experts.gate_up_proj", gate_up, 1 / math.sqrt(arch.width), "muon"))
            rows.append((layer + "mlp.experts.down_proj", down, residual_gain / math.sqrt(arch.text_mlp), "muon"))
        else:
            matrix(layer + "mlp.gate_proj", arch.text_mlp, arch.width)
            matrix(layer + "mlp.up_proj", arch.text_mlp, arch.width)
            matrix(layer + "mlp.down_proj", arch.width, arch.text_mlp, residual_gain)
    norm(text + "norm", arch.width, bias=False)
    rows.append(("lm_head.weight", (vocab, arch.width), 0.02, "adam"))
    return rows


def initial_positions(arch, generator):
    """A position table that starts as smooth waves over the picture, rotated at random: [side * side, E]."""
    side, half = arch.positions_per_side, arch.vision_width // 2
    cycles = torch.tensor([0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4])
    phase = 2 * math.pi * torch.linspace(0, 1, side)[:, None] * cycles
    axis = torch.cat((phase.sin(), phase.cos()), 1).repeat(1, half // 16 + 1)[:, :half]  # [side, E / 2]
    table = torch.cat((axis[:, None].expand(side, side, half), axis[None].expand(side, side, half)), -1)
    rotation = torch.linalg.qr(torch.randn(2 * half, 2 * half, generator=generator))[0]
    return 0.7 * (table @ rotation).reshape(side * side, 2 * half)


# ---------------------------------------------------------------------------------------------------- inputs


def patchify(pictures, arch):
    """Args: pictures: [B, 3, rows * cell, columns * cell] in [0, 1].

    Returns: [B, P, 3 * patch * patch] float32, normalised, the four patches of an image token next to each other.
    """
    batch, _, height, width = pictures.shape
    rows, columns, patch, merge = height // arch.cell, width // arch.cell, arch.patch, arch.merge
    mean, std = (send(torch.tensor(v), pictures.device).view(1, 3, 1, 1) for v in (arch.pixel_mean, arch.pixel_std))
    x = ((pictures - mean) / std).view(batch, 3, rows, merge, patch, columns, merge, patch)
    # [B, 3, rows, 2, patch, columns, 2, patch] -> [B, rows, columns, 2, 2, 3, patch, patch]
    return x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(batch, rows * columns * merge**2, 3 * patch**2)


def vision_rotary(arch, rows, columns):
    """Args: rows, columns: image tokens. Returns: cos, sin, each [P, 1, h] float32, for every patch in merged order."""
    merge, quarter = arch.merge, arch.vision_width // arch.vision_heads // 4
    y, x = torch.meshgrid(torch.arange(rows * merge), torch.arange(columns * merge), indexing="ij")
    merged = lambda t: t.reshape(rows, merge, columns, merge).transpose(1, 2).flatten()  # noqa: E731
    frequency = arch.vision_rope_theta ** -(torch.arange(quarter) / quarter)
    angle = torch.cat((merged(y)[:, None] * frequency, merged(x)[:, None] * frequency), -1)
    angle = torch.cat((angle, angle), -1)[:, None]
    return angle.cos(), angle.sin()


def position_weights(arch, cells):
    """Bilinear weights that stretch one axis of the position table over `cells` patches: [cells, side] float32."""
    where = torch.linspace(0, arch.positions_per_side - 1, cells)
    below = where.floor().long()
    above = (below + 1).clamp(max=arch.positions_per_side - 1)
    weights, cell = torch.zeros(cells, arch.positions_per_side), torch.arange(cells)
    weights[cell, below] += 1 - (where - below)
    weights[cell, above] += where - below
    return weights


def text_rotary(arch, start, rows, columns, length):
    """Rotary table of one sequence: `start` text tokens, rows * columns image tokens, then text up to `length`.

    Returns: cos, sin, each [S, 1, h] float32. Every channel pair turns with time, height or width (M-RoPE): in three
        consecutive sections in Qwen2-VL, interleaved in Qwen3-VL.
    """
    tokens = rows * columns
    position = torch.zeros(3, length)
    position[:, :start] = torch.arange(start)
    position[:, start : start + tokens] = start
    position[1, start : start + tokens] += torch.arange(rows).repeat_interleave(columns)
    position[2, start : start + tokens] += torch.arange(columns).repeat(rows)
    position[:, start + tokens :] = start + max(rows, columns) + torch.arange(length - start - tokens)
    half = arch.head_dim // 2
    angle = position[..., None] * arch.rope_theta ** -(torch.arange(half) / half)  # [3, S, h / 2]
    if arch.is_qwen2:
        axis = torch.arange(3).repeat_interleave(torch.tensor(arch.mrope_section))
    else:
        axis = torch.zeros(half, dtype=torch.long)
        for a in (1, 2):
            axis[a : 3 * arch.mrope_section[a] : 3] = a
    angle = angle[axis, :, torch.arange(half)].T  # [S, h / 2]
    angle = torch.cat((angle, angle), -1)[:, None]
    return angle.cos(), angle.sin()


# ---------------------------------------------------------------------------------------------------- blocks


def rotate(x, cos, sin):
    """Rotary embedding. Args: x: [B, S, H, h]. cos, sin: [S, 1, h]. Returns: [B, S, H, h]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rms_norm(x, weight, eps=1e-6):
    """Root-mean-square norm of the last axis, in float32, rounded before the weight as Transformers does."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def attention(q, k, v, causal):
    """Args: q: [B, S, H, h]. k, v: [B, S, K, h]. Returns: [B, S, H * h]."""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def vision_block(x, cos, sin, w, heads, quick_gelu):
    """Args: x: [B, P, E]. w: the block's weights by their names within the block. Returns: [B, P, E]."""
    first, second = ("mlp.fc1", "mlp.fc2") if quick_gelu else ("mlp.linear_fc1", "mlp.linear_fc2")
    y = F.layer_norm(x, x.shape[-1:], w["norm1.weight"], w["norm1.bias"], 1e-6)
    q, k, v = F.linear(y, w["attn.qkv.weight"], w["attn.qkv.bias"]).unflatten(-1, (3, heads, -1)).unbind(2)
    q, k = rotate(q.float(), cos, sin).to(x.dtype), rotate(k.float(), cos, sin).to(x.dtype)
    x = x + F.linear(attention(q, k, v, causal=False), w["attn.proj.weight"], w["attn.proj.bias"])
    y = F.layer_norm(x, x.shape[-1:], w["norm2.weight"], w["norm2.bias"], 1e-6)
    y = F.linear(y, w[first + ".weight"], w[first + ".bias"])
    y = y * torch.sigmoid(1.702 * y) if quick_gelu else F.gelu(y, approximate="tanh")
    return x + F.linear(y, w[second + ".weight"], w[second + ".bias"])


def merge(x, w, names, norm_after_merge):
    """Four neighbouring patches to one image token. Args: x: [B, P, E]. Returns: [B, N, D]."""
    norm, first, second = names
    if norm_after_merge:
        x = x.unflatten(1, (-1, 4)).flatten(2)  # [B, N, 4 E]
    x = F.layer_norm(x, x.shape[-1:], w[norm + ".weight"], w[norm + ".bias"], 1e-6)
    if not norm_after_merge:
        x = x.unflatten(1, (-1, 4)).flatten(2)
    x = F.gelu(F.linear(x, w[first + ".weight"], w[first + ".bias"]))
    return F.linear(x, w[second + ".weight"], w[second + ".bias"])


def joined(y, w, names):
    """Several linears on one input as one product (fewer passes over y). Returns: their outputs, side by side."""
    weight = torch.cat([w[name + ".weight"] for name in names])
    bias = torch.cat([w[name + ".bias"] for name in names]) if names[0] + ".bias" in w else None
    return F.linear(y, weight, bias)


def text_block(x, cos, sin, w, heads, kv_heads):
    """Args: x: [B, S, D]. w: the layer's weights by their names within the layer. Returns: [B, S, D], router loss."""
    y = rms_norm(x, w["input_layernorm.weight"])
    qkv = joined(y, w, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), 2)
    if "self_attn.q_norm.weight" in w:
        q, k = rms_norm(q, w["self_attn.q_norm.weight"]), rms_norm(k, w["self_attn.k_norm.weight"])
    x = x + F.linear(attention(rotate(q, cos, sin), rotate(k, cos, sin), v, causal=True), w["self_attn.o_proj.weight"])
    y = rms_norm(x, w["post_attention_layernorm.weight"])
    if "mlp.gate.weight" in w:
        z, router_loss = experts(y, w)
        return x + z, router_loss
    gate, up = joined(y, w, ("mlp.gate_proj", "mlp.up_proj")).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"]), x.new_zeros(())


def experts(y, w):
    """Two experts per token, weights renormalised, computed as one wide MLP in which the other experts get weight 0.

    Args: y: [B, S, D]. Returns: [B, S, D], and the load-balancing loss (1 when all experts are used equally).
    Source: loss of Fedus et al. 2021, "Switch Transformers", section 2.2.
    """
    probability = F.linear(y.float(), w["mlp.gate.weight"].float()).softmax(-1)  # [B, S, X]
    best = probability.amax(-1, keepdim=True)
    second = probability.masked_fill(probability == best, -1).amax(-1, keepdim=True)
    chosen = probability >= second  # max twice: much faster than topk on rows of eight
    share = torch.where(chosen, probability / (best + second), 0.0).to(y.dtype)
    gate_up, down = w["mlp.experts.gate_up_proj"], w["mlp.experts.down_proj"]  # [X, D, 2 I], [X, I, D]
    count, width, _ = gate_up.shape
    hidden = (y @ gate_up.transpose(0, 1).reshape(width, -1)).unflatten(-1, (count, -1))  # [B, S, X, 2 I]
    gate, up = hidden.chunk(2, -1)
    hidden = (F.silu(gate) * up * share[..., None]).flatten(2)  # [B, S, X I]
    load = chosen.float().mean((0, 1)) / 2 * count
    return hidden @ down.reshape(-1, width), (load * probability.mean((0, 1))).sum()


# ---------------------------------------------------------------------------------------------------- the model


class Model:
    """The forward pass over `weights` ({hub name: tensor}). `compile` fuses each block's elementwise operations."""

    def __init__(self, arch, weights, compile=False):
        self.arch, self.weights = arch, weights
        vision, text = prefixes(arch)
        self.vision, self.text = vision, text
        self.vision_blocks = [self._below(f"{vision}blocks.{i}.") for i in range(arch.vision_depth)]
        self.text_blocks = [self._below(f"{text}layers.{i}.") for i in range(arch.depth)]
        # Plain ints in the closures, so that the compiler takes them as constants.
        vision_heads, quick_gelu, heads, kv_heads = arch.vision_heads, arch.is_qwen2, arch.heads, arch.kv_heads
        self.vision_block = lambda x, cos, sin, w: vision_block(x, cos, sin, w, vision_heads, quick_gelu)
        self.text_block = lambda x, cos, sin, w: text_block(x, cos, sin, w, heads, kv_heads)
        if compile:
            self.vision_block = torch.compile(self.vision_block, dynamic=True)
            self.text_block = torch.compile(self.text_block, dynamic=True)

    def _below(self, prefix):
        return {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}

    def see(self, patches, rotary, position_axes):
        """Vision tower. Args: patches: [B, P, 3 * patch * patch]. rotary: of `vision_rotary`. position_axes:
        `position_weights` of both axes, or None for Qwen2-VL.

        Returns: image features and deepstack features, each [B, N, D]: [main, first, second, ...].
        """
        arch, w = self.arch, self.weights
        projection = w[self.vision + "patch_embed.proj.weight"].sum(2).flatten(1)  # [E, 3 * patch * patch]
        x = F.linear(patches.to(projection.dtype), projection, w.get(self.vision + "patch_embed.proj.bias"))
        if position_axes is not None:
            side, (vertical, horizontal) = arch.positions_per_side, position_axes
            table = w[self.vision + "pos_embed.weight"].float().view(side, side, -1)
            stretched = torch.einsum("yi,ije->yje", vertical, table)
            positions = torch.einsum("xj,yje->yxe", horizontal, stretched)  # [2 rows, 2 columns, E]
            rows, columns = len(vertical) // 2, len(horizontal) // 2
            positions = positions.view(rows, 2, columns, 2, -1).transpose(1, 2).reshape(1, x.shape[1], -1)
            x = x + positions.to(x.dtype)
        deepstack, names = [], ("norm", "linear_fc1", "linear_fc2")
        for i, block in enumerate(self.vision_blocks):
            x = self.vision_block(x, *rotary, block)
            if i in arch.deepstack_layers:
                merger = self._below(f"{self.vision}deepstack_merger_list.{len(deepstack)}.")
                deepstack.append(merge(x, merger, names, norm_after_merge=True))
        names = ("ln_q", "mlp.0", "mlp.2") if arch.is_qwen2 else names
        return [merge(x, self._below(self.vision + "merger."), names, norm_after_merge=False), *deepstack]

    def answer(self, features, ids, image_places, rotary, last):
        """Language model. Args: features: of `see`. ids: [B, S] int64. image_places: [N] int64, the positions of the
        image tokens. rotary: of `text_rotary`, in the compute dtype. last: A, how many final positions get logits.

        Returns: logits [B, A, V], mean router loss over the layers (0 without experts).
        """
        main, *deepstack = features
        x = F.embedding(ids, self.weights[self.text + "embed_tokens.weight"]).index_copy(1, image_places, main)
        router_loss = 0.0
        for i, block in enumerate(self.text_blocks):
            x, loss = self.text_block(x, *rotary, block)
            router_loss = router_loss + loss.float() / self.arch.depth
            if i < len(deepstack):
                x = x.index_add(1, image_places, deepstack[i])
        x = rms_norm(x[:, -last:], self.weights[self.text + "norm.weight"])
        return F.linear(x, self.weights["lm_head.weight"]), router_loss
