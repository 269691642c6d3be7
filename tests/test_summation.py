"""Chosen orders give known answers; revealed orders are the ones that were there, and replay bit for bit."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlmlab.cli import main
from vlmlab.errors import VlmlabError
from vlmlab.floats import FORMATS
from vlmlab.summation import (
    OPS,
    ORDERS,
    BlackBox,
    add,
    canonical,
    flat,
    kahan,
    leaves,
    linear,
    replays,
    reveal_order,
    same_order,
    steps,
    text_form,
    torch_sum,
)

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


def test_a_fused_adder_is_a_wide_node_and_not_certain():
    tree = ((0, 1, 2, 3), (4, 5, 6, 7))

    def fused(x):
        halves = [x[:, :4].double(), x[:, 4:].double()]
        sums = []
        for half in halves:  # all aligned to the largest, as a tensor core does
            unit = half.abs().amax(1, keepdim=True).clamp(min=1e-300) * 2.0**-24
            sums.append(((half / unit).trunc() * unit).sum(1))
        return (sums[0] + sums[1]).float()

    found = reveal_order(BlackBox("fused", 8, torch.float32, fused, 8))
    assert canonical(found.tree) == tree and not found.certain
    assert text_form(found.tree) == "({0, 1, 2, 3} + {4, 5, 6, 7})"


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


def test_a_wrong_tree_does_not_replay():
    box = torch_sum(256)
    right = reveal_order(box)
    assert right.replay_bitwise_equal
    assert not replays(box, ORDERS["sequential"](256))


# ---------------------------------------------------------------------------------------------------- real kernels


@pytest.mark.parametrize("op", sorted(OPS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_kernels_are_revealed_and_replay(op, dtype):
    found = reveal_order(OPS[op](192, dtype))
    assert found.tree is not None and sorted(leaves(found.tree)) == list(range(192)), found.why
    assert found.replay_bitwise_equal


def test_a_linear_at_the_models_shape_takes_few_calls():
    found = reveal_order(linear(1024, torch.bfloat16, tokens=830, row=7, width=4096))
    assert found.replay_bitwise_equal and found.calls <= 20 and sorted(leaves(found.tree)) == list(range(1024))


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


def test_the_command_line(capsys):
    assert main(["reveal", "linear", "--n", "64", "--dtype", "bfloat16", "--rows", "16", "--row", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {"op", "tree", "calls", "probes", "seconds", "replay_bitwise_equal", "certain"}
    assert wanted <= found.keys() and found["replay_bitwise_equal"] is True
    assert main(["reveal", "sum"]) == 0 and "replay bit-equal" in capsys.readouterr().out
    for wrong in (["sum", "--rows", "4"], ["linear", "--row", "1"], ["sum", "--n", "1"]):
        assert main(["reveal", *wrong]) == 2 and "vlmlab: " in capsys.readouterr().err
