"""Cases asked at once answer as each alone; where bits differ it is counted, and a planted difference is found."""

import dataclasses
import json

import pytest
import torch

from vlmlab import ask
from vlmlab.ask import Forward, Way, ask_hybrid
from vlmlab.batching import batch_effect
from vlmlab.causes import hf_plan, sglang_plan
from vlmlab.errors import VlmlabError
from vlmlab.grounding import BOX_QUESTION, case_of, cases
from vlmlab.hookpoints import FAMILIES
from vlmlab.hypotheses import HYPOTHESES, of_family

pytestmark = pytest.mark.usefixtures("one_thread")
MOE = FAMILIES[2]
IN_FP8 = Way(hf_plan().switched("fp8", "channel/token"))
EXACT = Way(hf_plan(), torch.float64)


@pytest.fixture(scope="module")
def forwards(checkpoints):
    """By family; each loaded once."""
    return {family: Forward(checkpoints[family]) for family in FAMILIES}


@pytest.fixture(scope="module")
def posed():
    """Four questions about pictures of one size."""
    return cases(5, (140, 168))[1:]


def watched(monkeypatch, change=lambda logits: logits):
    """Sizes of the batches that the language model reads and tokens of each. change: of the logits."""
    sizes, language = [], ask.Hybrid.language

    def seen(self, ids, *others):
        sizes.append((len(ids), ids.shape[1]))
        return change(language(self, ids, *others))

    monkeypatch.setattr(ask.Hybrid, "language", seen)
    return sizes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", [hf_plan(), hf_plan("eager"), sglang_plan()], ids=["hf", "eager", "sglang"])
def test_in_bfloat16_a_batch_has_the_bits_of_each_case_alone(family, plan, forwards, posed):
    found = batch_effect(forwards[family], posed, Way(plan))
    assert found.cases == 4 and found.decode_steps > 4 * 5 and json.dumps(dataclasses.asdict(found))
    assert found.answers == found.prefills == 0
    if family == MOE:  # a product with one row of 32 channels may take another kernel: one element of 100000
        assert found.steps < found.decode_steps
    else:
        assert found.bitwise_equal and found.largest == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_a_batch_is_rounding_and_said_to_be(family, forwards, posed):
    found = batch_effect(forwards[family], posed, EXACT)
    assert found.answers == 0 and found.largest < 1e-11
    assert found.bitwise_equal == (found.largest == 0.0 and found.prefills == found.steps == 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp8_prefills_have_the_same_bits_and_answers_stay(family, forwards, posed, monkeypatch):
    sizes = watched(monkeypatch)
    found = batch_effect(forwards[family], posed, IN_FP8)
    assert found.prefills == found.answers == 0
    assert max(sizes)[0] == (1 if family == MOE else 4)  # experts share a scale over the rows of a call
    assert found.bitwise_equal or family != MOE


def test_experts_in_fp8_share_a_scale_in_bfloat16_only(forwards, posed):
    forward = forwards[MOE]
    forward.ask(posed[0], EXACT)
    forward.ask(posed[0], IN_FP8)
    coarse, exact = forward._hybrids[None].fp8, forward._hybrids[torch.float64].fp8
    mixing = [
        how for how in ("hf", "tensor/token", "tensor/none", "channel/token", "block/group") if coarse.mixes_rows(how)
    ]
    assert mixing == ["tensor/token", "channel/token"]
    assert not exact.mixes_rows("channel/token")


def test_experts_that_share_a_scale_would_change_more_than_rounding_does(forwards, posed, monkeypatch):
    monkeypatch.setattr("vlmlab.fp8_weights.FP8Weights.mixes_rows", lambda *_: False)
    assert batch_effect(forwards[MOE], posed, IN_FP8).prefills > 0


@pytest.mark.parametrize("row", [0, 2])
def test_one_row_that_a_batch_changes_is_found(row, forwards, posed, monkeypatch):
    def nudged(logits):
        if len(logits) == 4:
            flat = logits[row]
            flat[7] = torch.nextafter(flat[7], torch.full_like(flat[7], torch.inf))
        return logits

    sizes = watched(monkeypatch, nudged)
    found = batch_effect(forwards["qwen3_vl"], posed, Way(hf_plan()))
    assert found.prefills == 1 and 0 < found.steps <= found.decode_steps / 2 and not found.bitwise_equal
    assert max(sizes)[0] == 4 and min(sizes)[0] == 1


def test_a_swap_of_two_sequences_changes_their_answers(forwards, posed, monkeypatch):
    watched(monkeypatch, lambda logits: logits[[1, 0, 2, 3]] if len(logits) == 4 else logits)
    found = batch_effect(forwards["qwen3_vl"], posed, Way(hf_plan()))
    assert found.answers >= 2 and found.prefills == 2


def test_one_case_is_no_evidence(forwards, posed):
    with pytest.raises(VlmlabError, match="expected at least two cases to batch, got 1"):
        batch_effect(forwards["qwen3_vl"], posed[:1], Way(hf_plan()))


# ---------------------------------------------------------------------------------------------------- ask_hybrid


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_sizes_and_prompts_keep_their_order(family, forwards, monkeypatch):
    small = [case_of((112, 140), (20 + 9 * i, 30, 60 + 9 * i, 80), "red", "rectangle") for i in range(3)]
    asked = f"{small[1].question} It is there."
    mixed = [small[0], *cases(3, (140, 168), 1)[1:], dataclasses.replace(small[1], question=asked), small[2]]
    sizes, forward = watched(monkeypatch), forwards[family]
    found = ask_hybrid(forward, mixed, {"": Way(hf_plan())})[""]
    prefills = [batch for batch, tokens in sizes if tokens > 1]
    assert sorted(prefills) == [1, 2, 2]
    assert found == [forward.judge(case, Way(hf_plan())) for case in mixed]
    assert len({outcome.answer for outcome in found}) > 3


def test_a_batch_is_no_larger_than_said_and_shrinks_as_answers_end(forwards, posed, monkeypatch):
    monkeypatch.setattr(ask, "TOGETHER", 3)
    sizes, forward, way = watched(monkeypatch), forwards["qwen3_vl"], Way(hf_plan())
    boxes = [dataclasses.replace(posed[0], question=BOX_QUESTION), *posed]
    monkeypatch.setattr(ask._Text, "length", lambda *_: 0)  # sorts box and points together
    found = ask_hybrid(forward, boxes, {"": way})[""]
    assert max(batch for batch, _ in sizes) <= 3
    lengths = [len(forward.ask(case, way).tokens) for case in boxes]
    assert sum(batch for batch, tokens in sizes[: -sum(lengths)] if tokens == 1) == sum(n - 1 for n in lengths)
    assert [o.answer for o in found] == [forward.ask(case, way).answer for case in boxes]


def test_an_ended_sequence_leaves_the_batch_and_the_others_keep_their_bits(forwards, posed, monkeypatch):
    forward, way = forwards["qwen3_vl"], Way(hf_plan())
    replies = [forward.ask(case, way) for case in posed]
    early = replies[0].tokens[2]  # a token that ends some answers before others
    assert len({reply.tokens.index(early) if early in reply.tokens else -1 for reply in replies}) > 1
    monkeypatch.setattr(forward.text, "ends", {*forward.text.ends, early})
    sizes = watched(monkeypatch)
    found = batch_effect(forward, posed, way)
    assert found.bitwise_equal
    assert max(sizes)[0] == 4 and {2, 3} & {batch for batch, tokens in sizes if tokens == 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_hypotheses_answer_in_a_batch_as_alone(family, forwards, posed):
    forward, wanted = forwards[family], of_family(family)
    names = [name for name in wanted if name in ("1-D positions", "picture resized twice", "deepstack one row off")]
    ways = {"": Way(hf_plan())} | {name: Way(hf_plan(), hypothesis=HYPOTHESES[name]) for name in names}
    found = ask_hybrid(forward, posed[:2], ways)
    for name, way in ways.items():
        assert [o.answer for o in found[name]] == [forward.judge(case, way).answer for case in posed[:2]], name
    assert all([o.answer for o in found[name]] != [o.answer for o in found[""]] for name in names)


def test_ways_that_compute_alike_compute_once(forwards, posed, monkeypatch):
    sizes, frame = watched(monkeypatch), HYPOTHESES["read in pixels of the resized picture"]
    ways = {"hf": Way(hf_plan()), "order": Way(hf_plan().switched("deepstack_order", "hf"))}
    ways |= {"frame": Way(hf_plan(), hypothesis=frame), "other": Way(sglang_plan())}
    found = ask_hybrid(forwards["qwen3_vl"], posed, ways)
    assert sum(tokens > 1 for _, tokens in sizes) == 2
    assert [o.answer for o in found["hf"]] == [o.answer for o in found["frame"]]
    assert [o.point for o in found["hf"]] != [o.point for o in found["frame"]]
