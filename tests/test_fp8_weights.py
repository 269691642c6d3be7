"""FP8 in the forward: only what SGLang quantises, errors of the size e4m3 has, checkpoints equal what they store."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from vlmlab import engine_sglang
from vlmlab.causes import hf_plan, sglang_plan
from vlmlab.checkpoint import DATA, load_checkpoint
from vlmlab.engine_hf import open_hf
from vlmlab.engine_sglang import open_sglang
from vlmlab.errors import VlmlabError
from vlmlab.fp8 import dequantize, dynamic_scale, fp8_linear, quantize_activation, quantize_weight, stack
from vlmlab.fp8_weights import SCHEMES, FP8Weights
from vlmlab.hybrid import Hybrid

ONLINE = [scheme for scheme in SCHEMES if scheme != "tensor/tensor"]
FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
ROUNDING = 2**-3 / math.sqrt(12) / math.sqrt(1.5 / math.log(2))  # rms error of rounding to e4m3, all mantissas alike


def in_fp8(scheme, plan=None):
    return (plan or hf_plan()).switched("fp8", scheme)


@pytest.fixture(scope="module")
def states(hybrids, ask):
    """(family, plan, dtype) to every hook point's tensor, the picture's among them."""

    @torch.no_grad()
    def run(family, plan, dtype=None, hybrid=None):
        hybrid, inputs = hybrid or hybrids(family, dtype), ask(family, (4, 4), seed=5)
        found = {}
        seen = hybrid.vision(inputs.pixel_values, inputs.image_grid_thw, plan, found.__setitem__)
        positions = hybrid.positions(inputs.input_ids, inputs.image_grid_thw)
        hybrid.language(inputs.input_ids, positions, plan, seen, record=found.__setitem__)
        return found

    return run


@pytest.fixture(scope="module")
def plain(states):
    return {family: states(family, hf_plan()) for family in FAMILIES}


def differs(a, b):
    return {name for name in a if not torch.equal(a[name], b[name])}


def error(x, truth):
    return ((x.double() - truth).norm() / truth.norm()).item()


# ---------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("scheme", ONLINE)
def test_a_scheme_changes_the_language_models_linears_only(scheme, states, plain):
    found = states("qwen3_vl", in_fp8(scheme))
    changed = differs(found, plain["qwen3_vl"])
    assert {name for name in found if name.startswith("layers.")} - changed == {"layers.0.resid_pre"}
    assert changed.isdisjoint(name for name in found if name.startswith("vision."))
    assert error(found["layers.0.attn_out"], plain["qwen3_vl"]["layers.0.attn_out"].double()) < 0.2


def test_schemes_differ_and_leave_nothing_behind(states, plain):
    found = {scheme: states("qwen3_vl", in_fp8(scheme))["layers.0.attn_out"] for scheme in ONLINE}
    for one in ONLINE:
        assert [other for other in ONLINE if torch.equal(found[one], found[other])] == [one]
    assert not differs(states("qwen3_vl", hf_plan()), plain["qwen3_vl"])


def test_a_vit_is_quantised_in_qwen2_vl_and_experts_but_no_router_in_a_mixture(states, plain, hybrids):
    assert "vision.0.attn_out" in differs(states("qwen2_vl", in_fp8("channel/token")), plain["qwen2_vl"])
    changed = differs(states("qwen3_vl_moe", in_fp8("channel/token")), plain["qwen3_vl_moe"])
    assert "layers.0.mlp_out" in changed and "vision.0.attn_out" not in changed
    hybrid, read = hybrids("qwen3_vl_moe"), plain["qwen3_vl_moe"]["layers.0.resid_mid"]
    logits = [hybrid.router_logits(0, read, plan) for plan in (hf_plan(), in_fp8("tensor/token"))]
    assert torch.equal(*logits)
    head = [hybrid.logits(read, plan) for plan in (hf_plan(), in_fp8("tensor/token"))]
    assert torch.equal(*head)


def test_a_scheme_goes_with_any_plan_and_any_layer(states, plain, hybrids):
    order, depth = hf_plan().switched("deepstack_order", "once"), hybrids("qwen3_vl").depth
    both = states("qwen3_vl", in_fp8("channel/token", order))
    assert differs(both, states("qwen3_vl", order)) and differs(both, states("qwen3_vl", in_fp8("channel/token")))
    late = hf_plan().switched("fp8", "channel/token", range(30, depth), depth)
    changed = differs(states("qwen3_vl", late), plain["qwen3_vl"])
    assert "layers.30.attn_out" in changed and "layers.29.mlp_out" not in changed


def test_a_plans_key_tells_schemes_apart():
    assert in_fp8("channel/token").key([]) != in_fp8("block/group").key([]) != hf_plan().key([])
    assert sglang_plan().key([]) == hf_plan().key([])


def test_no_such_scheme(states):
    with pytest.raises(VlmlabError, match="expected fp8 as one of tensor/token"):
        states("qwen3_vl", in_fp8("row/token"))
    with pytest.raises(VlmlabError, match="needs a checkpoint with input scales"):
        states("qwen3_vl", in_fp8("tensor/tensor"))


# ---------------------------------------------------------------------------------------------------- size of errors


@pytest.mark.parametrize("scheme", ONLINE)
def test_an_error_has_the_size_of_its_roundings(scheme, hybrids):
    generator = torch.Generator().manual_seed(0)
    hybrid, exact = hybrids("qwen3_vl"), hybrids("qwen3_vl", torch.float64)
    modules = [f"model.layers.3.mlp.{name}_proj" for name in ("gate", "up")]
    x = torch.randn(500, 96, generator=generator).bfloat16()
    truth = F.linear(x.double(), torch.cat([exact.weights[f"{m}.weight"] for m in modules]))
    stored = torch.cat(exact.fp8.products(x.double(), modules, scheme), -1)
    found = torch.cat(hybrid.fp8.products(x, modules, scheme), -1)
    assert stored.dtype == torch.float64
    assert error(stored, truth) == pytest.approx(ROUNDING, rel=0.15)
    roundings = 1 if scheme.endswith("none") else 2
    assert error(found, truth) == pytest.approx(ROUNDING * math.sqrt(roundings), rel=0.15)
    alone = error(found, stored)
    assert alone < 0.003 if scheme.endswith("none") else alone == pytest.approx(ROUNDING, rel=0.15)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_the_stored_weights_are_one_truth(family, states):
    exact = states(family, hf_plan(), torch.float64)
    schemes = [states(family, in_fp8(scheme), torch.float64) for scheme in ("channel/token", "channel/none")]
    assert not differs(*schemes)
    assert 0.005 < error(schemes[0]["layers.0.attn_out"], exact["layers.0.attn_out"]) < 0.2


def test_weights_are_quantised_once(hybrids, monkeypatch):
    hybrid, x = hybrids("qwen3_vl"), torch.ones(1, 96, dtype=torch.bfloat16)
    first = hybrid.fp8.products(x, ["model.layers.5.mlp.gate_proj"], "channel/none")
    monkeypatch.setattr("vlmlab.fp8_weights.quantize_weight", None)
    assert torch.equal(first[0], hybrid.fp8.products(x, ["model.layers.5.mlp.gate_proj"], "channel/none")[0])


# ---------------------------------------------------------------------------------------------------- parts


def small(model_type="qwen3_vl", declared=None, **weights):
    config = {"model_type": model_type} | ({} if declared is None else {"quantization_config": declared})
    return FP8Weights(config, weights, torch.bfloat16)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_fused_linears_share_a_scale_per_tensor_and_keep_their_blocks():
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    parts = [drawn(rows, 96, seed=rows) * rows for rows in (128, 64, 32)]
    biases = [drawn(1, len(part), seed=9)[0] for part in parts]
    weights = {f"{name}.weight": part for name, part in zip(names, parts, strict=True)}
    weights |= {f"{name}.bias": bias for name, bias in zip(names, biases, strict=True)}
    x, fp8 = drawn(5, 96, seed=7), small("qwen2_vl", **weights)
    whole, bias = quantize_weight(torch.cat(parts), "tensor"), torch.cat(biases)
    found = fp8.products(x, names, "tensor/token")
    assert [part.shape[1] for part in found] == [128, 64, 32]
    assert torch.equal(torch.cat(found, -1), fp8_linear(x, whole, bias, "token"))
    blocks = [
        fp8_linear(x, quantize_weight(part, "block"), bias, "group") for part, bias in zip(parts, biases, strict=True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(fp8.products(x, names, "block/group"), blocks, strict=True))


@pytest.mark.parametrize("scheme", ["channel/token", "block/group", "tensor/none"])
def test_experts_quantised_here_have_one_scale_or_blocks(scheme):
    name, weight = "model.layers.0.mlp.experts.down_proj", drawn(3, 96, 32)
    parts = {0: drawn(4, 32, seed=1), 2: drawn(2, 32, seed=2) * 9}
    found = small("qwen3_vl_moe", **{name: weight}).expert_products(parts, name, scheme)
    assert found.keys() == parts.keys()
    for expert, part in parts.items():
        if scheme == "block/group":
            wanted = fp8_linear(part, quantize_weight(weight[expert], "block"), None, "group")
        else:
            one = quantize_activation(weight[expert], "tensor", dynamic_scale(weight[expert]))
            shared = dynamic_scale(parts[2]) if scheme == "channel/token" else None  # the largest row of the call
            wanted = fp8_linear(part, one, None, "tensor" if scheme == "channel/token" else "none", shared)
        assert torch.equal(found[expert], wanted)


def test_a_dynamic_scale_survives_what_is_not_finite():
    assert dynamic_scale(torch.tensor([[1.0, math.nan, -4.0]])).item() == pytest.approx(4 / 448)
    assert dynamic_scale(torch.tensor([[math.inf]])).isfinite() and dynamic_scale(torch.zeros(1, 1)) > 0


# ---------------------------------------------------------------------------------------------------- checkpoints

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head", "re:.*visual.*"],
}
TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
DECLARED = {
    "channel": COMPRESSED,
    "tensor": TENSOR,
    "static": TENSOR | {"activation_scheme": "static"},
    "block": TENSOR | {"weight_block_size": [128, 128], "modules_to_not_convert": ["model.visual", "lm_head"]},
}


def make_fp8(folder, form):
    """The embedded qwen3-vl-tiny with FP8 linears. form: of DECLARED. Returns: folder."""
    folder = shutil.copytree(DATA / "checkpoints" / "qwen3-vl-tiny", folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": DECLARED[form]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name in [n for n in weights if ".layers." in n and n.endswith("_proj.weight")]:
        quantized = quantize_weight(weights[name], "tensor" if form == "static" else form)
        scale = quantized.scale.reshape(()) if quantized.granularity == "tensor" else quantized.scale
        weights |= {name: quantized.values, f"{name}_scale" + ("_inv" if form == "block" else ""): scale}
        if form == "static":
            weights[name.replace(".weight", ".input_scale")] = torch.tensor(0.02 + 0.01 * ("k_proj" in name))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def edit(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("form", "scheme"), [("channel", "channel/token"), ("block", "block/group")])
def test_a_checkpoint_computes_what_quantising_here_does(form, scheme, states, hybrids, tmp_path):
    checkpoint = load_checkpoint(make_fp8(tmp_path / form, form))
    assert (checkpoint.fp8, checkpoint.dtype) == (True, "bfloat16")
    stored = Hybrid(checkpoint)
    found = states("qwen3_vl", hf_plan(), hybrid=stored)
    assert not differs(found, states("qwen3_vl", in_fp8(scheme)))
    assert not differs(found, states("qwen3_vl", in_fp8(scheme), hybrid=stored))
    assert differs(found, states("qwen3_vl", in_fp8(f"{form}/none"), hybrid=stored))
    exact = Hybrid(checkpoint, torch.float64)
    x, modules = drawn(4, 96).double(), ["model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj"]
    own = exact.fp8.products(x, modules, "hf")
    here = hybrids("qwen3_vl", torch.float64).fp8.products(x, modules, scheme)
    assert all(torch.equal(a, b) for a, b in zip(own, here, strict=True))
    with pytest.raises(VlmlabError, match=rf"expected {form}/\.\.\., since the checkpoint is stored as {scheme}"):
        states("qwen3_vl", in_fp8("tensor/token"), hybrid=stored)


@pytest.mark.parametrize("form", ["tensor", "static"])
def test_a_checkpoint_with_a_scale_per_tensor_keeps_each_parts_own(form, hybrids, tmp_path):
    stored, plain = Hybrid(load_checkpoint(make_fp8(tmp_path / form, form))), hybrids("qwen3_vl")
    names, x = [f"model.layers.2.self_attn.{name}_proj" for name in "qkv"], drawn(6, 96)
    parts = [quantize_weight(plain.weights[f"{name}.weight"], "tensor") for name in names]
    activation, static = ("tensor", 0.03) if form == "static" else ("token", None)  # the largest of 0.02, 0.03, 0.02
    wanted = fp8_linear(x, stack(parts), None, activation, static)
    assert torch.equal(torch.cat(stored.fp8.products(x, names, "sglang"), -1), wanted)
    one, x = "model.layers.2.self_attn.o_proj", drawn(6, 128)
    for how in ("hf", "tensor/token"):
        here = plain.fp8.products(x, [one], "tensor/token")[0]
        assert torch.equal(stored.fp8.products(x, [one], how)[0], here) is (form == "tensor" or how != "hf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_stored_experts_keep_their_scales(dtype):
    name, weight = "model.layers.0.mlp.experts.gate_up_proj", drawn(2, 256, 200)
    parts = {0: drawn(3, 200, seed=1).to(dtype), 1: drawn(1, 200, seed=2).to(dtype)}
    for form, activation in (("channel", "token"), ("block", "group"), ("tensor", "tensor")):
        made = [quantize_weight(w, form) for w in weight]
        scales = torch.stack([q.scale.reshape(()) if form == "tensor" else q.scale for q in made])
        weights = {name: torch.stack([q.values for q in made]), f"{name}_scale": scales}
        fp8 = FP8Weights({"model_type": "qwen3_vl_moe", "quantization_config": DECLARED[form]}, weights, dtype)
        found = fp8.expert_products(parts, name, "hf")
        whole = torch.cat(list(parts.values()))
        shared = dynamic_scale(whole) if form == "tensor" and dtype != torch.float64 else None
        for expert, part in parts.items():
            assert torch.equal(found[expert], fp8_linear(part, made[expert], None, activation, shared))
            if dtype == torch.float64:
                assert torch.equal(found[expert], F.linear(part, dequantize(made[expert])))


# ---------------------------------------------------------------------------------------------------- malformed ones

NAME = "model.layers.0.self_attn.o_proj"
MADE = quantize_weight(drawn(96, 128), "tensor")


@pytest.mark.parametrize(
    ("declared", "changed", "says"),
    [
        (TENSOR, {"weight_scale": None}, "o_proj.weight_scale or .* beside the FP8 weight, got 0"),
        (TENSOR, {"weight_scale_inv": torch.ones(1)}, "got 2"),
        (TENSOR, {"weight_scale": torch.ones(3)}, r"o_proj.weight: expected a tensor scale .* got \[3\]"),
        (TENSOR, {"weight_scale": torch.tensor(math.nan)}, "o_proj.weight: expected finite"),
        (DECLARED["block"], {}, r"expected a block scale of shape \[1, 1\]"),
        (DECLARED["static"], {}, "expected one positive finite .*o_proj.input_scale, got none"),
        (DECLARED["static"], {"input_scale": torch.tensor(math.nan)}, r"input_scale, got \[nan\]"),
        (TENSOR, {"weight": drawn(96, 128)}, "expected .*o_proj.weight in float8_e4m3fn"),
        (TENSOR | {"ignored_layers": [NAME]}, {}, "expected no FP8 weight .*o_proj"),
        (None, {}, "expected no FP8 weight .*o_proj"),
        (TENSOR | {"ignored_layers": [NAME]}, {"weight": drawn(96, 128)}, "scales of FP8 weights only"),
        ({"quant_method": "awq"}, {}, "quant_method 'awq' is not supported"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_an_error(declared, changed, says):
    parts = {"weight": MADE.values, "weight_scale": MADE.scale.reshape(())} | changed
    weights = {f"{NAME}.{key}": value for key, value in parts.items() if value is not None}
    with pytest.raises(VlmlabError, match=says):
        small(declared=declared, **weights)


def test_fp8_where_sglang_has_none_is_an_error():
    name = "visual.blocks.0.attn.proj"
    stored = {f"{name}.weight": MADE.values, f"{name}.weight_scale": MADE.scale.reshape(())}
    with pytest.raises(VlmlabError, match=r"expected no FP8 weight visual\.blocks"):
        small(declared=TENSOR, **stored)
    assert small("qwen2_vl", TENSOR, **stored).products(drawn(2, 128), [name], "hf") is not None


def test_static_scales_of_experts_are_refused():
    name, made = "model.layers.0.mlp.experts.down_proj", quantize_weight(drawn(96, 32), "tensor")
    with pytest.raises(VlmlabError, match="static activation scales of experts"):
        small("qwen3_vl_moe", DECLARED["static"], **{name: made.values[None], f"{name}_scale": torch.ones(1)})
    with pytest.raises(VlmlabError, match=r"down_proj: expected scales of 1 experts, got \[2\]"):
        small("qwen3_vl_moe", TENSOR, **{name: made.values[None], f"{name}_scale": torch.ones(2)})


def test_malformed_folders_are_errors(tmp_path):
    folder = make_fp8(tmp_path / "fp8", "channel")
    name = "model.language_model.layers.3.mlp.down_proj.weight_scale"
    edit(folder, lambda weights: weights[name].fill_(math.nan))
    with pytest.raises(VlmlabError, match=r"layers\.3\.mlp\.down_proj\.weight: expected finite"):
        Hybrid(load_checkpoint(folder))
    edit(folder, lambda weights: weights.pop(name))
    with pytest.raises(VlmlabError, match=r"layers\.3\.mlp\.down_proj\.weight_scale or"):
        Hybrid(load_checkpoint(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float8_e4m3fn"}))
    with pytest.raises(VlmlabError, match="expected dtype bfloat16"):
        load_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(VlmlabError, match="'gptq' is not supported"):
        load_checkpoint(folder)


@pytest.mark.parametrize("form", ["channel", "block"])
def test_engines_on_a_cpu_refuse_before_they_start(form, tmp_path, monkeypatch):
    checkpoint = load_checkpoint(make_fp8(tmp_path / form, form))
    monkeypatch.setattr("transformers.AutoModelForImageTextToText.from_pretrained", None)
    monkeypatch.setattr(engine_sglang.subprocess, "Popen", None)
    monkeypatch.setattr(engine_sglang, "engine_checks", lambda: [])
    with pytest.raises(VlmlabError, match="expected a CUDA device for the FP8 checkpoint"), open_hf(checkpoint, "cpu"):
        pass
    extra = {"device": "cpu"}
    with pytest.raises(VlmlabError, match=r"expected a CUDA device .* AMX"), open_sglang(checkpoint, extra):
        pass
    plain = load_checkpoint(DATA / "checkpoints" / "qwen3-vl-tiny")
    with pytest.raises(VlmlabError, match="AMX"), open_sglang(plain, extra | {"quantization": "fp8"}):
        pass
