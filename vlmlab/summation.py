"""The same numbers added in a chosen order, and the order in which a given callable adds.

ORDERS              trees over n numbers: sequential, reversed, pairwise, blocked, split-K
add, kahan          a sum in a chosen order and format
steps               every addition of it: both operands, the exact sum, what was rounded away
reveal_order        the tree of a black-box sum, by numerical probing, checked by replaying it bit for bit
same_order          whether two trees add alike
flat, text_form     a tree as shallow lists, and in few characters

A tree is an index (a leaf) or a tuple of trees. Two are added; more than two go into a fused adder at once.

Probing (Xie et al., USENIX ATC 2025, "FPRev"): where number i is +M and j is -M, every 1 that is added before the two
have met is swallowed, and every other one is counted by the result. The count says how large the smallest subtree is
that holds both. Many masks travel in one call, and subtrees are worked through level by level.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmlab.errors import VlmlabError
from vlmlab.floats import FORMATS, Format, format_of, round_to, ulp

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
    """One addition. left, right: operands. exact: their sum. rounded: to the format. lost: exact - rounded. ulp: the
    format's spacing at the result."""

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

    return _fold(tree, lambda leaf: round_to(numbers[..., leaf], form), join)


def steps(tree: Tree, numbers: Sequence[float], form: Format) -> list[Step]:
    """Every addition of `add`, in the order in which it happens. Args: as in add, numbers: n floats."""
    found = []

    def join(parts: list[float]) -> float:
        total = parts[0]
        for part in parts[1:]:
            exact = total + part
            rounded = _rounded(exact, form)
            spacing = ulp(torch.tensor(exact, dtype=torch.float64), form).item()
            found.append(Step(total, part, exact, rounded, exact - rounded, spacing))
            total = rounded
        return total

    _fold(tree, lambda leaf: _rounded(numbers[leaf], form), join)
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


def _bottom_up(tree: Tree) -> list[Tree]:
    """Nodes in an order in which children come before their parent, left to right; no recursion."""
    stack, order = [tree], []
    while stack:
        node = stack.pop()
        order.append(node)
        if not isinstance(node, int):
            stack.extend(node)
    return order[::-1]


def _fold(tree: Tree, leaf: Callable[[int], Any], join: Callable[[list[Any]], Any]) -> Any:
    """The value of a tree: `leaf` of every leaf, `join` of the values of a node's children."""
    done: list[Any] = []
    for node in _bottom_up(tree):
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

    return _fold(tree, lambda leaf: (leaf, leaf), join)[1]


def same_order(a: Tree, b: Tree) -> bool:
    """Whether two trees add alike; which operand stands left does not matter."""
    codes = [[node if isinstance(node, int) else -len(node) for node in _bottom_up(canonical(t))] for t in (a, b)]
    return codes[0] == codes[1]


def flat(tree: Tree) -> Any:
    """A tree as shallow lists, for JSON: `[a, b, c]` is (a + b) + c, `{"fused": [a, b, c]}` one fused addition."""

    def join(parts: list[Any]) -> Any:
        if len(parts) > 2:
            return {"fused": parts}
        return [*parts[0], parts[1]] if isinstance(parts[0], list) else parts

    return _fold(tree, lambda leaf: leaf, join)


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

    return _fold(tree, lambda leaf: (str(leaf), [leaf]), join)[0]


def _run(chain: list[int]) -> str:
    step = chain[1] - chain[0]
    if len(chain) > 2 and all(b - a == step for a, b in itertools.pairwise(chain)):
        return f"{chain[0]}..{chain[-1]}" + ("" if step == 1 else f"/{step}")
    if len(chain) <= 4:
        return f"[{' '.join(map(str, chain))}]"
    return f"[{' '.join(map(str, chain[:3]))} .. {chain[-1]}]({len(chain)})"


# ---------------------------------------------------------------------------------------------------- reveal


@dataclass(frozen=True)
class Revealed:
    """What probing found.

    Attributes: op. n. dtype. tree: None when it cannot be told. calls, probes: of the callable, and masks in them.
    seconds: of probing. replay_bitwise_equal: whether the tree gives the callable's bits on fresh cancelling numbers;
    None without a tree. certain: it does, and no node is a fused adder. why: in words, when there is no tree.
    """

    op: str
    n: int
    dtype: str
    tree: Tree | None
    calls: int
    probes: int
    seconds: float
    replay_bitwise_equal: bool | None
    certain: bool
    why: str = ""


@dataclass(frozen=True)
class BlackBox:
    """A callable that sums.

    Attributes: name. n: summands. dtype: of the numbers and of the result. run: ([B, n] numbers) to [B] sums, all with
    the kernel in question, B at most `rows`. rows: most masks per call. scale: what a sum is multiplied by (1 / n for a
    mean). accumulator: format in which the additions are rounded.
    """

    name: str
    n: int
    dtype: torch.dtype
    run: Callable[[Tensor], Tensor]
    rows: int
    scale: float = 1.0
    accumulator: str = "fp32"


class _Probe:
    """Counts by masks. Ones go out in portions that the result can count exactly."""

    def __init__(self, box: BlackBox) -> None:
        self.box, self.calls, self.probes = box, 0, 0
        form, wide = format_of(box.dtype), FORMATS[box.accumulator]
        # M must swallow every one in the accumulator, and both must exist in the format of the numbers.
        gap = wide.precision + 12
        top = min(60, int(torch.tensor(form.largest).log2().item()))
        self.big, self.one = 2.0**top, 2.0 ** max(top - gap - form.precision, form.least - form.precision + 1)
        if self.big / self.one < 2.0**gap:
            raise VlmlabError(f"{box.dtype} has too little range for a {box.accumulator} accumulator: cannot tell")
        # A factor that is no power of two rounds the count once more.
        exact = math.frexp(box.scale)[0] == 0.5
        self.portion, self.slack = (2**form.precision, 0.0) if exact else (2 ** (form.precision - 2), 0.3)

    def sizes(self, asked: list[tuple[int, int, Tensor]], rows: int | None = None) -> list[int]:
        """Per (i, j, leaves): how many of the leaves the smallest subtree with i and j has. rows: most masks a call."""
        rows = rows or self.box.rows
        masks, owner = [], []
        for number, (i, j, universe) in enumerate(asked):
            others = universe[(universe != i) & (universe != j)]
            for portion in others.split(self.portion) if len(others) else [others]:
                masks.append((i, j, portion))
                owner.append(number)
        sizes = [len(universe) for _, _, universe in asked]
        for start in range(0, len(masks), rows):
            chunk = masks[start : start + rows]
            numbers = torch.zeros(len(chunk), self.box.n, dtype=torch.float64)
            for row, (i, j, portion) in enumerate(chunk):
                numbers[row, portion] = self.one
                numbers[row, i], numbers[row, j] = self.big, -self.big
            for number, count in zip(owner[start:], self.counts(numbers), strict=False):
                sizes[number] -= count
        return sizes

    def counts(self, numbers: Tensor) -> list[int]:
        """One call. Raises: VlmlabError: a result that cannot be how many ones were left."""
        sums = call(self.box, numbers).double() / self.box.scale / self.one
        self.calls, self.probes = self.calls + 1, self.probes + len(numbers)
        whole, most = sums.round(), numbers.eq(self.one).sum(1)
        if (
            not sums.isfinite().all()
            or ((sums - whole).abs() > self.slack).any()
            or ((whole < 0) | (whole > most)).any()
        ):
            raise VlmlabError("a probe's result is no count: this is no plain sum, or its accumulator saturates")
        return [int(count) for count in whole]


def call(box: BlackBox, numbers: Tensor) -> Tensor:
    """The callable on [B, n] numbers. Returns: [B]. Raises: VlmlabError: no tensor, a wrong shape, no floats."""
    sums = box.run(numbers.to(box.dtype))
    if not isinstance(sums, Tensor) or sums.shape != (len(numbers),):
        shape = list(sums.shape) if isinstance(sums, Tensor) else type(sums).__name__
        raise VlmlabError(f"expected {box.name} to return [{len(numbers)}] sums, got {shape}")
    if not sums.is_floating_point():
        raise VlmlabError(f"expected {box.name} to return floating-point numbers, got {sums.dtype}")
    return sums.cpu()


def reveal_order(box: BlackBox) -> Revealed:
    """Find the order in which a callable adds.

    Args: box: the callable. Returns: Revealed; without a tree, and with the reason, where probing cannot tell.
    Raises: VlmlabError: fewer than two numbers, integers, a wrong shape, or a callable that is not deterministic.
    """
    if box.n < 2:
        raise VlmlabError(f"expected at least 2 numbers, got {box.n}")
    if not box.dtype.is_floating_point:
        raise VlmlabError(f"expected a floating-point dtype, got {box.dtype}")
    start = time.perf_counter()
    name = str(box.dtype).removeprefix("torch.")
    fresh = cancelling(box, min(box.rows, 64), seed=0)
    if not torch.equal(call(box, fresh).view(torch.uint8), call(box, fresh).view(torch.uint8)):
        raise VlmlabError(f"{box.name} is not deterministic: two calls on the same numbers differ")
    probe = None
    try:
        probe = _Probe(box)
        tree = _build(probe)
        _check_single_probes(probe, tree)
    except VlmlabError as error:
        calls, probes = (probe.calls, probe.probes) if probe else (0, 0)
        seconds = time.perf_counter() - start
        return Revealed(box.name, box.n, name, None, calls, probes, seconds, None, False, str(error))
    seconds = time.perf_counter() - start
    equal = replays(box, tree)
    certain = equal and not any(not isinstance(node, int) and len(node) > 2 for node in _bottom_up(tree))
    return Revealed(box.name, box.n, name, tree, probe.calls, probe.probes, seconds, equal, certain)


def _build(probe: _Probe) -> Tree:
    """Breadth first: for one leaf of every pending group, the subtree sizes with all others of the group."""
    root: dict[str, Any] = {"leaves": torch.arange(probe.box.n), "outside": None}
    pending = [root]
    while pending:
        asked: list[tuple[int, int, Tensor]] = []
        for group in pending:
            members, outside = group["leaves"], group["outside"]
            universe = members if outside is None else torch.cat((members, torch.tensor([outside])))
            asked += [(int(members[0]), int(j), universe) for j in members[1:]]
        pending = _split(pending, torch.tensor(probe.sizes(asked)))
    return _assemble(root)


def _split(groups: list[dict[str, Any]], sizes: Tensor) -> list[dict[str, Any]]:
    """Sort the members of every group by where they join its first leaf. Returns: groups still to be looked into."""
    following, start = [], 0
    for group in groups:
        members = group["leaves"]
        own = sizes[start : start + len(members) - 1]
        start += len(members) - 1
        group["root_size"], group["joining"] = int(own.max()), []
        for size in own.unique().tolist():
            joining = {"leaves": members[1:][own == size], "outside": int(members[0])}
            group["joining"].append(joining)
            if len(joining["leaves"]) > 1:
                following.append(joining)
    return following


def _assemble(root: dict[str, Any]) -> Tree:
    """The tree of the groups. A group whose own root already holds the leaf outside it joins as further children."""
    order, stack = [], [root]
    while stack:
        group = stack.pop()
        order.append(group)
        stack.extend(joining for joining in group.get("joining", ()))
    for group in reversed(order):
        tree: Tree = int(group["leaves"][0])
        for joining in group.get("joining", ()):
            child, members = joining["tree"], len(joining["leaves"])
            wide = members > 1 and joining["root_size"] > members
            tree = (tree, *child) if wide else (tree, child)
        group["tree"] = tree
    return root["tree"]


def _check_single_probes(probe: _Probe, tree: Tree, count: int = 4) -> None:
    """A handful of masks once more, one per call: a batch must not have changed the kernel. Raises: VlmlabError."""
    where = leaves(tree)
    pairs = [(where[k * len(where) // count], where[-1 - k * len(where) // (2 * count)]) for k in range(count)]
    pairs = [(i, j) for i, j in pairs if i != j]
    everything = torch.arange(probe.box.n)
    together = probe.sizes([(i, j, everything) for i, j in pairs]) if probe.box.rows > 1 else []
    pairs = pairs[: len(together)]
    for pair, size in zip(pairs, together, strict=True):
        if probe.sizes([(*pair, everything)], rows=1) != [size]:
            raise VlmlabError("a mask gives another count alone than among others: the kernel changes with the batch")


def cancelling(box: BlackBox, rows: int, seed: int) -> Tensor:
    """Numbers of random size that come in pairs of opposite sign, so that their sum is rounding and nothing else.

    On ordinary numbers a wrong tree often gives the right bits. Returns: [rows, n] float64, values of the dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(rows, (box.n + 1) // 2, dtype=torch.float64, generator=generator)
    half = half * torch.exp2(torch.randint(-3, 4, half.shape, generator=generator).double())
    both = torch.cat((half, -half), 1)[:, : box.n].to(box.dtype).double()
    return both.gather(1, torch.rand(rows, box.n, generator=generator).argsort(1))


def replays(box: BlackBox, tree: Tree, seeds: Sequence[int] = (1, 2, 3)) -> bool:
    """Whether a tree gives the callable's bits on fresh cancelling numbers. Args: tree: over box.n leaves."""
    result = format_of(box.dtype)
    for seed in seeds:
        numbers = cancelling(box, min(box.rows, 256), seed)
        wanted = call(box, numbers).double()
        total = add(tree, numbers, FORMATS[box.accumulator])
        scaled = round_to(total * box.scale, FORMATS[box.accumulator]) if box.scale != 1 else total
        if not torch.equal(round_to(scaled, result), wanted):
            return False
    return True


# ---------------------------------------------------------------------------------------------------- adapters


def torch_sum(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu", rows: int = 256) -> BlackBox:
    """torch.sum over the last axis of [rows, n]."""
    return _padded("sum", n, dtype, device, rows, lambda x: x.sum(-1))


def torch_mean(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu", rows: int = 256) -> BlackBox:
    """torch.mean over the last axis of [rows, n]."""
    return _padded("mean", n, dtype, device, rows, lambda x: x.mean(-1), 1.0 / n)


def _padded(
    name: str,
    n: int,
    dtype: torch.dtype,
    device: str,
    rows: int,
    reduce: Callable[[Tensor], Tensor],
    scale: float = 1.0,
) -> BlackBox:
    """A reduction of [rows, n]: fewer masks are filled up, since the shape chooses the kernel."""

    def run(numbers: Tensor) -> Tensor:
        x = torch.zeros(rows, n, dtype=dtype, device=device)
        x[: len(numbers)] = numbers.to(device)
        return reduce(x)[: len(numbers)]

    return BlackBox(name, n, dtype, run, rows, scale, _accumulator(dtype))


def _accumulator(dtype: torch.dtype) -> str:
    return "fp64" if dtype == torch.float64 else "fp32"


def linear(
    n: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tokens: int = 1,
    row: int = 0,
    width: int = 512,
    threads: int | None = None,
) -> BlackBox:
    """One row of torch.nn.functional.linear on [tokens, n] with a weight [width, n]; masks are rows of the weight.

    Args: n: summands. tokens: rows of the batch, M. row: which of them. width: output features. threads: of torch on
    the CPU, None for as many as there are.
    """

    def run(numbers: Tensor) -> Tensor:
        weight = torch.zeros(width, n, dtype=dtype, device=device)
        weight[: len(numbers)] = numbers.to(device)
        x = torch.ones(tokens, n, dtype=dtype, device=device)
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            return torch.nn.functional.linear(x, weight)[row, : len(numbers)]
        finally:
            torch.set_num_threads(before)

    return BlackBox("linear", n, dtype, run, width, 1.0, _accumulator(dtype))


def matmul(
    n: int, dtype: torch.dtype = torch.float32, device: str = "cpu", tokens: int = 512, row: int = 0
) -> BlackBox:
    """One row of torch.matmul of [tokens, n] with [n, 512]; masks are columns of the second. Args: as in linear."""

    def run(numbers: Tensor) -> Tensor:
        right = torch.zeros(n, 512, dtype=dtype, device=device)
        right[:, : len(numbers)] = numbers.to(device).T
        left = torch.ones(tokens, n, dtype=dtype, device=device)
        return torch.matmul(left, right)[row, : len(numbers)]

    return BlackBox("matmul", n, dtype, run, 512, 1.0, _accumulator(dtype))


def dot(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> BlackBox:
    """torch.dot with ones; one mask per call."""

    def run(numbers: Tensor) -> Tensor:
        return torch.dot(numbers[0].to(device), torch.ones(n, dtype=dtype, device=device))[None]

    return BlackBox("dot", n, dtype, run, 1, 1.0, _accumulator(dtype))


OPS: dict[str, Callable[..., BlackBox]] = {
    "sum": torch_sum,
    "mean": torch_mean,
    "dot": dot,
    "matmul": matmul,
    "linear": linear,
}
