"""FP8: every rounding is within half a step, scales multiply, products equal exact ones, configs say what they mean."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmlab.errors import VlmlabError
from vlmlab.floats import FORMATS, round_to, ulp
from vlmlab.fp8 import (
    WEIGHT_GRANULARITIES,
    Quantization,
    Quantized,
    dequantize,
    fp8_linear,
    is_fp8,
    is_skipped,
    quantize_activation,
    quantize_weight,
    read_quantization,
    scale_convention,
    stack,
    stored_weight,
)

E4M3 = FORMATS["e4m3"]
PAIRS = [("tensor", "token"), ("tensor", "tensor"), ("channel", "token"), ("channel", "tensor"), ("block", "group")]
PAIRS += [(weight, "none") for weight in WEIGHT_GRANULARITIES]


def numbers(rows, columns, seed=0, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-4, 5, (rows, 1), generator=generator).float())
    return (torch.randn(rows, columns, generator=generator) * spread * scale).to(dtype)


def static_for(activation):
    return 0.03 if activation == "tensor" else None


def half_steps(q, x):
    """Largest error of a round trip, in half steps of e4m3 at the value; the scale's own rounding adds a bit."""
    back, x = dequantize(q), x.double()
    scale = dequantize(Quantized(torch.ones_like(q.values), q.scale, q.granularity))
    return ((back - x).abs() / (ulp(x / scale, E4M3) / 2 * scale)).max().item()


# ---------------------------------------------------------------------------------------------------- quantisation


@pytest.mark.parametrize("granularity", WEIGHT_GRANULARITIES)
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (200, 300), (256, 384), (3, 129)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_comes_back_within_half_a_step(granularity, shape, dtype):
    w = numbers(*shape, dtype=dtype)
    q = quantize_weight(w, granularity)
    blocks = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    assert q.scale.shape == {"tensor": (1, 1), "channel": (shape[0], 1), "block": blocks}[granularity]
    assert (q.values.dtype, q.scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert half_steps(q, w) < 1.0001
    wrong = Quantized(q.values, q.scale * 1.1, q.granularity)
    assert half_steps(wrong, w) > 1.0001


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 140),
    st.integers(1, 140),
    st.integers(0, 10**6),
    st.integers(-20, 20),
    st.sampled_from([*WEIGHT_GRANULARITIES, "token", "group"]),
)
def test_every_scale_is_positive_and_the_largest_value_of_its_tile_is_448(rows, columns, seed, exponent, granularity):
    x = numbers(rows, columns, seed, scale=2.0**exponent)
    make = quantize_weight if granularity in WEIGHT_GRANULARITIES else quantize_activation
    q = make(x, granularity)
    assert q.scale.isfinite().all() and (q.scale > 0).all() and q.values.float().isfinite().all()
    assert half_steps(q, x) < 1.0001
    if granularity not in ("block",):  # its floor is 1e-4
        assert q.values.float().abs().max() == 448


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_values_are_torchs_cast_of_the_exactly_scaled_input(seed):
    x = numbers(5, 256, seed)
    scale = (x.double().abs().amax(1, keepdim=True) / 448).float()
    q = quantize_activation(x, "token")
    assert torch.equal(q.scale, scale)
    assert torch.equal(q.values.float(), (x.float() * (1 / scale)).to(torch.float8_e4m3fn).float())
    assert torch.equal(q.values.double(), round_to((x.float() * (1 / scale)).double(), E4M3))


def test_the_formulas_of_a_scale_differ_in_the_last_bit():
    x = numbers(500, 128)
    token, group = quantize_activation(x, "token"), quantize_activation(x, "group")
    assert not torch.equal(token.scale, group.scale)
    assert torch.allclose(token.scale, group.scale, rtol=2.0**-22, atol=0)


def test_a_block_depends_on_nothing_outside_it():
    w = numbers(200, 300)
    changed = w.clone()
    changed[128:, 256:] *= 8  # the last, partial block
    before, after = quantize_weight(w, "block"), quantize_weight(changed, "block")
    same = before.scale == after.scale
    assert same.sum() == 5 and not same[1, 2]
    assert torch.equal(before.values.float()[:128], after.values.float()[:128])
    assert torch.equal(quantize_weight(w[128:, 256:], "block").scale, before.scale[1:, 2:])


@pytest.mark.parametrize("granularity", WEIGHT_GRANULARITIES)
def test_zeros_stay_zeros(granularity):
    w = numbers(256, 256)
    w[:128, :128] = 0
    w[3] = 0
    q = quantize_weight(w, granularity)
    assert (q.scale > 0).all() and (dequantize(q)[:128, :128] == 0).all() and (dequantize(q)[3] == 0).all()
    nothing = quantize_weight(torch.zeros(2, 2), granularity)
    assert (nothing.scale > 0).all() and (dequantize(nothing) == 0).all()


@pytest.mark.parametrize("granularity", ["token", "group"])
def test_tokens_of_zeros_stay_zeros(granularity):
    x = numbers(4, 300)
    x[1] = 0
    q = quantize_activation(x, granularity)
    assert (q.scale > 0).all() and (q.values.float()[1] == 0).all()


def test_a_static_scale_saturates():
    x = torch.tensor([[448.0, 449, 464, 480, 1e30, -1e30, math.inf, -math.inf, math.nan, 0.1]])
    q = quantize_activation(x, "tensor", 1.0)
    assert q.values.float().tolist()[0][:9] == [448, 448, 448, 448, 448, -448, 448, -448, 448]
    assert q.values.float()[0, 9] == x[0, 9:].to(torch.float8_e4m3fn).float()


@pytest.mark.parametrize(("granularity", "stored"), [("token", [448.0, 448.0]), ("group", [math.nan, 448.0])])
def test_nan_is_stored_as_the_kernels_do_and_never_counts_for_a_scale(granularity, stored):
    q = quantize_activation(torch.tensor([[math.nan, 4.0]]), granularity)
    torch.testing.assert_close(q.values.float(), torch.tensor([stored]), equal_nan=True)
    assert q.scale.item() == pytest.approx(4 / 448)


@pytest.mark.parametrize("granularity", ["token", "group"])
def test_infinity_reaches_the_product(granularity):
    x = numbers(2, 128)
    x[0, 5] = math.inf
    weight = quantize_weight(numbers(8, 128), "channel" if granularity == "token" else "block")
    out = fp8_linear(x, weight, activation=granularity)
    assert not out[0].isfinite().any() and out[1].isfinite().all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: quantize_weight(torch.zeros(2, 2), "row"), "expected weight granularity"),
        (lambda: quantize_weight(torch.full((2, 2), math.nan), "tensor"), "finite weight"),
        (lambda: quantize_weight(torch.zeros(0, 2), "tensor"), "non-empty weight"),
        (lambda: quantize_weight(torch.zeros(2, 2).double(), "tensor"), "float64"),
        (lambda: quantize_activation(torch.zeros(2), "token"), "non-empty activation"),
        (lambda: quantize_activation(torch.zeros(2, 2), "none"), "expected activation granularity"),
        (lambda: quantize_activation(torch.zeros(2, 2), "tensor"), "static scale"),
        (lambda: quantize_activation(torch.zeros(2, 2), "token", 1.0), "static scale"),
        (lambda: quantize_activation(torch.zeros(2, 2), "tensor", 0.0), "positive finite"),
        (lambda: quantize_activation(torch.zeros(2, 2), "tensor", torch.ones(2)), "one positive"),
    ],
)
def test_what_cannot_be_quantised_is_an_error(call, says):
    with pytest.raises(VlmlabError, match=says):
        call()


# ---------------------------------------------------------------------------------------------------- stored weights


@pytest.mark.parametrize("granularity", WEIGHT_GRANULARITIES)
def test_a_scale_multiplies_and_its_reciprocal_divides(granularity):
    w = numbers(200, 300, scale=0.02)
    q = quantize_weight(w, granularity)
    assert scale_convention(q.values, q.scale, w) == "multiply"
    assert scale_convention(q.values, q.scale.bfloat16(), w) == "multiply"  # checkpoints store scales in bf16
    assert scale_convention(q.values, 1 / q.scale, w) == "divide"
    with pytest.raises(VlmlabError, match="neither"):
        scale_convention(q.values, q.scale * 1.3, w)
    with pytest.raises(VlmlabError, match="neither"):
        scale_convention(q.values, q.scale, w.flip(0))
    with pytest.raises(VlmlabError, match="both"):
        scale_convention(
            q.values, torch.ones_like(q.scale), dequantize(Quantized(q.values, q.scale * 0 + 1, granularity))
        )


def test_one_block_of_another_convention_is_seen():
    w = numbers(256, 256, scale=0.02)
    q = quantize_weight(w, "block")
    q.scale[1, 1] = 1 / q.scale[1, 1]
    with pytest.raises(VlmlabError, match="neither"):
        scale_convention(q.values, q.scale, w)


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [("tensor", ()), ("tensor", (1,)), ("channel", (200,)), ("channel", (200, 1)), ("block", (2, 3))],
)
def test_a_stored_weight_is_the_quantised_one(granularity, shape):
    q = quantize_weight(numbers(200, 300), granularity)
    stored = stored_weight(q.values, q.scale.reshape(shape), granularity)
    assert torch.equal(dequantize(stored), dequantize(q)) and stored.scale.shape == q.scale.shape


@pytest.mark.parametrize(
    ("values", "scale", "granularity"),
    [
        (torch.zeros(200, 300), torch.ones(1), "tensor"),
        (torch.zeros(200, 300, dtype=torch.float8_e5m2), torch.ones(1), "tensor"),
        (torch.zeros(200, 300, dtype=torch.float8_e4m3fn), torch.ones(300), "channel"),
        (torch.zeros(200, 300, dtype=torch.float8_e4m3fn), torch.ones(3, 2), "block"),
        (torch.zeros(200, 300, dtype=torch.float8_e4m3fn), torch.ones(1), "token"),
        (torch.zeros(200, 300, dtype=torch.float8_e4m3fn), torch.ones(1, dtype=torch.uint8), "tensor"),
        (torch.zeros(200, 300, dtype=torch.float8_e4m3fn), torch.tensor(-1.0), "tensor"),
        (torch.zeros(200, 300, dtype=torch.float8_e4m3fn), torch.tensor(math.inf), "tensor"),
        (torch.full((2, 2), math.nan).to(torch.float8_e4m3fn), torch.tensor(1.0), "tensor"),
        (torch.zeros(4, dtype=torch.float8_e4m3fn), torch.ones(4), "channel"),
    ],
)
def test_a_weight_that_is_not_what_it_should_be_is_an_error(values, scale, granularity):
    with pytest.raises(VlmlabError, match="expected"):
        stored_weight(values, scale, granularity)


@pytest.mark.parametrize("granularity", WEIGHT_GRANULARITIES)
def test_a_stacked_weight_is_its_parts(granularity):
    parts = [quantize_weight(numbers(rows, 300, seed=rows), granularity) for rows in (256, 128, 128)]
    stacked = stack(parts)
    assert torch.equal(dequantize(stacked), torch.cat([dequantize(part) for part in parts]))
    assert stacked.granularity == ("block" if granularity == "block" else "channel")
    x, activation = numbers(5, 300), "group" if granularity == "block" else "token"
    separate = torch.cat([fp8_linear(x, part, activation=activation) for part in parts], -1)
    torch.testing.assert_close(fp8_linear(x, stacked, activation=activation), separate, rtol=2.0**-7, atol=1e-3)


def test_what_cannot_be_stacked_is_an_error():
    with pytest.raises(VlmlabError, match="whole 128-row blocks"):
        stack([quantize_weight(numbers(200, 128), "block"), quantize_weight(numbers(128, 128), "block")])
    with pytest.raises(VlmlabError, match="one granularity"):
        stack([quantize_weight(numbers(128, 128), "block"), quantize_weight(numbers(128, 128), "channel")])
    with pytest.raises(VlmlabError, match="one granularity"):
        stack([])


# ---------------------------------------------------------------------------------------------------- the product


@pytest.mark.parametrize(("granularity", "activation"), PAIRS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_that_of_the_dequantised_matrices(granularity, activation, bias):
    x, weight = numbers(7, 300), quantize_weight(numbers(200, 300, seed=1, scale=0.02), granularity)
    b = numbers(1, 200, seed=2)[0] if bias else None
    left = (
        x.double() if activation == "none" else dequantize(quantize_activation(x, activation, static_for(activation)))
    )
    exact = F.linear(left, dequantize(weight), None if b is None else b.double())
    wide = fp8_linear(x, weight, b, activation, static_for(activation), out_dtype=torch.float32)
    assert ((wide.double() - exact).norm() / exact.norm()) < 1e-6
    out = fp8_linear(x, weight, b, activation, static_for(activation))
    assert out.dtype == torch.bfloat16
    if not (bias and granularity == "block"):  # which rounds before the bias
        assert torch.equal(out, wide.bfloat16())


def test_products_of_small_integers_are_exact():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (6, 256), generator=generator).bfloat16()
    w = torch.randint(-8, 9, (130, 256), generator=generator)
    x[:, ::128], w[::128, ::128] = 7, 7  # the largest magnitude times a power of two is 448
    x, w = x.clamp(-7, 7), w.clamp(-7, 7)
    for granularity, activation in (("block", "group"), ("tensor", "token"), ("channel", "none")):
        weight = quantize_weight(w.float(), granularity)
        out = fp8_linear(x, weight, activation=activation, out_dtype=torch.float32)
        assert torch.equal(dequantize(weight).round().long(), w)
        assert torch.equal(out.round().double(), x.double() @ w.double().T)


def test_a_block_product_rounds_before_its_bias():
    x, weight = numbers(7, 256), quantize_weight(numbers(128, 256, seed=1), "block")
    bias = numbers(1, 128, seed=2)[0]
    assert torch.equal(fp8_linear(x, weight, bias, "group"), fp8_linear(x, weight, None, "group") + bias)
    channel = quantize_weight(numbers(128, 256, seed=1), "channel")
    assert not torch.equal(fp8_linear(x, channel, bias), fp8_linear(x, channel) + bias)


@pytest.mark.parametrize("granularity", WEIGHT_GRANULARITIES)
def test_a_float64_input_meets_the_stored_weights_unquantised(granularity):
    x, bias = numbers(7, 300).double(), numbers(1, 200)[0]
    weight = quantize_weight(numbers(200, 300, seed=1), granularity)
    truth = fp8_linear(x, weight, bias, "group" if granularity == "block" else "token")
    assert truth.dtype == torch.float64
    assert torch.equal(truth, F.linear(x, dequantize(weight), bias.double()))


@pytest.mark.parametrize(
    ("shape", "granularity", "activation", "says"),
    [
        ((7, 300), "block", "token", "pairing"),
        ((7, 300), "channel", "group", "pairing"),
        ((7, 300), "tensor", "int8", "activation granularity"),
        ((7, 299), "tensor", "token", "expected .* 300"),
        ((300,), "tensor", "token", "expected .* 300"),
    ],
)
def test_what_no_kernel_multiplies_is_an_error(shape, granularity, activation, says):
    weight = quantize_weight(numbers(200, 300), granularity)
    with pytest.raises(VlmlabError, match=says):
        fp8_linear(torch.ones(shape), weight, activation=activation)
    with pytest.raises(VlmlabError, match="bias"):
        fp8_linear(torch.ones(7, 300), weight, torch.ones(300))
    with pytest.raises(VlmlabError, match="one per token"):
        fp8_linear(torch.ones(7, 300), quantize_activation(torch.ones(2, 300), "token"))


# ---------------------------------------------------------------------------------------------------- config.json

BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["model.visual", "lm_head", "model.language_model.layers.0.mlp.gate"],
}
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
            "output_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*visual.*", r"re:.*mlp\.gate$"],
    "kv_cache_scheme": None,
}


def read(declared):
    return read_quantization({"quantization_config": declared})


def without(declared, key):
    return {name: value for name, value in declared.items() if name != key}


@pytest.mark.parametrize(
    ("declared", "wanted"),
    [
        (BLOCKS, ("fp8", "block", "group")),
        (without(BLOCKS, "weight_block_size"), ("fp8", "tensor", "token")),
        (without(BLOCKS, "weight_block_size") | {"activation_scheme": "static"}, ("fp8", "tensor", "tensor")),
        (without(BLOCKS, "modules_to_not_convert"), ("fp8", "block", "group")),
        (COMPRESSED, ("compressed-tensors", "channel", "token")),
    ],
)
def test_supported_forms_are_read(declared, wanted):
    found = read(declared)
    assert (found.method, found.weight, found.activation) == wanted and found.fmt == "e4m3"
    assert found.ignored == tuple(declared.get("modules_to_not_convert", declared.get("ignore", [])))
    assert is_fp8({"quantization_config": declared})


def deep(path, value):
    changed = copy.deepcopy(COMPRESSED)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return changed


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        (None, "quantization_config"),
        (["fp8"], "quantization_config"),
        ({}, "quant_method"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        (BLOCKS | {"fmt": "e5m2"}, "e5m2"),
        (BLOCKS | {"weight_block_size": [64, 64]}, "weight_block_size"),
        (BLOCKS | {"weight_block_size": [True, 128]}, "weight_block_size"),
        (BLOCKS | {"activation_scheme": "static"}, "activation_scheme"),
        (without(BLOCKS, "activation_scheme"), "activation_scheme"),
        (BLOCKS | {"scale_fmt": "ue8m0"}, "ue8m0"),
        (BLOCKS | {"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo"),
        (BLOCKS | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (BLOCKS | {"modules_to_not_convert": [1]}, "modules_to_not_convert"),
        (BLOCKS | {"ignored_layers": ["."]}, "ignored_layers"),
        (deep(("format",), "int-quantized"), "int-quantized"),
        (deep(("kv_cache_scheme",), {"num_bits": 8}), "kv_cache_scheme"),
        (deep(("config_groups",), {}), "config_groups"),
        (deep(("config_groups", "group_1"), {}), "several"),
        (deep((*GROUP, "targets"), ["re:.*"]), "targets"),
        (deep((*GROUP, "weights", "strategy"), "block"), "block"),
        (deep((*GROUP, "weights", "num_bits"), 4), "num_bits"),
        (deep((*GROUP, "weights", "symmetric"), 1), "symmetric"),
        (deep((*GROUP, "input_activations"), None), "input_activations"),
        (deep((*GROUP, "input_activations", "dynamic"), False), "dynamic"),
        (deep(("ignore",), ["re:(a+)+$"]), "re:"),
        (deep(("ignore",), ["re:" + ".*a" * 5]), "re:"),
    ],
)
def test_other_forms_are_named(declared, names):
    with pytest.raises(VlmlabError, match=names):
        read(declared)


def test_only_fp8_is_fp8():
    assert not is_fp8({}) and not is_fp8({"quantization_config": {"quant_method": "awq"}})
    assert not is_fp8({"quantization_config": COMPRESSED | {"format": "int-quantized"}})


# ---------------------------------------------------------------------------------------------------- skipped modules

LAYER = "model.language_model.layers.0."


def fp8(*ignored):
    return Quantization("fp8", "e4m3", "block", "group", ignored)


@pytest.mark.parametrize(
    ("ignored", "module", "skipped"),
    [
        ("model.visual", "model.visual.blocks.0.attn.qkv", True),
        ("visual", "model.visual.merger.linear_fc1", True),
        ("model.visual", "visual.merger.linear_fc1", True),
        ("lm_head", "lm_head", True),
        ("mlp.gate", LAYER + "mlp.gate", True),
        ("mlp.gate", LAYER + "mlp.gate_up_proj", False),
        ("mlp.gate", LAYER + "mlp.gate_proj", False),
        ("model.layers.0", LAYER + "mlp.down_proj", True),
        ("model.layers.0", "model.language_model.layers.10.mlp.down_proj", False),
        (LAYER + "mlp", "model.layers.0.mlp.down_proj", True),
        (LAYER + "mlp.experts", LAYER + "mlp.experts", True),
        ("lm_head", LAYER + "self_attn.qkv_proj", False),
    ],
)
def test_an_entry_names_a_module_and_what_is_below(ignored, module, skipped):
    assert is_skipped(fp8("never", ignored), module) is skipped


def test_a_fused_module_is_skipped_when_all_its_parts_are():
    parts = [LAYER + f"self_attn.{name}_proj" for name in "qkv"]
    assert is_skipped(fp8(*parts), LAYER + "self_attn.qkv_proj")
    assert not is_skipped(fp8(), LAYER + "self_attn.qkv_proj")
    with pytest.raises(VlmlabError, match="qkv_proj"):
        is_skipped(fp8(*parts[:2]), LAYER + "self_attn.qkv_proj")


@pytest.mark.parametrize(
    ("module", "skipped"),
    [
        ("lm_head", True),
        ("model.visual.blocks.0.attn.qkv", True),
        (LAYER + "mlp.gate", True),
        (LAYER + "mlp.gate_proj", False),
        (LAYER + "self_attn.qkv_proj", False),
    ],
)
def test_compressed_tensors_match_ends_and_patterns(module, skipped):
    assert is_skipped(read(COMPRESSED), module) is skipped
    below = read(COMPRESSED | {"ignore": [LAYER + "mlp"]})
    assert not is_skipped(below, LAYER + "mlp.down_proj")
