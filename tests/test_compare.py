import dataclasses
import json
import math

import pytest
import torch
from test_trace import INFO

from vlmlab.compare import (
    compare_inputs,
    compare_traces,
    comparison_json,
    implied_grid,
    next_token,
    public_figures,
)
from vlmlab.errors import VlmlabError
from vlmlab.trace import Trace

NAMES = ("vision.patch_embed", "vision.0.resid_post", "vision.merger", "layers.0.resid_pre", "logits")


def _trace(**changed):
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(6, 4, generator=generator).bfloat16() for name in NAMES}
    return Trace(INFO, {k: v for k, v in (tensors | changed).items() if v is not None})


def _changed(name, index, value):
    tensor = _trace()[name].clone()
    tensor[index] = value
    return {name: tensor}


def test_equal_traces_are_ok_everywhere_and_diverge_nowhere():
    comparison = compare_traces(_trace(), _trace())
    assert [row.status for row in comparison.rows] == ["ok"] * 5
    assert [row.hookpoint for row in comparison.rows] == list(NAMES)
    assert all(row.cosine_min == row.cosine_whole == 1.0 and row.rel_l2_error == 0.0 for row in comparison.rows)
    assert comparison.first_divergence() is None


def test_one_changed_value_is_found_at_its_hook_point_and_token():
    comparison = compare_traces(_trace(), _trace(**_changed("vision.0.resid_post", (3, 1), 50.0)))
    first = comparison.first_divergence()
    assert (first.hookpoint, first.status, first.cosine_min_token) == ("vision.0.resid_post", "mismatch", 3)
    assert comparison.first_divergence("language") is None
    assert comparison.floor("vision") is first
    assert first.cosine_min < first.cosine_mean < 1.0


def test_length_stands_beside_angle():
    longer = _trace()["logits"].clone()
    longer[2] *= 2  # the same direction
    row = compare_traces(_trace(), _trace(logits=longer)).row("logits")
    assert (row.cosine_min, row.norm_ratio_worst, row.norm_ratio_token) == (1.0, 2.0, 2)
    assert 1 < row.norm_ratio < 2
    row = compare_traces(_trace(logits=longer), _trace()).row("logits")
    assert (row.norm_ratio_worst, row.norm_ratio_token) == (0.5, 2)


def test_one_ulp_is_a_mismatch():
    tensor = _trace()["logits"].clone()
    tensor.view(torch.int16)[5, 3] ^= 1
    row = compare_traces(_trace(), _trace(logits=tensor)).row("logits")
    assert row.status == "mismatch" and not row.bitwise_equal and row.max_abs_diff > 0


def test_a_wider_dtype_with_the_same_values_is_ok():
    assert compare_traces(_trace(), _trace(logits=_trace()["logits"].float())).row("logits").status == "ok"


def test_missing_on_either_side():
    comparison = compare_traces(_trace(), _trace(logits=None))
    assert comparison.row("logits").status == "missing" and comparison.row("logits").cosine_min is None
    assert compare_traces(_trace(logits=None), _trace()).row("logits").status == "missing"


def test_shapes_that_differ():
    row = compare_traces(_trace(), _trace(logits=torch.ones(6, 5).bfloat16())).row("logits")
    assert row.status == "shape_mismatch" and row.cosine_min is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_has_its_own_status_and_enters_no_mean(bad):
    comparison = compare_traces(_trace(), _trace(**_changed("logits", (0, 0), bad)))
    row = comparison.row("logits")
    assert row.status == "non_finite" and row.cosine_mean is None
    assert comparison.first_divergence() is row


def test_zero_vectors_are_counted_and_enter_no_mean():
    zero = _changed("logits", 2, 0.0)
    row = compare_traces(_trace(**zero), _trace(**zero)).row("logits")
    assert (row.status, row.undefined_tokens, row.cosine_mean) == ("ok", 1, 1.0)
    all_zero = {"logits": torch.zeros(6, 4).bfloat16()}
    row = compare_traces(_trace(**all_zero), _trace(**all_zero)).row("logits")
    assert (row.status, row.undefined_tokens, row.cosine_min, row.rel_l2_error) == ("ok", 6, None, None)


def test_comparing_nothing_raises():
    with pytest.raises(VlmlabError, match="no evidence: the two traces have no hook point in common"):
        compare_traces(_trace(), Trace(INFO, {"final_norm": torch.ones(1, 1)}))


@pytest.mark.parametrize("field", ["weights_hash", "input_hash"])
def test_different_weights_or_input_are_no_evidence(field):
    other = Trace(dataclasses.replace(INFO, **{field: "other"}), _trace().tensors)
    with pytest.raises(VlmlabError, match=f"no evidence: the traces differ in {field}"):
        compare_traces(_trace(), other)


def test_json_has_the_promised_keys_and_is_strict():
    zero = {"logits": torch.zeros(6, 4).bfloat16()}
    comparison = compare_traces(_trace(**zero), _trace(**zero))
    result = comparison_json(comparison, True, {"total": 1.23456})
    parsed = json.loads(json.dumps(result, allow_nan=False))
    assert set(parsed) == {"engines", "inputs_equal", "parts", "seconds"}
    assert set(parsed["parts"]) == {"vit", "prefill"}
    promised = {"hookpoint", "layer", "status", "cosine_min", "cosine_min_token", "cosine_mean", "cosine_whole"}
    promised |= {"norm_ratio", "norm_ratio_worst", "norm_ratio_token", "rel_l2_error", "max_abs_diff", "bitwise_equal"}
    assert all(promised <= set(row) for part in parsed["parts"].values() for row in part["rows"])
    assert (parsed["parts"]["vit"]["tokens"], parsed["parts"]["vit"]["patches"]) == (6, 6)
    assert parsed["parts"]["prefill"]["rows"][-1]["cosine_min"] is None


def test_two_runs_of_one_engine_keep_both_sides():
    engines = comparison_json(compare_traces(_trace(), _trace()), True, {})["engines"]
    assert set(engines) == {"baseline", "target"}


def test_summary_is_computed():
    comparison = compare_traces(_trace(), _trace(**_changed("vision.merger", (1, 0), 9.0)))
    assert comparison.summary().startswith(
        "4 of 5 hook points bit-equal; ViT: first at vision.merger, lowest cosine 0."
    )
    assert comparison.summary().endswith("prefill: no divergence")


@pytest.mark.engine
def test_both_engines_see_the_same_input(traces):
    seen = compare_inputs(*traces)
    assert seen["equal"].all(), seen.to_string()
    assert len(seen) == 9


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("inputs.input_ids", "token ids"),
        ("inputs.pixel_values", "pixel values"),
        ("inputs.positions", "M-RoPE positions"),
        ("layers.0.resid_pre", "embeddings entering the language model"),
    ],
)
def test_a_changed_input_is_flagged(traces, name, item):
    hf, sglang = traces
    changed = sglang[name].clone()
    changed[..., 3] += 1
    seen = compare_inputs(hf, Trace(sglang.info, {**sglang.tensors, name: changed}))
    assert item in list(seen.loc[~seen["equal"], "item"])


@pytest.mark.engine
def test_threads_count_on_a_cpu_only(traces):
    def items(device):
        pair = [Trace(dataclasses.replace(t.info, device=device, threads=n), t.tensors) for n, t in enumerate(traces)]
        seen = compare_inputs(*pair)
        return list(seen.loc[~seen["equal"], "item"])

    assert items({"type": "cpu", "capability": "AVX2"}) == ["threads"]
    assert items({"type": "cuda", "capability": "sm_90"}) == []


def test_a_trace_without_inputs_is_no_evidence():
    with pytest.raises(VlmlabError, match="no evidence: the hf trace holds no inputs"):
        compare_inputs(_trace(), _trace())


@pytest.mark.engine
def test_figures_on_the_reference_input(traces, comparison):
    assert len(comparison.part("vision")) == 131 and len(comparison.part("language")) == 115
    assert comparison.first_divergence("vision").hookpoint == "vision.patch_embed"
    assert implied_grid(traces[0], traces[0]["inputs.input_ids"]) == (1, 48, 60)
    assert next_token(traces[0]) == next_token(traces[1])


@pytest.mark.engine
def test_public_figures_stand_beside_ours_and_keep_their_provenance(comparison):
    table = public_figures(comparison)
    public = table[table["where"] == "reported in public"]
    assert list(public["lowest cosine"]) == [0.1775, 0.9499, 0.580]
    assert set(public["device"]) == {"NVIDIA RTX 4090 D"} and set(public["model"]) == {"Qwen2-VL-7B"}
    ours = table[table["where"] == "measured here"]
    assert set(ours["model"]) == {"qwen2-vl-tiny"}
    assert ours["lowest cosine"].iloc[0] == comparison.row("vision.merger").cosine_min
