"""Revealed orders are the ones that were there, replay bit for bit, and are refused where nothing can be told."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlmlab.errors import VlmlabError
from vlmlab.floats import FORMATS, fused_multiply_add
from vlmlab.reveal import BlackBox, Way, replays, reveal_order
from vlmlab.reveal_ops import torch_sum
from vlmlab.summation import ORDERS, add, canonical, leaves, same_order, text_form

FP32 = FORMATS["fp32"]
pytestmark = pytest.mark.usefixtures("one_thread")


def trees(most=24):
    def grown(order, cuts):
        parts = list(order)
        for cut in cuts:
            if len(parts) > 1:
                at = cut % (len(parts) - 1)
                parts[at : at + 2] = [(parts[at], parts[at + 1])]
        return parts[0]

    sizes = st.integers(2, most)
    return sizes.flatmap(
        lambda n: st.builds(
            grown,
            st.permutations(range(n)),
            st.lists(st.integers(0, 10**6), min_size=n - 1, max_size=n - 1),
        )
    )


def box_of(tree, n, dtype=torch.float32, rows=32):
    return BlackBox("planted", n, dtype, lambda x: add(tree, x.double(), FP32).to(dtype), rows)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees())
def test_a_planted_tree_is_revealed_and_replays(tree):
    found = reveal_order(box_of(tree, len(leaves(tree))))
    assert same_order(found.tree, tree) and found.replay_bitwise_equal and found.certain


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees(most=400), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_also_where_the_result_counts_only_so_far(tree, dtype):
    n = len(leaves(tree))
    assert same_order(reveal_order(box_of(tree, n, dtype)).tree, tree)


def aligned(x, extra_bits):
    """[B, k] float64 added at once, as in a tensor core: cut off at the largest exponent's unit and at the end."""
    unit = torch.ldexp(torch.ones(len(x), 1).double(), torch.frexp(x.abs().amax(1, keepdim=True))[1] - 24 - extra_bits)
    total = ((x / unit).trunc() * unit).sum(1)
    down = torch.ldexp(torch.ones_like(total), torch.frexp(total)[1] - 24)
    return (total / down).trunc() * down


@pytest.mark.parametrize("extra_bits", [0, 1, 2, 3])
def test_a_fused_adder_is_a_wide_node_and_its_extra_bits_are_found(extra_bits):
    tree = ((0, 1, 2, 3), (4, 5, 6, 7))

    def fused(x):
        halves = [aligned(half, extra_bits) for half in x.double().split(4, 1)]
        return (halves[0] + halves[1]).float()

    found = reveal_order(BlackBox("fused", 8, torch.float32, fused, 8))
    assert canonical(found.tree) == tree and found.certain
    assert found.fused_adder.startswith(f"{extra_bits} bits") and "truncated" in found.fused_adder
    assert text_form(found.tree) == "({0, 1, 2, 3} + {4, 5, 6, 7})"


def test_an_adder_that_rounds_in_a_way_we_do_not_know_is_not_called_equal():
    def odd(x):
        unit = torch.ldexp(torch.ones(len(x), 1).double(), torch.frexp(x.abs().amax(1, keepdim=True))[1] - 20)
        return ((x.double() / unit).round() * unit).sum(1).float()

    found = reveal_order(BlackBox("odd", 8, torch.float32, odd, 8))
    assert len(canonical(found.tree)) == 8 and found.replay_bitwise_equal is False and not found.certain


# ---------------------------------------------------------------------------------------------------- products


def products_in(how):
    def multiply(x, numbers):
        total = torch.zeros(len(numbers), dtype=torch.float64)
        for k in range(len(x)):
            a, b = x[k].double(), numbers[:, k].double()
            total = (
                fused_multiply_add(a, b, total, FP32) if how == "fused" else (total + (a * b).float()).float().double()
            )
        return total.float()

    return BlackBox("x", 12, torch.float32, lambda n: multiply(torch.ones(12), n), 16, multiply=multiply)


@pytest.mark.parametrize("how", ["fused", "rounded first"])
def test_how_products_enter_the_sum_is_found_by_replay(how):
    found = reveal_order(products_in(how))
    assert found.certain and found.products == how and same_order(found.tree, ORDERS["sequential"](12))
    other = {"fused": "rounded first", "rounded first": "fused"}[how]
    assert not replays(products_in(how), found.tree, Way(other))


# ---------------------------------------------------------------------------------------------------- no signs


def unsigned(tree, n, finish=lambda total: total.float()):
    return BlackBox(
        "squares",
        n,
        torch.float32,
        lambda x: finish(add(tree, x.double(), FP32)),
        64,
        summands=lambda numbers: numbers.float().double(),
        finish=lambda total, numbers: finish(total).double(),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees())
def test_a_tree_is_revealed_without_negative_numbers(tree):
    found = reveal_order(unsigned(tree, len(leaves(tree))))
    assert same_order(found.tree, tree) and found.replay_bitwise_equal


def test_a_coarse_result_cannot_tell():
    found = reveal_order(unsigned(ORDERS["pairwise"](8), 8, lambda total: total.bfloat16().float()))
    assert found.tree is None and "too few digits" in found.why


def test_what_is_no_sum_gets_no_tree_without_signs_either():
    box = BlackBox("x", 6, torch.float32, lambda x: x.float().amax(1), 8, summands=lambda n: n, finish=lambda t, n: t)
    assert reveal_order(box).tree is None
    assert "at most" in reveal_order(unsigned(0, 2000)).why


def test_a_wrong_tree_does_not_replay():
    box = torch_sum(256)
    right = reveal_order(box)
    assert right.replay_bitwise_equal
    assert not replays(box, ORDERS["sequential"](256))


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("box", "said"),
    [
        (BlackBox("x", 1, torch.float32, lambda x: x.sum(1), 4), "at least 2"),
        (BlackBox("x", 4, torch.int32, lambda x: x.sum(1), 4), "floating-point dtype"),
        (BlackBox("x", 4, torch.float32, lambda x: x, 4), "sums"),
        (BlackBox("x", 4, torch.float32, lambda x: x.sum(1).int(), 4), "floating-point numbers"),
        (BlackBox("x", 4, torch.float32, lambda x: 1.0, 4), "got float"),
        (BlackBox("x", 4, torch.float32, lambda x: x.sum(1) + torch.rand(1), 4), "not deterministic"),
    ],
)
def test_what_cannot_be_asked_is_refused(box, said):
    with pytest.raises(VlmlabError, match=said):
        reveal_order(box)


@pytest.mark.parametrize(
    "run", [lambda x: x.max(1).values, lambda x: x.square().sum(1), lambda x: x.sum(1) * torch.nan, lambda x: x.mean(1)]
)
def test_what_is_no_plain_sum_gets_no_tree(run):
    found = reveal_order(BlackBox("x", 10, torch.float32, run, 16))
    assert found.tree is None and found.why and found.replay_bitwise_equal is None and not found.certain


def test_a_kernel_that_changes_with_the_batch_is_noticed():
    def run(x):
        order = ORDERS["sequential" if len(x) == 1 else "pairwise"](12)
        return add(order, x.double(), FP32).float()

    found = reveal_order(BlackBox("x", 12, torch.float32, run, 16))
    assert found.tree is None and "batch" in found.why
