"""The reach holds what legal plans answer, and not what a fault answers; hand-made logits with known answers."""

import json
import re
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from vlmlab import jitter
from vlmlab.ask import Forward, Reply, Way, ask_hybrid
from vlmlab.causes import hf_plan
from vlmlab.errors import VlmlabError
from vlmlab.grounding import case_of, cases, judge
from vlmlab.hypotheses import HYPOTHESES, ORDERS
from vlmlab.jitter import Reach, coverage, ensemble, legal_reach

CASE = case_of((1000, 1000), (700, 300, 800, 400), "red", "rectangle")
END = 13  # token ids 0 to 9 are digits, then "(", ", ", ")" and the end
TEXTS = [*"0123456789", "(", ", ", ")"]


class Model:
    """A forward with known logits: rivals lie below the written token, and another way lifts them by `noise`."""

    checkpoint = SimpleNamespace(family="qwen3_vl")

    def __init__(self, text="(749, 350)", rivals=None, noise=0.0):
        self.tokens = [TEXTS.index(part) for part in re.findall(r", |.", text)]
        self.rivals, self.noise, self.asked = rivals or {}, noise, []

    def ask(self, case, way, forced=()):
        self.asked.append((way, tuple(forced)))
        tokens, rows = [], []
        wanted = [*self.tokens, END]
        for step in range(len(wanted)):
            row = torch.full((14,), -20.0)
            row[wanted[step]] = 5.0
            for token, below in self.rivals.get(step, {}).items():
                row[token] = 5.0 - below + (self.noise if way == "other" else 0.0)
            rows.append(row)
            tokens.append(forced[step] if step < len(forced) else int(row.argmax()))
        answer = "".join(TEXTS[token] for token in tokens[:-1])
        return Reply(answer, tuple(tokens), torch.stack(rows), (1000, 1000))


def test_without_a_near_tie_only_the_baseline_is_in_reach():
    reach = legal_reach(Model(noise=0.1), CASE, "baseline", ["other"])
    assert [outcome.answer for outcome in reach.answers] == ["(749, 350)"]
    assert reach.box == (749.0, 350.0, 749.0, 350.0) and reach.complete


@pytest.mark.parametrize(("noise", "answers"), [(0.26, ["(749, 350)", "(748, 350)"]), (0.24, ["(749, 350)"])])
def test_a_token_is_followed_where_twice_the_jitter_lifts_it(noise, answers):
    reach = legal_reach(Model(rivals={3: {8: 0.5}}, noise=noise), CASE, "baseline", ["other"])
    assert [outcome.answer for outcome in reach.answers] == answers


def test_near_ties_of_both_coordinates_combine_and_the_box_holds_them():
    model = Model(rivals={2: {5: 0.5}, 7: {1: 0.5}}, noise=0.3)
    reach = legal_reach(model, CASE, "baseline", ["other"])
    assert {outcome.answer for outcome in reach.answers} == {"(749, 350)", "(759, 350)", "(749, 351)", "(759, 351)"}
    assert reach.box == (749.0, 350.0, 759.0, 351.0)
    inside, outside, prose = (judge(CASE, answer, "qwen3_vl") for answer in ("(755, 351)", "(755, 352)", "no"))
    assert [reach.holds(other) for other in (inside, outside, prose)] == [True, False, False]
    found = coverage([reach] * 3, [reach.baseline, inside, outside])
    assert (found.n, found.moved, found.outside) == (3, 2, 1) and json.dumps(asdict(found))


def test_an_unreadable_answer_is_in_reach_only_where_its_text_is():
    model = Model(rivals={8: {9: 0.5}}, noise=0.3)  # a digit for the last bracket
    reach = legal_reach(model, CASE, "baseline", ["other"])
    assert [outcome.status for outcome in reach.answers] == ["ok", "unparsable"]
    assert reach.holds(judge(CASE, "(749, 3509", "qwen3_vl")) and not reach.holds(judge(CASE, "(749", "qwen3_vl"))


def test_too_many_answers_are_said_to_be_incomplete(monkeypatch):
    monkeypatch.setattr(jitter, "MOST_ANSWERS", 3)
    model = Model(rivals={2: {5: 0.5}, 7: {1: 0.5}}, noise=0.3)
    reach = legal_reach(model, CASE, "baseline", ["other"])
    assert len(reach.answers) == 3 and not reach.complete


def test_nothing_to_predict_from_and_other_cases_are_refused():
    with pytest.raises(VlmlabError, match="no evidence"):
        legal_reach(Model(), CASE, "baseline", [])
    outcome = judge(CASE, "(1, 1)", "qwen3_vl")
    reach = Reach(outcome, (outcome,), None, True)
    other = judge(case_of((1000, 1000), (1, 1, 9, 9), "red", "rectangle"), "(1, 1)", "qwen3_vl")
    with pytest.raises(VlmlabError, match="another case"):
        reach.holds(other)
    with pytest.raises(VlmlabError, match="got 1 and 0"):
        coverage([reach], [])


def test_the_embedded_model_moves_inside_its_reach_under_orders_and_outside_without_deepstack(checkpoints):
    checkpoint = checkpoints["qwen3_vl"]
    forward, posed = Forward(checkpoint), cases(3, (160, 160))[1:]
    baseline, *plans = ensemble()
    reaches = [legal_reach(forward, case, baseline, plans) for case in posed]
    orders = {name: Way(hf_plan().switched("deepstack_order", way)) for name, way in ORDERS.items()}
    dropped = {"dropped": Way(hf_plan(), hypothesis=HYPOTHESES["deepstack dropped"])}
    found = {name: coverage(reaches, o) for name, o in ask_hybrid(forward, posed, orders | dropped).items()}
    assert found.pop("dropped").outside == 2
    assert [one.outside for one in found.values()] == [0] * len(ORDERS)
