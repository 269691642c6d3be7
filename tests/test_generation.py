"""Forced is free where the tokens are the same, every way sees the same rows, and no state is left from before."""

import json

import pytest
import torch
from conftest import STEPS

from vlmlab import engines, generation
from vlmlab.attribution import explain_steps
from vlmlab.drift import spread, step_table
from vlmlab.engine_hf import open_hf, vision_output
from vlmlab.errors import VlmlabError
from vlmlab.generation import Answer, capture_answers, check_room, end_of_text, stacked, unexplained
from vlmlab.metrics import bitwise_equal
from vlmlab.passes import Passes
from vlmlab.store import store_folder
from vlmlab.trace import write_json

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def asking(inputs, traces):
    """(Inputs, HF trace, SGLang trace) of the reference input, whose answer is long."""
    return inputs, *traces


def test_every_engine_follows_its_own_tokens_and_forced_ones_are_transformers(answers, asking, sglang_engine):
    assert len(answers.hf.tokens) == len(answers.sglang.tokens) == STEPS + 1
    assert answers.forced.tokens == answers.hf.tokens
    for answer in (answers.hf, answers.sglang):
        assert answer.logits.argmax(-1).tolist() == list(answer.tokens)
    assert list(answers.sglang.tokens) == sglang_engine.generate(asking[0], STEPS + 1, vision_output(asking[1]))
    pairs = zip(answers.hf.tokens, answers.sglang.tokens, strict=True)
    same = next((k for k, (a, b) in enumerate(pairs) if a != b), STEPS)
    assert same and all(
        bitwise_equal(a[name], b[name])
        for a, b in zip(answers.sglang.steps[:same], answers.forced.steps, strict=False)
        for name in a.hook_points
    )


def test_every_way_has_the_same_rows(answers):
    end = {name: way["layers.27.resid_post"] for name, way in answers.ways.items()}
    assert {
        "decode",
        "prefill",
        f"prefill in chunks of {generation.CHUNK}",
        "decode, batch of 4",
        "Transformers, decode",
    } <= set(end)
    assert {len(states) for states in end.values()} == {STEPS}
    seen = end["decode, batch of 4"].isfinite().all(1)
    assert seen.sum() >= STEPS - 2 * generation.COPIES
    for way in spread({name: states[seen] for name, states in end.items()}, "decode"):
        assert way.min_cosine > 0.9 and way.undefined == 0, way
    shifted = torch.stack((end["decode"], end["prefill"].roll(1, 0)))
    assert torch.cosine_similarity(*shifted.double(), dim=-1).min() < 0.9  # a row too early would be seen


def test_on_policy_is_refused_here_in_one_sentence(answers):
    if torch.cuda.is_available():
        pytest.skip("SGLang takes rl_on_policy_target on CUDA")
    assert answers.on_policy is None
    assert "attention backends are supported" in answers.refused[generation.ON_POLICY]


def test_the_store_is_read_and_a_run_cut_short_is_not(answers, asking, checkpoint, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a stored capture must not start an engine")

    with monkeypatch.context() as patch:
        patch.setattr(engines, "open_hf", never)
        patch.setattr(engines, "open_sglang", never)
        again = capture_answers(checkpoint, *asking, STEPS, shapes=False)
        assert again.hf.tokens == answers.hf.tokens and list(again.ways) == ["decode"]
        (noted,) = store_folder().glob(f"*-{STEPS}-answers/forced/tokens.json")
        kept = noted.read_text()
        noted.unlink()
        with pytest.raises(AssertionError, match="must not start"):
            capture_answers(checkpoint, *asking, STEPS, shapes=False)
        noted.write_text(kept)


def test_every_step_of_both_engines_is_reproduced_by_the_causes(answers, asking, checkpoint):
    again = explain_steps(Passes.of(checkpoint), *asking[1:], answers.hf.tokens[:-1])
    assert unexplained(answers.hf.steps, again.baseline) == unexplained(answers.forced.steps, again.target) == 0
    assert unexplained(answers.hf.steps, again.target) > 0
    assert set(again.alone) == {"rms_norm", "residual_sum"}
    assert all(len(change) == STEPS for change in again.alone.values())
    assert again.truth[again.end].dtype == torch.float64 and len(again.truth["logits"]) == STEPS + 1
    table = step_table(answers.hf.logits, answers.forced.logits, None, answers.hf.tokens)
    assert len(table) == STEPS + 1 and table[0].kl is not None


# ---------------------------------------------------------------------------------------------------- stale states


def test_text_after_a_picture_is_what_a_fresh_process_gives(asking, sglang_first, sglang_engine, tmp_path):
    text, steps, first, prefill = sglang_first
    sglang_engine.capture(asking[0], tmp_path / "picture")
    after, tokens = sglang_engine.capture_decode(text, tmp_path / "after", 3)
    assert tokens == first
    pairs = [*zip(after, steps, strict=True), (sglang_engine.capture(text, tmp_path / "after_prefill"), prefill)]
    assert all(bitwise_equal(a[name], b[name]) for a, b in pairs for name in b.tensors)


def test_text_after_a_picture_is_what_a_fresh_model_gives(asking, ask, checkpoint, hf_engines, tmp_path):
    text = ask("qwen2_vl", question="List every shape with its color and center.")
    used = hf_engines("qwen2_vl")
    used.capture(asking[0], tmp_path / "picture")
    after, tokens = used.capture_decode(text, tmp_path / "after", 3)
    with open_hf(checkpoint) as fresh:
        steps, first = fresh.capture_decode(text, tmp_path / "fresh", 3)
    assert tokens == first
    assert all(bitwise_equal(a[n], b[n]) for a, b in zip(after, steps, strict=True) for n in b.tensors)


def test_a_second_picture_of_the_same_size_never_gets_the_first_ones_result(ask, sglang_engine, hf_engines, tmp_path):
    one, two = (ask("qwen2_vl", (6, 8), seed=seed) for seed in (1, 2))
    for engine in (sglang_engine, hf_engines("qwen2_vl")):
        folder = tmp_path / engine.name
        alone = engine.capture(two, folder / "alone")
        first, second = engine.capture(one, folder / "one"), engine.capture(two, folder / "two")
        assert not bitwise_equal(first["vision.merger"], second["vision.merger"])
        assert not bitwise_equal(first["final_norm"], second["final_norm"])
        assert all(bitwise_equal(alone[name], second[name]) for name in alone.tensors)


# ---------------------------------------------------------------------------------------------------- bad input


def test_an_answer_that_does_not_fit_is_refused_before_any_engine_starts(asking, checkpoint, monkeypatch):
    monkeypatch.setattr(engines, "open_hf", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(VlmlabError, match="do not fit into max_total_tokens = 200"):
        capture_answers(checkpoint, *asking, 100, engine_args={"max_total_tokens": 200})
    with pytest.raises(VlmlabError, match="do not fit into max_position_embeddings"):
        check_room(checkpoint, asking[0], 10**6, {})
    with pytest.raises(VlmlabError, match="at least 1 step"):
        check_room(checkpoint, asking[0], 0, {})


def answer(*tokens, bad=None):
    logits = torch.zeros(1, 8)
    steps = [{"logits": logits if k != bad else logits * torch.nan} for k in range(len(tokens) - 1)]
    return Answer(tokens, tuple(steps), logits)


def test_an_answer_ends_where_the_text_does(checkpoint):
    assert end_of_text(checkpoint) == {2}
    cut = generation._until_end(answer(5, 6, 2, 7), 3, frozenset({2}))
    assert cut.tokens == (5, 6, 2) and len(cut.steps) == 2 and cut.ended == "the answer ends at step 2"
    whole = generation._until_end(answer(5, 6, 7), 2, frozenset({2}))
    assert whole.tokens == (5, 6, 7) and not whole.ended
    with pytest.raises(VlmlabError, match="the answer is empty: the first token ends it"):
        generation._until_end(answer(2, 5), 1, frozenset({2}))
    with pytest.raises(VlmlabError, match="the answer is empty: the logits of the prefill are not finite"):
        generation._until_end(Answer((), (), torch.zeros(1, 8)), 3, frozenset())


def test_what_came_before_logits_that_are_not_finite_is_kept_and_labelled(asking, hf_engines, tmp_path, monkeypatch):
    engine, plain = hf_engines("qwen2_vl"), hf_engines("qwen2_vl").model.lm_head.forward
    calls = []

    def broken(states):
        calls.append(1)
        return plain(states) * (torch.nan if len(calls) == 4 else 1.0)

    monkeypatch.setattr(engine.model.lm_head, "forward", broken)
    steps, tokens = engine.capture_decode(asking[0], tmp_path, 6)
    assert len(steps) == 3 and len(tokens) == 3 and not steps[-1]["logits"].isfinite().any()
    cut = generation._until_end(Answer(tuple(tokens), steps, torch.zeros(1, 448)), 6, frozenset())
    assert cut.ended == "logits are not finite at step 2" and len(cut.steps) == 3
    table = step_table(cut.logits[1:], cut.logits[1:], None, tokens)
    assert [step.status for step in table] == ["ok", "ok", "non_finite"]
    assert stacked(steps, "final_norm").shape[0] == 3


def test_a_note_that_is_broken_is_no_stored_run(tmp_path):
    assert generation._stored(tmp_path, False) is None
    for broken in ("{", "[]", json.dumps({"tokens": [1], "steps": 2})):
        (tmp_path / "tokens.json").write_text(broken)
        assert generation._stored(tmp_path, False) is None
    write_json(tmp_path / "tokens.json", {"tokens": [1], "steps": 0})
    assert generation._stored(tmp_path, False) == ((), [1]) and generation._stored(tmp_path, True) is None
