"""What a trace was given, its forward run again whole or operation by operation, and how much of it is reproduced."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from vlmlab.causes import hf_plan, sglang_plan
from vlmlab.errors import VlmlabError
from vlmlab.hookpoints import FAMILIES
from vlmlab.hybrid import Cache
from vlmlab.replay import Closure, asked_of, closure, differing, inputs_of, local_states, run_plan, save_difference
from vlmlab.trace import Trace


@pytest.fixture(scope="module")
def captured(hf_engines, ask, tmp_path_factory):
    """family to (inputs, Transformers' trace in memory)."""
    made = {}

    def capture(family, grid=(5, 7)):
        if (family, grid) not in made:
            inputs = ask(family, grid, seed=5)
            trace = hf_engines(family).capture(inputs, tmp_path_factory.mktemp("hf") / "trace")
            made[family, grid] = inputs, Trace(trace.info, dict(trace.tensors))
        return made[family, grid]

    return capture


def without(trace, *names):
    """The trace less the tensors whose name ends so."""
    return Trace(trace.info, {name: t for name, t in trace.tensors.items() if not name.endswith(names)})


def renamed(trace, **flags):
    """The trace with other flags."""
    return Trace(dataclasses.replace(trace.info, flags=trace.info.flags | flags), trace.tensors)


def replaced(trace, **tensors):
    """Args: tensors: by name, with `__` for a dot."""
    return Trace(trace.info, {**trace.tensors, **{name.replace("__", "."): t for name, t in tensors.items()}})


# ---------------------------------------------------------------------------------------------------- what was given


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_was_given_its_own_vision_output(family, hybrids, captured):
    inputs, trace = captured(family)
    asked = asked_of(hybrids(family), trace, trace)
    assert torch.equal(asked.input_ids, inputs.input_ids)
    assert torch.equal(asked.positions, trace["inputs.positions"])
    assert torch.equal(asked.pixels, inputs.pixel_values.bfloat16())
    assert torch.equal(asked.grid_thw, inputs.image_grid_thw)
    assert torch.equal(asked.seen.features, trace["vision.merger"])
    levels = [trace[name] for name in trace.hook_points if name.startswith("vision.deepstack")]
    assert len(levels) == (0 if family == "qwen2_vl" else 3)
    assert all(torch.equal(a, b) for a, b in zip(asked.seen.deepstack, levels, strict=True))


def test_sglangs_language_part_is_asked_with_transformers_vision_output(hybrids, captured):
    _, hf = captured("qwen3_vl")
    own = {name: t + 1 for name, t in hf.tensors.items() if name.startswith(("vision.merger", "vision.deepstack"))}
    other = Trace(hf.info, {**hf.tensors, **own, "inputs.pixel_values": hf["inputs.pixel_values"] * 2})
    given = asked_of(hybrids("qwen3_vl"), renamed(other, language_input="given vision output"), hf)
    assert torch.equal(given.seen.features, hf["vision.merger"])
    assert torch.equal(given.seen.deepstack[1], hf["vision.deepstack.1"])
    assert torch.equal(given.pixels, other["inputs.pixel_values"])  # its vision part had its own picture
    by_itself = asked_of(hybrids("qwen3_vl"), renamed(other, language_input="own vision output"), hf)
    assert torch.equal(by_itself.seen.features, other["vision.merger"])
    assert torch.equal(by_itself.seen.deepstack[1], other["vision.deepstack.1"])


@pytest.mark.engine
def test_a_real_sglang_trace_is_asked_so(traces, hybrids):
    hf, sglang = traces
    asked = asked_of(hybrids("qwen2_vl"), sglang, hf)
    assert torch.equal(asked.seen.features, hf["vision.merger"])
    assert differing(asked.seen.features, sglang["vision.merger"]) > 0
    assert torch.equal(asked.pixels, sglang["inputs.pixel_values"])
    assert torch.equal(asked.input_ids, hf["inputs.input_ids"])


def test_positions_come_from_the_definition_and_not_from_the_trace(hybrids, captured):
    _, trace = captured("qwen2_vl")
    wrong = replaced(trace, inputs__positions=trace["inputs.positions"] + 1)
    assert torch.equal(asked_of(hybrids("qwen2_vl"), wrong, wrong).positions, trace["inputs.positions"])


def test_text_only_has_nothing_seen(hybrids, captured):
    _, trace = captured("qwen3_vl", None)
    asked = asked_of(hybrids("qwen3_vl"), trace, trace)
    assert (asked.pixels, asked.grid_thw, asked.seen) == (None, None, None)
    assert set(run_plan(hybrids("qwen3_vl"), asked, hf_plan())) == set(trace.hook_points)


def test_a_baseline_without_inputs_is_no_evidence(hybrids, captured):
    _, trace = captured("qwen2_vl")
    with pytest.raises(VlmlabError, match="no evidence: the baseline trace holds no inputs"):
        asked_of(hybrids("qwen2_vl"), trace, without(trace, "inputs.input_ids"))
    asked_of(hybrids("qwen2_vl"), without(trace, "inputs.input_ids"), trace)  # the baseline's are taken


# ---------------------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize("family", FAMILIES)
def test_one_part_alone_has_the_bits_it_has_in_the_whole(family, hybrids, captured):
    _, trace = captured(family)
    hybrid = hybrids(family)
    asked = asked_of(hybrid, trace, trace)
    whole = run_plan(hybrid, asked, sglang_plan())
    vision, language = (run_plan(hybrid, asked, sglang_plan(), part) for part in ("vision", "language"))
    assert list(whole) == [*vision, *language]
    assert all(name.startswith("vision.") for name in vision)
    assert not any(name.startswith("vision.") for name in language)
    assert not any(differing(whole[name], part[name]) for part in (vision, language) for name in part)


def test_the_language_part_is_not_charged_with_what_vision_does(hybrids, captured):
    _, trace = captured("qwen3_vl")
    hybrid = hybrids("qwen3_vl")
    asked = asked_of(hybrid, trace, trace)
    found = closure(trace, run_plan(hybrid, asked, hf_plan().switched("vit_attention", "sglang")))
    changed = found.total - found.equal
    assert changed > 100 and found.first == "vision.0.attn_out"
    states = run_plan(hybrid, asked, hf_plan().switched("vit_attention", "sglang"))
    assert not any(differing(states[n], trace[n]) for n in trace.hook_points if not n.startswith("vision."))


# ---------------------------------------------------------------------------------------------------- closure


def test_closure_counts_tensors_and_elements(captured):
    _, trace = captured("qwen2_vl")
    names = trace.hook_points
    states = {name: trace[name].clone() for name in names}
    assert closure(trace, states) == Closure(len(names), len(names), 0, None)
    states["layers.4.mlp_out"][3, :5] += 1
    states["layers.2.attn_out"][0, 0] += 1
    assert closure(trace, states) == Closure(len(names) - 2, len(names), 6, "layers.2.attn_out")
    states["layers.0.attn_out"] = states["layers.0.attn_out"][1:]
    assert closure(trace, states).first == "layers.0.attn_out"
    assert closure(trace, {"final_norm": states["final_norm"]}) == Closure(1, 1, 0, None)


def test_positive_and_negative_zero_differ():
    zeros, other = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.bfloat16)
    other[1, 2] = -0.0
    assert torch.equal(zeros, other)
    assert differing(zeros, other) == 1 and differing(zeros, zeros.clone()) == 0
    assert differing(zeros.float(), other) == 1  # widening keeps the sign


def test_differing_counts_bits():
    x = torch.tensor([[1.0, float("nan"), 3.0]])
    assert differing(x, x.clone()) == 0  # the same NaN
    assert differing(x, torch.nextafter(x, torch.full_like(x, 9))) == 2
    assert differing(x, x[:, :2]) == 2 and differing(x, x.T) == 3  # another shape: nothing is equal
    assert differing(x[:, :1].bfloat16(), x[:, :1]) == 0  # widening a bfloat16 is exact
    assert differing(torch.tensor([[1.001]]).bfloat16(), torch.tensor([[1.001]])) == 1
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int64):
        a = torch.tensor([[1, 2, 3]]).to(dtype)
        assert differing(a, a.clone()) == 0 and differing(a, a.flip(1)) == 2
    columns = torch.arange(6.0).view(2, 3)
    assert differing(columns.T.contiguous().T, columns) == 0


def test_nothing_in_common_is_no_evidence(captured):
    _, trace = captured("qwen2_vl")
    for states in ({}, {"layers.99.mlp_out": torch.zeros(1, 1)}, {"inputs.positions": trace["inputs.positions"]}):
        with pytest.raises(VlmlabError, match="no evidence: the plan computed none of the trace's hook points"):
            closure(trace, states)


# ---------------------------------------------------------------------------------------------------- local


@pytest.mark.parametrize("grid", [(5, 7), None], ids=["picture", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_local_states_are_the_trace_under_its_own_plan(family, grid, hybrids, captured):
    _, trace = captured(family, grid)
    hybrid = hybrids(family)
    asked = asked_of(hybrid, trace, trace)
    states = local_states(hybrid, trace, asked, hf_plan())
    assert set(states) == set(trace.hook_points)
    assert closure(trace, states) == Closure(len(states), len(states), 0, None)
    foreign = closure(trace, local_states(hybrid, trace, asked, sglang_plan()))
    assert foreign.equal < foreign.total


@pytest.mark.engine
def test_local_states_of_a_real_sglang_trace(traces, hybrids):
    hf, sglang = traces
    hybrid = hybrids("qwen2_vl")
    states = local_states(hybrid, sglang, asked_of(hybrid, sglang, hf), sglang_plan())
    assert closure(sglang, states) == Closure(len(sglang.hook_points), len(sglang.hook_points), 0, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_error_shows_where_it_is_made_and_where_it_is_added_up_only(family, hybrids, captured):
    _, trace = captured(family)
    hybrid = hybrids(family)
    # a wrong half-block that the stream never got: its own operation is off, and the sum that should hold it
    wrong = Trace(trace.info, {**trace.tensors, "layers.7.mlp_out": trace["layers.7.mlp_out"] * 2})
    states = local_states(hybrid, wrong, asked_of(hybrid, trace, trace), hf_plan())
    off = [name for name in states if differing(states[name], wrong[name])]
    # Transformers' next norm reads the sum that was recomputed
    assert off == ["layers.7.mlp_out", "layers.7.resid_post", "layers.8.attn_out"]
    whole = run_plan(hybrid, asked_of(hybrid, trace, trace), hf_plan())
    assert [name for name in whole if name in wrong and differing(whole[name], wrong[name])] == ["layers.7.mlp_out"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lost", [("attn_out",), ("mlp_out",), ("attn_out", "mlp_out")])
def test_half_blocks_that_were_not_captured_are_left_out(family, lost, hybrids, captured):
    _, trace = captured(family)
    hybrid = hybrids(family)
    layers = [f"layers.{i}.{name}" for i in (0, 4, 9, hybrid.depth - 1) for name in lost]
    partial = without(trace, *layers)
    assert len(partial.tensors) == len(trace.tensors) - len(layers)
    states = local_states(hybrid, partial, asked_of(hybrid, trace, trace), hf_plan())
    # the sum that would hold it has no input either, so it is not judged
    sums = {"attn_out": "resid_mid", "mlp_out": "resid_post"}
    gone = {*layers, *(name.rsplit(".", 1)[0] + "." + sums[name.rsplit(".", 1)[1]] for name in layers)}
    if "mlp_out" in lost and family != "qwen2_vl":
        gone.add("layers.0.before_deepstack")
    assert set(trace.hook_points) - set(states) == gone
    assert closure(partial, states) == Closure(len(states), len(states), 0, None)


@pytest.mark.parametrize(
    "lost",
    [
        "vision.patch_embed",
        "vision.0.resid_pre",
        "vision.4.attn_out",
        "vision.4.resid_mid",
        "vision.4.mlp_out",
        "vision.4.resid_post",
        "layers.0.resid_pre",
        "layers.4.resid_mid",
        "layers.4.resid_post",
        "layers.1.before_deepstack",
        "final_norm",
        "logits",
    ],
)
def test_any_hook_point_may_be_missing(lost, hybrids, captured):
    _, trace = captured("qwen3_vl")
    hybrid = hybrids("qwen3_vl")
    partial = without(trace, lost)
    assert len(partial.tensors) == len(trace.tensors) - 1
    states = local_states(hybrid, partial, asked_of(hybrid, trace, trace), hf_plan())
    assert lost not in states
    assert closure(partial, states) == Closure(len(states), len(states), 0, None)


def test_experts_are_those_of_the_captured_router_logits(hybrids, captured):
    _, trace = captured("qwen3_vl_moe")
    hybrid, name = hybrids("qwen3_vl_moe"), "layers.6.router_logits"
    asked = asked_of(hybrid, trace, trace)
    swapped = Trace(trace.info, {**trace.tensors, name: trace[name].flip(1)})
    states = local_states(hybrid, swapped, asked, hf_plan())
    assert [n for n in states if differing(states[n], swapped[n])] == [name, "layers.6.mlp_out"]
    partial = without(trace, name)
    states = local_states(hybrid, partial, asked, hf_plan())
    assert set(trace.hook_points) - set(states) == {name, "layers.6.mlp_out"}
    assert closure(partial, states).first is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_of_the_language_part_alone(family, hybrids, captured):
    _, trace = captured(family)
    hybrid = hybrids(family)
    language = Trace(trace.info, {n: t for n, t in trace.tensors.items() if not n.startswith("vision.")})
    states = local_states(hybrid, language, asked_of(hybrid, trace, trace), hf_plan())
    assert set(states) == set(language.hook_points)
    assert closure(language, states).equal == len(language.hook_points)


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_steps_need_the_keys_and_values_of_earlier_tokens(family, hybrids, hf_engines, captured, tmp_path):
    inputs, prefill = captured(family)
    hybrid = hybrids(family)
    cache = Cache()
    asked = asked_of(hybrid, prefill, prefill)
    local_states(hybrid, prefill, asked, hf_plan(), cache)
    assert cache.keys[0].shape[2] == inputs.tokens
    for k, step in enumerate(hf_engines(family).capture_decode(inputs, tmp_path, 2, [11, 12])[0]):
        now = dataclasses.replace(
            asked,
            input_ids=step["inputs.input_ids"],
            positions=step["inputs.positions"],
            pixels=None,
            grid_thw=None,
            seen=None,
        )
        blind = closure(step, local_states(hybrid, step, now, hf_plan()))
        states = local_states(hybrid, step, now, hf_plan(), cache)
        assert closure(step, states) == Closure(len(step.hook_points), len(step.hook_points), 0, None)
        assert blind.first == "layers.0.attn_out"
        assert cache.keys[0].shape[2] == inputs.tokens + k + 1


def test_operations_are_computed_in_the_hybrids_dtype(hybrids, captured):
    _, trace = captured("qwen2_vl")
    exact = hybrids("qwen2_vl", torch.float64)
    states = local_states(exact, trace, asked_of(exact, trace, trace), hf_plan())
    assert {state.dtype for state in states.values()} == {torch.float64}
    name = "layers.3.resid_mid"
    wanted = trace["layers.2.resid_post"].double() + trace["layers.3.attn_out"].double()
    assert torch.equal(states[name], wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_operation_reads_is_kept_with_a_difference(family, hybrids, captured, tmp_path):
    hybrid, (_, trace) = hybrids(family), captured(family)
    for name in trace.hook_points:
        read = inputs_of(hybrid, name)
        assert all(other in trace for other in read)
        first = name in ("vision.patch_embed", "layers.0.resid_pre")
        assert bool(read) != first, name
    last = f"layers.{hybrid.depth - 1}"
    save_difference(tmp_path / "kept", hybrid, trace, dict(trace.tensors), f"{last}.resid_post")
    kept = load_file(tmp_path / "kept")
    assert sorted(kept) == ["captured", "computed", f"input.{last}.mlp_out", f"input.{last}.resid_mid"]
