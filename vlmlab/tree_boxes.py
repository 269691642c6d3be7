"""An addition tree as few boxes: what repeats is there once.

boxes       the boxes of a tree, level by level
Box         what stands for a subtree: a number, an addition, a sequence, halves of halves, a fused adder
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from vlmlab.summation import Tree, fold

MOST_BOXES, MOST_LEVELS = 60, 9


@dataclass(frozen=True, eq=False)
class _Node:
    """A subtree. shape: the same for subtrees that are alike up to one offset of all leaves. least: smallest leaf.
    size: leaves. children: by smallest leaf, since addition commutes."""

    shape: int
    least: int
    size: int
    children: tuple["_Node", ...] = ()


@dataclass(frozen=True)
class Box:
    """What is drawn for a subtree.

    Attributes: kind: "number", "add", "sequence", "pairwise", "fused" or "below". text. size: leaves. below: what hangs
    there, with words for the line to it; a list is numbers.
    """

    kind: str
    text: str
    size: int
    below: tuple[tuple[str, "_Node | list[int]"], ...] = ()


def _nodes(tree: Tree) -> _Node:
    shapes: dict[tuple[tuple[int, int], ...], int] = {}

    def join(parts: list[_Node]) -> _Node:
        parts = sorted(parts, key=lambda part: part.least)
        least = parts[0].least
        key = tuple((part.shape, part.least - least) for part in parts)
        return _Node(shapes.setdefault(key, len(shapes) + 1), least, sum(part.size for part in parts), tuple(parts))

    return fold(tree, lambda leaf: _Node(0, leaf, 1), join)


def _step(numbers: Sequence[int]) -> int | None:
    """The constant step of at least two numbers, or None."""
    found = {b - a for a, b in itertools.pairwise(numbers)}
    return found.pop() if len(found) == 1 else None


def _span(numbers: Sequence[int]) -> str:
    """Numbers in few characters, as summation.text_form writes a chain."""
    step = _step(numbers)
    if len(numbers) > 2 and step:
        return f"{numbers[0]}..{numbers[-1]}" + ("" if step == 1 else f"/{step}")
    if len(numbers) <= 4:
        return " ".join(map(str, numbers))
    return f"[{' '.join(map(str, numbers[:3]))} .. {numbers[-1]}]({len(numbers)})"


def _times(places: Sequence[int]) -> str:
    """That a part is drawn once for several, and how far from one to the next."""
    return f"x {len(places)}, {places[1] - places[0]:+} each"


def _sequence(node: _Node) -> tuple[_Node | None, list[tuple[_Node, ...]]]:
    """A chain from its end down: what it starts with (None: with the first part), and what each of its additions adds.

    The parts are alike and equally far apart; single numbers may be anywhere.
    """
    parts: list[tuple[_Node, ...]] = []

    def goes_on(part: tuple[_Node, ...]) -> bool:
        if not parts:
            return True
        shapes = [[(one.shape, one.least - some[0].least) for one in some] for some in (part, parts[-1])]
        starts = [some[0].least for some in (*parts[:2], parts[-1], part)]
        regular = len(parts) < 2 or starts[1] - starts[0] == starts[-1] - starts[-2]
        return shapes[0] == shapes[1] and (regular or (len(part) == 1 and part[0].size == 1))

    while node.children:
        kept = max(node.children, key=lambda child: child.size)
        if parts and len(node.children) == 2 and node.children[0].shape == node.children[1].shape:
            a, b = node.children  # the innermost two: in the order that keeps the step
            kept = b if a.least - parts[-1][0].least == b.least - a.least else a
        part = tuple(child for child in node.children if child is not kept)
        if not goes_on(part):
            break
        parts.append(part)
        node = kept
    if goes_on((node,)):
        return None, [(node,), *reversed(parts)]
    return node, parts[::-1]


def _halves(node: _Node) -> tuple[_Node, list[int], list[int]]:
    """Equal halves of equal halves: the first part, where all parts begin, how far apart two are added, widest last."""
    part, places, apart = node, [node.least], list[int]()
    found = part, places, apart
    while len(part.children) == 2 and part.children[0].shape == part.children[1].shape:
        distance = part.children[1].least - part.children[0].least
        places = sorted(place + more for place in places for more in (0, distance))
        part, apart = part.children[0], [distance, *apart]
        if _step(places):
            found = part, places, apart
    return found


def _groups(nodes: Sequence[_Node]) -> list[tuple[str, "_Node | list[int]"]]:
    """Children of one adder, those that are alike together."""
    found: list[tuple[str, _Node | list[int]]] = []
    for leaf, some in itertools.groupby(nodes, key=lambda node: node.size == 1):
        if leaf:
            found.append(("", [node.least for node in some]))
            continue
        for _, alike in itertools.groupby(some, key=lambda node: node.shape):
            same = list(alike)
            places = [node.least for node in same]
            found += [(_times(places), same[0])] if _step(places) else [("", node) for node in same]
    return found


def _box(node: "_Node | list[int]") -> Box:
    if isinstance(node, list):
        return Box("number", _span(node), len(node))
    if not node.children:
        return Box("number", str(node.least), 1)
    part, places, apart = _halves(node)
    start, parts = _sequence(node)
    if len(places) > max(2, len(parts)):
        neighbours = all(b == 2 * a for a, b in itertools.pairwise(apart))
        how = "pairwise" if neighbours else f"pairwise, {', '.join(map(str, apart))} apart"
        if part.size == 1:
            return Box("pairwise", f"{_span(places)}, {how}", node.size)
        return Box("pairwise", f"{len(places)} {how}", node.size, ((_times(places), part),))
    first, places = parts[0], [part[0].least for part in parts]
    below: tuple[tuple[str, _Node | list[int]], ...]
    if len(parts) == 1:
        below = tuple(_groups(node.children))
        if len(node.children) == 2:
            return Box("add", "+", node.size, below)
        if node.size == len(node.children):
            return Box("fused", f"{_span([child.least for child in node.children])}, fused", node.size)
        return Box("fused", f"{len(node.children)} at once, fused", node.size, below)
    if len(first) > 1:
        below = tuple((f"{_times(places)} {words}".strip(), child) for words, child in _groups(first))
    elif first[0].size == 1:
        below = (("then", places),)
    else:
        below = ((_times(places), first[0]),)
    if start is not None:
        text = (
            f"{len(parts)} fused in sequence, {1 + len(first)} at once"
            if len(first) > 1
            else f"{len(parts)} more in sequence"
        )
        return Box("fused" if len(first) > 1 else "sequence", text, node.size, (("start", start), *below))
    if first[0].size == 1:
        pair = len(parts) == 2
        text = " + ".join(map(str, places)) if pair else f"{_span(places)}, in sequence"
        return Box("add" if pair else "sequence", text, node.size)
    if len(parts) == 2:
        return Box("add", "+", node.size, below)
    return Box("sequence", f"{len(parts)} in sequence", node.size, below)


def boxes(tree: Tree) -> list[tuple[Box, int, int, str]]:
    """The boxes of a tree, level by level: at most MOST_BOXES on MOST_LEVELS, those cut off are "below".

    Args: tree: of summation, of any depth. Returns: box, level, index of its parent (-1), words on the line to it.
    """
    found: list[tuple[Box, int, int, str]] = []
    waiting: deque[tuple[_Node | list[int], int, int, str]] = deque([(_nodes(tree), 0, -1, "")])
    while waiting:
        node, level, parent, words = waiting.popleft()
        box = _box(node)
        if box.below and (level + 1 == MOST_LEVELS or 1 + len(found) + len(waiting) + len(box.below) > MOST_BOXES):
            box = Box("below", "not drawn", box.size)
        waiting.extend((child, level + 1, len(found), line) for line, child in box.below)
        found.append((box, level, parent, words))
    return found
