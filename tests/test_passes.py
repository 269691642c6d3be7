"""Passes that are computed once, also by another process, and that share layers without changing a bit."""

import dataclasses

import pytest
import torch

from vlmlab import arithmetic, passes, store
from vlmlab.causes import causes_of, hf_plan, sglang_plan
from vlmlab.hookpoints import FAMILIES
from vlmlab.passes import Passes, counted
from vlmlab.replay import asked_of, run_plan
from vlmlab.trace import Trace

pytestmark = pytest.mark.usefixtures("one_thread")
QWEN2, QWEN3, MOE = FAMILIES


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VLMLAB_CACHE", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture(scope="module")
def given(hf_engines, hybrids, ask, tmp_path_factory):
    """family to (Asked, Transformers' trace) of a small picture."""
    made = {}

    def given(family):
        if family not in made:
            trace = hf_engines(family).capture(ask(family, (5, 7), seed=13), tmp_path_factory.mktemp("hf") / "trace")
            made[family] = asked_of(hybrids(family), trace, trace), trace
        return made[family]

    return given


def same_cache(a, b):
    """Bit for bit, in every layer."""
    pairs = ((a.keys, b.keys), (a.values, b.values))
    return all(x.keys() == y.keys() and all(torch.equal(x[i], y[i]) for i in x) for x, y in pairs)


def never(*_):
    raise AssertionError("computed again")


def test_a_pass_is_computed_once_in_memory_and_by_other_processes(given, checkpoints, folder, monkeypatch):
    asked, _ = given(QWEN2)
    first = Passes.of(checkpoints[QWEN2])
    found = first.get(asked, "language", hf_plan())
    other = Passes.of(checkpoints[QWEN2])
    truth = other.truth(asked, "language")
    with monkeypatch.context() as patch:
        patch.setattr(passes, "run_plan", never)
        assert first.get(asked, "language", hf_plan()) is found
        again = other.get(asked, "language", hf_plan())
        for one, two in ((found, again), (truth, Passes.of(checkpoints[QWEN2]).truth(asked, "language"))):
            assert (one.bits, one.created) == (two.bits, two.created)  # what was stored says when it was made
            assert list(one.states) == list(two.states) and same_cache(one.cache, two.cache)
            assert all(torch.equal(one.states[n], two.states[n]) for n in one.states)
        for plan in (sglang_plan(), hf_plan().switched("fp8", "channel/token")):  # shows that the check can fail
            with pytest.raises(AssertionError, match="computed again"):
                other.get(asked, "language", plan)
    assert sorted(counted("").values()) == [1, 1]


def test_another_input_code_device_or_environment_is_another_pass(given, checkpoints, folder, monkeypatch):
    asked, _ = given(QWEN2)

    def names(asked=asked):
        ours_now = Passes.of(checkpoints[QWEN2])
        return {ours_now.key("pass", asked.digest(part)) for part in asked.parts}

    plain = names()
    assert plain == names() and len(plain) == 2
    other_ids = asked.input_ids.clone()
    other_ids[0] += 1
    assert len(plain | names(dataclasses.replace(asked, input_ids=other_ids))) == 3  # the vision part is the same
    assert len(plain | names(dataclasses.replace(asked, pixels=asked.pixels + 1))) == 3
    monkeypatch.setattr(store, "_code_hash", lambda modules: "changed code")
    assert not plain & names()
    monkeypatch.undo()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert not plain & names()
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    with monkeypatch.context() as patch:
        patch.setattr(passes, "device_info", lambda device: {"type": "other"})
        assert not plain & names()


def test_a_broken_entry_is_computed_again(given, checkpoints, folder):
    asked, _ = given(QWEN2)
    found = Passes.of(checkpoints[QWEN2]).get(asked, "language", hf_plan())
    (entry,) = folder.glob("pass-*")
    whole = entry.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole.replace(b"order", b"odder")):
        entry.write_bytes(content)
        again = Passes.of(checkpoints[QWEN2]).get(asked, "language", hf_plan())
        assert again.bits == found.bits
    assert sum(counted("").values()) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_that_differs_from_a_layer_on_starts_there_with_the_same_bits(family, given, hybrids, monkeypatch):
    asked, _ = given(family)
    hybrid, begun = hybrids(family), []
    compute = passes.run_plan

    def watched(hybrid, asked, plan, part, before, cache):
        begun.append(0 if before is None else before[0])
        return compute(hybrid, asked, plan, part, before, cache)

    monkeypatch.setattr(passes, "run_plan", watched)
    for part in asked.parts:
        depth = hybrid.depths[part]
        shared = Passes(hybrid)
        shared.get(asked, part, hf_plan())
        for cause in causes_of(family, part):
            for layer in (1, 3, depth - 1) if cause.layered else (depth if cause.name == "head" else 0,):
                layers = range(layer, depth) if cause.layered else None
                plan = hf_plan().switched(cause.name, "sglang", layers, depth)
                begun.clear()
                found = shared.get(asked, part, plan)
                assert begun == [layer]
                alone = Passes(hybrid).get(asked, part, plan)
                assert found.bits == alone.bits and list(found.bits) == list(alone.bits)
                assert same_cache(found.cache, alone.cache)
                assert begun == [layer, 0]


def test_a_state_taken_from_a_wrong_layer_would_be_seen(given, hybrids):
    asked, _ = given(QWEN3)
    hybrid = hybrids(QWEN3)
    states = run_plan(hybrid, asked, hf_plan(), "language")
    right = run_plan(hybrid, asked, hf_plan(), "language", (4, states))
    assert all(torch.equal(right[name], state) for name, state in states.items())
    moved = states | {"layers.3.mlp_out": states["layers.2.mlp_out"]}
    wrong = run_plan(hybrid, asked, hf_plan(), "language", (4, moved))
    assert not torch.equal(wrong["layers.4.attn_out"], states["layers.4.attn_out"])


def test_attention_of_equal_inputs_is_computed_once_and_of_others_is_not(given, hybrids, monkeypatch):
    asked, _ = given(QWEN2)
    hybrid, calls = hybrids(QWEN2), []
    attend = arithmetic.full_attention

    def counting(*args):
        calls.append(args[-1])
        return attend(*args)

    monkeypatch.setattr(arithmetic, "full_attention", counting)
    ours = Passes(hybrid)
    for plan in (hf_plan(), hf_plan().switched("vit_norm_eps", "sglang")):  # the eps is the same number
        ours.get(asked, "vision", plan)
    assert calls == ["hf"] * hybrid.vision_depth
    ours.get(asked, "vision", hf_plan().switched("patch_embed", "sglang"))
    ours.get(asked, "vision", hf_plan().switched("vit_attention", "sglang"))
    assert calls.count("sglang") == hybrid.vision_depth


def test_closure_by_digests_is_closure_by_values(given, hybrids):
    asked, trace = given(QWEN2)
    ours = Passes(hybrids(QWEN2))
    whole, states = ours.closure(trace, asked, hf_plan())
    assert (whole.equal, whole.total, whole.first, states) == (len(trace.hook_points),) * 2 + (None, {})
    wide = {name: tensor.float() if name == "logits" else tensor for name, tensor in trace.tensors.items()}
    assert ours.closure(Trace(trace.info, wide), asked, hf_plan())[0] == whole  # as SGLang may store logits
    one_bit = trace["layers.5.mlp_out"].clone()
    one_bit.view(torch.int16)[3, 7] ^= 1
    broken, states = ours.closure(Trace(trace.info, {**trace.tensors, "layers.5.mlp_out": one_bit}), asked, hf_plan())
    assert (broken.total - broken.equal, broken.elements, broken.first) == (1, 1, "layers.5.mlp_out")
    assert set(states) == set(trace.hook_points)


def test_memory_is_bounded(given, hybrids, monkeypatch):
    asked, _ = given(QWEN2)
    monkeypatch.setattr(passes, "REMEMBERED_BYTES", 1)
    ours = Passes(hybrids(QWEN2))
    first = ours.get(asked, "language", hf_plan())
    assert ours.get(asked, "language", hf_plan()) is not first  # nothing was kept


def test_weights_changed_by_hand_are_never_stored(given, hybrids, folder):
    Passes(hybrids(QWEN2)).get(given(QWEN2)[0], "language", hf_plan())
    assert not folder.exists()
