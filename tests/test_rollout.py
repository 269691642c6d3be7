"""Ratios and KL estimators by hand, and what is refused."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmlab.drift import step_table
from vlmlab.errors import VlmlabError
from vlmlab.rollout import logprobs_of, rollout_numbers

BF16, INF, NAN = torch.bfloat16, math.inf, math.nan


def logits(*rows, dtype=torch.float32):
    return torch.tensor(rows, dtype=dtype)


def one(baseline, target, truth=None, **options):
    (step,) = step_table(baseline, target, truth, [0], **options)
    return step


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rollout_numbers_of_two_tokens_by_hand():
    found = rollout_numbers(logits([0.5, 0.5]).double().log()[0], logits([0.25, 0.75]).double().log()[0])
    half, more = math.log(0.5), math.log(1.5)
    assert (found.ratio_min, found.ratio_max, found.ratio_mean) == pytest.approx((0.5, 1.5, 1.0))
    assert found.max_abs_diff == pytest.approx(math.log(2)) and found.mean_abs_diff == pytest.approx((more - half) / 2)
    assert found.k1 == pytest.approx(-(half + more) / 2)
    assert found.k2 == pytest.approx((half**2 + more**2) / 4)
    assert found.k3 == pytest.approx(-(half + more) / 2)  # the mean of r - 1 is 0 here
    assert (found.tokens, found.outside_band, found.temperature) == (2, 1.0, None)


def test_k1_and_k3_estimate_the_kl_of_what_drew_the_tokens():
    q, p = logits([0.5, 0.3, 0.2]).double(), logits([0.4, 0.4, 0.2]).double()
    drawn = torch.multinomial(q[0], 100_000, replacement=True, generator=torch.Generator().manual_seed(0))
    found = rollout_numbers(q.log()[0, drawn], p.log()[0, drawn])
    kl = (q * (q / p).log()).sum().item()
    assert found.k1 == pytest.approx(kl, rel=0.1) and found.k3 == pytest.approx(kl, rel=0.1)


def test_equal_logprobs_give_exactly_nothing():
    x = -noise(20).abs()
    found = rollout_numbers(x, x)
    assert (found.max_abs_diff, found.k1, found.k2, found.k3, found.outside_band) == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert found.ratio_min == found.ratio_max == 1.0


logprob = st.floats(-1e3, 0.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(logprob, logprob | st.floats(-1e-9, 0.0)), min_size=1, max_size=8))
def test_k2_and_k3_are_never_negative_and_the_result_is_json(pairs):
    old, new = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    for found in (rollout_numbers(old, new), rollout_numbers(old, old + (new - old) * 1e-12)):
        assert found.k2 >= 0 and (found.k3 is None or found.k3 >= 0)
        json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_logprobs_that_are_not_finite_are_counted_and_left_out():
    found = rollout_numbers(torch.tensor([-1.0, NAN, -2.0]), torch.tensor([-1.0, -1.0, -INF]))
    assert (found.tokens, found.non_finite, found.max_abs_diff) == (1, 2, 0.0)
    with pytest.raises(VlmlabError, match="none of 1 tokens"):
        rollout_numbers(torch.tensor([NAN]), torch.tensor([-1.0]))


def test_the_band_is_closed():
    assert rollout_numbers(torch.zeros(1), torch.tensor([math.log(0.81)])).outside_band == 0.0
    assert rollout_numbers(torch.zeros(1), torch.tensor([math.log(0.79)])).outside_band == 1.0
    assert rollout_numbers(torch.tensor([-1.0]), torch.tensor([math.log(1.21) - 1.0])).outside_band == 1.0


def test_rollout_numbers_refuse_probabilities_and_other_lengths():
    with pytest.raises(VlmlabError, match=r"at most 0, got 0\.9"):
        rollout_numbers(torch.tensor([0.9]), torch.tensor([-0.1]))
    with pytest.raises(VlmlabError, match=r"\[2\] and \[3\]"):
        rollout_numbers(torch.zeros(2), torch.zeros(3))
    with pytest.raises(VlmlabError, match="nothing to compare"):
        rollout_numbers(torch.zeros(0), torch.zeros(0))


def test_logprobs_are_raw_by_default_and_say_their_temperature():
    x = logits([0.0, 2.0], [NAN, 0.0])
    raw, warm = logprobs_of(x, [1, 0]), logprobs_of(x, torch.tensor([1, 0]), temperature=2.0)
    assert raw.values[0].item() == pytest.approx(-math.log1p(math.exp(-2)), rel=1e-12)
    assert warm.values[0].item() == pytest.approx(-math.log1p(math.exp(-1)), rel=1e-12)
    assert raw.values[1].isnan() and (raw.temperature, warm.temperature) == (1.0, 2.0)
    assert rollout_numbers(raw, raw).temperature == 1.0
    with pytest.raises(VlmlabError, match=r"one temperature, got 1\.0 for old and 2\.0"):
        rollout_numbers(raw, warm)
    for bad in (0.0, -1.0, NAN):
        with pytest.raises(VlmlabError, match="temperature above 0"):
            logprobs_of(x, [0, 0], temperature=bad)
