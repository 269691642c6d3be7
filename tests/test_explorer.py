"""Any plan on a pair of traces of a small picture."""

import pytest
import torch

from vlmlab.causes import hf_plan, sglang_plan
from vlmlab.errors import VlmlabError
from vlmlab.explorer import METRICS, Explorer
from vlmlab.hybrid import Hybrid
from vlmlab.passes import Passes

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def explorer(checkpoint, small_traces):
    return Explorer(Passes(Hybrid(checkpoint), Hybrid(checkpoint, torch.float64)), *small_traces)


def test_nothing_switched_is_transformers_and_everything_is_sglang(explorer):
    for part in explorer.parts:
        nothing = explorer.curve(part, explorer.plan({}), "hf", "relative L2 error")
        assert nothing.table["worst"].max() == 0 and nothing.remainder > 0.9 * nothing.total
        everything = explorer.curve(part, sglang_plan(), "sglang", "1 - cosine")
        assert everything.table["worst"].max() < 1e-12 and everything.remainder == 0
        assert explorer.curve(part, sglang_plan(), "hf", "1 - cosine").table["worst"].max() > 1e-6


def test_the_live_causes_leave_no_remainder_and_one_alone_does(explorer):
    both = explorer.plan({"rms_norm": None, "residual_sum": None})
    assert explorer.curve("language", both, "hf", "1 - cosine").remainder == 0
    assert explorer.curve("language", explorer.plan({"rms_norm": None}), "hf", "1 - cosine").remainder > 0


def test_a_layer_range_changes_nothing_below_it(explorer):
    curve = explorer.curve("language", explorer.plan({"rms_norm": range(10, 28)}), "hf", "relative L2 error")
    worst = curve.table.set_index("hookpoint")["worst"]
    assert worst["layers.9.resid_post"] == 0 < worst["layers.10.resid_post"]


def test_the_envelope_holds_each_legal_plan(explorer):
    for metric in METRICS:
        for plan in (hf_plan(), sglang_plan()):
            table = explorer.curve("language", plan, "truth", metric).table
            assert (table["worst"] <= table["envelope"]).all() and table["envelope"].iloc[-1] > 0


def test_a_curve_is_computed_once(explorer, monkeypatch):
    plan = explorer.plan({"residual_sum": None})
    first = explorer.curve("language", plan, "hf", "1 - cosine")
    monkeypatch.setattr(explorer, "_compute", lambda *_: pytest.fail("computed again"))
    assert explorer.curve("language", plan, "hf", "1 - cosine") is first
    with pytest.raises(pytest.fail.Exception):  # shows that the check above can fail
        explorer.curve("language", explorer.plan({"residual_sum": range(3)}), "hf", "1 - cosine")


def test_an_unknown_choice_is_named(explorer):
    with pytest.raises(VlmlabError, match="expected one of"):
        explorer.curve("language", hf_plan(), "nobody", "1 - cosine")
