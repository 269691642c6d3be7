"""Specifications hold what they were given, and draw."""

import json
import math

import pytest

from vlmlab import charts

HOOKS = ["vision.0.resid_pre", "vision.0.resid_post", "vision.merger"]
BASELINES, METRICS = ("SGLang", "float64"), ("1 - cosine", "relative L2 error")


def plans():
    about = [{"baseline": b, "metric": m} for b in BASELINES for m in METRICS]
    curves = [
        {"plan": plan, **a, "worst": [0.0, 1e-3, 2e-3 + plan], "mean": [0.0, None, 1e-4], "token": [0, 1, 2]}
        for plan in range(4)
        for a in about
    ]
    envelopes = [{**a, "envelope": [1e-6, 1e-3, 4e-3]} for a in about]
    return charts.plan_chart(
        "t",
        {"patch_embed": "Patch", "vit_attention": "Attention"},
        HOOKS,
        curves,
        envelopes,
        [{"plan": plan, "text": f"{plan} of 9"} for plan in range(4)],
    )


def names(spec):
    return [parameter["name"] for parameter in spec["params"]]


def test_every_cause_is_a_switch_and_every_choice_is_offered():
    spec = plans()
    assert names(spec) == ["baseline", "metric", "cause_patch_embed", "cause_vit_attention"]
    assert spec["params"][0]["bind"]["options"] == list(BASELINES) and spec["params"][0]["value"] == "SGLang"
    whole = json.dumps(spec)
    assert "(cause_patch_embed ? 1 : 0) + (cause_vit_attention ? 2 : 0)" in whole
    assert all(hook in whole for hook in HOOKS)


def test_nothing_is_loaded_from_an_address():
    for spec in (plans(), tokens(), charts.step_chart("t", [1e-3, None], ["a", "b"], "m")):
        assert spec.pop("$schema").startswith("https://vega.github.io/schema/vega-lite/")
        assert "://" not in json.dumps(spec)


def tokens(picture=None):
    values = [[1e-3, 2e-5, 0.0, float("nan")], [1e-4, 1e-2, 1e-6, 3e-3]]
    return charts.token_charts("t", HOOKS[:2], values, "m", ["a", "b", "c", "d"], picture)


def test_token_charts_start_at_the_worst_token_of_the_last_hook_point():
    spec = tokens()
    assert {p["name"]: p["value"] for p in spec["params"]} == {"layer": 1, "token": 1}
    assert spec["datasets"]["texts"] == [{"texts": ["a", "b", "c", "d"]}]
    assert spec["datasets"]["values"][0]["values"] == "goby00--"


def test_packed_values_keep_two_percent():
    values = [1e-9, 3.456e-7, 0.02, 1.0, 1.9]
    digits = charts.packed(values)
    for k, value in enumerate(values):
        level = int(digits[2 * k : 2 * k + 2], 36)
        assert charts.FLOOR * 10 ** (level / 100) == pytest.approx(value, rel=0.012)
    assert charts.packed([0.0, 1e-30, None, math.inf, math.nan, 1e30]) == "0000------zz"


def test_rounded_values_are_strict():
    assert charts.rounded([1.23456e-5, 0.0, None, math.nan, -math.inf]) == [1.23e-5, 0.0, None, None, None]


@pytest.mark.parametrize("spec", [plans(), charts.step_chart("steps", [1e-3, 0.0, None], ["a", "b", "c"], "m")])
def test_svg_is_drawn(spec):
    drawn = charts.svg(spec)
    assert drawn.startswith("<svg") and drawn.count("<path") > 3


def test_jpeg_is_drawn_on_the_picture():
    pixel = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="
    assert charts.jpeg(tokens((pixel, 2, 2)))[:2] == b"\xff\xd8"
    assert charts.jpeg(tokens())[:2] == b"\xff\xd8"


def test_the_bundle_is_whole_and_can_stand_in_a_page():
    script = charts.bundle()
    assert "vegaEmbed" in script and "</script" not in script.lower()
