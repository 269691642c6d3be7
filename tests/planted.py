"""Mistakes planted in a loaded Transformers model, to test what calls a deviation "bug" or "rounding".

Fault    one mistake: how to plant it, and the hook point it changes first
FAULTS   all of them

A fault acts on one model instance through hooks and replaced attributes, and is gone when its context ends. Weights
are never edited in place: a changed copy stands in for the parameter, and the parameter itself is put back. What the
trace records as `inputs.*` stays right; only the computation is wrong.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType

import torch
from torch import nn

from vlmlab.hookpoints import FAMILIES

QWEN2, QWEN3, MOE = FAMILIES[:1], FAMILIES[1:], FAMILIES[2:]
LAYER, BLOCK = 5, 7  # where a fault of a single layer, or of a single ViT block, sits


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes: name. families: where it can be made; the first stands for all in `make test`. plant: (model, config) to
    the context in which it is made. first: config to the first hook point that changes. observable: False where the
    change is of the size of rounding: on the test's picture, 90% of the tokens stay within 2.5 times of what bf16 costs
    them, at every hook point.
    """

    name: str
    families: tuple[str, ...]
    plant: Callable
    first: Callable
    observable: bool = True


@contextmanager
def changed(*changes):
    """Set attributes, and put the old ones back. Args: changes: (object, attribute, new value)."""
    old = [(thing, name, getattr(thing, name)) for thing, name, _ in changes]
    try:
        for thing, name, value in changes:
            setattr(thing, name, value)
        yield
    finally:
        for thing, name, value in reversed(old):
            if isinstance(value, MethodType):  # the class has it
                vars(thing).pop(name, None)
            else:
                setattr(thing, name, value)


@contextmanager
def before(modules, hook):
    """Args: hook: (args, kwargs) to the (args, kwargs) the modules shall get."""
    handles = [
        module.register_forward_pre_hook(lambda _, args, kwargs: hook(args, kwargs), with_kwargs=True)
        for module in modules
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def after(modules, hook):
    """Args: hook: (args, output) to the output the modules shall give."""
    handles = [module.register_forward_hook(lambda _, args, output: hook(args, output)) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_argument(modules, change):
    return before(modules, lambda args, kwargs: ((change(args[0]), *args[1:]), kwargs))


def second_argument(modules, change):
    return before(modules, lambda args, kwargs: ((args[0], change(args[1]), *args[2:]), kwargs))


def skipped(modules):
    return after(modules, lambda args, output: args[0])


def edited(module, name, edit):
    """A change for `changed`. Args: edit: takes a parameter's values and returns the wrong ones."""
    old = getattr(module, name)
    return module, name, nn.Parameter(edit(old.detach().clone()), requires_grad=old.requires_grad)


def negate(*row):
    def edit(weight):
        weight[row] *= -1
        return weight

    return edit


def swap_rows(i, j):
    def edit(weight):
        weight[[i, j]] = weight[[j, i]]
        return weight

    return edit


def exchanged(one, other, name, other_name=None):
    """Changes for `changed` that exchange two attributes."""
    other_name = other_name or name
    return (one, name, getattr(other, other_name)), (other, other_name, getattr(one, name))


# The parts of a model


def language(model):
    return model.model.language_model


def vision(model):
    return model.model.visual


def layers(model):
    return list(language(model).layers)


def attentions(model):
    return [layer.self_attn for layer in layers(model)]


def routers(model):
    return [layer.mlp.gate for layer in layers(model)]


def norms(model):
    pairs = [(layer.input_layernorm, layer.post_attention_layernorm) for layer in layers(model)]
    return [*(norm for pair in pairs for norm in pair), language(model).norm]


def vision_norms(model):
    return [norm for block in vision(model).blocks for norm in (block.norm1, block.norm2)]


def mergers(model):
    return [*getattr(vision(model), "deepstack_merger_list", ()), vision(model).merger]


def merger_norm(merger):
    return merger.ln_q if hasattr(merger, "ln_q") else merger.norm


def text_of(config):
    return config.get("text_config") or config


def first_merger(config):
    return "vision.deepstack.0" if config["vision_config"].get("deepstack_visual_indexes") else "vision.merger"


# Positions


def one_row(model, config):
    def count(positions):
        return torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)

    return second_argument([language(model).rotary_emb], count)


def wrong_rows(rows):
    return lambda model, config: second_argument([language(model).rotary_emb], lambda positions: positions[rows])


def chunked_sections(model, config):
    rotary = language(model).rotary_emb

    def compose(freq):
        freq = torch.cat([part[i] for i, part in enumerate(freq.split(rotary.mrope_section, dim=-1))], dim=-1)
        return torch.cat((freq, freq), dim=-1)

    return changed((rotary, "recomposition_frequencies", compose))


def interleaved_sections(model, config):
    rotary = language(model).rotary_emb

    def compose(freq):
        mixed = freq[0].clone()
        for row in (1, 2):
            here = slice(row, 3 * rotary.mrope_section[row], 3)
            mixed[..., here] = freq[row, ..., here]
        return torch.cat((mixed, mixed), dim=-1)

    return changed((rotary, "recomposition_frequencies", compose))


def moved_positions(move):
    """Args: move: edits positions [3, T] in place, given image [T] bool."""

    def plant(model, config):
        right = model.model.compute_3d_position_ids

        def wrong(**kwargs):
            positions = right(**kwargs).clone()
            move(positions[:, 0], kwargs["mm_token_type_ids"][0] == 1)
            return positions

        return changed((model.model, "compute_3d_position_ids", wrong))

    return plant


def shift_image(positions, image):
    positions[:, image] += 1


def count_image_tokens(positions, image):
    """The text after the picture goes on as if each image token had taken one position."""
    places = image.nonzero()[:, 0]
    following = positions[:, places[-1] + 1 :]
    following += positions[0, places[0]] + len(places) - following[0, 0]


def end_at_shorter_side(positions, image):
    places = image.nonzero()[:, 0]
    ends = positions[1:, image].amax(dim=1)
    positions[:, places[-1] + 1 :] -= ends.max() - ends.min()


def bf16_frequencies(model, config):
    rotary = language(model).rotary_emb
    return changed((rotary, "inv_freq", rotary.inv_freq.bfloat16().float()))


def wrong_theta(model, config):
    rotary = language(model).rotary_emb
    theta = text_of(config)["rope_parameters"]["rope_theta"]
    exponents = torch.arange(len(rotary.inv_freq), device=rotary.inv_freq.device) / len(rotary.inv_freq)
    return changed((rotary, "inv_freq", 1.0 / (100 * theta) ** exponents))


def adjacent_pairs(model, config):
    """Rotates dimensions (0, 1), (2, 3), ... together, as GPT-J does, where halves are paired."""
    here = attentions(model)
    size = here[0].head_dim
    modules = [getattr(a, f"{x}_norm", getattr(a, f"{x}_proj")) for a in here for x in "qk"]

    def halves(args, output):
        return output.unflatten(-1, (-1, size // 2, 2)).transpose(-1, -2).flatten(-3)

    return after(modules, halves)


# Attention


def wrong_mask(keep):
    """Args: keep: (query place, key place) to whether the key is seen."""

    def hook(args, kwargs):
        x = kwargs["hidden_states"]
        place = torch.arange(x.shape[1], device=x.device)
        hidden = ~keep(place[:, None], place[None, :])
        mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(hidden, torch.finfo(x.dtype).min)[None, None]
        return args, {**kwargs, "attention_mask": mask}

    return lambda model, config: before(attentions(model), hook)


def wrong_scale(scale):
    """Args: scale: attention module to its wrong factor."""
    return lambda model, config: changed(*((a, "scaling", scale(a)) for a in attentions(model)))


def vision_scale(model, config):
    return changed(*((block.attn, "scaling", block.attn.dim**-0.5) for block in vision(model).blocks))


@contextmanager
def tiled_heads(model, config):
    """Query head h reads KV head h % groups: the KV heads are tiled where each has to be repeated."""
    here = attentions(model)
    groups = here[0].num_key_value_groups
    projections = [projection for a in here for projection in (a.k_proj, a.v_proj)]
    with (
        changed(*((a, "num_key_value_groups", 1) for a in here)),
        after(projections, lambda args, output: output.repeat(1, 1, groups)),
    ):
        yield


def lost_heads(model, config):
    """Only the first half of the heads reaches the output, as when tensor parallel ranks are not summed."""

    def half(x):
        return torch.cat((x[..., : x.shape[-1] // 2], torch.zeros_like(x[..., x.shape[-1] // 2 :])), dim=-1)

    return first_argument([a.o_proj for a in attentions(model)], half)


def no_qkv_bias(model, config):
    attention = attentions(model)[LAYER]
    return changed(
        *((projection, "bias", None) for projection in (attention.q_proj, attention.k_proj, attention.v_proj))
    )


def no_qk_norm(model, config):
    attention = attentions(model)[LAYER]
    return skipped([attention.q_norm, attention.k_norm])


def exchanged_qk_norm(model, config):
    return changed(*(c for a in attentions(model) for c in exchanged(a.q_norm, a.k_norm, "weight")))


# Norms and residuals


def norm_eps(eps):
    return lambda model, config: changed(*((norm, "variance_epsilon", eps) for norm in norms(model)))


def vision_norm_eps(eps):
    return lambda model, config: changed(*((norm, "eps", eps) for norm in vision_norms(model)))


def norm_weight_plus_one(model, config):
    return changed(*(edited(norm, "weight", lambda weight: weight + 1) for norm in norms(model)))


def other_final_norm(model, config):
    return changed((language(model).norm, "weight", layers(model)[LAYER].input_layernorm.weight))


def no_attention_residual(model, config):
    layer = layers(model)[LAYER]

    def forward(x, **kwargs):
        x = layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))

    return changed((layer, "forward", forward))


def no_mlp_residual(model, config):
    layer = layers(model)[LAYER]

    def forward(x, **kwargs):
        x = x + layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0]
        return layer.mlp(layer.post_attention_layernorm(x))

    return changed((layer, "forward", forward))


def no_vision_residual(model, config):
    block = vision(model).blocks[BLOCK]

    def forward(x, **kwargs):
        x = block.attn(block.norm1(x), **kwargs)
        return x + block.mlp(block.norm2(x))

    return changed((block, "forward", forward))


# MLPs and experts


def vision_activation(activation):
    def plant(model, config):
        mlps = [block.mlp for block in vision(model).blocks]
        return changed(*((mlp, "act" if hasattr(mlp, "act") else "act_fn", activation()) for mlp in mlps))

    return plant


def merger_activation(activation):
    def plant(model, config):
        merger = vision(model).merger
        return changed((merger.mlp, "1", activation()) if hasattr(merger, "mlp") else (merger, "act_fn", activation()))

    return plant


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


def gelu_mlp(model, config):
    mlp = layers(model)[LAYER].mlp
    return changed((getattr(mlp, "experts", mlp), "act_fn", nn.GELU()))


def gate_for_up(model, config):
    mlp = layers(model)[LAYER].mlp
    if not hasattr(mlp, "experts"):
        return changed(*exchanged(mlp, mlp, "gate_proj", "up_proj"))
    half = mlp.experts.gate_up_proj.shape[1] // 2
    return changed(edited(mlp.experts, "gate_up_proj", lambda weight: weight.roll(half, 1)))


def bad_row(model, config):
    mlp = layers(model)[LAYER].mlp
    if not hasattr(mlp, "experts"):
        return changed(edited(mlp.down_proj, "weight", negate(3)))
    return changed(edited(mlp.experts, "down_proj", negate(slice(None), 3)))


def bad_vision_row(model, config):
    return changed(edited(vision(model).blocks[BLOCK].attn.proj, "weight", negate(3)))


def exchanged_experts(model, config):
    experts = layers(model)[LAYER].mlp.experts
    return changed(*(edited(experts, name, swap_rows(2, 3)) for name in ("gate_up_proj", "down_proj")))


def router_scores(score):
    """Args: score: (all logits, indices of the chosen experts) to the wrong weights of the chosen experts."""

    def hook(args, output):
        logits, scores, chosen = output
        return logits, score(logits.float(), chosen).to(scores.dtype), chosen

    return lambda model, config: after(routers(model), hook)


def sigmoid_scores(logits, chosen):
    scores = logits.sigmoid().gather(1, chosen)
    return scores / scores.sum(dim=1, keepdim=True)


def top_1(model, config):
    return changed(*((router, "top_k", 1) for router in routers(model)))


def other_o_proj(model, config):
    here, following = attentions(model)[LAYER : LAYER + 2]
    return changed((here, "o_proj", following.o_proj))


def exchanged_layers(model, config):
    modules = language(model).layers
    return changed(*exchanged(modules, modules, str(LAYER), str(LAYER + 1)))


# From the picture to the language model


def raster_patches(model, config):
    """Patches row by row, where each 2 x 2 group has to stand together."""
    merge = vision(model).spatial_merge_size

    def hook(args, kwargs):
        t, h, w = kwargs["grid_thw"][0].tolist()
        blocks = args[0].view(t, h // merge, w // merge, merge, merge, -1)
        return (blocks.transpose(2, 3).reshape(args[0].shape), *args[1:]), kwargs

    return before([vision(model)], hook)


def merge_order(model, config):
    """The patches of each 2 x 2 group column by column."""
    merge = vision(model).spatial_merge_size

    def transpose(x):
        return x.view(-1, merge, merge, x.shape[-1]).transpose(1, 2).reshape(x.shape)

    return first_argument(mergers(model), transpose)


def wrong_pixels(change):
    """Args: change: pixels [P, channel, time, row, column] to the wrong ones."""

    def plant(model, config):
        embed = vision(model).patch_embed
        shape = (embed.in_channels, embed.temporal_patch_size, embed.patch_size, embed.patch_size)
        return first_argument([embed], lambda x: change(x.view(-1, *shape)).reshape(x.shape))

    return plant


def transposed_table(model, config):
    table, side = vision(model).pos_embed, vision(model).num_grid_per_side

    def transpose(weight):
        return weight.view(side, side, -1).transpose(0, 1).reshape(weight.shape)

    return changed(edited(table, "weight", transpose))


def image_one_late(model, config):
    """Every image feature one token later than its place."""
    right = model.model.get_placeholder_mask

    def wrong(*args, **kwargs):
        image, video = right(*args, **kwargs)
        return image.roll(1, 1), video

    return changed((model.model, "get_placeholder_mask", wrong))


def deepstack(change):
    """Args: change: the list of features by level to the wrong list."""

    def hook(args, kwargs):
        return args, {**kwargs, "deepstack_visual_embeds": change(kwargs["deepstack_visual_embeds"])}

    return lambda model, config: before([language(model)], hook)


def late_taps(model, config):
    taps = vision(model).deepstack_visual_indexes
    return changed((vision(model), "deepstack_visual_indexes", [tap + 1 for tap in taps]))


def at(name):
    return lambda config: name


def last_deepstack_layer(config):
    return f"layers.{len(config['vision_config']['deepstack_visual_indexes']) - 1}.resid_post"


ATTENTION, MLP = at("layers.0.attn_out"), at("layers.0.mlp_out")  # of a fault in every layer
VISION_ATTENTION, VISION_MLP = at("vision.0.attn_out"), at("vision.0.mlp_out")
LAYER_ATTENTION, LAYER_MLP = at(f"layers.{LAYER}.attn_out"), at(f"layers.{LAYER}.mlp_out")
DEEPSTACK = at("layers.0.resid_post")

FAULTS = (
    # language model: positions
    Fault("M-RoPE rows collapsed to one", FAMILIES, one_row, ATTENTION),
    Fault("M-RoPE height and width swapped", FAMILIES, wrong_rows([0, 2, 1]), ATTENTION),
    Fault("M-RoPE width takes the time row", FAMILIES, wrong_rows([0, 1, 0]), ATTENTION),
    Fault("M-RoPE sections chunked", QWEN3, chunked_sections, ATTENTION),
    Fault("M-RoPE sections interleaved", QWEN2, interleaved_sections, ATTENTION),
    Fault("image positions shifted by one", FAMILIES, moved_positions(shift_image), ATTENTION),
    Fault("text after the image counts its tokens", FAMILIES, moved_positions(count_image_tokens), ATTENTION),
    Fault("text after the image starts at its shorter side", FAMILIES, moved_positions(end_at_shorter_side), ATTENTION),
    Fault("rotary frequencies in bf16", FAMILIES, bf16_frequencies, ATTENTION, observable=False),
    Fault("rope_theta of another model", FAMILIES, wrong_theta, ATTENTION),
    Fault("rotary pairs adjacent dimensions", FAMILIES, adjacent_pairs, ATTENTION),
    # language model: attention
    Fault("causal mask off by one", FAMILIES, wrong_mask(lambda q, k: k <= q + 1), ATTENTION),
    Fault("no causal mask", FAMILIES, wrong_mask(lambda q, k: k >= 0 * q), ATTENTION),
    Fault("sliding window of 64", FAMILIES, wrong_mask(lambda q, k: (k <= q) & (k > q - 64)), ATTENTION),
    Fault("attention scale missing", FAMILIES, wrong_scale(lambda a: 1.0), ATTENTION),
    Fault(
        "attention scale of the whole width",
        FAMILIES,
        wrong_scale(lambda a: a.q_proj.in_features**-0.5),
        ATTENTION,
    ),
    Fault("KV heads tiled", FAMILIES, tiled_heads, ATTENTION),
    Fault("half of the heads lost", FAMILIES, lost_heads, ATTENTION),
    Fault("QKV bias missing in one layer", QWEN2, no_qkv_bias, LAYER_ATTENTION),
    Fault("QK norm skipped in one layer", QWEN3, no_qk_norm, LAYER_ATTENTION),
    Fault("Q and K norm weights exchanged", QWEN3, exchanged_qk_norm, ATTENTION),
    Fault("o_proj of the next layer in one layer", FAMILIES, other_o_proj, LAYER_ATTENTION),
    Fault("two layers exchanged", FAMILIES, exchanged_layers, LAYER_ATTENTION),
    # language model: norms, residuals, head
    Fault("RMSNorm eps 0.1", FAMILIES, norm_eps(0.1), ATTENTION),
    Fault("RMSNorm eps 1e-5", FAMILIES, norm_eps(1e-5), ATTENTION, observable=False),
    Fault("RMSNorm weight plus one", FAMILIES, norm_weight_plus_one, ATTENTION),
    Fault("final norm missing", FAMILIES, lambda model, config: skipped([language(model).norm]), at("final_norm")),
    Fault("final norm has another norm's weight", FAMILIES, other_final_norm, at("final_norm")),
    Fault("attention residual dropped in one layer", FAMILIES, no_attention_residual, at(f"layers.{LAYER}.resid_mid")),
    Fault("MLP residual dropped in one layer", FAMILIES, no_mlp_residual, at(f"layers.{LAYER}.resid_post")),
    Fault(
        "two rows of lm_head swapped",
        FAMILIES,
        lambda model, config: changed(edited(model.lm_head, "weight", swap_rows(2, 367))),
        at("logits"),
    ),
    # language model: MLP and experts
    Fault("GELU for SiLU in one layer", FAMILIES, gelu_mlp, LAYER_MLP),
    Fault("gate and up swapped in one layer", FAMILIES, gate_for_up, LAYER_MLP),
    Fault("one row of down_proj negated", FAMILIES, bad_row, LAYER_MLP),
    Fault(
        "router weights not renormalised",
        MOE,
        router_scores(lambda logits, chosen: logits.softmax(1).gather(1, chosen)),
        MLP,
    ),
    Fault("router weights by sigmoid", MOE, router_scores(sigmoid_scores), MLP),
    Fault("two experts exchanged in one layer", MOE, exchanged_experts, LAYER_MLP),
    Fault("top-1 for top-2 experts", MOE, top_1, MLP),
    # deepstack
    Fault("deepstack dropped", QWEN3, deepstack(lambda levels: None), DEEPSTACK),
    Fault("deepstack doubled", QWEN3, deepstack(lambda levels: [2 * x for x in levels]), DEEPSTACK),
    Fault(
        "deepstack one layer late",
        QWEN3,
        deepstack(lambda levels: [torch.zeros_like(levels[0]), *levels]),
        DEEPSTACK,
    ),
    Fault("deepstack one token late", QWEN3, deepstack(lambda levels: [x.roll(1, 0) for x in levels]), DEEPSTACK),
    Fault("deepstack levels reversed", QWEN3, deepstack(lambda levels: levels[::-1]), DEEPSTACK),
    Fault("last deepstack level dropped", QWEN3, deepstack(lambda levels: levels[:-1]), last_deepstack_layer),
    Fault("deepstack taken one block late", QWEN3, late_taps, at("vision.deepstack.0")),
    Fault(
        "deepstack merger norms skipped",
        QWEN3,
        # their norm comes after the 2 x 2 groups are joined
        lambda model, config: skipped([merger.norm for merger in vision(model).deepstack_merger_list]),
        at("vision.deepstack.0"),
    ),
    # picture, ViT, merger
    Fault("pixels blue first", FAMILIES, wrong_pixels(lambda x: x.flip(1)), at("vision.patch_embed")),
    Fault("pixels transposed in the patch", FAMILIES, wrong_pixels(lambda x: x.mT), at("vision.patch_embed")),
    Fault(
        "pixels channel last in the patch", FAMILIES, wrong_pixels(lambda x: x.movedim(1, -1)), at("vision.patch_embed")
    ),
    Fault("pixels not normalised", QWEN3, wrong_pixels(lambda x: x * 0.5 + 0.5), at("vision.patch_embed")),
    Fault("patches in raster order", FAMILIES, raster_patches, at("vision.patch_embed")),
    Fault(
        "position table without align_corners",
        QWEN3,
        lambda model, config: changed((vision(model), "interpolation_align_corners", False)),
        at("vision.0.resid_pre"),
    ),
    Fault(
        "position table dropped",
        QWEN3,
        lambda model, config: changed(edited(vision(model).pos_embed, "weight", torch.zeros_like)),
        at("vision.0.resid_pre"),
    ),
    Fault("position table transposed", QWEN3, transposed_table, at("vision.0.resid_pre")),
    Fault(
        "ViT rotary rows and columns swapped",
        FAMILIES,
        lambda model, config: second_argument([vision(model).rotary_pos_emb], lambda positions: positions.flip(-1)),
        VISION_ATTENTION,
    ),
    Fault("ViT attention scale of the whole width", FAMILIES, vision_scale, VISION_ATTENTION),
    Fault("ViT LayerNorm eps 1", FAMILIES, vision_norm_eps(1.0), VISION_ATTENTION),
    Fault("ViT LayerNorm eps 1e-5", FAMILIES, vision_norm_eps(1e-5), VISION_ATTENTION, observable=False),
    Fault("ViT GELU for QuickGELU", QWEN2, vision_activation(nn.GELU), VISION_MLP),
    Fault("ViT erf GELU for tanh GELU", QWEN3, vision_activation(nn.GELU), VISION_MLP, observable=False),
    Fault("ViT QuickGELU for tanh GELU", QWEN3, vision_activation(QuickGELU), VISION_MLP),
    Fault("ViT residual dropped in one block", FAMILIES, no_vision_residual, at(f"vision.{BLOCK}.resid_mid")),
    Fault("one row of a ViT projection negated", FAMILIES, bad_vision_row, at(f"vision.{BLOCK}.attn_out")),
    Fault(
        "merger norm skipped",
        FAMILIES,
        lambda model, config: skipped([merger_norm(vision(model).merger)]),
        at("vision.merger"),
    ),
    Fault(
        "merger tanh GELU for erf GELU",
        FAMILIES,
        merger_activation(lambda: nn.GELU(approximate="tanh")),
        at("vision.merger"),
        observable=False,
    ),
    Fault("merger QuickGELU for GELU", FAMILIES, merger_activation(QuickGELU), at("vision.merger"), observable=False),
    Fault("merger reads its patches by column", FAMILIES, merge_order, first_merger),
    Fault("image features one token late", FAMILIES, image_one_late, at("layers.0.resid_pre")),
)
