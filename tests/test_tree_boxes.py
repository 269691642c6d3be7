"""A tree's boxes: what repeats is drawn once, and every number is accounted for."""

import random
import re

import pytest

from vlmlab.plots import plot_tree
from vlmlab.summation import ORDERS, backwards, blocked, canonical, pairwise, sequential, split_k
from vlmlab.tree_boxes import boxes


def lines_of(tree):
    """What is written in a tree's picture, its title left out."""
    return [text.get_text() for text in plot_tree(tree, "title").axes[0].texts[1:]]


def boxes_of(tree):
    return [line for line in lines_of(tree) if line and not line.startswith(("x ", "start", "then"))]


def chain(parts):
    tree = parts[0]
    for part in parts[1:]:
        tree = (tree, part)
    return tree


def fused(n, width):
    tree = tuple(range(width))
    for start in range(width, n, width):
        tree = (tree, *range(start, start + width))
    return tree


def butterfly(n):
    parts = list(range(n))
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [(parts[i], parts[i + half]) for i in range(half)]
    return parts[0]


def random_tree(n, seed):
    parts, draw = list(range(n)), random.Random(seed)
    while len(parts) > 1:
        i, j = sorted(draw.sample(range(len(parts)), 2))
        parts[i] = (parts[i], parts.pop(j))
    return parts[0]


@pytest.mark.parametrize(
    ("tree", "lines"),
    [
        (7, ["7"]),
        ((0, 1), ["0 + 1"]),
        ((0, 1, 2), ["0..2, fused\n3 numbers"]),
        (sequential(4096), ["0..4095, in sequence\n4096 numbers"]),
        (backwards(4096), ["4095..0/-1, in sequence\n4096 numbers"]),
        (canonical(backwards(9)), ["8..0/-1, in sequence\n9 numbers"]),
        (chain([5, 0, 1, 4, 2, 3]), ["[0 5 1 .. 3](6), in sequence\n6 numbers"]),
        (pairwise(4096), ["0..4095, pairwise\n4096 numbers"]),
        (butterfly(8), ["0..7, pairwise, 4, 2, 1 apart\n8 numbers"]),
        (blocked(4096, 8), ["", "512 in sequence\n4096 numbers", "x 512, +8 each", "0..7, in sequence\n8 numbers"]),
        (split_k(4096, 32), ["", "32 pairwise\n4096 numbers", "x 32, +1 each", "0..4064/32, in sequence\n128 numbers"]),
    ],
)
def test_what_repeats_in_a_tree_is_drawn_once(tree, lines):
    assert [line for line in lines_of(tree) if line] == [line for line in lines if line]


def test_a_cascade_shows_its_three_levels():
    lanes = [chain([chain(range(k + 512 * b, k + 512 * (b + 1), 32)) for b in range(8)]) for k in range(32)]
    assert lines_of(chain(lanes))[1:] == [
        "x 32, +1 each",
        "8 in sequence\n128 numbers",
        "x 8, +512 each",
        "0..480/32, in sequence\n16 numbers",
    ]


def test_a_fused_adder_looks_different():
    figure = plot_tree(fused(4096, 8), "title")
    assert lines_of(fused(4096, 8)) == [
        "511 fused in sequence, 9 at once\n4096 numbers",
        "start",
        "0..7, fused\n8 numbers",
        "x 511, +8 each",
        "8..15\n8 numbers",
    ]
    wide, start, _ = figure.axes[0].patches
    plain = plot_tree(sequential(8), "title").axes[0].patches[0]
    assert wide.get_edgecolor() == start.get_edgecolor() != plain.get_edgecolor()
    assert wide.get_linewidth() > plain.get_linewidth()


def test_one_number_elsewhere_is_not_hidden_by_collapsing():
    swapped = chain([chain(range(8)), chain(range(8, 16)), chain([16, 17, 18, 19, 20, 21, 23, 22])])
    assert boxes_of(blocked(24, 8)) == ["3 in sequence\n24 numbers", "0..7, in sequence\n8 numbers"]
    assert "[16 17 18 .. 22](8), in sequence\n8 numbers" in boxes_of(swapped)
    assert lines_of(chain([(0, 1), (2, 3), (5, 6)])) == [
        "2 more in sequence\n6 numbers",
        "start",
        "0 + 1",
        "x 2, +3 each",
        "2 + 3",
    ]


def unaccounted(tree):
    """Boxes whose children, as often as the lines say, do not make up their numbers."""
    found = boxes(tree)
    for index, (box, *_) in enumerate(found):
        children = [(child, re.match(r"x (\d+)", words)) for child, _, parent, words in found if parent == index]
        if children and box.size != sum(child.size * (int(times[1]) if times else 1) for child, times in children):
            yield box


@pytest.mark.parametrize("n", [16, 1000, 4096])
def test_a_random_tree_stays_small_and_accounts_for_every_number(n):
    tree = random_tree(n, seed=n)
    texts = boxes_of(tree)
    assert len(texts) <= 60 and texts[0] == f"+\n{n} numbers" and lines_of(tree) == lines_of(tree)
    assert not list(unaccounted(tree))
    assert any(box.startswith("not drawn") for box in texts) == (n > 16)


@pytest.mark.parametrize("n", [12, 63, 100, 1000])
def test_every_order_accounts_for_every_number(n):
    trees = [order(n) for order in ORDERS.values()] + [split_k(n, 32), fused(n - n % 8, 8), blocked(n, 7)]
    assert not [box for tree in trees for box in unaccounted(tree)]


def test_a_deep_tree_without_a_pattern_is_cut():
    tree = 0
    for k in range(2000):
        tree = (tree, chain(range(3 * k + 1, 3 * k + 3 + k % 2)))
    texts = boxes_of(tree)
    assert len(texts) <= 60 and any(box.startswith("not drawn") for box in texts)
