"""The ways of a step are one function in float64. In bfloat16 some differ, some never do, and each is the engine's."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from vlmlab import arithmetic as by
from vlmlab.metrics import bitwise_equal

BF16, F64 = torch.bfloat16, torch.float64
# Float64 rounds at 1.1e-16, and no step here sums more than some hundred products.
EXACT = 1e-13
GRIDS = ((2, 2), (4, 6), (8, 10), (14, 10), (20, 34), (42, 52), (96, 2))
SIDE, MERGE, WIDTH = 48, 2, 64


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def random(*shape, dtype=F64):
    return torch.randn(*shape, dtype=F64).to(dtype)


def tensors(outcome):
    return [outcome] if isinstance(outcome, Tensor) else [t for t in outcome if t is not None]


def error(outcome, other):
    """Largest relative L2 error of any tensor."""
    pairs = zip(tensors(outcome), tensors(other), strict=True)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)


def equal_bits(outcome, other):
    return all(bitwise_equal(a, b) for a, b in zip(tensors(outcome), tensors(other), strict=True))


# Every step with a choice. Each case: dtype to {way: outcome}, from the same random numbers for every way.


def residual_sum(dtype):
    residual, x = random(40, 64, dtype=dtype), random(40, 64, dtype=dtype)
    return {how: by.residual_sum(residual, x, how)[1] for how in ("hf", "sglang")}


def rms_norm(dtype):
    x, weight = random(40, 64, dtype=dtype), random(64, dtype=dtype)
    return {how: by.rms_norm(x, weight, 1e-6, how) for how in ("hf", "sglang")}


def patch_embedding(dtype):
    pixels, weight, bias = random(400, 392, dtype=dtype), random(64, 2, 1, 14, 14, dtype=dtype), random(64, dtype=dtype)
    return {how: by.patch_embedding(pixels, weight, bias, how) for how in ("hf", "sglang")}


def stacked_linear(dtype):
    x, weights = random(40, 64, dtype=dtype), [random(n, 64, dtype=dtype) for n in (128, 32, 32)]
    biases = [random(len(weight), dtype=dtype) for weight in weights]
    return {how: by.stacked_linear(x, weights, biases, how) for how in ("hf", "sglang")}


def head(dtype):
    x, weight = random(40, 64, dtype=dtype), random(384, 64, dtype=dtype)
    return {how: by.head(x, weight, how) for how in ("hf", "sglang")}


def full_attention(dtype):
    q, k, v = (random(80, 2, 32, dtype=dtype) for _ in "qkv")
    return {how: by.full_attention(q, k, v, how) for how in ("hf", "eager", "sglang")}


def causal_attention(dtype):
    q, k, v = (random(1, heads, 50, 32, dtype=dtype) for heads in (4, 2, 2))
    return {how: by.causal_attention(q, k, v, how) for how in ("hf", "eager", "sglang")}


def rotary_table(dtype):
    positions = torch.arange(4096)
    return {how: by.rotary_table(positions, 64, 10000.0, dtype, how) for how in ("hf", "sglang")}


def blend_positions(dtype):
    table = random(SIDE * SIDE, WIDTH, dtype=dtype)
    return {  # on many other grids rounded weights hide the formula
        f"{formula} {precision}": by.blend_positions(table, (26, 30), MERGE, formula, precision)
        for formula, precision in itertools.product(("hf", "sglang"), repeat=2)
    }


def deepstack_sum(dtype):
    residual, x, features = (random(n, 64, dtype=dtype) for n in (40, 40, 12))
    rows = (torch.arange(40) >= 9) & (torch.arange(40) < 21)
    found = {}
    for how in ("hf", "sglang"):
        stream, pending = by.deepstack_sum(residual, x, features, rows, how)
        found[how] = stream + pending
    return found


def experts(dtype):
    logits, outputs = random(40, 8, dtype=dtype), random(40, 2, 64, dtype=dtype)
    return {how: by.combine(outputs, by.route(logits, 2, how)[0], how) for how in ("hf", "sglang")}


LIVE = (
    residual_sum, rms_norm, patch_embedding, full_attention, blend_positions, deepstack_sum, experts
)  # fmt: skip
DEAD = (stacked_linear, head, rotary_table)
STEPS = (*LIVE, *DEAD, causal_attention)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_all_ways_agree_in_float64(step):
    found = step(F64)
    for way, outcome in found.items():
        assert error(outcome, found[next(iter(found))]) < EXACT, way
        assert all(t.dtype == F64 for t in tensors(outcome))


def test_the_agreement_check_can_fail():
    x, weight = random(40, 64), random(64)
    assert error(by.rms_norm(x, weight, 1e-6, "hf"), by.rms_norm(x, weight, 1.1e-6, "sglang")) > EXACT
    assert error([x, weight], [x, weight * (1 + 1e-12)]) > EXACT


@pytest.mark.parametrize("step", LIVE, ids=lambda step: step.__name__)
def test_the_live_ways_differ_in_bfloat16(step):
    found = step(BF16)
    for way, other in itertools.combinations(found, 2):
        assert not equal_bits(found[way], found[other]), (way, other)
        # By rounding only: of one or two roundings at 2^-9 each, none larger than the result.
        assert error(found[way], found[other]) < 2**-7


@pytest.mark.parametrize("step", DEAD, ids=lambda step: step.__name__)
def test_the_dead_ways_have_equal_bits_in_bfloat16(step):
    found = step(BF16)
    assert equal_bits(found["hf"], found["sglang"])


# ---------------------------------------------------------------------------------------------------- norms, residual


def test_wide_is_float32_unless_it_is_float64():
    assert by.wide(random(3, dtype=BF16)).dtype == by.wide(random(3, dtype=torch.float32)).dtype == torch.float32
    assert by.wide(random(3)).dtype == F64


def test_the_stream_of_a_residual_sum_has_equal_bits_either_way():
    residual, x = random(400, 64, dtype=BF16), random(400, 64, dtype=BF16)
    residual[0], x[0] = -0.0, -0.0
    residual[1], x[1] = -0.0, 0.0
    x[2] = -residual[2]
    (stream, read), (other, wide) = (by.residual_sum(residual, x, how) for how in ("hf", "sglang"))
    assert bitwise_equal(stream, other)
    assert bitwise_equal(stream, read)
    assert wide.dtype == torch.float32 and bitwise_equal(wide.to(BF16), stream)
    assert torch.equal(torch.signbit(stream[:3]).any(1), torch.tensor([True, False, False]))


def test_the_wide_ways_leave_out_a_rounding():
    residual, x, features = (random(40, 64, dtype=BF16) for _ in range(3))
    stream, read = by.residual_sum(residual, x, "wide")
    assert stream.dtype == torch.float32 and bitwise_equal(stream, read)
    assert bitwise_equal(by.residual_sum(stream, x, "wide")[0], residual.float() + x.float() + x.float())
    weight = random(64, dtype=BF16)
    normed = by.rms_norm(x, weight, 1e-6, "wide")
    assert normed.dtype == torch.float32 and bitwise_equal(normed.to(BF16), by.rms_norm(x, weight, 1e-6, "hf"))
    kept, pending = by.deepstack_sum(residual, x, features, torch.ones(40, dtype=torch.bool), "in_norm")
    stream, read = by.residual_sum(kept, pending, "sglang")
    assert bitwise_equal(read, residual.float() + x.float() + features.float()) and bitwise_equal(stream, read.to(BF16))


def test_rms_norm_is_its_definition_and_weights_of_one_hide_the_difference():
    x, weight = random(40, 64), random(64)
    assert (
        error(by.rms_norm(x, weight, 0.5, "hf"), weight * x / (x.square().mean(1, keepdim=True) + 0.5).sqrt()) < EXACT
    )
    x = x.to(BF16)
    assert equal_bits(*(by.rms_norm(x, torch.ones(64, dtype=BF16), 1e-6, how) for how in ("hf", "sglang")))


def test_rms_norm_of_an_unrounded_sum_comes_out_in_the_storage_dtype():
    for how in ("hf", "sglang"):
        assert by.rms_norm(random(4, 64, dtype=torch.float32), random(64, dtype=BF16), 1e-6, how).dtype == BF16


def test_layer_norm_is_its_definition():
    x, weight, bias = random(40, 64), random(64), random(64)
    mean, variance = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
    assert error(by.layer_norm(x, weight, bias, 0.5), (x - mean) / (variance + 0.5).sqrt() * weight + bias) < EXACT


# ---------------------------------------------------------------------------------------------------- linear


def test_linears_are_products_with_transposed_weights():
    x, weights, biases = random(40, 64), [random(n, 64) for n in (128, 32)], [random(128), random(32)]
    for how in ("hf", "sglang"):
        wanted = [x @ w.T + b for w, b in zip(weights, biases, strict=True)]
        assert error(by.stacked_linear(x, weights, biases, how), wanted) < EXACT
        assert error(by.stacked_linear(x, weights, None, how), [x @ w.T for w in weights]) < EXACT
        logits = by.head(x, weights[0], how)
        assert logits.shape == (1, 128)
        assert error(logits, x[-1:] @ weights[0].T) < EXACT
        kernel = random(8, 3, 2, 4, 4)
        pixels = random(20, 3 * 2 * 4 * 4)
        assert error(by.patch_embedding(pixels, kernel, None, how), pixels @ kernel.flatten(1).T) < EXACT


# ---------------------------------------------------------------------------------------------------- attention


def plain_attention(q, k, v, seen):
    """Softmax by definition. Args: q: [T, H, h]. k, v: [S, K, h]. seen: (query, key) to bool. Returns: [T, H * h]."""
    out = torch.empty_like(q)
    for t, head_ in itertools.product(range(q.shape[0]), range(q.shape[1])):
        group = head_ * k.shape[1] // q.shape[1]
        keys = [s for s in range(k.shape[0]) if seen(t, s)]
        weights = (k[keys, group] @ q[t, head_] * q.shape[-1] ** -0.5).exp()
        out[t, head_] = weights @ v[keys, group] / weights.sum()
    return out.flatten(1)


@pytest.mark.parametrize("how", ["hf", "eager", "sglang"])
def test_full_attention_is_a_plain_softmax(how):
    q, k, v = (random(12, 2, 8) for _ in "qkv")
    assert error(by.full_attention(q, k, v, how), plain_attention(q, k, v, lambda t, s: True)) < EXACT
    assert error(by.full_attention(q, k, v, how), plain_attention(q, k, v, lambda t, s: s <= t)) > 0.1


@pytest.mark.parametrize("how", ["hf", "eager", "sglang"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_causal_attention_is_a_plain_softmax_in_prefill_and_decode(how, kv_heads):
    q, k, v = random(12, 4, 8), random(12, kv_heads, 8), random(12, kv_heads, 8)
    wanted = plain_attention(q, k, v, lambda t, s: s <= t)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    assert error(by.causal_attention(q, k, v, how), wanted) < EXACT
    assert error(by.causal_attention(q[:, :, -1:], k, v, how), wanted[-1:]) < EXACT
    assert error(by.causal_attention(q, k.roll(1, 2), v, how), wanted) > 0.1


def test_where_the_keys_lie_in_memory_changes_no_bit_but_eager_does():
    found = causal_attention(BF16)
    assert equal_bits(found["hf"], found["sglang"])
    assert not equal_bits(found["hf"], found["eager"])
    assert error(found["eager"], found["hf"]) < 2**-7


# ---------------------------------------------------------------------------------------------------- rotary positions


@pytest.mark.parametrize(("dim", "theta"), [(16, 10000.0), (32, 100.0), (128, 1e6), (128, 5e6)])
def test_rotary_tables_have_equal_bits_over_4096_positions(dim, theta):
    positions = torch.arange(4096)
    for dtype in (BF16, torch.float32):
        hf, sglang = (by.rotary_table(positions, dim, theta, dtype, how) for how in ("hf", "sglang"))
        assert equal_bits(hf, sglang)
        assert hf[0].dtype == dtype
        # what float32 leaves of an angle up to 4096, and the rounding of the result
        limit = 4096 * 2.0**-23 + torch.finfo(dtype).eps
        angle = positions[:, None] * theta ** (-torch.arange(0, dim, 2, dtype=F64) / dim)
        assert (hf[0].double() - angle.cos()).abs().max() < limit
        assert (hf[1].double() - angle.sin()).abs().max() < limit
    other = by.rotary_table(positions, dim, theta * 1.01, BF16, "sglang")
    assert not equal_bits(by.rotary_table(positions, dim, theta, BF16, "hf"), other)


def test_rotary_tables_take_positions_of_any_shape():
    positions = torch.randint(0, 100, (3, 7))
    for how in ("hf", "sglang"):
        cos, sin = by.rotary_table(positions, 32, 100.0, F64, how)
        assert cos.shape == sin.shape == (3, 7, 16)
        assert torch.equal(cos[..., 0], positions.double().cos())


@pytest.mark.parametrize(
    ("module", "section"),
    [
        (Qwen2VLRotaryEmbedding, [4, 6, 6]),
        (Qwen2VLRotaryEmbedding, [16, 24, 24]),
        (Qwen3VLTextRotaryEmbedding, [6, 5, 5]),
        (Qwen3VLTextRotaryEmbedding, [24, 20, 20]),
    ],
)
def test_mixing_positions_is_what_the_modules_do(module, section):
    axes = random(3, 5, sum(section))
    interleaved = module is Qwen3VLTextRotaryEmbedding
    before = axes.clone()
    mixed = by.mix_positions(axes, section, interleaved)
    assert bitwise_equal(axes, before)  # the module overwrites its own
    wanted = module.recomposition_frequencies(SimpleNamespace(mrope_section=section), axes[:, None].clone())[0]
    assert bitwise_equal(torch.cat((mixed, mixed), -1), wanted)
    assert not bitwise_equal(by.mix_positions(axes, section, not interleaved), mixed)
    owners = [int((mixed == axis).all(0).sum()) for axis in axes]
    assert owners == section


def test_rotations_turn_pairs_of_halves():
    x, angle = random(5, 2, 16), random(5, 8)
    turned = torch.view_as_complex(torch.stack((x[..., :8], x[..., 8:]), -1))
    turned = turned * torch.polar(torch.ones_like(angle), angle)[:, None]
    wanted = torch.cat((turned.real, turned.imag), -1)
    for rotate in (by.rotate_vision, functools.partial(by.rotate_text, how="hf")):
        assert error(rotate(x, angle.cos(), angle.sin()), wanted) < EXACT
        assert error(rotate(x, angle.cos(), -angle.sin()), wanted) > 0.1


def test_vision_rotates_in_float32_and_text_in_the_storage_dtype():
    x, angle = random(50, 2, 16, dtype=BF16), random(50, 8, dtype=torch.float32)
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    vision, text = by.rotate_vision(x, cos, sin), by.rotate_text(x, cos, sin, "hf")
    assert vision.dtype == text.dtype == BF16
    assert bitwise_equal(vision, by.rotate_text(x.float(), cos.float(), sin.float(), "hf").to(BF16))
    assert not bitwise_equal(vision, text)


# ---------------------------------------------------------------------------------------------------- position table


@pytest.mark.parametrize("cells", [1, 2, 3, 10, 47, 48, 52, 95, 500])
def test_taps_run_from_the_first_entry_to_the_last(cells):
    for how in ("hf", "sglang"):
        below, above, across = by.position_taps(cells, SIDE, how, F64)
        where = below + across
        wanted = torch.tensor([i * (SIDE - 1) / max(cells - 1, 1) for i in range(cells)], dtype=F64)
        assert (where - wanted).abs().max() < EXACT * SIDE
        assert ((across >= 0) & (across < 1)).all()
        assert torch.equal(above, (below + 1).clamp(max=SIDE - 1))
        assert below[0] == 0 and where[-1] == (SIDE - 1 if cells > 1 else 0)


def as_transformers(table, grid):
    thw = torch.tensor([[1, *grid]])
    indices, weights = get_vision_interpolation_indices_and_weights(
        thw, num_grid_per_side=SIDE, mode="bilinear", align_corners=True, spatial_merge_size=MERGE
    )
    return (F.embedding(indices, table) * weights[:, :, None]).sum(1).to(table.dtype)


def as_sglang(table, grid):
    """Written from SGLang's formula patch by patch: the only shared thing is torch.linspace."""
    rows, columns = grid
    places = [torch.linspace(0, SIDE - 1, n, dtype=torch.float32) for n in grid]
    out = []
    for i, j in itertools.product(range(rows), range(columns)):
        y, x = places[0][i], places[1][j]
        top, left = int(y), int(x)
        bottom, right = min(top + 1, SIDE - 1), min(left + 1, SIDE - 1)
        dy, dx = y - top, x - left
        w11 = dy * dx
        w10, w01 = dy - w11, dx - w11
        w00 = 1 - dy - w01
        corners = ((top, left, w00), (top, right, w01), (bottom, left, w10), (bottom, right, w11))
        products = torch.stack([table[r * SIDE + c] * w.to(table.dtype) for r, c, w in corners])
        out.append(products.sum(dim=0))
    shape = (rows // MERGE, MERGE, columns // MERGE, MERGE, -1)
    return torch.stack(out).view(*shape).permute(0, 2, 1, 3, 4).reshape(rows * columns, -1)


@pytest.mark.parametrize("grid", GRIDS)
def test_blended_positions_have_the_bits_of_each_engine(grid):
    table = random(SIDE * SIDE, WIDTH, dtype=BF16)
    hf = by.blend_positions(table, grid, MERGE, "hf", "hf")
    sglang = by.blend_positions(table, grid, MERGE, "sglang", "sglang")
    assert hf.shape == (grid[0] * grid[1], WIDTH) and hf.dtype == BF16
    assert bitwise_equal(hf, as_transformers(table, grid))
    assert bitwise_equal(sglang, as_sglang(table, grid))


def test_the_bit_check_of_blended_positions_can_fail():
    table, grid = random(SIDE * SIDE, WIDTH, dtype=BF16), (14, 10)
    assert not bitwise_equal(by.blend_positions(table, grid, MERGE, "sglang", "sglang"), as_transformers(table, grid))
    assert not bitwise_equal(by.blend_positions(table, grid, MERGE, "hf", "hf"), as_sglang(table, grid))
    assert not bitwise_equal(by.blend_positions(table, grid, 1, "hf", "hf"), as_transformers(table, grid))


def test_a_grid_as_large_as_the_table_is_the_table_in_merged_order():
    table = random(36, WIDTH)
    wanted = table.view(3, 2, 3, 2, -1).transpose(1, 2).reshape(36, -1)
    for formula, precision in itertools.product(("hf", "sglang"), repeat=2):
        assert error(by.blend_positions(table, (6, 6), 2, formula, precision), wanted) < EXACT


# ---------------------------------------------------------------------------------------------------- deepstack


def test_deepstack_features_reach_image_tokens_only():
    residual, x, features = random(6, 4), random(6, 4), random(2, 4)
    rows = torch.tensor([False, True, False, True, False, False])
    wanted = residual + x
    wanted[1] += features[0]
    wanted[3] += features[1]
    for how in ("hf", "once", "in_norm"):
        stream, pending = by.deepstack_sum(residual, x, features, rows, how)
        assert error(stream + pending, wanted) < EXACT
        assert bitwise_equal(stream[~rows], residual[~rows]) and bitwise_equal(pending[~rows], x[~rows])
        assert bitwise_equal((stream + pending)[rows], (pending if how == "in_norm" else stream)[rows])
    kept, pending = by.deepstack_sum(residual, x, features, rows, "sglang")
    assert bitwise_equal(kept, residual) and error(kept + pending, wanted) < EXACT


def test_adding_zeros_turns_negative_zero_positive_in_sglangs_order_only():
    residual, x = torch.full((2, 4), -0.0, dtype=BF16), torch.full((2, 4), -0.0, dtype=BF16)
    features, rows = torch.zeros(1, 4, dtype=BF16), torch.tensor([True, False])
    stream, _ = by.deepstack_sum(residual, x, features, rows, "hf")
    assert torch.signbit(stream[:, 0]).tolist() == [False, True]
    kept, pending = by.deepstack_sum(residual, x, features, rows, "sglang")
    for how in ("hf", "sglang"):
        assert torch.signbit(by.residual_sum(kept, pending, how)[0][:, 0]).tolist() == [False, False]


# ---------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("how", ["hf", "sglang"])
def test_route_takes_the_likeliest_and_renormalises(how):
    logits = random(40, 8)
    weights, chosen = by.route(logits, 2, how)
    assert torch.equal(chosen, logits.argsort(1, descending=True)[:, :2])
    picked = logits.gather(1, chosen).exp()
    assert error(weights, picked / picked.sum(1, keepdim=True)) < EXACT


@pytest.mark.parametrize("how", ["hf", "sglang"])
def test_route_weighs_given_experts(how):
    logits = random(40, 8, dtype=BF16)
    weights, chosen = by.route(logits, 2, how)
    again, same = by.route(logits, 2, how, chosen)
    assert torch.equal(same, chosen) and bitwise_equal(again, weights)
    other = torch.tensor([[5, 2]]).expand(40, 2)
    weights, given = by.route(logits, 2, how, other)
    assert torch.equal(given, other)
    picked = logits.float().exp().gather(1, other)
    assert error(weights, picked / picked.sum(1, keepdim=True)) < (2**-8 if how == "hf" else 2**-20)


def test_route_rounds_the_weights_in_transformers_only_and_chooses_alike():
    logits = random(400, 8, dtype=BF16)
    (hf, chosen), (sglang, also) = (by.route(logits, 2, how) for how in ("hf", "sglang"))
    assert torch.equal(chosen, also)
    assert hf.dtype == BF16 and sglang.dtype == torch.float32
    assert bitwise_equal(sglang.to(BF16), hf) and not torch.equal(hf.float(), sglang)


@pytest.mark.parametrize("how", ["hf", "sglang"])
def test_combine_is_a_weighted_sum(how):
    outputs, weights = random(40, 2, 16), random(40, 2)
    assert error(by.combine(outputs, weights, how), torch.einsum("tkd,tk->td", outputs, weights)) < EXACT


def test_rounded_weights_make_no_difference_where_transformers_combines():
    logits, outputs = random(400, 8, dtype=BF16), random(400, 2, 64, dtype=BF16)
    rounded, precise = (by.route(logits, 2, how)[0] for how in ("hf", "sglang"))
    assert bitwise_equal(by.combine(outputs, rounded, "hf"), by.combine(outputs, precise, "hf"))
    assert not bitwise_equal(by.combine(outputs, rounded, "sglang"), by.combine(outputs, precise, "sglang"))
    assert not bitwise_equal(by.combine(outputs, rounded, "hf"), by.combine(outputs, rounded, "sglang"))
    assert by.combine(outputs, precise, "sglang").dtype == BF16


@pytest.mark.parametrize("patches", [16, 140, 320])
def test_a_mask_of_ones_makes_torch_take_the_math_kernel(patches):
    """What SGLang asks for, written out: the boolean mask, from which the choice of kernel follows."""
    generator = torch.Generator().manual_seed(patches)
    q, k, v = (torch.randn(patches, 2, 32, generator=generator).bfloat16() for _ in range(3))
    mask = torch.ones(1, patches, patches, dtype=torch.bool)
    batched = [t.contiguous().unsqueeze(0).transpose(1, 2) for t in (q, k, v)]
    masked = F.scaled_dot_product_attention(*batched, attn_mask=mask, scale=32**-0.5)
    expected = masked[0].transpose(0, 1).reshape(patches, -1)
    assert torch.equal(by.full_attention(q, k, v, "sglang"), expected)
    assert not torch.equal(by.full_attention(q, k, v, "hf"), expected)
