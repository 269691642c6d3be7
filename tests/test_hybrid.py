"""The hybrid forward is Transformers under one plan and SGLang under another, bit for bit, and float64 in float64."""

import dataclasses

import pytest
import torch
from sampled import sampled

from vlmlab.causes import hf_plan, sglang_plan
from vlmlab.engine_hf import vision_output
from vlmlab.errors import VlmlabError
from vlmlab.hookpoints import FAMILIES, hook_points
from vlmlab.hybrid import Cache, Hybrid, Seen
from vlmlab.replay import asked_of, closure, differing, run_plan

GRIDS = [(8, 10), (5, 7), None]  # image tokens; None: text only
FORCED = [11, 7 + 90, 42]  # tokens of the decode steps, whatever the model would say
LOCATIONS = {"qwen2_vl": "down_proj.weight", "qwen3_vl": "down_proj.weight", "qwen3_vl_moe": "experts.down_proj"}


def grid_name(grid):
    return "text" if grid is None else f"{grid[0]}x{grid[1]}"


@pytest.fixture(scope="module")
def captured(hf_engines, ask, tmp_path_factory):
    """(family, attention, grid) to (inputs, Transformers' trace); each captured once."""
    made = {}

    def capture(family, attention="sdpa", grid=GRIDS[0]):
        key = family, attention, grid
        if key not in made:
            inputs = ask(family, grid, seed=3)
            folder = tmp_path_factory.mktemp("hf") / "trace"
            made[key] = inputs, hf_engines(family, attention).capture(inputs, folder)
        return made[key]

    return capture


def assert_closed(trace, states):
    """Every hook point of the trace is there and has equal bits."""
    found = closure(trace, states)
    assert found.first is None
    assert found.equal == found.total == len(trace.hook_points)
    assert set(trace.hook_points) <= set(states)


@torch.no_grad()
def decoded(hybrid, inputs, plan, tokens, seen=None):
    """States of decode steps after the hybrid's own prefill. seen: vision output to use instead of the hybrid's own."""
    cache = Cache()
    if seen is None and inputs.pixel_values is not None:
        seen = hybrid.vision(inputs.pixel_values, inputs.image_grid_thw, plan)
    positions = hybrid.positions(inputs.input_ids, inputs.image_grid_thw)
    hybrid.language(inputs.input_ids, positions, plan, seen, cache)
    steps = []
    for k, token in enumerate(tokens):
        at = torch.full((3, 1), int(positions.max()) + 1 + k)
        steps.append({})
        hybrid.language(torch.tensor([token]), at, plan, None, cache, steps[-1].__setitem__)
    return steps


def language_points(checkpoint):
    return {point.name for point in hook_points(checkpoint.config) if point.part == "language"}


# ---------------------------------------------------------------------------------------------------- positions


def with_picture(inputs, grid, before, after):
    """Inputs of made-up tokens: some text, a picture of the given grid, some text."""
    picture = [inputs.image_token_id] * (grid[0] * grid[1])
    ids = torch.tensor([20] * before + picture + [30] * after)
    thw = torch.tensor([[1, grid[0] * inputs.merge_size, grid[1] * inputs.merge_size]])
    return dataclasses.replace(inputs, input_ids=ids, image_grid_thw=thw)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("before", "after"), [(0, 9), (1, 1), (15, 30), (4, 0)])
def test_positions_are_those_of_transformers(family, before, after, hf_engines, hybrids, ask):
    plain = ask(family)
    for grid in ((1, 1), (4, 4), (5, 7), (10, 3), (24, 30), (1, 40)):
        inputs = with_picture(plain, grid, before, after)
        positions = hybrids(family).positions(inputs.input_ids, inputs.image_grid_thw)
        assert positions.dtype == torch.int64
        assert torch.equal(positions, hf_engines(family).positions(inputs)), grid
        turned = with_picture(plain, grid[::-1], before, after)
        if grid[0] != grid[1]:
            assert not torch.equal(positions, hf_engines(family).positions(turned))


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_real_prompts(family, hf_engines, hybrids, ask):
    for grid in GRIDS:
        inputs = ask(family, grid)
        positions = hybrids(family).positions(inputs.input_ids, inputs.image_grid_thw)
        assert torch.equal(positions, hf_engines(family).positions(inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_text_count_on(family, hybrids):
    ids = torch.tensor([20, 21, 22])
    wanted = torch.tensor([[0, 1, 2]] * 3)
    assert torch.equal(hybrids(family).positions(ids, None), wanted)
    assert torch.equal(hybrids(family).positions(ids, torch.tensor([[1, 8, 8]])), wanted)  # a grid without a picture


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_number_of_image_tokens_is_an_error(family, hybrids, ask):
    inputs = with_picture(ask(family), (4, 5), 3, 3)
    assert hybrids(family).positions(inputs.input_ids, inputs.image_grid_thw).shape == (3, 26)
    one, ids = inputs.image_token_id, inputs.input_ids
    cases = {
        "one missing": torch.cat((ids[:3], ids[4:])),
        "one too many": torch.cat((ids[:3], ids[3:4], ids[3:])),
        "not in a row": torch.cat((ids[:4], ids[:1], ids[4:])),
        "another one later": torch.cat((ids[:3], ids[4:], ids[3:4])),
    }
    assert (cases["not in a row"] == one).sum() == (cases["another one later"] == one).sum() == 20
    for name, wrong in cases.items():
        with pytest.raises(VlmlabError, match="expected 20 image tokens in a row"):
            hybrids(family).positions(wrong, inputs.image_grid_thw)
            pytest.fail(name)


def test_several_frames_are_refused(hybrids, ask):
    inputs = ask("qwen2_vl", (4, 4))
    with pytest.raises(VlmlabError, match="expected one picture, got 2 frames"):
        hybrids("qwen2_vl").vision(inputs.pixel_values, inputs.image_grid_thw * torch.tensor([2, 1, 1]), hf_plan())


# ---------------------------------------------------------------------------------------------------- Transformers


# SDPA is what Transformers runs unless asked: on every size and family. Eager differs in attention alone.
WITH = [(family, attention, grid) for family in FAMILIES for attention in ("sdpa", "eager") for grid in GRIDS]
CASES = sampled(
    [pytest.param(*case, id=f"{case[0]}-{case[1]}-{grid_name(case[2])}") for case in WITH],
    keep=lambda family, attention, grid: attention == "sdpa" or grid == GRIDS[0],
)


@pytest.mark.parametrize(("family", "attention", "grid"), CASES)
def test_prefill_has_the_bits_of_transformers(family, attention, grid, hybrids, captured):
    _, trace = captured(family, attention, grid)
    hybrid = hybrids(family)
    points = [point for point in hook_points(trace.info.config) if grid is not None or point.part == "language"]
    assert trace.hook_points == tuple(point.name for point in points)
    asked = asked_of(hybrid, trace, trace)
    assert_closed(trace, run_plan(hybrid, asked, hf_plan(attention)))
    other = hf_plan("eager" if attention == "sdpa" else "sdpa")
    assert closure(trace, run_plan(hybrid, asked, other)).equal < len(points)


@pytest.mark.parametrize(
    ("family", "attention"),
    sampled(
        [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager")],
        keep=lambda family, attention: attention == "sdpa" or family == FAMILIES[-1],
    ),
)
def test_decode_steps_have_the_bits_of_transformers(family, attention, hybrids, hf_engines, captured, tmp_path):
    hybrid, plan = hybrids(family), hf_plan(attention)
    inputs, _ = captured(family, attention)
    steps = hf_engines(family, attention).capture_decode(inputs, tmp_path, len(FORCED), FORCED)[0]
    states = decoded(hybrid, inputs, plan, FORCED)
    for step, found in zip(steps, states, strict=True):
        assert set(step.hook_points) == language_points(hybrid.checkpoint)
        assert_closed(step, found)
    wrong = decoded(hybrid, inputs, plan, [FORCED[0] + 1, *FORCED[1:]])
    assert closure(steps[0], wrong[0]).first == "layers.0.resid_pre"
    assert closure(steps[1], wrong[1]).first == "layers.0.attn_out"  # the earlier token shows through the cache


def test_decode_steps_after_text_only(hybrids, hf_engines, captured, tmp_path):
    inputs, _ = captured("qwen3_vl", "sdpa", None)
    steps = hf_engines("qwen3_vl").capture_decode(inputs, tmp_path, len(FORCED), FORCED)[0]
    for step, found in zip(steps, decoded(hybrids("qwen3_vl"), inputs, hf_plan(), FORCED), strict=True):
        assert_closed(step, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_weight_moved_by_one_unit_breaks_the_closure(family, hybrids, captured, monkeypatch):
    _, trace = captured(family)
    hybrid = hybrids(family)
    name = f"model.layers.3.mlp.{LOCATIONS[family]}"
    weight = hybrid.weights[name].clone()
    flat = weight.view(-1)
    place = flat.abs().argmax()
    flat[place] = torch.nextafter(flat[place], torch.full_like(flat[place], torch.inf))
    assert differing(weight, hybrid.weights[name]) == 1
    asked = asked_of(hybrid, trace, trace)
    with monkeypatch.context() as patch:
        patch.setitem(hybrid.weights, name, weight)
        broken = closure(trace, run_plan(hybrid, asked, hf_plan()))
    assert broken.first == "layers.3.mlp_out"
    assert broken.equal < broken.total
    assert_closed(trace, run_plan(hybrid, asked, hf_plan()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("cause", "stem"), [("rms_norm", "layers"), ("vit_attention", "vision")])
def test_a_plan_that_differs_from_a_layer_on_differs_from_there_on(family, cause, stem, hybrids, captured):
    _, trace = captured(family)
    hybrid, layer = hybrids(family), 9
    depth = hybrid.depth if stem == "layers" else hybrid.vision_depth
    plan = hf_plan().switched(cause, "sglang", range(layer, depth), depth)
    states = run_plan(hybrid, asked_of(hybrid, trace, trace), plan)
    own = [name for name in trace.hook_points if name.startswith(f"{stem}.")]
    same = [name for name in own if not differing(states[name], trace[name])]
    assert same == own[: own.index(f"{stem}.{layer}.attn_out")]
    other = "vision" if stem == "layers" else "layers"  # each part is given its own input
    assert not any(differing(states[n], trace[n]) for n in trace.hook_points if n.startswith(f"{other}."))
    one = run_plan(hybrid, asked_of(hybrid, trace, trace), hf_plan().switched(cause, "sglang", [layer], depth))
    assert not differing(one[f"{stem}.{layer}.attn_out"], states[f"{stem}.{layer}.attn_out"])
    assert differing(one[own[-1]], states[own[-1]])


# ---------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_agrees_with_float64(family, hybrids, captured):
    _, trace = captured(family)
    asked = asked_of(hybrids(family), trace, trace)
    exact = run_plan(hybrids(family, torch.float64), asked, hf_plan())
    close = run_plan(hybrids(family, torch.float32), asked, hf_plan())
    coarse = run_plan(hybrids(family), asked, hf_plan())
    assert set(trace.hook_points) <= set(exact) == set(close)
    for name, truth in exact.items():
        assert truth.dtype == torch.float64 and close[name].dtype == torch.float32
        assert (close[name] - truth).norm() < 1e-5 * truth.norm(), name
    last = f"layers.{hybrids(family).depth - 1}.resid_post"
    assert (coarse[last].double() - exact[last]).norm() > 1e-5 * exact[last].norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plans_are_one_function_in_float64(family, hybrids, captured):
    _, trace = captured(family)
    exact = hybrids(family, torch.float64)
    assert exact.eps == 1e-6, "else vit_norm_eps is another function"
    asked = asked_of(exact, trace, trace)
    states = [run_plan(exact, asked, plan) for plan in (hf_plan(), hf_plan("eager"), sglang_plan())]
    for name, truth in states[0].items():
        for other in states[1:]:
            assert (other[name] - truth).double().norm() < 1e-11 * truth.double().norm(), name


# ---------------------------------------------------------------------------------------------------- parts


def test_the_cache_grows_by_the_new_tokens():
    cache = Cache()
    k, v = torch.rand(1, 2, 5, 4), torch.rand(1, 2, 5, 4)
    assert cache.append(0, k, v) == (k, v)
    cache.append(1, v, k)
    more, values = cache.append(0, k[:, :, :1], v[:, :, 1:2])
    assert more.shape == values.shape == (1, 2, 6, 4)
    assert torch.equal(more[:, :, 5], k[:, :, 0]) and torch.equal(values[:, :, 5], v[:, :, 1])
    assert torch.equal(cache.keys[0], more) and torch.equal(cache.keys[1], v)


def test_image_features_take_the_places_of_image_tokens(hybrids):
    hybrid = hybrids("qwen2_vl")
    image = hybrid.checkpoint.config["image_token_id"]
    ids = torch.tensor([9, image, image, 9])
    features = torch.full((2, 128), 0.1)
    plain, filled = hybrid.embed(ids), hybrid.embed(ids, Seen(features))
    assert torch.equal(filled[1:3], features.bfloat16())
    assert torch.equal(filled[[0, 3]], plain[[0, 3]])
    assert not torch.equal(filled[1:3], plain[1:3])


# ---------------------------------------------------------------------------------------------------- SGLang


@pytest.fixture(
    scope="module", params=[pytest.param(FAMILIES[0], marks=pytest.mark.xdist_group("reference")), *FAMILIES[1:]]
)
def sglang(request):
    """A started SGLang engine, one family after the other."""
    if request.param == FAMILIES[0]:
        return request.getfixturevalue("sglang_engine")
    return request.getfixturevalue("sglang_engines")(request.param)


@pytest.mark.engine
@pytest.mark.parametrize("grid", GRIDS, ids=grid_name)
def test_prefill_has_the_bits_of_sglang(grid, sglang, hybrids, captured, tmp_path):
    family = sglang.checkpoint.family
    inputs, hf = captured(family, "sdpa", grid)
    trace = sglang.capture(inputs, tmp_path / "trace", vision_output(hf))
    hybrid = hybrids(family)
    assert set(trace.hook_points) == set(hf.hook_points)
    asked = asked_of(hybrid, trace, hf)
    assert_closed(trace, run_plan(hybrid, asked, sglang_plan()))
    assert closure(trace, run_plan(hybrid, asked, hf_plan())).equal < len(trace.hook_points)
    for i in range(len(hybrid.deepstack_layers)):  # captured before SGLang adds in place, and after
        middle, mlp_out, before, after = (
            trace[f"layers.{i}.{half}"] for half in ("resid_mid", "mlp_out", "before_deepstack", "after_deepstack")
        )
        assert not differing(before, middle + mlp_out)
        image = hybrid.image_rows(inputs.input_ids).cpu()
        assert not differing(before[~image], after[~image])
        assert not differing(after[image], middle[image] + (mlp_out[image] + trace_features(asked, i)))
        assert bool(differing(before, after)) == (grid is not None)


def trace_features(asked, i):
    return asked.seen.deepstack[i] if asked.seen else torch.zeros(0, 1)


@pytest.mark.engine
def test_decode_steps_have_the_bits_of_sglang(sglang, hybrids, captured, tmp_path):
    family = sglang.checkpoint.family
    inputs, hf = captured(family)
    steps, tokens = sglang.capture_decode(inputs, tmp_path, 3, vision_output(hf))
    hybrid = hybrids(family)
    seen = asked_of(hybrid, hf, hf).seen
    for step, found in zip(steps, decoded(hybrid, inputs, sglang_plan(), tokens[:3], seen), strict=True):
        assert set(step.hook_points) == language_points(hybrid.checkpoint)
        assert_closed(step, found)
        for i in range(len(hybrid.deepstack_layers)):  # nothing is added
            assert not differing(step[f"layers.{i}.before_deepstack"], step[f"layers.{i}.after_deepstack"])
    wrong = decoded(hybrid, inputs, hf_plan(), tokens[:3], seen)
    assert closure(steps[2], wrong[2]).equal < closure(steps[2], wrong[2]).total


def test_weights_are_cast_and_expert_weights_stand_as_they_multiply(hybrids):
    dense, sparse = hybrids("qwen2_vl"), hybrids("qwen3_vl_moe", torch.float64)
    assert not dense.sparse and sparse.sparse
    assert {weight.dtype for weight in dense.weights.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in sparse.weights.values()} == {torch.float64}
    width = sparse.weights["model.embed_tokens.weight"].shape[1]
    assert sparse.weights["model.layers.0.mlp.experts.gate_up_proj"].shape[-1] == width
    assert sparse.weights["model.layers.0.mlp.experts.down_proj"].shape[-2] == width
    assert isinstance(dense, Hybrid) and dense.dtype == torch.bfloat16
