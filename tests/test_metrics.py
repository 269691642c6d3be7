import math

import pytest
import torch

from vlmlab import metrics


def test_cosine_of_known_angles():
    a = torch.tensor([[1.0, 0.0], [1.0, 0.0], [3.0, 4.0]])
    b = torch.tensor([[1.0, 1.0], [-2.0, 0.0], [6.0, 8.0]])
    assert metrics.cosine_similarity(a, b).tolist() == pytest.approx([math.sqrt(0.5), -1.0, 1.0], abs=1e-15)


def test_cosine_of_equal_vectors_is_exactly_one():
    a = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert (metrics.cosine_similarity(a, a) == 1.0).all()


def test_cosine_neither_overflows_nor_leaves_its_range():
    huge = torch.full((1, 8), 1e300, dtype=torch.float64)
    assert metrics.cosine_similarity(huge, huge).item() == 1.0
    large = torch.full((1, 8), 3e38)
    assert metrics.cosine_similarity(large, -large).item() == pytest.approx(-1.0, abs=1e-15)


def test_cosine_sees_one_channel_that_bfloat16_products_would_hide():
    a = torch.full((1, 4096), 1.0).bfloat16()
    b = a.clone()
    b[0, 0] = -1.0
    assert metrics.cosine_similarity(a, b).item() == pytest.approx(1 - 2 / 4096, abs=1e-12)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_zero_and_non_finite_vectors_are_undefined(bad):
    a, b = torch.ones(2, 3), torch.ones(2, 3)
    a[1] = bad
    cosine = metrics.cosine_similarity(a, b)
    assert cosine[0] == 1.0 and cosine[1].isnan()
    assert metrics.rel_l2_error(a, b)[1].isnan()
    assert metrics.norm_ratio(a, b)[1].isnan()


def test_length_is_seen_where_cosine_is_blind():
    a = torch.tensor([[3.0, 4.0]])
    assert metrics.cosine_similarity(a, 2 * a).item() == 1.0
    assert metrics.rel_l2_error(a, 2 * a).item() == 1.0
    assert metrics.norm_ratio(a, 2 * a).item() == 2.0
    assert metrics.max_abs_diff(a, 2 * a) == 4.0


def test_bitwise_equal_means_bits():
    zero = torch.tensor([0.0])
    nan = torch.tensor([math.nan])
    assert metrics.bitwise_equal(nan, nan.clone())
    assert not metrics.bitwise_equal(zero, -zero)
    assert not metrics.bitwise_equal(zero, zero.double())
    assert not metrics.bitwise_equal(zero, torch.zeros(1, 1))
    one = torch.ones(3, 5).bfloat16()
    other = one.clone()
    other.view(torch.int16)[2, 4] ^= 1
    assert metrics.bitwise_equal(one, one.t().contiguous().t())
    assert not metrics.bitwise_equal(one, other)


@pytest.mark.parametrize("measure", [metrics.cosine_similarity, metrics.rel_l2_error, metrics.max_abs_diff])
def test_shapes_and_emptiness_raise(measure):
    with pytest.raises(ValueError, match=r"baseline \(2, 3\) and target \(3, 2\)"):
        measure(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="nothing to compare"):
        measure(torch.ones(0, 3), torch.ones(0, 3))


def test_dominant_channels_are_named_with_their_share():
    states = torch.ones(4, 8)
    states[:, 5] = 10.0
    channel, share = metrics.dominant_channels(states, 1)[0]
    assert channel == 5 and share == pytest.approx(100 / 107)
    assert metrics.dominant_channels(torch.zeros(2, 2)) == []
    with pytest.raises(ValueError, match="nothing to compare"):
        metrics.dominant_channels(torch.zeros(0, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_units_in_the_last_place_are_counted_across_zero(dtype):
    one = torch.tensor([[1.0]], dtype=dtype)
    up = torch.nextafter(one, torch.full_like(one, 2))
    assert metrics.ulp_diff(one, up) == metrics.ulp_diff(up, one) == 1 and metrics.ulp_diff(one, one) == 0
    zero = torch.zeros_like(one)
    smallest = torch.nextafter(zero, one)
    assert metrics.ulp_diff(zero, -zero) == 0 and metrics.ulp_diff(-smallest, smallest) == 2
    assert metrics.ulp_diff(one, 2 * one) == round(1 / torch.finfo(dtype).eps)
    with pytest.raises(ValueError, match="equal shapes and dtypes"):
        metrics.ulp_diff(one, one.T.repeat(2, 1))
