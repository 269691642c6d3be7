"""Chosen orders give known answers; trees are compared and written."""

import pytest
import torch

from vlmlab.floats import FORMATS
from vlmlab.summation import ORDERS, add, flat, kahan, leaves, same_order, steps, text_form

BF16, FP32 = FORMATS["bf16"], FORMATS["fp32"]
pytestmark = pytest.mark.usefixtures("one_thread")


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------- chosen orders


def test_bf16_256_plus_1_plus_1_depends_on_the_order():
    assert add(((0, 1), 2), tensor(256, 1, 1), BF16) == 256
    assert add((0, (1, 2)), tensor(256, 1, 1), BF16) == 258
    assert add((0, (1, 2)), tensor(256, 1, 1), FP32) == 258


def test_every_order_holds_every_number_once():
    for n in (1, 2, 3, 7, 8, 33):
        for name, order in ORDERS.items():
            assert sorted(leaves(order(n))) == list(range(n)), name


def test_integers_come_out_alike_and_rounding_does_not():
    whole = torch.arange(64, dtype=torch.float64)
    assert {add(order(64), whole, FP32).item() for order in ORDERS.values()} == {2016.0}
    real = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float().double()
    assert len({add(order(64), real, BF16).item() for order in ORDERS.values()}) > 2


def test_a_sum_in_a_format_is_torchs():
    x = torch.randn(100, 33).double().to(torch.bfloat16)
    total = x[:, 0]
    for k in range(1, 33):
        total = total + x[:, k]
    assert torch.equal(add(ORDERS["sequential"](33), x.double(), BF16), total.double())


def test_kahan_loses_less_than_any_order():
    x = torch.full((4096,), 0.1, dtype=torch.float64)
    exact = 4096 * torch.tensor(0.1).bfloat16().double()
    lost = [abs(add(order(4096), x, BF16) - exact) for order in ORDERS.values()]
    assert abs(kahan(x, BF16) - exact) <= min(lost) and max(lost) > 100


def test_steps_say_what_was_rounded_away():
    first, second = steps(((0, 1), 2), [256.0, 1.0, 3.0], BF16)
    assert (first.left, first.right, first.exact, first.rounded, first.lost, first.ulp) == (256, 1, 257, 256, 1, 2)
    assert (second.left, second.exact, second.rounded, second.lost) == (256, 259, 260, -1)


# ---------------------------------------------------------------------------------------------------- trees


def test_trees_are_equal_up_to_the_side_of_operands():
    assert same_order(((0, 1), 2), (2, (1, 0))) and not same_order(((0, 1), 2), (0, (1, 2)))
    deep = ORDERS["sequential"](5000)
    assert same_order(deep, deep) and not same_order(deep, ORDERS["reversed"](5000))


def test_forms_of_a_tree():
    assert text_form(ORDERS["sequential"](100)) == "0..99"
    assert text_form(ORDERS["split-K"](64)) == "((0..60/4 + 1..61/4) + (2..62/4 + 3..63/4))"
    assert text_form((((0, 2), 1), (3, 5))) == "([0 2 1] + [3 5])"
    assert flat(ORDERS["sequential"](4000)) == list(range(4000))
    assert flat(((0, 1), (2, 3, 4))) == [0, 1, {"fused": [2, 3, 4]}]
