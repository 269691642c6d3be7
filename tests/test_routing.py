"""Counts on logits made by hand, and the experts that the engines really chose."""

import dataclasses
import json

import pytest
import torch
from test_trace import INFO

from vlmlab.compare import compare_traces, comparison_json
from vlmlab.engine_hf import recording
from vlmlab.hookpoints import hook_points
from vlmlab.routing import Flips, chosen_experts, expert_flips, flipped_tokens
from vlmlab.trace import Trace

LOGITS = torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 4], [1, 4, 3, 2], [4, 1, 2, 3]])
SPARSE = dataclasses.replace(INFO, config={"text_config": {"num_experts_per_tok": 2}})


def trace(*layers):
    """A trace of nothing but router logits."""
    return Trace(SPARSE, {f"layers.{i}.router_logits": logits for i, logits in enumerate(layers)})


def with_row(token, *row):
    logits = LOGITS.clone()
    logits[token] = torch.tensor(row)
    return logits


def test_the_likeliest_come_first():
    assert chosen_experts(LOGITS, 2).tolist() == [[0, 1], [3, 2], [1, 2], [0, 3]]
    assert chosen_experts(LOGITS.bfloat16(), 1).flatten().tolist() == [0, 3, 1, 0]


def test_a_swap_of_two_experts_and_a_swap_of_their_order_are_told_apart():
    other = with_row(1, 1.0, 4, 3, 2)  # experts 1 and 3 exchanged
    order = with_row(2, 1.0, 3, 4, 2)
    assert expert_flips(trace(LOGITS, LOGITS, LOGITS), trace(LOGITS, other, order)) == (
        Flips(0, 4, (), (), 0),
        Flips(1, 4, (1,), (), 0),
        Flips(2, 4, (), (2,), 0),
    )
    assert flipped_tokens(trace(LOGITS).tensors, trace(other).tensors, 2).tolist() == [False, True, False, False]
    assert not flipped_tokens(trace(LOGITS).tensors, trace(order).tensors, 2).any()
    assert expert_flips(trace(LOGITS), trace(with_row(0, 40.0, 30, 1, 2))) == (Flips(0, 4, (), (), 0),)  # not chosen


def test_ties_flip_nothing_by_themselves_and_are_told():
    tied = with_row(0, 4.0, 3, 3, 1)
    assert expert_flips(trace(tied), trace(tied.clone())) == (Flips(0, 4, (), (), 0),)
    [first], [second] = (
        expert_flips(trace(tied), trace(with_row(0, *row))) for row in ((4.0, 3, 2, 1), (4.0, 2, 3, 1))
    )
    assert sorted([first.experts, second.experts]) == [(), (0,)]  # the tie goes one way
    assert sorted([first.ties, second.ties]) == [0, 1]
    equal = with_row(3, 4.0, 1, 2, 4)
    flips = [expert_flips(trace(equal), trace(with_row(3, *row)))[0] for row in ((5.0, 1, 2, 4), (4.0, 1, 2, 5))]
    assert sorted(f.order for f in flips) == [(), (3,)] and sorted(f.ties for f in flips) == [0, 1]


def test_what_cannot_be_compared_is_left_out():
    nan = with_row(0, float("nan"), 3, 2, 1)
    others = (nan, LOGITS[:2], LOGITS)
    assert [f.layer for f in expert_flips(trace(LOGITS, LOGITS, LOGITS), trace(*others))] == [2]
    assert expert_flips(trace(LOGITS), Trace(SPARSE, {})) == ()
    dense = Trace(INFO, {"final_norm": LOGITS})
    assert expert_flips(dense, dense) == () and flipped_tokens(dense.tensors, dense.tensors, 0) is None


def test_a_comparison_counts_them_and_says_so_in_json():
    comparison = compare_traces(trace(LOGITS), trace(with_row(1, 1.0, 4, 3, 2)))
    assert comparison.flips == (Flips(0, 4, (1,), (), 0),)
    content = json.loads(json.dumps(comparison_json(comparison, True, {}), allow_nan=False))
    flips = content["parts"]["prefill"]["expert_flips"]
    assert flips == [{"layer": 0, "tokens": 4, "experts": [1], "order": [], "ties": 0}]
    dense = Trace(INFO, {"final_norm": LOGITS})
    assert "expert_flips" not in comparison_json(compare_traces(dense, dense), True, {})["parts"]["prefill"]


def test_transformers_chooses_so(hf_engines, ask, one_thread):
    engine = hf_engines("qwen3_vl_moe")
    points = [p for p in hook_points(engine.checkpoint.config) if p.name.endswith("router_logits")]
    logits, chosen = {}, {}
    handles = [
        engine.model.get_submodule(p.hf).register_forward_hook(
            lambda module, inputs, output, name=p.name: chosen.update({name: output[2].clone()})
        )
        for p in points
    ]
    try:
        with recording(engine.model, points, lambda name, tensor: logits.update({name: tensor.clone()})):
            engine.forward(ask("qwen3_vl_moe", (5, 7)))
    finally:
        for handle in handles:
            handle.remove()
    assert len(points) == 30 and logits.keys() == chosen.keys()
    assert all(torch.equal(chosen_experts(logits[name], 2), chosen[name]) for name in chosen)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_vl"])
def test_dense_decoders_have_no_router(family, checkpoints):
    assert not any(point.name.endswith("router_logits") for point in hook_points(checkpoints[family].config))
