"""Shares that add up, causes that are live or proven dead, distances to the truth, and the JSON of it all."""

import dataclasses
import functools
import itertools
import json
import math
import re

import pytest
import torch
from sampled import sampled

from vlmlab import arithmetic, attribution
from vlmlab.attribution import (
    Alone,
    Attribution,
    CauseEffect,
    Explanation,
    Nearness,
    attribute,
    closer_to_truth,
    control,
    explain,
    near_tie,
    part_end,
)
from vlmlab.causes import causes_of, hf_plan, sglang_plan
from vlmlab.errors import VlmlabError
from vlmlab.hookpoints import FAMILIES
from vlmlab.passes import Passes
from vlmlab.replay import Closure, asked_of, run_plan
from vlmlab.trace import Trace
from vlmlab.verdict import Finding, Verdict

QWEN2, QWEN3, MOE = FAMILIES
BF16, F64 = torch.bfloat16, torch.float64
PARTS = [(family, part) for family in FAMILIES for part in ("vision", "language")]


def richest(family, part):
    """Qwen2-VL, and the families with most causes: the vision tower is the same in both of Qwen3's."""
    return family == QWEN2 or (family, part) in ((QWEN3, "vision"), (MOE, "language"))


@pytest.fixture(scope="module")
def asked_on(hf_engines, hybrids, ask, tmp_path_factory):
    """(family, grid) to (hybrid, Asked, Transformers' trace) of a small picture."""
    made = {}

    def asked(family, grid=(5, 7)):
        if (family, grid) not in made:
            inputs = ask(family, grid, seed=13)
            trace = hf_engines(family).capture(inputs, tmp_path_factory.mktemp("hf") / "trace")
            trace = Trace(trace.info, dict(trace.tensors))
            made[family, grid] = hybrids(family), asked_of(hybrids(family), trace, trace), trace
        return made[family, grid]

    return asked


@pytest.fixture(scope="module")
def passes_of(hybrids):
    """Family to Passes, which compute each pass once."""
    return functools.cache(lambda family: Passes(hybrids(family), hybrids(family, F64)))


@pytest.fixture(scope="module")
def attributed(asked_on, passes_of):
    """(family, part) to the Attribution; each computed once."""

    @functools.cache
    def attributed(family, part):
        _, asked, _ = asked_on(family)
        return attribute(passes_of(family), asked, part, hf_plan(), sglang_plan(), lambda line: None)

    return attributed


def close(a, b):
    """Equal up to the float64 rounding of some hundred additions."""
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-15)


# ---------------------------------------------------------------------------------------------------- shares


def test_shares_of_a_game_by_all_orders():
    names = ["a", "b", "c", "d"]
    generator = torch.Generator().manual_seed(0)
    subsets = [frozenset(s) for size in range(5) for s in itertools.combinations(names, size)]
    worth = {s: torch.rand((), generator=generator, dtype=F64).item() if s else 0.0 for s in subsets}
    shares = attribution._shapley(names, worth)
    orders = list(itertools.permutations(names))
    for name in names:
        gains = [worth[frozenset(o[: o.index(name) + 1])] - worth[frozenset(o[: o.index(name)])] for o in orders]
        assert close(shares[name], sum(gains) / len(orders))
    assert close(sum(shares.values()), worth[frozenset(names)])


def test_shares_of_games_with_known_values():
    alone = {frozenset(): 0.0, frozenset("a"): 1.0}
    assert attribution._shapley(["a"], alone) == {"a": 1.0}
    assert attribution._shapley([], {frozenset(): 0.0}) == {}
    # two gloves: worth something as a pair only
    gloves = {frozenset(): 0.0, frozenset("l"): 0.0, frozenset("r"): 0.0, frozenset("lr"): 1.0}
    assert attribution._shapley(["l", "r"], gloves) == {"l": 0.5, "r": 0.5}
    # one that adds nothing gets nothing, and what does not interact keeps its own
    names = ["x", "y", "idle"]
    game = {
        frozenset(s): 2.0 * ("x" in s) - 3.0 * ("y" in s) for n in range(4) for s in itertools.combinations(names, n)
    }
    shares = attribution._shapley(names, game)
    assert all(close(shares[name], value) for name, value in {"x": 2.0, "y": -3.0, "idle": 0.0}.items())


@pytest.mark.parametrize(("family", "part"), sampled(PARTS, keep=richest))
def test_shares_of_an_engine_add_up_to_what_is_explained(family, part, attributed):
    found = attributed(family, part)
    live = [effect for effect in found.effects if effect.live]
    assert found.total > 0
    assert close(sum(effect.share for effect in found.effects), found.explained)
    assert close(sum(effect.alone.closer for effect in live) + found.interaction, found.explained)
    assert close(found.explained, found.total)  # all live causes together are the other plan
    assert found.plans == 2 ** len(live)
    assert all(effect.share == 0 for effect in found.effects if not effect.live)


# ---------------------------------------------------------------------------------------------------- live and dead


@pytest.mark.parametrize(
    ("family", "part", "live"),
    sampled(
        [
            (QWEN2, "language", {"rms_norm", "residual_sum"}),
            (QWEN3, "language", {"rms_norm", "residual_sum", "qk_norm", "deepstack_order"}),
            (
                MOE,
                "language",
                {"rms_norm", "residual_sum", "qk_norm", "deepstack_order", "router_weights", "expert_combine"},
            ),
        ],
        keep=lambda family, part, live: richest(family, part),
    ),
)
def test_live_causes(family, part, live, attributed):
    found = attributed(family, part)
    assert {effect.name for effect in found.effects if effect.live} == live
    assert [effect.name for effect in found.effects] == [cause.name for cause in causes_of(family, part)]


@pytest.mark.parametrize(
    ("family", "always"),
    sampled(
        [(QWEN2, {"vit_attention"})]
        + [(family, {"position_precision", "vit_rotary", "vit_attention"}) for family in (QWEN3, MOE)],
        keep=lambda family, always: richest(family, "vision"),
    ),
)
def test_live_causes_of_vision(family, always, attributed):
    found = attributed(family, "vision")
    live = {effect.name for effect in found.effects if effect.live}
    # the formula acts on some grids only; whether a small picture hides the patch embedding depends on the processor
    assert always <= live <= always | {"patch_embed"} | ({"position_formula"} if family != QWEN2 else set())
    assert [effect.name for effect in found.effects] == [cause.name for cause in causes_of(family, "vision")]


@pytest.mark.parametrize(("family", "part"), sampled(PARTS, keep=richest))
def test_every_dead_cause_is_proven_to_act(family, part, attributed):
    effects = attributed(family, part).effects
    dead = [effect for effect in effects if not effect.live]
    assert dead
    for effect in dead:
        assert effect.acts is True, effect.name
        assert effect.alone == Alone(0, None, 0.0, 0.0)
    for effect in effects:
        assert effect.part == part
        if effect.live:
            assert effect.acts is None


def test_what_a_cause_does_alone(attributed, asked_on):
    hybrid, asked, _ = asked_on(QWEN2)
    effects = {effect.name: effect for effect in attributed(QWEN2, "language").effects}
    assert effects["rms_norm"].alone.first == "layers.0.attn_out"
    assert effects["residual_sum"].alone.first == "layers.0.mlp_out"  # layer 0's first norm reads no sum
    assert effects["rms_norm"].alone.tensors > 100 > effects["head"].alone.tensors
    base = run_plan(hybrid, asked, hf_plan(), "language")
    on = run_plan(hybrid, asked, hf_plan().switched("rms_norm", "sglang"), "language")
    errors = (on["layers.27.resid_post"].double() - base["layers.27.resid_post"].double()).norm(dim=1)
    errors = errors / base["layers.27.resid_post"].double().norm(dim=1)
    assert close(effects["rms_norm"].alone.distance, errors.square().mean().sqrt().item())
    assert attributed(QWEN2, "vision").end == part_end(hybrid, "vision") == "vision.merger"
    assert attributed(QWEN2, "language").end == part_end(hybrid, "language") == "layers.27.resid_post"


def test_tokens_that_any_plan_routes_elsewhere_stand_apart(attributed):
    assert (attributed(QWEN2, "language").flipped, attributed(QWEN2, "language").flipped_total) == (0, None)
    found = attributed(MOE, "language")
    assert found.flipped > 0 and found.flipped_total > found.total
    assert all(abs(effect.share) < found.total for effect in found.effects)


def test_attention_counts_as_a_cause_where_transformers_runs_eager(asked_on):
    hybrid, asked, _ = asked_on(QWEN2)
    found = attribute(Passes(hybrid), asked, "language", hf_plan("eager"), sglang_plan(), lambda line: None)
    assert {e.name for e in found.effects if e.live} == {"rms_norm", "residual_sum", "attention"}
    assert close(sum(e.share for e in found.effects), found.total)


def test_phases_are_said(asked_on):
    hybrid, asked, _ = asked_on(QWEN2)
    lines = []
    attribute(Passes(hybrid), asked, "vision", hf_plan(), sglang_plan(), lines.append)
    (live,) = re.findall(r"of (\d) live causes", lines[1])
    assert lines == ["vision: 4 causes one at a time", f"vision: {2 ** int(live)} combinations of {live} live causes"]


def test_a_part_that_the_input_lacks_is_no_evidence(hybrids, hf_engines, ask, tmp_path):
    trace = hf_engines(QWEN2).capture(ask(QWEN2), tmp_path / "trace")
    asked = asked_of(hybrids(QWEN2), trace, trace)
    with pytest.raises(VlmlabError, match="no evidence: the input has no vision part"):
        attribute(Passes(hybrids(QWEN2)), asked, "vision", hf_plan(), sglang_plan(), lambda line: None)


# ---------------------------------------------------------------------------------------------------- control


def named(family, name):
    return next(cause for cause in causes_of(family) if cause.name == name)


def blind(function, *places):
    """A function whose SGLang way takes ones for the arguments at the given places."""

    @functools.wraps(function)
    def ignoring(*args):
        if "sglang" not in [argument for argument in args if isinstance(argument, str)]:
            return function(*args)
        ones = [[torch.ones_like(t) for t in a] if isinstance(a, list) else torch.ones_like(a) for a in args[:2]]
        return function(*(ones[i] if i in places else a for i, a in enumerate(args)))

    return ignoring


@pytest.mark.parametrize(
    ("family", "cause", "function"),
    [
        (QWEN2, "rms_norm", "rms_norm"),
        (QWEN2, "patch_embed", "patch_embedding"),
        (QWEN2, "gate_up_linear", "stacked_linear"),
        (QWEN2, "qkv_linear", "stacked_linear"),
        (QWEN2, "head", "head"),
        (QWEN3, "qk_norm", "rms_norm"),
        (QWEN2, "vit_attention", "full_attention"),
        (QWEN2, "attention", "causal_attention"),
        (QWEN2, "residual_sum", "residual_sum"),
    ],
)
def test_the_control_fails_where_sglangs_way_ignores_what_it_reads(family, cause, function, asked_on, monkeypatch):
    hybrid, asked, _ = asked_on(family)
    assert control(Passes(hybrid), asked, named(family, cause), hf_plan(), sglang_plan())
    place = 0 if function.endswith("attention") else 1
    monkeypatch.setattr(arithmetic, function, blind(getattr(arithmetic, function), place))
    assert not control(Passes(hybrid), asked, named(family, cause), hf_plan(), sglang_plan())


@pytest.mark.parametrize(
    ("family", "cause"),
    sampled(
        [(family, cause.name) for family in FAMILIES for cause in causes_of(family)],
        keep=lambda family, name: family == [f for f in FAMILIES if name in {c.name for c in causes_of(f)}][-1],
    ),
)
def test_the_control_shows_for_every_cause(family, cause, asked_on):
    hybrid, asked, _ = asked_on(family)
    assert control(Passes(hybrid), asked, named(family, cause), hf_plan(), sglang_plan())


@pytest.mark.parametrize("family", sampled(FAMILIES, keep=lambda family: family == MOE))  # every kind of cause
def test_the_control_leaves_everything_as_it_was(family, asked_on, monkeypatch):
    hybrid, asked, _ = asked_on(family)
    before, eps, passes = dict(hybrid.weights), hybrid.eps, Passes(hybrid)
    by = hybrid.by
    for cause in causes_of(family):
        assert control(passes, asked, cause, hf_plan(), sglang_plan())

    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(attribution, "walk_plan", fails)
    for cause in causes_of(family):
        with pytest.raises(ZeroDivisionError):
            control(passes, asked, cause, hf_plan(), sglang_plan())
    assert hybrid.by is by and hybrid.eps == eps
    assert all(hybrid.weights[name] is weight for name, weight in before.items())


# ---------------------------------------------------------------------------------------------------- truth


def test_the_closer_engine_is_named_and_a_tie_is_a_tie():
    truth = {"x": torch.tensor([[3.0, 4.0], [6.0, 8.0]], dtype=F64)}
    near, far = truth["x"].clone(), truth["x"].clone()
    near[0, 0] += 0.5  # 0.1 of the token's length
    far[0, 0] += 1.0
    far[1, 1] += 1.0  # 0.1
    [row] = closer_to_truth(truth, {"x": near}, {"x": far}, ["x"])
    assert (row.hookpoint, row.closer, row.flipped) == ("x", "hf", 0)
    assert close(row.hf, math.sqrt(0.01 / 2)) and close(row.sglang, math.sqrt(0.05 / 2))
    assert row.sglang_share == 0.0
    [row] = closer_to_truth(truth, {"x": far}, {"x": near}, ["x"])
    assert (row.closer, row.sglang_share) == ("sglang", 1.0)
    [row] = closer_to_truth(truth, {"x": far}, {"x": far.clone()}, ["x"])
    assert (row.closer, row.sglang_share, row.hf) == ("tie", 0.0, row.sglang)
    # closer at one token of two, but by less: the mean decides, the share tells
    other = truth["x"].clone()
    other[1, 0] += 0.1
    [row] = closer_to_truth(truth, {"x": near}, {"x": other}, ["x"])
    assert (row.closer, row.sglang_share) == ("sglang", 0.5)


def test_the_truth_of_several_hook_points_in_the_order_asked_for():
    states = {name: torch.ones(2, 3, dtype=F64) for name in "abc"}
    rows = closer_to_truth(states, states, {**states, "b": states["b"] * 2}, ["c", "b"])
    assert [(row.hookpoint, row.closer) for row in rows] == [("c", "tie"), ("b", "hf")]


def test_tokens_routed_to_other_experts_are_left_out():
    def routed(*tokens):
        """Logits of 8 experts that choose the two given for each token."""
        logits = torch.zeros(len(tokens), 8)
        for row, (first, second) in zip(logits, tokens, strict=True):
            row[first], row[second] = 2, 1
        return logits

    router = "layers.0.router_logits"
    truth = {"x": torch.ones(3, 2, dtype=F64), router: routed((0, 1), (2, 3), (4, 5))}
    hf = {"x": truth["x"].clone(), router: routed((1, 0), (2, 7), (4, 5))}  # order means nothing
    sglang = {"x": truth["x"].clone(), router: truth[router]}
    hf["x"][1] = 100
    sglang["x"][0] = 1.5
    [row] = closer_to_truth(truth, hf, sglang, ["x"], 2)
    assert (row.closer, row.flipped, row.hf) == ("hf", 1, 0.0)
    assert close(row.hf_flipped, 99) and row.sglang_flipped == 0  # reported apart
    sglang[router] = routed((6, 1), (2, 3), (4, 5))
    [row] = closer_to_truth(truth, hf, sglang, ["x"], 2)
    assert (row.closer, row.flipped) == ("tie", 2)
    # of another length, as the logits: nothing to leave out
    [row] = closer_to_truth(
        {**truth, "y": truth["x"][:1]}, {**hf, "y": truth["x"][:1]}, {**sglang, "y": truth["x"][:1] * 2}, ["y"], 2
    )
    assert (row.closer, row.flipped) == ("hf", 0) and row.hf_flipped is None


def test_near_ties_are_within_one_unit_of_bfloat16():
    def logits(*values):
        return torch.tensor([values])

    unit = 2.0**-7  # of bfloat16 below 2, above 1
    assert near_tie(logits(1.5, 0.0, 1.5))
    assert near_tie(logits(1.5, 1.5 - unit))
    assert not near_tie(logits(1.5, 1.5 - 2 * unit))
    assert near_tie(logits(1.5, 1.5 - unit).to(BF16))
    assert not near_tie(logits(1.5, 1.5 - 1.01 * unit))
    assert near_tie(logits(-300.0, -302.0, -900.0)) and not near_tie(logits(-300.0, -306.0, -900.0))
    assert near_tie(logits(1.0, 1.0 - unit / 2)) and not near_tie(logits(1.0, 1.0 - unit))  # smaller units below 1


# ---------------------------------------------------------------------------------------------------- explanation


KEYS = {"verdict", "first_outside", "closure", "remainder", "causes", "closer_to_truth"}


def made_up(number=0.5, outside=False):
    """An Explanation in which every float is the given number."""
    finding = Finding("layers.3.mlp_out", 3, "MLP", 7, number, number, number, number, number, outside, False, 0)
    rounding, found = Verdict("rounding", ()), Verdict("bug" if outside else "rounding", (finding,))
    effects = (CauseEffect("rms_norm", "language", True, None, number, Alone(9, "layers.0.attn_out", number, number)),)
    part = Attribution("language", "layers.3.resid_post", number, number, number, 2, 0, None, effects)
    row = Nearness("final_norm", number, number, "tie", number, 0)
    return Explanation(
        {"hf": rounding, "sglang": found},
        {"hf": Closure(5, 5, 0, None), "sglang": Closure(3, 5, 40, "layers.3.mlp_out")},
        {},
        (part,),
        (row,),
        {"hf": False, "sglang": True},
        {"hf": 11, "sglang": 12},
    )


def strict(explanation):
    return json.loads(json.dumps(explanation.json(), allow_nan=False))


def test_json_has_the_keys_of_the_specification():
    content = strict(made_up())
    assert set(content) >= KEYS
    assert content["verdict"] == "rounding" and content["first_outside"] is None
    assert content["closure"] == {
        "hf": {"tensors_equal": 5, "tensors_total": 5},
        "sglang": {"tensors_equal": 3, "tensors_total": 5},
    }
    assert content["remainder"] == {"tensors": 2, "elements": 40}
    [cause] = content["causes"]
    assert set(cause) >= {"name", "live", "share", "alone"}
    assert (cause["name"], cause["live"], cause["share"]) == ("rms_norm", True, 0.5)
    assert cause["alone"] == {"tensors": 9, "first": "layers.0.attn_out", "distance": 0.5, "closer": 0.5}
    assert content["closer_to_truth"][0]["hookpoint"] == "final_norm"
    assert content["near_tie"] == {"hf": False, "sglang": True}
    assert content["next_tokens"] == {"hf": 11, "sglang": 12}


def test_json_names_the_engine_and_the_first_operation_outside():
    explained = made_up(outside=True)
    assert explained.word == "bug"
    assert explained.first_outside[0] == "sglang"
    content = strict(explained)
    assert content["verdict"] == "bug"
    assert content["first_outside"]["engine"] == "sglang"
    assert content["first_outside"]["hookpoint"] == "layers.3.mlp_out"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_is_strict_whatever_the_numbers_are(number):
    content = strict(made_up(number, outside=True))
    assert content["causes"][0]["share"] is None
    assert content["causes"][0]["alone"]["distance"] is None
    assert content["first_outside"]["error"] is None
    assert content["closer_to_truth"][0]["hf"] is None


def test_the_word_is_the_worst_of_both_engines():
    def word(hf, sglang):
        return dataclasses.replace(made_up(), verdicts={"hf": Verdict(hf, ()), "sglang": Verdict(sglang, ())}).word

    assert word("rounding", "rounding") == "rounding"
    assert word("rounding", "bug") == word("bug", "rounding") == word("bug", "no evidence") == "bug"
    assert word("rounding", "no evidence") == word("no evidence", "rounding") == "no evidence"


@pytest.mark.parametrize("what", ["weights_hash", "input_hash"])
def test_traces_of_different_inputs_or_weights_are_no_evidence(what, asked_on, hybrids):
    hybrid, _, trace = asked_on(QWEN2)
    other = Trace(dataclasses.replace(trace.info, **{what: "0" * 64}), trace.tensors)
    with pytest.raises(VlmlabError, match=f"no evidence: the traces differ in {what}"):
        explain(Passes(hybrid, hybrids(QWEN2, F64)), trace, other, lambda line: None)


def foreign(trace, hybrid, asked):
    """A trace as SGLang would leave it, made by the hybrid under its plan."""
    flags = {**trace.info.flags, "language_input": "given vision output"}
    info = dataclasses.replace(trace.info, engine="sglang", flags=flags)
    states = run_plan(hybrid, asked, sglang_plan())
    return Trace(info, {**trace.tensors, **{name: states[name] for name in trace.hook_points}})


@pytest.mark.parametrize("family", sampled(FAMILIES, keep=lambda family: family == MOE))  # every kind of cause
def test_two_clean_engines_are_explained_without_remainder(family, asked_on, passes_of):
    hybrid, asked, hf = asked_on(family)
    lines = []
    explained = explain(passes_of(family), hf, foreign(hf, hybrid, asked), lines.append)
    content = strict(explained)
    assert content["verdict"] == "rounding" and content["first_outside"] is None
    total = {"tensors_equal": len(hf.hook_points), "tensors_total": len(hf.hook_points)}
    assert content["closure"] == {"hf": total, "sglang": total}
    assert content["remainder"] == {"tensors": 0, "elements": 0}
    assert [cause["name"] for cause in content["causes"]] == [
        cause.name for part in ("vision", "language") for cause in causes_of(family, part)
    ]
    for part in explained.attributions:
        assert close(sum(effect.share for effect in part.effects), part.total)
    names = [row["hookpoint"] for row in content["closer_to_truth"]]
    assert names[-2:] == ["final_norm", "logits"] and f"layers.{hybrid.depth - 1}.resid_post" in names
    assert {row["closer"] for row in content["closer_to_truth"]} <= {"hf", "sglang", "tie"}
    assert len(lines) == len(set(lines)) > 4


def test_a_bug_in_one_engine_is_the_word_for_both(asked_on, passes_of):
    hybrid, asked, hf = asked_on(QWEN2)
    broken = foreign(hf, hybrid, asked)
    broken = Trace(broken.info, {**broken.tensors, "layers.5.mlp_out": -broken["layers.5.mlp_out"]})
    explained = explain(passes_of(QWEN2), hf, broken, lambda line: None)
    assert explained.word == "bug"
    engine, first = explained.first_outside
    assert (engine, first.hookpoint) == ("sglang", "layers.5.mlp_out")
    assert explained.closures["sglang"].first == "layers.5.mlp_out"
    assert strict(explained)["remainder"]["tensors"] == 1


def test_text_alone_is_explained_by_its_language_part(hybrids, hf_engines, ask, tmp_path):
    hybrid = hybrids(QWEN3)
    hf = hf_engines(QWEN3).capture(ask(QWEN3), tmp_path / "trace")
    sglang = foreign(hf, hybrid, asked_of(hybrid, hf, hf))
    explained = explain(Passes(hybrid, hybrids(QWEN3, F64)), hf, sglang, lambda line: None)
    assert [part.part for part in explained.attributions] == ["language"]
    assert explained.word == "rounding"
    dead = {effect.name: effect for effect in explained.attributions[0].effects if not effect.live}
    assert "deepstack_order" in dead  # there is no picture to add
    assert strict(explained)["remainder"] == {"tensors": 0, "elements": 0}


@pytest.mark.engine
def test_the_reference_input_on_both_real_engines(traces, checkpoint, monkeypatch):
    passes = Passes.of(checkpoint)  # stored, for the notebooks too
    hf, sglang = traces
    monkeypatch.setattr(attribution, "control", lambda *_: True)  # shown above; a third of the time here
    asked = asked_of(passes.hybrid, sglang, hf)
    found = attribute(passes, asked, "language", hf_plan(), sglang_plan(), lambda line: None)
    assert {effect.name for effect in found.effects if effect.live} == {"rms_norm", "residual_sum"}
    assert close(sum(effect.share for effect in found.effects), found.explained)
    assert close(found.explained, found.total)
    # the distance between the plans is the distance between the engines
    a, b = (trace["layers.27.resid_post"].double() for trace in traces)
    assert close(found.total, ((b - a).norm(dim=1) / a.norm(dim=1)).square().mean().sqrt().item())


@pytest.mark.parametrize("part", ["vision", "language"])
def test_leaving_one_out_and_adding_one_after_the_other_end_where_they_must(part, attributed):
    found = attributed(QWEN2, part)
    live = [effect for effect in found.effects if effect.live]
    assert close(live[-1].cumulative, found.total - found.explained)
    assert close(live[0].cumulative, found.total - live[0].alone.closer)
    assert max(effect.left_out for effect in live) > 0  # a small one may round away before the end
    assert all(e.left_out is None and e.cumulative is None for e in found.effects if not e.live)
