"""Every planted fault is called a bug and found where it acts; whatever computes rightly is called rounding.

The faults are those of planted.py, the legal computations both engines' own and some that are none of the plans.
"""

import dataclasses
import json

import pytest
import torch
from planted import FAULTS
from sampled import sampled
from torch.nn.attention import SDPBackend, sdpa_kernel

from data.shapes import unseen_texture
from vlmlab import verdict as judging
from vlmlab.causes import hf_plan, sglang_plan
from vlmlab.engine_hf import vision_output
from vlmlab.hookpoints import FAMILIES, hook_points
from vlmlab.hybrid import Cache, Seen
from vlmlab.replay import asked_of, asked_of_step, differing, local_states
from vlmlab.trace import Trace
from vlmlab.verdict import MARGIN, OPERATIONS, Verdict, judge, judge_steps, legal_plans, operation_of

QWEN2, QWEN3, MOE = FAMILIES
GRID = (8, 10)  # image tokens, as in test_planted.py
SHARED_ON_MOE = {
    "M-RoPE rows collapsed to one",
    "text after the image counts its tokens",
    "causal mask off by one",
    "attention scale of the whole width",
    "KV heads tiled",
    "Q and K norm weights exchanged",
    "RMSNorm weight plus one",
    "attention residual dropped in one layer",
    "one row of down_proj negated",
    "gate and up swapped in one layer",
    "GELU for SiLU in one layer",
    "deepstack one token late",
    "last deepstack level dropped",
    "one row of a ViT projection negated",
}


def taken(fault, family):
    return family in fault.families and (family != MOE or fault.families == (MOE,) or fault.name in SHARED_ON_MOE)


CASES = [(family, fault) for family in FAMILIES for fault in FAULTS if fault.observable and taken(fault, family)]
UNOBSERVABLE = [(f, fault) for f in FAMILIES for fault in FAULTS if not fault.observable and f in fault.families]
# They stay within 2.5 times of the whole forward's rounding, but not within twice that of the merger alone.
FOUND_NONETHELESS = {(QWEN3, "merger QuickGELU for GELU"), (MOE, "merger QuickGELU for GELU")}
QUESTIONS = (
    "List every shape with its color and center.",
    "Point at the center of the red rectangle and then of the green circle.",
    "What is the bounding box of the blue circle? Answer with four numbers and nothing else, and take your time.",
    "Where?",
)
GRIDS = ((4, 4), (5, 7), (8, 10), (10, 12), (4, 12), (9, 5))
CLEAN = [(family, number) for family in FAMILIES for number in range(18)]


def once(family, fault):
    """Every fault on one family, and those that only one family tells from rounding there, too."""
    return family == fault.families[0] or (family == QWEN3 and (family, fault.name) in FOUND_NONETHELESS)


def in_turn(family, number):
    """A third of CLEAN: every number once, and every grid on every family."""
    return (number + number // len(GRIDS)) % len(FAMILIES) == FAMILIES.index(family)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def held(trace):
    """The trace with its tensors in memory."""
    return Trace(trace.info, dict(trace.tensors))


@pytest.fixture(scope="module")
def clean(hf_engines, ask, tmp_path_factory):
    """family to (engine, inputs, trace without a fault)."""
    made = {}

    def opened(family):
        if family not in made:
            engine, inputs = hf_engines(family), ask(family, GRID, seed=34)
            folder = tmp_path_factory.mktemp("clean") / "trace"
            made[family] = engine, inputs, held(engine.capture(inputs, folder))
        return made[family]

    return opened


@pytest.fixture(scope="module")
def verdict_on(hybrids):
    """(trace, baseline) to a Verdict."""

    def judged(trace, baseline):
        hybrid = hybrids(trace.info.family)
        exact = hybrids(trace.info.family, torch.float64)
        return judge(hybrid, exact, trace, asked_of(hybrid, trace, baseline))

    return judged


@pytest.fixture(scope="module")
def outcome(clean, verdict_on, tmp_path_factory):
    """(family, fault) to the Verdict on the faulty engine; each computed once."""
    made = {}

    def judged(family, fault):
        if (family, fault.name) not in made:
            engine, inputs, trace = clean(family)
            with fault.plant(engine.model, engine.checkpoint.config):
                faulty = engine.capture(inputs, tmp_path_factory.mktemp("faulty") / "trace")
            made[family, fault.name] = verdict_on(held(faulty), trace)
        return made[family, fault.name]

    return judged


# ---------------------------------------------------------------------------------------------------- faults


def identify(value):
    return getattr(value, "name", value)


@pytest.mark.parametrize(("family", "fault"), sampled(CASES, keep=once), ids=identify)
def test_a_fault_is_a_bug_and_found_where_it_acts_first(family, fault, outcome, clean):
    verdict = outcome(family, fault)
    assert verdict.word == "bug"
    assert verdict.first.hookpoint == fault.first(clean(family)[0].checkpoint.config)
    assert verdict.first.ratio > MARGIN or verdict.first.token_ratio > MARGIN
    assert verdict.first.hookpoint in verdict.sentence() and verdict.sentence().startswith("bug: first at")


@pytest.mark.exhaustive(instead="test_a_fault_is_a_bug_and_found_where_it_acts_first")
def test_all_faults_are_found_and_nine_of_ten_located(outcome, clean):
    found, located, missed = 0, 0, []
    for family, fault in CASES:
        verdict = outcome(family, fault)
        found += verdict.word == "bug"
        place = verdict.first and verdict.first.hookpoint
        located += place == fault.first(clean(family)[0].checkpoint.config)
        if verdict.word != "bug":
            missed.append(f"{family}: {fault.name}")
    assert found == len(CASES), f"{found} of {len(CASES)} faults found; missed: {missed}"
    assert located >= 0.9 * len(CASES), f"{located} of {len(CASES)} faults located"


@pytest.mark.parametrize(("family", "fault"), sampled(UNOBSERVABLE, keep=once), ids=identify)
def test_a_change_of_the_size_of_rounding_is_rounding(family, fault, outcome, clean):
    verdict = outcome(family, fault)
    if (family, fault.name) in FOUND_NONETHELESS:
        assert verdict.word == "bug"
        assert {f.hookpoint for f in verdict.outside} == {fault.first(clean(family)[0].checkpoint.config)}
        return
    assert verdict.word == "rounding", verdict.sentence()
    assert verdict.first is None


def test_every_case_of_the_lists_exists():
    assert len(CASES) >= 90
    assert {fault.name for fault in FAULTS} >= SHARED_ON_MOE
    assert {family for family, _ in CASES} == {family for family, _ in UNOBSERVABLE} == set(FAMILIES)
    assert sum(fault.families == (MOE,) for _, fault in CASES) >= 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stale", [0, 5])
def test_a_stale_rope_delta_is_found_in_the_decode_steps(family, stale, clean, hybrids, monkeypatch, tmp_path):
    """Positions of decode steps that miss the picture's offset; without a fault the same steps are rounding."""
    engine, inputs, prefill = clean(family)
    hybrid, exact, tokens = hybrids(family), hybrids(family, torch.float64), [11, 12, 13]
    decode = engine._decode
    monkeypatch.setattr(engine, "_decode", lambda ids, positions, cache: decode(ids, positions + stale, cache))
    traces = [held(trace) for trace in engine.capture_decode(inputs, tmp_path, len(tokens), tokens)[0]]
    asked = asked_of(hybrid, prefill, prefill)
    steps = [(trace, asked_of_step(asked, k, tokens[k])) for k, trace in enumerate(traces)]
    first, *verdicts = judge_steps(hybrid, exact, [(prefill, asked), *steps])
    assert first.word == "rounding" and len(verdicts) == len(tokens)
    for verdict in verdicts:
        if stale:
            assert verdict.word == "bug" and verdict.first.hookpoint == "layers.0.attn_out"
        else:
            assert verdict.word == "rounding" and all(finding.exact for finding in verdict.findings)


def test_what_is_nowhere_above_one_unit_is_called_not_observable(clean, verdict_on):
    _, _, trace = clean(QWEN2)
    tensors = dict(trace.tensors)
    moved = tensors["final_norm"].clone()
    moved[3, 5] = torch.nextafter(moved[3, 5], torch.tensor(torch.inf, dtype=moved.dtype))
    tensors["final_norm"] = moved
    verdict = verdict_on(Trace(trace.info, tensors), trace)
    assert verdict.word == "rounding" and "a fault here is not observable" in verdict.sentence()
    assert "not observable" not in verdict_on(trace, trace).sentence()  # bit-equal: nothing is there
    moved[3, 5] = torch.nextafter(moved[3, 5], torch.tensor(torch.inf, dtype=moved.dtype))
    assert "not observable" not in verdict_on(Trace(trace.info, tensors), trace).sentence()


# ---------------------------------------------------------------------------------------------------- clean


@pytest.mark.parametrize(("family", "number"), sampled(CLEAN, keep=in_turn))
def test_a_clean_engine_is_never_a_bug(family, number, hf_engines, ask, verdict_on, tmp_path):
    grid, question = GRIDS[number % len(GRIDS)], QUESTIONS[number % len(QUESTIONS)]
    texture = (None, unseen_texture)[number // 3 % 2]
    inputs = ask(family, grid, 1000 + number, question, texture)
    attention = ("sdpa", "eager")[number // 2 % 2]
    trace = held(hf_engines(family, attention).capture(inputs, tmp_path / "trace"))
    verdict = verdict_on(trace, trace)
    assert verdict.word == "rounding", verdict.sentence()
    assert len(verdict.findings) == len(trace.hook_points)
    assert [finding.hookpoint for finding in verdict.findings] == list(trace.hook_points)


def test_the_clean_inputs_differ_in_size_texture_length_and_attention(ask):
    assert len(CLEAN) >= 50
    choices = {(GRIDS[n % 6], QUESTIONS[n % 4], n // 3 % 2, n // 2 % 2) for _, n in CLEAN}
    assert all(len({choice[i] for choice in choices}) == count for i, count in enumerate((6, 4, 2, 2)))
    kept = [case for case in CLEAN if in_turn(*case)]
    assert {n for _, n in kept} == set(range(18)) and {(f, n % 6) for f, n in kept} == {(f, n % 6) for f, n in CLEAN}
    assert len({ask(QWEN2, (4, 4), 0, question).tokens for question in QUESTIONS}) == len(QUESTIONS)
    assert len({ask(QWEN2, (4, 4), seed).hash for seed in range(5)}) == 5
    assert ask(QWEN2, (4, 4), 0).hash != ask(QWEN2, (4, 4), 0, texture=unseen_texture).hash


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_is_rounding(family, hf_engines, ask, verdict_on, tmp_path):
    trace = held(hf_engines(family).capture(ask(family), tmp_path / "trace"))
    assert verdict_on(trace, trace).word == "rounding"


@pytest.mark.engine
@pytest.mark.parametrize("number", range(5))
def test_sglang_is_never_a_bug(number, sglang_engine, hf_engines, ask, verdict_on, tmp_path):
    texture = (None, unseen_texture)[number % 2]
    inputs = ask(QWEN2, GRIDS[number], 2000 + number, QUESTIONS[number % len(QUESTIONS)], texture)
    hf = held(hf_engines(QWEN2).capture(inputs, tmp_path / "hf"))
    sglang = held(sglang_engine.capture(inputs, tmp_path / "sglang", vision_output(hf)))
    verdict = verdict_on(sglang, hf)
    assert verdict.word == "rounding", verdict.sentence()
    assert all(finding.exact for finding in verdict.findings)  # its own plan is among the legal ones
    assert len(verdict.findings) == len(sglang.hook_points)


# ---------------------------------------------------------------------------------------------------- none of the plans


@torch.no_grad()
def rounded_forward(hybrid, asked, plan):
    """A forward in the hybrid's dtype in which only what the hook points hold is rounded to bfloat16."""
    states = {}

    def keep(name, tensor):
        states[name] = tensor.bfloat16()
        return states[name].to(hybrid.dtype)

    grid = int(asked.grid_thw[0, 1]), int(asked.grid_thw[0, 2])
    x = keep("vision.patch_embed", hybrid.patch_embed(asked.pixels, plan))
    x = keep("vision.0.resid_pre", hybrid.add_positions(x, grid, plan))
    rotary, deepstack = hybrid.vision_rotary(grid), []
    for i in range(hybrid.vision_depth):
        half = keep(f"vision.{i}.attn_out", hybrid.vision_attention(i, x, rotary, plan))
        x = keep(f"vision.{i}.resid_mid", x + half)
        half = keep(f"vision.{i}.mlp_out", hybrid.vision_mlp(i, x, plan))
        x = keep(f"vision.{i}.resid_post", x + half)
        if i in hybrid.deepstack_layers:
            k = len(deepstack)
            deepstack.append(keep(f"vision.deepstack.{k}", hybrid.deepstack_merger(k, x, plan)))
    seen = Seen(keep("vision.merger", hybrid.merger(x, plan)), tuple(deepstack))
    rows, rotary, cache = hybrid.image_rows(asked.input_ids), hybrid.text_rotary(asked.positions), Cache()
    x = keep("layers.0.resid_pre", hybrid.embed(asked.input_ids, seen))
    for i in range(hybrid.depth):
        half = keep(f"layers.{i}.attn_out", hybrid.attention(i, x, rotary, plan, cache))
        x = keep(f"layers.{i}.resid_mid", hybrid.add(x, half, i, plan)[0])
        routing = keep(f"layers.{i}.router_logits", hybrid.router_logits(i, x, plan)) if hybrid.sparse else None
        half = keep(f"layers.{i}.mlp_out", hybrid.mlp(i, x, plan, routing))
        if i < len(deepstack):
            keep(f"layers.{i}.before_deepstack", x + half)
            x, half = hybrid.add_deepstack(i, x, half, deepstack[i], rows, plan)
        x = keep(f"layers.{i}.resid_post", hybrid.add(x, half, i + 1, plan)[0])
    keep("logits", hybrid.logits(keep("final_norm", hybrid.final_norm(x, plan)), plan))
    return states


def exact_share(verdict):
    return sum(finding.exact for finding in verdict.findings) / len(verdict.findings)


@pytest.mark.parametrize("plan", [hf_plan(), sglang_plan()], ids=["hf", "sglang"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_rounded_at_the_hook_points_is_rounding(family, plan, clean, hybrids, verdict_on):
    _, _, trace = clean(family)
    wide = hybrids(family, torch.float32)
    states = rounded_forward(wide, asked_of(wide, trace, trace), plan)
    assert set(states) == set(trace.hook_points)
    inputs = {name: tensor for name, tensor in trace.tensors.items() if name.startswith("inputs.")}
    verdict = verdict_on(Trace(trace.info, inputs | states), trace)
    assert verdict.word == "rounding", verdict.sentence()
    assert exact_share(verdict) < 0.6  # sums round alike everywhere; attention and MLPs do not


@pytest.mark.parametrize("grid", [(4, 4), (8, 10)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_attention_kernel_is_rounding(family, grid, hf_engines, ask, verdict_on, tmp_path):
    inputs = ask(family, grid, 7)
    with sdpa_kernel(SDPBackend.MATH):
        trace = held(hf_engines(family).capture(inputs, tmp_path / "trace"))
    verdict = verdict_on(trace, trace)
    assert verdict.word == "rounding", verdict.sentence()
    assert exact_share(verdict) < 1


@pytest.mark.parametrize("family", FAMILIES)
def test_another_number_of_threads_is_rounding(family, clean, verdict_on, tmp_path):
    engine, inputs, trace = clean(family)
    torch.set_num_threads(2)
    try:
        other = held(engine.capture(inputs, tmp_path / "trace"))
    finally:
        torch.set_num_threads(1)
    assert other.info.threads == 2 and trace.info.threads == 1
    assert verdict_on(other, trace).word == "rounding"


@pytest.mark.parametrize("way", ["eager", "batched_mm"])
def test_another_way_to_call_the_experts_is_rounding(way, clean, verdict_on, tmp_path):
    engine, inputs, trace = clean(MOE)
    before = engine.model.config._experts_implementation
    engine.model.set_experts_implementation(way)
    try:
        assert engine.model.config.text_config._experts_implementation == way != before
        other = held(engine.capture(inputs, tmp_path / "trace"))
    finally:
        engine.model.set_experts_implementation(before)
    verdict = verdict_on(other, trace)
    assert verdict.word == "rounding", verdict.sentence()


# ---------------------------------------------------------------------------------------------------- judging


def changed(trace, name, change):
    tensor = trace[name].clone()
    change(tensor)
    return Trace(trace.info, {**trace.tensors, name: tensor})


def test_a_single_wrong_token_is_a_bug_and_named(clean, verdict_on):
    _, _, trace = clean(QWEN2)

    def negate(tensor):
        tensor[17] *= -1

    verdict = verdict_on(changed(trace, "layers.20.mlp_out", negate), trace)
    assert verdict.word == "bug"
    assert (verdict.first.hookpoint, verdict.first.layer, verdict.first.token) == ("layers.20.mlp_out", 20, 17)
    assert verdict.first.operation == OPERATIONS["mlp_out"]
    assert not verdict.first.exact
    assert "token 17" in verdict.sentence()
    assert verdict.outside[0] is verdict.first


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_a_bug(value, clean, verdict_on):
    _, _, trace = clean(QWEN2)

    def spoil(tensor):
        tensor[5, 3] = value

    verdict = verdict_on(changed(trace, "layers.27.mlp_out", spoil), trace)
    assert verdict.word == "bug"
    assert (verdict.first.hookpoint, verdict.first.token) == ("layers.27.mlp_out", 5)


def test_a_wrong_pixel_and_a_wrong_logit_are_bugs(clean, verdict_on):
    _, _, trace = clean(QWEN3)
    for name, place in (("vision.patch_embed", 100), ("logits", 0), ("final_norm", 60), ("layers.0.resid_pre", 2)):
        verdict = verdict_on(changed(trace, name, lambda tensor, at=place: tensor[at].mul_(1.5)), trace)
        assert (verdict.word, verdict.first.hookpoint, verdict.first.token) == ("bug", name, place)


def test_an_error_does_not_make_later_operations_suspect(clean, verdict_on):
    _, _, trace = clean(QWEN2)

    def shift(tensor):
        tensor += 1

    verdict = verdict_on(changed(trace, "layers.9.resid_post", shift), trace)
    # the sum that should have made the changed stream, and what reads it; the MLP reads the next sum as recomputed
    near = {"layers.9.resid_post", *(f"layers.10.{name}" for name in ("attn_out", "resid_mid", "mlp_out"))}
    assert verdict.first.hookpoint == "layers.9.resid_post"
    assert {finding.hookpoint for finding in verdict.outside} <= near


def test_nothing_captured_with_its_input_is_no_evidence(clean, verdict_on):
    _, _, trace = clean(QWEN2)
    inputs = {name: tensor for name, tensor in trace.tensors.items() if name.startswith("inputs.")}
    bare = Trace(trace.info, inputs)
    outputs_only = Trace(trace.info, {**inputs, "layers.7.mlp_out": trace["layers.7.mlp_out"]})
    for nothing in (bare, outputs_only):
        verdict = verdict_on(nothing, trace)
        assert verdict == Verdict("no evidence", ())
        assert verdict.first is None and verdict.sentence().startswith("no evidence: 0 of 0")


def test_legal_plans_are_one_function_in_float64(clean, hybrids):
    _, _, trace = clean(QWEN3)
    exact = hybrids(QWEN3, torch.float64)
    asked = asked_of(exact, trace, trace)
    first, *others = [local_states(exact, trace, asked, plan) for plan in legal_plans()]
    assert len(others) >= 3
    for states in others:
        assert all((states[name] - first[name]).norm() <= 1e-13 * first[name].norm() for name in first)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_is_judged_by_its_own_states_though_plans_share_a_vision_part(clean, hybrids, monkeypatch, family):
    _, _, trace = clean(family)
    hybrid, exact, given = hybrids(family), hybrids(family, torch.float64), {}
    find, asked = judging._find, asked_of(hybrid, trace, trace)

    def watched(name, operation, target, truth, legal, alternatives):
        given[name] = legal
        return find(name, operation, target, truth, legal, alternatives)

    monkeypatch.setattr(judging, "_find", watched)
    judge(hybrid, exact, trace, asked)
    for k, plan in enumerate(legal_plans()):
        alone = local_states(hybrid, trace, asked, plan)
        assert alone.keys() == given.keys()
        assert [name for name in alone if differing(alone[name], given[name][k])] == []


def test_every_operation_has_words(checkpoints):
    for checkpoint in checkpoints.values():
        for point in hook_points(checkpoint.config):
            assert operation_of(point.name) in OPERATIONS.values()
    assert operation_of("vision.deepstack.2") == "deepstack merger"
    assert operation_of("vision.3.resid_post") == "residual sum after the MLP"
    early = ("layers.0.before_deepstack", "layers.0.resid_post", "layers.1.resid_post")
    assert operation_of(early[1], early) == "residual sum after the MLP and deepstack addition"
    assert operation_of(early[2], early) == "residual sum after the MLP"


def test_findings_are_plain_values(clean, verdict_on):
    _, _, trace = clean(MOE)
    verdict = verdict_on(trace, trace)
    row = json.loads(json.dumps(dataclasses.asdict(verdict.findings[-1]), allow_nan=False))
    assert row["hookpoint"] == "logits" and row["exact"] is True and row["layer"] is None
    assert all(finding.ratio <= 1 and finding.token_ratio <= 1 for finding in verdict.findings if finding.exact)


def test_either_of_two_tied_experts_may_be_taken_and_no_other(clean, hybrids, verdict_on):
    _, _, trace = clean(MOE)
    hybrid, layer, token = hybrids(MOE), 4, 9
    router, mlp_out = f"layers.{layer}.router_logits", f"layers.{layer}.mlp_out"
    logits = trace[router].clone()
    first, second, third = logits[token].topk(3).indices.tolist()
    logits[token, third] = logits[token, second]
    names = [f"layers.{layer}.{half}" for half in ("resid_pre", "attn_out")]
    read = hybrid.add(*(trace[name] for name in names), layer, hf_plan())[1]
    fourth = next(x for x in range(logits.shape[1]) if x not in (first, second, third))
    for expert, outside, ties in ((second, False, 1), (third, False, 1), (fourth, True, 1)):
        chosen = logits.topk(2).indices
        chosen[token] = torch.tensor([first, expert])
        with torch.no_grad():
            out = hybrid.mlp(layer, read, hf_plan(), logits, chosen)
        taken = Trace(trace.info, {**trace.tensors, router: logits, mlp_out: out})
        [finding] = [f for f in verdict_on(taken, trace).findings if f.hookpoint == mlp_out]
        assert (finding.outside, finding.ties >= ties) == (outside, True), expert
