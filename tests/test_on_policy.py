"""Every row has a source that exists and a way that the forward takes; together they are the real engine's bits."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from sampled import sampled
from test_causes import defined, places

from vlmlab.causes import causes_of
from vlmlab.engine_sglang import open_sglang
from vlmlab.hybrid import Seen
from vlmlab.hypotheses import HYPOTHESES, of_family
from vlmlab.machine import has_sglang
from vlmlab.on_policy import BOTH, CHANGES, ON_CPU, separable
from vlmlab.replay import Asked, closure, run_plan


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.title} {len(change.families)}")
def test_a_row_is_complete_and_its_source_exists(change):
    assert change.families and set(change.families) <= set(BOTH) and change.what.endswith(".")
    assert bool(change.cause) == bool(change.way)
    for family in change.families:
        assert not change.cause or change.cause in {cause.name for cause in causes_of(family)}
        assert not change.hypothesis or change.hypothesis in of_family(family)
    package, version, found = places(change.source)
    assert (package, version) == ("sglang", "0.5.23") and found
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        pytest.skip("sglang is not installed, so its sources cannot be looked up")
    for path, name in found:
        assert name in defined(Path(spec.submodule_search_locations[0]) / path), (path, name)


def test_a_row_that_is_wrong_would_be_seen():
    wrong = dataclasses.replace(CHANGES[0], cause="no_such_cause")
    with pytest.raises(AssertionError):
        test_a_row_is_complete_and_its_source_exists(wrong)
    with pytest.raises(AssertionError):
        test_a_row_is_complete_and_its_source_exists(dataclasses.replace(CHANGES[0], way=""))
    with pytest.raises(AssertionError):
        test_a_row_is_complete_and_its_source_exists(dataclasses.replace(CHANGES[0], hypothesis="3-D positions"))


def test_every_row_that_names_a_way_is_in_the_plan():
    for family in BOTH:
        plan, hypotheses = separable(family)
        assert hypotheses == ("1-D positions",)
        for change in CHANGES:
            if change.cause and family in change.families:
                assert plan.how(change.cause, 0) == change.way


@pytest.mark.engine
@pytest.mark.parametrize("family", sampled(BOTH, keep=lambda family: family == "qwen3_vl"))  # has the most rows
def test_the_rows_together_are_the_real_engine_bit_for_bit(family, checkpoints, hybrids, ask, tmp_path):
    if not has_sglang():
        pytest.skip('SGLang is not installed: pip install "vlmlab[sglang]"')
    if torch.cuda.is_available():
        pytest.skip("on CUDA batch-invariant kernels, which are not separable, come with it")
    inputs, hybrid = ask(family, (8, 10), seed=34), hybrids(family)
    with open_sglang(checkpoints[family], {"rl_on_policy_target": "fsdp"}, ON_CPU) as engine:
        trace = engine.capture(inputs, tmp_path / "trace")
        assert len(engine.generate(inputs, 3)) == 3
    assert trace.info.flags["rl_on_policy_target"] == "fsdp"
    grid = inputs.image_grid_thw
    seen = Seen(trace["vision.merger"], trace.deepstack)
    positions = hybrid.positions(inputs.input_ids, grid)
    asked = Asked(inputs.input_ids, positions, trace["inputs.pixel_values"], grid, seen)
    plan, names = separable(family)
    for name in names:
        asked = HYPOTHESES[name].asked(asked)
    assert torch.equal(asked.positions, trace["inputs.positions"])

    states = run_plan(hybrid, asked, plan)
    if trace["final_norm"].dtype == torch.float32:  # kept wide for the head, which reads it rounded
        trace = dataclasses.replace(trace, tensors={**trace.tensors, "final_norm": trace["final_norm"].bfloat16()})
    assert closure(trace, states).equal == len(trace.hook_points)
    for cause in {change.cause for change in CHANGES if change.way not in ("", "sglang") and family in change.families}:
        assert closure(trace, run_plan(hybrid, asked, plan.switched(cause, "sglang"))).equal < len(trace.hook_points)
    with_rows_and_columns = dataclasses.replace(asked, positions=positions)
    assert closure(trace, run_plan(hybrid, with_rows_and_columns, plan)).equal < len(trace.hook_points)
