"""The order in which a given callable adds, found by numerical probing and checked by replaying it bit for bit.

reveal_order    the tree of a black-box sum
BlackBox        a callable that sums; reveal_ops has this machine's kernels
replays         whether a tree gives a callable's bits on fresh numbers

Sums of signed numbers are probed by cancellation (Xie et al., USENIX ATC 2025, "FPRev"): where number i is +M and j is
-M, every 1 that is added before the two have met is swallowed, and every other one is counted by the result. The count
says how large the smallest subtree is that holds both. Many masks travel in one call, and subtrees are worked through
level by level.

Sums that cannot be negative (squares, exponentials) are probed by absorption: beside a large number i a small one is
lost, and twice the small one is not. So the result shows whether two small numbers j and k met each other before either
met i. These triples determine the tree.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vlmlab.errors import VlmlabError
from vlmlab.floats import FORMATS, Format, format_of, fused_multiply_add, round_to, ulp
from vlmlab.summation import Tree, bottom_up, fold, leaves

MOST_BY_ABSORPTION = 1024  # triples need about n squared probes


@dataclass(frozen=True)
class BlackBox:
    """A callable that sums.

    Attributes: name. n: summands. dtype: of the numbers and of the result. run: ([B, n] numbers) to [B] results, all
    with the kernel in question, B at most `rows`. rows: most masks per call. scale: what a sum is multiplied by (1 / n
    for a mean). accumulator: format in which the additions are rounded.
    multiply: of a sum of products: ([n], [B, n]) to [B], of which `run` is the case of ones.
    summands: of a sum that cannot be negative: (numbers [B, n]) to what the kernel adds, [B, n] float64.
    finish: of such a sum: (sums [B], numbers [B, n]) to the results. draw: (B, generator) to [B, n] numbers on which it
    can be replayed, where any positive ones cannot.
    """

    name: str
    n: int
    dtype: torch.dtype
    run: Callable[[Tensor], Tensor]
    rows: int
    scale: float = 1.0
    accumulator: str = "fp32"
    multiply: Callable[[Tensor, Tensor], Tensor] | None = None
    summands: Callable[[Tensor], Tensor] | None = None
    finish: Callable[[Tensor, Tensor], Tensor] | None = None
    draw: Callable[[int, torch.Generator], Tensor] | None = None


@dataclass(frozen=True)
class Way:
    """How products and fused adders round.

    Attributes: products: "exact", "rounded first", "fused" (into the addition), the same with the "right first" of two
    products, or "" for none. extra_bits: that an adder of more than two keeps below the last bit of its result. adder:
    "truncated" or "rounded" at its end, "" where there is none.
    """

    products: str = ""
    extra_bits: int = 0
    adder: str = ""


@dataclass(frozen=True)
class Revealed:
    """What probing found.

    Attributes: op. n. dtype. tree: None when it cannot be told. calls, probes: of the callable, and masks in them.
    seconds: of probing. replay_bitwise_equal: whether the tree gives the callable's bits on fresh numbers; None without
    a tree. certain: it does, and another tree does not. products: how a product enters the sum: "exact", "rounded
    first" or "fused"; "" where there is none or it cannot be told. fused_adder: how more than two numbers are added at
    once; "" where they are not. why: in words, what is not certain.
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
    products: str = ""
    fused_adder: str = ""
    why: str = ""


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
    fresh = fresh_numbers(box, min(box.rows, 64), seed=0)
    if not torch.equal(call(box, fresh).view(torch.uint8), call(box, fresh).view(torch.uint8)):
        raise VlmlabError(f"{box.name} is not deterministic: two calls on the same numbers differ")
    probe: _Probe = (_Cancelling if box.summands is None else _Absorbing)(box)
    found = Revealed(box.name, box.n, str(box.dtype).removeprefix("torch."), None, 0, 0, 0.0, None, False)
    try:
        tree = probe.tree()
    except VlmlabError as error:
        found = replace(found, why=str(error))
    else:
        found = replace(found, tree=tree)
    found = replace(found, calls=probe.calls, probes=probe.probes, seconds=time.perf_counter() - start)
    return found if found.tree is None else _replayed(box, found)


def _replayed(box: BlackBox, found: Revealed) -> Revealed:
    way = next((way for way in ways_of(box, found.tree) if replays(box, found.tree, way)), None)
    if way is None:
        return replace(found, replay_bitwise_equal=False, why="the tree does not give the kernel's bits")
    adder = f"{way.extra_bits} bits below the sum's last, then {way.adder}" if way.adder else ""
    found = replace(
        found, replay_bitwise_equal=True, products=way.products.removesuffix(", right first"), fused_adder=adder
    )
    other = _another(found.tree)
    if other is not None and replays(box, other, way):
        return replace(found, why="another tree gives the same bits: the result is too coarse to tell them apart")
    return replace(found, certain=True)


def _another(tree: Tree) -> Tree | None:
    """A tree with two leaves exchanged that never meet directly; None where there is none."""
    order = leaves(tree)
    if len(order) < 3:
        return None
    parent = {
        leaf: node for node in bottom_up(tree) if not isinstance(node, int) for leaf in node if isinstance(leaf, int)
    }
    a = order[0]
    b = next((leaf for leaf in reversed(order) if parent[leaf] is not parent[a]), None)
    if b is None:
        return None
    swap = {a: b, b: a}
    return fold(tree, lambda leaf: swap.get(leaf, leaf), tuple)


def call(box: BlackBox, numbers: Tensor) -> Tensor:
    """The callable on [B, n] numbers. Returns: [B]. Raises: VlmlabError: no tensor, a wrong shape, no floats."""
    return _checked(box, box.run(numbers.to(box.dtype)), len(numbers))


def _checked(box: BlackBox, sums: Any, count: int) -> Tensor:
    if not isinstance(sums, Tensor) or sums.shape != (count,):
        shape = list(sums.shape) if isinstance(sums, Tensor) else type(sums).__name__
        raise VlmlabError(f"expected {box.name} to return [{count}] sums, got {shape}")
    if not sums.is_floating_point():
        raise VlmlabError(f"expected {box.name} to return floating-point numbers, got {sums.dtype}")
    return sums.cpu().contiguous()


# ---------------------------------------------------------------------------------------------------- probing


class _Probe:
    """Counts its calls. `tree` raises VlmlabError where the results cannot be those of a sum, or do not tell."""

    def __init__(self, box: BlackBox) -> None:
        self.box, self.calls, self.probes = box, 0, 0

    def ask(self, numbers: Tensor) -> Tensor:
        self.calls, self.probes = self.calls + 1, self.probes + len(numbers)
        return call(self.box, numbers)

    def tree(self) -> Tree:
        raise NotImplementedError


class _Cancelling(_Probe):
    """By +M and -M. Ones go out in portions that the result can count exactly."""

    def _choose_sizes(self) -> None:
        """M, 1, and how many ones go out at once: M swallows them all in the accumulator, the result counts them."""
        form, wide = format_of(self.box.dtype), FORMATS[self.box.accumulator]
        exact = math.frexp(self.box.scale)[0] == 0.5  # a factor that is no power of two rounds the count once more
        digits, self.slack = (form.precision, 0.0) if exact else (form.precision - 2, 0.3)
        least = form.least - form.precision + (1 if exact else 3) - math.frexp(min(self.box.scale, 1.0))[1] + 1
        top = min(60, math.frexp(form.largest)[1] - 1)
        digits = min(digits, top - least - wide.precision - 1)
        if digits < 1:
            raise VlmlabError(f"{self.box.dtype} has too little range for a {wide.name} accumulator: cannot tell")
        self.portion = 2**digits
        self.big, self.one = 2.0**top, 2.0 ** max(least, top - wide.precision - digits - 12)

    def tree(self) -> Tree:
        """Breadth first: for one leaf of every pending group, the subtree sizes with all others of the group."""
        self._choose_sizes()
        root: dict[str, Any] = {"leaves": torch.arange(self.box.n), "outside": None}
        pending = [root]
        while pending:
            asked: list[tuple[int, Tensor, Tensor]] = []
            for group in pending:
                members, outside = group["leaves"], group["outside"]
                universe = members if outside is None else torch.cat((members, torch.tensor([outside])))
                asked.append((int(members[0]), members[1:], universe))
            pending = _split(pending, self.sizes(asked))
        tree = _assemble(root)
        self._check_single_probes(tree)
        return tree

    def sizes(self, asked: list[tuple[int, Tensor, Tensor]], rows: int | None = None) -> Tensor:
        """How many of a universe's leaves the smallest subtree with i and j has, for every j.

        Args: asked: (i, [J] js, universe) each. rows: most masks a call. Returns: the js' sizes, all in one row.
        """
        rows = rows or self.box.rows
        found = torch.cat([torch.full((len(js),), len(universe)) for _, js, universe in asked])
        calls: list[list[tuple[int, Tensor, Tensor, int]]] = [[]]
        room, at = rows, 0
        for i, js, universe in asked:
            for portion in universe.split(self.portion):
                done = 0
                while done < len(js):
                    if not room:
                        calls.append([])
                        room = rows
                    part = js[done : done + room]
                    calls[-1].append((i, part, portion, at + done))
                    room, done = room - len(part), done + len(part)
            at += len(js)
        for blocks in calls:
            numbers = torch.zeros(sum(len(js) for _, js, _, _ in blocks), self.box.n, dtype=self.box.dtype)
            row = 0
            for i, js, portion, _ in blocks:
                block = numbers[row : row + len(js)]
                block[:, portion] = self.one
                block[:, i] = self.big
                block[torch.arange(len(js)), js] = -self.big
                row += len(js)
            counts, row = self.counts(numbers), 0
            for _, js, _, start in blocks:
                found[start : start + len(js)] -= counts[row : row + len(js)]
                row += len(js)
        return found

    def counts(self, numbers: Tensor) -> Tensor:
        """One call. Raises: VlmlabError: a result that cannot be how many ones were left."""
        sums = self.ask(numbers).double() / self.box.scale / self.one
        whole, most = sums.round(), numbers.eq(self.one).sum(1)
        if (
            not sums.isfinite().all()
            or ((sums - whole).abs() > self.slack).any()
            or ((whole < 0) | (whole > most)).any()
        ):
            raise VlmlabError("a probe's result is no count: this is no plain sum, or its accumulator saturates")
        return whole.long()

    def _check_single_probes(self, tree: Tree, count: int = 4) -> None:
        """A handful of masks one per call, and at every place of a batch: neither must matter. Raises: VlmlabError."""
        if self.box.rows == 1:
            return
        where = leaves(tree)
        pairs = [(where[k * len(where) // count], where[-1 - k * len(where) // (2 * count)]) for k in range(count)]
        masks = torch.zeros(count, self.box.n, dtype=self.box.dtype)
        masks[:, : self.portion] = self.one
        for mask, (i, j) in zip(masks, pairs, strict=True):
            mask[i], mask[j] = self.big, -self.big if i != j else self.one
        alone = torch.cat([self.counts(mask[None]) for mask in masks])
        times = max(1, self.box.rows // count)
        if any(
            not torch.equal(self.counts(part.repeat(times, 1)), some.repeat(times))
            for part, some in zip(masks.split(self.box.rows), alone.split(self.box.rows), strict=True)
        ):
            raise VlmlabError("a mask gives another count alone than among others: the kernel changes with the batch")


def _split(groups: list[dict[str, Any]], sizes: Tensor) -> list[dict[str, Any]]:
    """Sort the members of every group by where they join its first leaf. Returns: groups still to be looked into."""
    following, start = [], 0
    for group in groups:
        members = group["leaves"]
        own = sizes[start : start + len(members) - 1]
        start += len(members) - 1
        group["root_size"], group["joining"] = int(own.max()), []
        order = own.argsort(stable=True)
        counts, others, at = own[order].unique_consecutive(return_counts=True)[1].tolist(), members[1:][order], 0
        alone = others.tolist()
        for count in counts:
            if count == 1:
                group["joining"].append(alone[at])
            else:
                group["joining"].append({"leaves": others[at : at + count], "outside": int(members[0])})
                following.append(group["joining"][-1])
            at += count
    return following


def _assemble(root: dict[str, Any]) -> Tree:
    """The tree of the groups: what joins a group's first leaf, in order, is a leaf or a group.

    A group whose own root already holds the leaf outside it joins as further children.
    """
    order, stack = [], [root]
    while stack:
        group = stack.pop()
        order.append(group)
        stack.extend(joining for joining in group["joining"] if isinstance(joining, dict))
    for group in reversed(order):
        tree: Tree = int(group["leaves"][0])
        for joining in group["joining"]:
            if not isinstance(joining, dict):
                tree = (tree, joining)
            elif joining.get("root_size", 0) > len(joining["leaves"]):
                tree = (tree, *joining["tree"])
            else:
                tree = (tree, joining["tree"])
        group["tree"] = tree
    return root["tree"]


class _Absorbing(_Probe):
    """By a large number beside two small ones."""

    def tree(self) -> Tree:
        """Breadth first: which others of a group meet before they meet one leaf, and in which order they meet it."""
        if self.box.n > MOST_BY_ABSORPTION:
            raise VlmlabError(
                f"expected at most {MOST_BY_ABSORPTION} numbers that cannot be negative, got {self.box.n}"
            )
        self._choose_sizes()
        root: dict[str, Any] = {"leaves": list(range(self.box.n))}
        pending = [root]
        while pending:
            pairs = [(g["leaves"][0], j, k) for g in pending for j, k in itertools.combinations(g["leaves"][1:], 2)]
            together = iter(self.closer(pairs))
            for group in pending:
                others = group["leaves"][1:]
                near = {j: {j} for j in others}
                for j, k in itertools.combinations(others, 2):
                    if next(together):
                        near[j].add(k)
                        near[k].add(j)
                group["joining"] = []
                while others:  # sets of leaves that are closer to each other than to the first
                    members = sorted(near[others[0]])
                    if any(near[j] != near[others[0]] for j in members):
                        raise VlmlabError("the probes contradict each other: this is no tree of plain additions")
                    group["joining"].append({"leaves": members})
                    others = [j for j in others if j not in near[members[0]]]
            triples = [
                (b["leaves"][0], group["leaves"][0], a["leaves"][0])
                for group in pending
                for a, b in itertools.permutations(group["joining"], 2)
            ]
            before = iter(self.closer(triples))
            for group in pending:
                joining = group["joining"]
                rank = {id(a): 0 for a in joining}
                for a, _ in itertools.permutations(joining, 2):
                    rank[id(a)] -= next(before)
                joining.sort(key=lambda a: rank[id(a)])  # who meets the first leaf before most others
                if sorted(rank.values()) != [*range(1 - len(joining), 1)]:
                    raise VlmlabError(
                        "the probes do not put the additions in one order: a fused adder, or no plain sum"
                    )
                group["joining"] = [a if len(a["leaves"]) > 1 else a["leaves"][0] for a in joining]
            pending = [a for group in pending for a in group["joining"] if isinstance(a, dict)]
        return _assemble(root)

    def _choose_sizes(self) -> None:
        """A large number beside which one small number is lost and two together are seen, wherever they stand."""
        n = self.box.n
        for large in torch.linspace(1.0, 3.96875, 96, dtype=torch.float64).tolist():
            small = 0.375 * ulp(torch.tensor(large), FORMATS[self.box.accumulator]).item()
            numbers = torch.zeros(3, n, dtype=torch.float64)
            numbers[:, 0], numbers[1, 1], numbers[2, 1] = large, small, 2 * small
            alone, lost, seen = self.ask(numbers)
            if alone == lost and alone != seen:
                break
        else:
            raise VlmlabError("the result has too few digits to show one unit in the sum's last place: cannot tell")
        self.large, self.small = large, small
        places = torch.arange(n)
        numbers = torch.diag(torch.full((n,), large, dtype=torch.float64))
        self.alone = self._all(numbers)
        numbers[places, (places + 1) % n] = small
        lost = self._all(numbers)
        numbers[places, (places + 1) % n] = 2 * small
        if not self.alone.equal(lost) or self.alone.eq(self._all(numbers)).any():
            raise VlmlabError("a small number is not lost alike beside every other: this is no plain sum")

    def _all(self, numbers: Tensor) -> Tensor:
        return torch.cat([self.ask(part) for part in numbers.split(self.box.rows)])

    def closer(self, triples: list[tuple[int, int, int]]) -> list[bool]:
        """Whether j and k meet before either meets i, for every (i, j, k)."""
        found: list[Tensor] = []
        for start in range(0, len(triples), self.box.rows):
            i, j, k = torch.tensor(triples[start : start + self.box.rows]).T
            numbers = torch.zeros(len(i), self.box.n, dtype=torch.float64)
            rows = torch.arange(len(i))
            numbers[rows, i], numbers[rows, j], numbers[rows, k] = self.large, self.small, self.small
            found.append(self.ask(numbers) != self.alone[i])
        return torch.cat(found).tolist() if found else []


# ---------------------------------------------------------------------------------------------------- replay


def fresh_numbers(box: BlackBox, rows: int, seed: int) -> Tensor:
    """Numbers of random size, values of the dtype: [rows, n] float64.

    In every second row signed ones come in pairs of opposite sign, so that their sum is rounding and nothing else: on
    ordinary numbers a wrong tree often gives the right bits. (A fused adder of all of them would give exactly 0.)
    """
    generator = torch.Generator().manual_seed(seed)
    if box.draw is not None:
        return box.draw(rows, generator)
    numbers = torch.randn(rows, box.n, dtype=torch.float64, generator=generator)
    spread = 3 + FORMATS[box.accumulator].precision - format_of(box.dtype).precision  # so that additions do round
    numbers = numbers * torch.exp2(torch.randint(-spread // 2, spread // 2 + 1, numbers.shape, generator=generator))
    numbers = numbers.to(box.dtype).double()
    if box.summands is not None:
        return numbers.abs()
    numbers[::2] = _paired(numbers[::2])
    return numbers[:, torch.rand(box.n, generator=generator).argsort()]


def _paired(numbers: Tensor) -> Tensor:
    """The second half becomes the first with the other sign."""
    half = numbers[:, : (numbers.shape[1] + 1) // 2]
    return torch.cat((half, -half), 1)[:, : numbers.shape[1]]


def ways_of(box: BlackBox, tree: Tree) -> list[Way]:
    """The ways in which products and fused adders may round. Two numbers of bf16 or fp16 have an exact product."""
    products: tuple[str, ...] = ("rounded first", "fused", "fused, right first")
    if box.multiply is None or box.accumulator != "fp32":  # the exact product of fp64 does not fit into anything here
        products = ("",)
    elif 2 * format_of(box.dtype).precision <= FORMATS["fp32"].precision:
        products = ("exact",)
    wide = any(not isinstance(node, int) and len(node) > 2 for node in bottom_up(tree))
    adders = itertools.product(range(4), ("truncated", "rounded")) if wide else [(0, "")]
    return [Way(way, *adder) for adder in adders for way in products]


def replays(box: BlackBox, tree: Tree, way: Way | None = None, seeds: Sequence[int] = ()) -> bool:
    """Whether a tree gives the callable's bits on fresh numbers; with products, both factors are random.

    Args: tree: over box.n leaves. way: one of ways_of; None is the first. Returns: bool.
    """
    way = way or ways_of(box, tree)[0]
    wide, result = FORMATS[box.accumulator], format_of(box.dtype)
    for seed in seeds or range(1, max(3, 32 // box.rows) + 1):
        numbers, ones = fresh_numbers(box, min(box.rows, 256), seed), torch.ones(box.n, dtype=torch.float64)
        if box.multiply is not None and way.products:
            ones, numbers = _with_factors(box, numbers, seed)
            wanted = _checked(box, box.multiply(ones.to(box.dtype), numbers.to(box.dtype)), len(numbers)).double()
        else:
            wanted = call(box, numbers).double()
        total = _add(tree, ones, box.summands(numbers) if box.summands is not None else numbers, wide, way)
        if box.finish is not None:
            total = box.finish(total, numbers)
        else:
            total = round_to(round_to(total * box.scale, wide) if box.scale != 1 else total, result)
        if not torch.equal(total, wanted):
            return False
    return True


def _with_factors(box: BlackBox, numbers: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """[n] factors, and [rows, n] numbers whose products with them cancel in every second row."""
    generator = torch.Generator().manual_seed(1000 + seed)
    factors = torch.randn(1, box.n, dtype=torch.float64, generator=generator).to(box.dtype).double()
    place = torch.rand(box.n, generator=generator).argsort()
    numbers = numbers.sign() * numbers.abs().clamp(min=2.0**-20)  # a subnormal product may be flushed to zero
    numbers[::2] = _paired(numbers[::2])
    return _paired(factors)[0].abs()[place], numbers[:, place]


def _add(tree: Tree, x: Tensor, y: Tensor, form: Format, way: Way) -> Tensor:
    """The sum of x * y in a tree's order. A leaf stays (x, y) until something is added to it."""

    def value(part: Any) -> Tensor:
        if not isinstance(part, tuple):
            return part
        product = part[0] * part[1]
        return product if way.products == "exact" else round_to(product, form)

    def join(parts: list[Any]) -> Tensor:
        if len(parts) > 2:
            return _add_at_once([(value(part), _exponent(part)) for part in parts], form, way)
        if way.products.startswith("fused"):
            if all(isinstance(part, tuple) for part in parts) and way.products.endswith("right first"):
                parts = parts[::-1]
            parts = sorted(parts, key=lambda part: isinstance(part, tuple))  # what is a sum already comes first
            if isinstance(parts[1], tuple):
                return fused_multiply_add(parts[1][0], parts[1][1], value(parts[0]), form)
        return round_to(value(parts[0]) + value(parts[1]), form)

    return fold(tree, lambda leaf: (x[leaf], y[..., leaf]), join)


def _exponent(part: Any) -> Tensor:
    """As the hardware has it: of a product the sum of both exponents, before its significand is normalised."""
    factors = part if isinstance(part, tuple) else (part,)
    return sum(torch.where(f == 0, -1000, torch.frexp(f)[1] - 1) for f in factors)  # type: ignore[return-value]


def _add_at_once(parts: list[tuple[Tensor, Tensor]], form: Format, way: Way) -> Tensor:
    """All parts aligned to the largest exponent and cut off, added exactly, and cut off or rounded to the format.

    Source: Fasi, Higham, Mikaitis and Pranesh 2021, "Numerical behavior of NVIDIA tensor cores".
    """
    top = parts[0][1]
    for _, exponent in parts[1:]:
        top = torch.maximum(top, exponent)
    unit = torch.ldexp(torch.ones_like(parts[-1][0]), top.clamp(min=-900) - (form.precision - 1 + way.extra_bits))
    total = sum(((value / unit).trunc() for value, _ in parts), torch.zeros_like(unit)) * unit
    if way.adder == "rounded":
        return round_to(total, form)
    spacing = ulp(total, form)
    return (total / spacing).trunc() * spacing
