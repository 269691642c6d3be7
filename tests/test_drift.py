"""Steps, divergence, states, growth and ways to compute: hand-made numbers with known answers."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmlab.attribution import near_tie
from vlmlab.drift import (
    first_divergence,
    grows,
    in_words,
    margins,
    spread,
    state_drift,
    step_table,
    summary,
)
from vlmlab.errors import VlmlabError

BF16, INF, NAN = torch.bfloat16, math.inf, math.nan


def logits(*rows, dtype=torch.float32):
    return torch.tensor(rows, dtype=dtype)


def one(baseline, target, truth=None, **options):
    (step,) = step_table(baseline, target, truth, [0], **options)
    return step


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---------------------------------------------------------------------------------------------------- steps


def test_kl_and_total_variation_of_known_distributions():
    step = one(logits([0.5, 0.25, 0.25]).log(), logits([0.25, 0.5, 0.25]).log())
    assert step.kl == pytest.approx(0.25 * math.log(2), rel=1e-7)  # float32 logarithms of the inputs
    assert step.total_variation == pytest.approx(0.25, rel=1e-7)
    assert (step.baseline_token, step.target_token, step.agree) == (0, 1, False)
    assert step.baseline_margin == pytest.approx(math.log(2), rel=1e-6)
    assert (step.baseline_logprob, step.target_logprob) == pytest.approx((math.log(0.5), math.log(0.25)), rel=1e-7)


def test_kl_is_of_the_target_from_the_baseline_and_not_the_reverse():
    p, q = logits([0.9, 0.1], dtype=torch.float64).log(), logits([0.5, 0.5], dtype=torch.float64).log()
    assert one(p, q).kl == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-12)
    assert one(q, p).kl == pytest.approx(0.5 * math.log(5 / 9) + 0.5 * math.log(5), rel=1e-12)


def test_float64_sees_what_a_float32_softmax_would_not():
    p = noise(1, 5000, dtype=torch.float64)
    q = p.clone()
    q[0, 7] += 1e-3
    share = p.softmax(-1)[0, 7].item()
    assert one(p, q).kl == pytest.approx(math.log1p(share * math.expm1(1e-3)) - share * 1e-3, abs=2e-15) != 0
    narrow = [x.float().log_softmax(-1) for x in (p, q)]
    assert abs((narrow[0].exp() * (narrow[0] - narrow[1])).sum().item() - one(p, q).kl) > 1e-10


def test_equal_logits_give_exactly_nothing():
    x = noise(3, 50, dtype=BF16)
    for step in step_table(x, x.float(), x.double(), [1, 2, 3]):  # a float32 copy of the same values
        assert (step.kl, step.total_variation, step.label, step.status) == (0.0, 0.0, "same", "ok")
        assert (step.target_token_rank, step.baseline_token_rank) == (1, 1)


def test_ranks_count_from_the_likeliest():
    step = one(logits([3.0, 2.0, 1.0, 0.0]), logits([1.0, 0.0, 2.0, 3.0]))
    assert (step.target_token_rank, step.baseline_token_rank) == (4, 3)


def test_a_planted_near_tie_and_a_planted_difference_get_their_labels():
    unit = 2.0**-7  # of bfloat16 in [1, 2)
    truth = logits([1.5, 1.5 - unit / 3, -4.0])
    tie = one(logits([1.5, 1.5 - unit, -4.0], dtype=BF16), logits([1.5 - unit, 1.5, -4.0]), truth)
    assert (tie.label, tie.storage_step, tie.truth_token) == ("near-tie", unit, 0)
    assert tie.gap == pytest.approx(unit / 3, rel=1e-4)
    real = one(logits([1.5, 1.0, -4.0], dtype=BF16), logits([1.0, 1.5, -4.0]), logits([1.5, 1.0, -4.0]))
    assert (real.label, real.gap) == ("not a near-tie", 0.5)


def test_the_truth_decides_against_two_engines_that_both_nearly_tie():
    unit = 2.0**-7
    baseline, target = logits([1.5, 1.5 - unit], dtype=BF16), logits([1.5 - unit, 1.5], dtype=BF16)
    assert one(baseline, target).label == "near-tie"
    assert one(baseline, target, logits([1.5, 0.5])).label == "not a near-tie"


def test_a_tie_of_the_two_likeliest_does_not_excuse_a_third_token():
    truth = logits([1.5, 1.5, -4.0])
    step = one(logits([1.5, 1.5, -4.0], dtype=BF16), logits([1.0, 1.0, 2.0], dtype=BF16), truth)
    assert (step.baseline_margin, step.label, step.gap) == (0.0, "not a near-tie", 5.5)


def test_margins_count_storage_steps():
    rows = logits([8.0, 7.9375, 0.0], [4.0, 4.0, 1.0], [NAN, 1.0, 0.0], dtype=torch.float64)
    assert str(margins(rows, BF16)) == str([2.0, 0.0, NAN])  # just below 8 bf16 has steps of 1/32


def test_the_storage_step_is_of_the_coarser_dtype_unless_said():
    x = logits([1.5, 0.0])
    assert one(x.to(BF16), x).storage_step == 2.0**-7
    assert one(x, x).storage_step == 2.0**-23
    assert one(x, x, storage=BF16).storage_step == 2.0**-7
    with pytest.raises(VlmlabError, match=r"floating-point storage dtype, got torch\.int8"):
        one(x, x, storage=torch.int8)


@settings(max_examples=200, deadline=None)
@given(st.floats(-300, 300), st.integers(0, 3), st.booleans())
def test_near_tie_means_what_it_means_for_one_engine(top, steps, round_top):
    first = torch.tensor(top).to(BF16 if round_top else torch.float32).float()
    second = first.to(BF16)
    for _ in range(steps):
        second = torch.nextafter(second, torch.tensor(-INF, dtype=BF16))
    row = torch.stack((first, torch.minimum(second.float(), first)))[None]
    step = one(row, row.flip(1), storage=BF16)
    if step.label != "same":
        assert (step.label == "near-tie") == near_tie(row)


def test_ruled_out_tokens():
    both = one(logits([0.0, 0.0, -INF]), logits([0.0, 0.0, -INF]))
    assert (both.kl, both.total_variation, both.status) == (0.0, 0.0, "ok")
    by_target = one(logits([0.0, 0.0]), logits([0.0, -INF]))
    assert (by_target.kl, by_target.total_variation, by_target.status) == (INF, 0.5, "one_sided_inf")
    by_baseline = one(logits([0.0, -INF]), logits([0.0, 0.0]))
    assert by_baseline.kl == pytest.approx(math.log(2)) and by_baseline.status == "one_sided_inf"
    assert one(logits([0.0, -5000.0]), logits([0.0, -INF])).kl == INF  # the probability itself underflows


@pytest.mark.parametrize("bad", [[NAN, 0.0], [INF, 0.0], [-INF, -INF]])
@pytest.mark.parametrize("side", [0, 1, 2])
def test_a_step_that_is_not_finite_enters_no_mean(bad, side):
    rows = [logits([0.0, 1.0], [0.0, 1.0]), logits([0.0, 1.5], [0.0, 1.0]), logits([0.0, 1.0], [0.0, 1.0])]
    rows[side][1] = torch.tensor(bad)
    good, broken = step_table(*rows, [0, 0])
    assert (broken.status, broken.kl, broken.label) == ("non_finite", None, None)
    counted = summary((good, broken))
    assert (counted.steps, counted.ok, counted.non_finite) == (2, 1, 1)
    assert counted.kl_mean == counted.kl_max == good.kl > 0
    assert summary((broken,)).kl_mean is None
    json.dumps(dataclasses.asdict(counted), allow_nan=False)


def test_a_summary_counts_labels_and_keeps_infinity_out_of_the_mean():
    table = step_table(
        logits([0.0, 1.0], [0.0, 1.0], [0.0, 0.0]), logits([0.0, 1.0], [1.0, 0.0], [0.0, -INF]), None, [0] * 3
    )
    counted = summary(table)
    assert (counted.ok, counted.one_sided_inf, counted.same, counted.not_near_ties) == (2, 1, 2, 1)
    assert counted.kl_mean == pytest.approx(counted.kl_max / 2) and math.isfinite(counted.kl_mean)
    with pytest.raises(VlmlabError, match="nothing to summarise"):
        summary(())


def test_a_table_becomes_a_frame():
    frame = pd.DataFrame(step_table(noise(2, 5), noise(2, 5, seed=1), None, [0, 1]))
    assert frame.step.tolist() == [0, 1] and (frame.kl > 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3), torch.ones(2, 4), None, [0, 0]), r"one shape with two axes, got baseline \[2, 3\]"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.ones(1, 3), [0, 0]), r"truth \[1, 3\]"),
        ((torch.ones(2, 3).int(), torch.ones(2, 3).int(), None, [0, 0]), "int32"),
        ((torch.ones(0, 3), torch.ones(0, 3), None, []), "nothing to compare"),
        ((torch.ones(2, 1), torch.ones(2, 1), None, [0, 0]), "at least 2 tokens, got 1"),
        ((torch.ones(2, 3), torch.ones(2, 3), None, [0]), "expected 2 token ids"),
        ((torch.ones(2, 3), torch.ones(2, 3), None, [0, 3]), "from 0 to 2"),
        ((torch.ones(2, 3), torch.ones(2, 3), None, [0, -1]), "from 0 to 2"),
        ((torch.ones(2, 3), torch.ones(2, 3), None, torch.ones(2)), "token ids"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, message):
    with pytest.raises(VlmlabError, match=message):
        step_table(*arguments)


# ---------------------------------------------------------------------------------------------------- divergence

TABLE = step_table(
    logits([1.0, 0.0, 0.0], [1.0, 1.0 - 2**-9, 0.0], [0.0, 0.0, 1.0], dtype=BF16),
    logits([1.0, 0.0, 0.0], [1.0, 1.0 + 2**-7, 0.0], [0.0, 1.0, 0.0], dtype=BF16),
    None,
    [0, 0, 2],
)


def test_texts_that_never_differ_have_no_divergence():
    assert first_divergence([0, 0], [0, 0], TABLE) is None


def test_the_first_divergence_carries_its_gap_and_label():
    found = first_divergence([0, 0, 2], [0, 1, 1], TABLE)
    assert (found.step, found.baseline_token, found.target_token, found.stopped) == (1, 0, 1, None)
    assert (found.label, found.gap, found.storage_step) == ("near-tie", 0.0, 2.0**-8)
    later = first_divergence([0, 0, 2], [0, 0, 1], TABLE)
    assert (later.step, later.label, later.gap) == (2, "not a near-tie", 1.0)


@pytest.mark.parametrize(
    ("texts", "stopped"), [(([0], [0, 1]), "baseline"), (([0, 0], [0]), "target"), (([], [0]), "baseline")]
)
def test_a_text_that_ends_earlier_is_a_prefix_of_the_other(texts, stopped):
    found = first_divergence(*texts, TABLE)
    assert (found.stopped, found.step) == (stopped, min(map(len, texts)))
    assert None in (found.baseline_token, found.target_token)


def test_a_text_may_end_where_the_table_does():
    found = first_divergence([0, 0, 2], [0, 0, 2, 1], TABLE)
    assert (found.step, found.stopped, found.label, found.gap) == (3, "baseline", None, None)


def test_no_margin_explains_a_token_that_was_not_the_likeliest():
    assert first_divergence([0, 2], [0, 1], TABLE).label == "not the likeliest token"
    assert first_divergence([1], [0], TABLE).label == "not the likeliest token"


def test_a_divergence_on_a_nan_step_is_not_a_near_tie():
    table = step_table(logits([NAN, 0.0]), logits([0.0, 1.0]), None, [0])
    found = first_divergence([0], [1], table)
    assert (found.status, found.label, found.gap) == ("non_finite", None, None)


def test_divergence_needs_tokens_and_their_step():
    with pytest.raises(VlmlabError, match="nothing to compare"):
        first_divergence([], [], TABLE)
    with pytest.raises(VlmlabError, match="holds step 3"):
        first_divergence([0, 0, 2, 1], [0, 0, 2, 0], TABLE)


# ---------------------------------------------------------------------------------------------------- states


def test_state_drift_of_known_vectors():
    baseline, target, truth = (
        logits([3.0, 4.0], [1.0, 0.0]),
        logits([3.0, 4.0], [0.0, 1.0]),
        logits([6.0, 8.0], [1.0, 0.0]),
    )
    found = state_drift(baseline, target, truth)
    assert found.cosine.tolist() == [1.0, 0.0]
    assert found.rel_l2.tolist() == pytest.approx([0.0, math.sqrt(2)])
    assert found.baseline_to_truth.tolist() == [0.5, 0.0]
    assert found.target_to_truth.tolist() == pytest.approx([0.5, math.sqrt(2)])
    assert found.bitwise_equal.tolist() == [True, False]
    assert state_drift(baseline, target).baseline_to_truth is None
    with pytest.raises(VlmlabError, match="one shape"):
        state_drift(baseline, target[:1])


def test_a_planted_trend_grows_and_noise_does_not():
    flat = noise(400, dtype=torch.float64)
    rising = flat + 0.02 * torch.arange(400)
    assert grows(rising).grows and grows(rising).slope_per_100 == pytest.approx(2.0, abs=0.2)
    assert not grows(flat).grows and not grows(-rising).grows
    assert grows(-rising).rank_correlation == -grows(rising).rank_correlation < -0.8
    json.dumps(dataclasses.asdict(grows(flat)), allow_nan=False)


def test_rank_correlation_and_p_value_of_a_small_case():
    found = grows([1, 2, 3, 4, 5, 6, 8, 7])
    assert found.rank_correlation == pytest.approx(1 - 6 * 2 / (8 * 63))
    assert found.p_value < 0.001  # 8 of 40320 orders give as much
    values, ranks = [3, 1, 2, 5, 4, 2, 6, 1], np.array([5, 1.5, 3.5, 7, 6, 3.5, 8, 1.5])
    middling = grows(values)
    assert middling.rank_correlation == pytest.approx(np.corrcoef(np.arange(8), ranks)[0, 1])
    every = np.array(list(itertools.permutations(ranks))) @ np.arange(8)
    assert middling.p_value == pytest.approx((every >= ranks @ np.arange(8)).mean(), abs=0.02)
    assert grows(values) == middling  # seeded


def test_one_spike_does_not_make_a_trend():
    spike = torch.zeros(50)
    spike[-1] = 1e6
    found = grows(spike)
    assert found.slope_per_100 > 0 and not found.grows


def test_equal_values_do_not_grow():
    found = grows(torch.zeros(20))
    assert (found.rank_correlation, found.p_value, found.slope_per_100, found.grows) == (0.0, 1.0, 0.0, False)


def test_steps_that_are_not_finite_are_left_out_in_place():
    values = torch.arange(20.0)
    values[3], values[7] = NAN, INF
    found = grows(values)
    assert (found.steps, found.left_out, found.rank_correlation) == (18, 2, 1.0)
    assert found.slope_per_100 == pytest.approx(100.0)


@pytest.mark.parametrize("values", [range(7), [NAN] * 5 + list(range(7)), []])
def test_too_few_steps_raise(values):
    with pytest.raises(VlmlabError, match="at least 8 finite steps"):
        grows(list(values))


def test_spread_over_ways_to_compute():
    states = noise(4, 8, dtype=BF16)
    moved = states.clone()
    moved[2] = -moved[2]
    zero = states.clone()
    zero[0] = NAN
    ways = spread({"prefill": states, "decode": states.clone(), "batch": moved, "broken": zero}, "prefill")
    same, batch, broken = ways
    assert (same.name, same.max_rel_l2, same.min_cosine, same.bitwise_equal) == ("decode", 0.0, 1.0, 1.0)
    assert (batch.name, batch.max_rel_l2, batch.min_cosine, batch.bitwise_equal) == ("batch", 2.0, -1.0, 0.75)
    assert (broken.undefined, broken.max_rel_l2, broken.bitwise_equal) == (1, 0.0, 0.75)
    json.dumps([dataclasses.asdict(way) for way in ways], allow_nan=False)


def test_equal_in_value_is_not_bitwise_equal():
    (way,) = spread({"a": torch.tensor([[0.0, 1.0]]), "b": torch.tensor([[-0.0, 1.0]])}, "a")
    assert (way.max_rel_l2, way.bitwise_equal) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": torch.ones(2, 2)}, "only way"),
        ({"b": torch.ones(2, 2)}, "expected the reference among"),
        ({"a": torch.ones(2, 2), "b": torch.ones(3, 2)}, "one shape"),
        ({"a": torch.ones(0, 2), "b": torch.ones(0, 2)}, "nothing to compare"),
    ],
)
def test_spread_that_compares_nothing_raises(rows, message):
    with pytest.raises(VlmlabError, match=message):
        spread(rows, "a")


def test_the_words_follow_the_numbers():
    rising, flat = grows([float(k) for k in range(10)]), grows([1.0] * 10)
    table = step_table(logits([0, 9, 1], [9, 0, 1]), logits([0, 9, 1], [0, 0, 9]), None, [1, 0])
    parted = first_divergence([1, 0], [1, 2], table)
    said = in_words(parted, rising, 3)
    assert "part at step 1 (not a near-tie)" in said and "the drift grows over 10" in said
    assert "3 tensors are left" in said
    said = in_words(None, flat, 0)
    assert "Equal texts" in said and "does not grow" in said and "reproduce every tensor" in said
