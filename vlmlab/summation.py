"""The same numbers added in a chosen order.

ORDERS              trees over n numbers: sequential, reversed, pairwise, blocked, split-K
add, kahan          a sum in a chosen order and format
steps               every addition of it: both operands, the exact sum, what was rounded away
same_order          whether two trees add alike
flat, text_form     a tree as shallow lists, and in few characters

A tree is an index (a leaf) or a tuple of trees. Two are added; more than two go into a fused adder at once.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmlab.floats import Format, round_to, ulp

Tree = Any  # int | tuple[Tree, ...]


# ---------------------------------------------------------------------------------------------------- chosen orders


def sequential(n: int) -> Tree:
    """((0 + 1) + 2) + ..."""
    return _chain(range(n))


def backwards(n: int) -> Tree:
    """The last number first."""
    return _chain(range(n - 1, -1, -1))


def pairwise(n: int) -> Tree:
    """Halves, and halves of halves."""
    return _halves(list(range(n)))


def blocked(n: int, size: int = 8) -> Tree:
    """Blocks of neighbours, each in sequence, then their sums in sequence."""
    return _chain([_chain(range(start, min(start + size, n))) for start in range(0, n, size)])


def split_k(n: int, parts: int = 4) -> Tree:
    """Every `parts`-th number in one sequence, then the sequences pairwise."""
    return _halves([_chain(range(k, n, parts)) for k in range(min(parts, n))])


ORDERS: dict[str, Callable[[int], Tree]] = {
    "sequential": sequential,
    "reversed": backwards,
    "pairwise": pairwise,
    "blocked": blocked,
    "split-K": split_k,
}


def _chain(parts: Sequence[Tree]) -> Tree:
    tree = parts[0]
    for part in parts[1:]:
        tree = (tree, part)
    return tree


def _halves(parts: Sequence[Tree]) -> Tree:
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) + 1) // 2
    return (_halves(parts[:middle]), _halves(parts[middle:]))


@dataclass(frozen=True)
class Step:
    """One addition. left, right: operands. exact: their sum, as float64. rounded: to the format. lost: left + right -
    rounded, NaN beside an infinity. ulp: the format's spacing at the sum, NaN at an infinity."""

    left: float
    right: float
    exact: float
    rounded: float
    lost: float
    ulp: float


def add(tree: Tree, numbers: Tensor, form: Format) -> Tensor:
    """Numbers added in the order of a tree, every intermediate rounded to a format.

    For formats up to fp32 float64 holds every operand, and rounding its sum once more changes nothing (Figueroa 1995).

    Args: tree: over n leaves. numbers: [..., n] float64, values of the format. form: format. Returns: [...] float64.
    """

    def join(parts: list[Tensor]) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = round_to(total + part, form)
        return total

    return fold(tree, lambda leaf: round_to(numbers[..., leaf], form), join)


def steps(tree: Tree, numbers: Sequence[float], form: Format) -> list[Step]:
    """Every addition of `add`, in the order in which it happens. Args: as in add, numbers: n floats."""
    found = []

    def join(parts: list[float]) -> float:
        total = parts[0]
        for part in parts[1:]:
            exact = total + part
            rounded = _rounded(exact, form)
            spacing = ulp(torch.tensor(exact, dtype=torch.float64), form).item() if math.isfinite(exact) else math.nan
            lost = math.fsum((total, part, -rounded)) if math.isfinite(rounded) else math.nan
            found.append(Step(total, part, exact, rounded, lost, spacing))
            total = rounded
        return total

    fold(tree, lambda leaf: _rounded(numbers[leaf], form), join)
    return found


def _rounded(value: float, form: Format) -> float:
    return round_to(torch.tensor(value, dtype=torch.float64), form).item()


def kahan(numbers: Tensor, form: Format) -> Tensor:
    """Compensated sum, every operation rounded to a format. Args: as in add. Returns: [...] float64.

    Source: Kahan 1965, "Further remarks on reducing truncation errors".
    """
    total, carried = torch.zeros_like(numbers[..., 0]), torch.zeros_like(numbers[..., 0])
    for k in range(numbers.shape[-1]):
        term = round_to(round_to(numbers[..., k], form) - carried, form)
        new = round_to(total + term, form)
        carried = round_to(round_to(new - total, form) - term, form)
        total = new
    return total


def bottom_up(tree: Tree) -> list[Tree]:
    """Nodes in an order in which children come before their parent, left to right; no recursion."""
    stack, order = [tree], []
    while stack:
        node = stack.pop()
        order.append(node)
        if not isinstance(node, int):
            stack.extend(node)
    return order[::-1]


def fold(tree: Tree, leaf: Callable[[int], Any], join: Callable[[list[Any]], Any]) -> Any:
    """The value of a tree: `leaf` of every leaf, `join` of the values of a node's children."""
    done: list[Any] = []
    for node in bottom_up(tree):
        if isinstance(node, int):
            done.append(leaf(node))
        else:
            parts = done[-len(node) :]
            del done[-len(node) :]
            done.append(join(parts))
    return done[0]


def leaves(tree: Tree) -> list[int]:
    """The leaves, left to right."""
    stack, found = [tree], []
    while stack:
        node = stack.pop()
        if isinstance(node, int):
            found.append(node)
        else:
            stack.extend(reversed(node))
    return found


def canonical(tree: Tree) -> Tree:
    """Children by their smallest leaf: addition commutes, so trees that differ only there are equal."""

    def join(parts: list[tuple[int, Tree]]) -> tuple[int, Tree]:
        parts = sorted(parts, key=lambda part: part[0])
        return parts[0][0], tuple(part for _, part in parts)

    return fold(tree, lambda leaf: (leaf, leaf), join)[1]


def same_order(a: Tree, b: Tree) -> bool:
    """Whether two trees add alike; which operand stands left does not matter."""
    codes = [[node if isinstance(node, int) else -len(node) for node in bottom_up(canonical(t))] for t in (a, b)]
    return codes[0] == codes[1]


def flat(tree: Tree) -> Any:
    """A tree as shallow lists, for JSON: `[a, b, c]` is (a + b) + c, `{"fused": [a, b, c]}` one fused addition."""

    def join(parts: list[Any]) -> Any:
        if len(parts) > 2:
            return {"fused": parts}
        return [*parts[0], parts[1]] if isinstance(parts[0], list) else parts

    return fold(tree, lambda leaf: leaf, join)


def text_form(tree: Tree) -> str:
    """A tree in few characters.

    `0..30/2` is a chain: 0, 2, 4, ... 30 added one after the other; `[0 1 3 .. 254](256)` a chain of 256 leaves without
    a constant step; `(a + b)` one addition; `{a, b, c}` a fused one.
    """

    def join(parts: list[tuple[str, list[int]]]) -> tuple[str, list[int]]:  # text, and the leaves of a plain chain
        if len(parts) == 2 and parts[0][1] and len(parts[1][1]) == 1:
            chain = parts[0][1] + parts[1][1]
            return _run(chain), chain
        texts = [words for words, _ in parts]
        return (f"({texts[0]} + {texts[1]})" if len(parts) == 2 else f"{{{', '.join(texts)}}}"), []

    return fold(tree, lambda leaf: (str(leaf), [leaf]), join)[0]


def _run(chain: list[int]) -> str:
    step = chain[1] - chain[0]
    if len(chain) > 2 and all(b - a == step for a, b in itertools.pairwise(chain)):
        return f"{chain[0]}..{chain[-1]}" + ("" if step == 1 else f"/{step}")
    if len(chain) <= 4:
        return f"[{' '.join(map(str, chain))}]"
    return f"[{' '.join(map(str, chain[:3]))} .. {chain[-1]}]({len(chain)})"
