"""Numbers to figures, with no numbers of their own.

plot_decay          per-layer cosine decay: worst token, mean and whole tensor, 1 - cosine on a log axis
plot_token_heat     every layer and token at once
plot_worst_tokens   the tokens that differ most, drawn on the picture
plot_plan           one part's decay under a plan, with the envelope of legal plans
plot_steps          figures of an answer, step by step
plot_sums           how the sums of the same numbers in many orders are distributed
plot_growth         a sum's error against the number of summands, with both bounds
plot_tree           an addition tree with its repeated blocks drawn once
plot_points         answered points on the picture
plot_reach          what rounding can do to an answered point, and what else was answered, on the picture
plot_shifts         how far conditions move points, every case
to_png              a figure as a picture file's bytes
"""

import io
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from vlmlab.compare import Comparison, Row
from vlmlab.errors import VlmlabError
from vlmlab.grounding import Case, Outcome
from vlmlab.hookpoints import block_of
from vlmlab.jitter import Reach
from vlmlab.summation import Tree
from vlmlab.tree_boxes import boxes

STYLES = {
    "cosine_min": ("worst token", "#c0392b", "o"),
    "cosine_mean": ("mean over tokens", "#2471a3", "s"),
    "cosine_whole": ("whole tensor", "#7d6608", "^"),
}
SHIFT_COLORS = ("#2471a3", "#d35400", "#1e8449", "#7d3c98", "#b7950b", "#148f77", "#922b21", "#5d6d7e")


def _decay(row: Row, measure: str) -> float:
    value = getattr(row, measure)
    return np.nan if value is None else 1.0 - value


def _stream(comparison: Comparison, part: str) -> list[Row]:
    """The rows that make a decay curve: the stream entering, after every block, and what follows the blocks."""
    kept = [row for row in comparison.part(part) if row.hookpoint.endswith(("resid_pre", "resid_post"))]
    after = [row for row in comparison.part(part) if row.layer is None and row.hookpoint != "vision.patch_embed"]
    return kept + after


def _label(row: Row) -> str:
    if row.layer is None:
        return row.hookpoint.removeprefix("vision.")
    return "in" if row.hookpoint.endswith("resid_pre") else str(row.layer)


def plot_decay(comparison: Comparison, part: str) -> Figure:
    """Per-layer cosine decay of the residual stream; the worst token of the worst layer is named.

    Args: comparison: compared traces. part: "vision" or "language".
    Returns: Figure. Raises: ValueError: the part has no rows.
    """
    rows = _stream(comparison, part)
    if not rows:
        raise ValueError(f"no evidence: nothing was compared in the {part} part")
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    axes = figure.subplots()
    x = np.arange(len(rows))
    curves = {measure: np.array([_decay(row, measure) for row in rows]) for measure in STYLES}
    positive = np.concatenate(list(curves.values()))
    positive = positive[positive > 0]
    low, high = (positive.min(), positive.max()) if positive.size else (1e-16, 1e-15)
    bottom = low / 10  # a log axis has no place for identical vectors, 1 - cosine = 0: they are drawn hollow down here
    axes.set_yscale("log")
    axes.set_ylim(bottom / 2, high * 10)
    for measure, (label, colour, marker) in STYLES.items():
        curve = curves[measure]
        axes.plot(x, np.where(curve > 0, curve, np.nan), color=colour, marker=marker, ms=3.5, lw=1.3, label=label)
        axes.plot(x[curve == 0], np.full((curve == 0).sum(), bottom), marker, mfc="none", mec=colour, ms=6)
    worst = min(
        (row for row in rows if row.cosine_min is not None), key=lambda row: row.cosine_min or 0.0, default=None
    )
    if worst is not None and worst.status != "ok":
        at = rows.index(worst)
        axes.annotate(
            f"{worst.hookpoint}, token {worst.cosine_min_token}: cosine {worst.cosine_min:.6f}",
            (float(x[at]), _decay(worst, "cosine_min")),
            xytext=(0, 14),
            textcoords="offset points",
            ha="right" if at > len(rows) / 2 else "left",
            arrowprops={"arrowstyle": "-", "lw": 0.8},
            fontsize=9,
        )
    step = max(1, len(rows) // 18)
    ticks = [i for i, row in enumerate(rows) if row.layer is None or i % step == 0]
    axes.set_xticks(ticks, [_label(rows[i]) for i in ticks], rotation=60 if any(r.layer is None for r in rows) else 0)
    axes.set_xlabel(f"{part} block (residual stream after it)")
    axes.set_ylabel("1 - cosine")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    axes.set_title(_title(comparison), fontsize=10, loc="left")
    identical = [row.hookpoint for row in rows if row.status == "ok"]
    if identical:
        axes.text(0.01, 0.02, f"{len(identical)} of {len(rows)} points bit-equal (hollow, at the bottom)",
                  transform=axes.transAxes, fontsize=8)  # fmt: skip
    return figure


def _title(comparison: Comparison) -> str:
    a, b = comparison.baseline, comparison.target
    device = " ".join(str(b.device[key]) for key in ("type", "capability") if key in b.device)
    return f"{a.model}: {a.release} against {b.release}, {b.dtype}, {device}"


def plot_token_heat(comparison: Comparison, part: str) -> Figure:
    """1 - cosine of every token (across) after every block (up), on a log colour scale.

    Args: comparison: compared traces. part: "vision" or "language".
    Returns: Figure. Raises: ValueError: the part has no blocks.
    """
    from matplotlib.colors import LogNorm

    rows = [row for row in comparison.part(part) if row.hookpoint.endswith("resid_post")]
    rows = [row for row in rows if row.hookpoint in comparison.cosines]
    if not rows:
        raise ValueError(f"no evidence: nothing was compared in the {part} part")
    decay = np.stack([1.0 - comparison.cosines[row.hookpoint].numpy() for row in rows])
    positive = decay[decay > 0]
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    axes = figure.subplots()
    low, high = (positive.min(), positive.max()) if positive.size else (1e-16, 1e-15)
    shown = np.where(decay > 0, decay, np.nan)
    image = axes.imshow(shown, aspect="auto", origin="lower", norm=LogNorm(low, max(high, low * 10)), cmap="magma")
    figure.colorbar(image, ax=axes, label="1 - cosine (blank: identical)")
    axes.set_xlabel("patch, four to a merged token" if part == "vision" else "token")
    axes.set_ylabel("block")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def plot_worst_tokens(
    values: np.ndarray, image: Image.Image, grid: tuple[int, int], label: str, count: int = 5
) -> Figure:
    """The merged image tokens on the picture: shaded by a value per token, the largest ones outlined and numbered.

    Args: values: [N], larger is worse. image: the picture as the engines saw it. grid: merged tokens (rows, columns).
    label: what the values are. count: how many to outline.
    Returns: Figure. Raises: ValueError: the grid does not match.
    """
    from matplotlib.patches import Rectangle

    rows, columns = grid
    if rows * columns != values.size:
        raise ValueError(f"expected a grid of {values.size} tokens, got {rows} x {columns}")
    figure = Figure(figsize=(8.5, 5.6))  # margins by hand: a layout engine would draw everything twice
    figure.subplots_adjust(left=0.07, right=1.0, top=0.95, bottom=0.09)
    axes = figure.subplots()
    axes.imshow(image, extent=(0, columns, rows, 0))
    shaded = values.reshape(rows, columns)
    shade = axes.imshow(
        shaded, extent=(0, columns, rows, 0), cmap="Reds", alpha=0.55, interpolation="nearest",
        vmin=0, vmax=max(values.max(), np.finfo(np.float32).tiny),
    )  # fmt: skip
    figure.colorbar(shade, ax=axes, label=label, shrink=0.8)
    worst = [token for token in np.argsort(-values, kind="stable")[:count] if values[token] > 0]
    if not worst:
        axes.set_title("identical at every token", fontsize=10, loc="left")
    for rank, token in enumerate(worst, start=1):
        row, column = divmod(int(token), columns)
        axes.add_patch(Rectangle((column, row), 1, 1, fill=False, ec="black", lw=1.6))
        axes.text(column + 1.1, row + 0.5, f"{rank}: token {token}", fontsize=8, va="center",
                  bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 1})  # fmt: skip
    axes.set_xlabel("merged token column")
    axes.set_ylabel("merged token row")
    return figure


def plot_plan(table: pd.DataFrame, metric: str, title: str) -> Figure:
    """One part's decay under a plan: worst token and mean, and the envelope that legal plans span.

    Args: table: of explorer.Curve. metric: what the numbers are. title: what is compared.
    Returns: Figure.
    """
    figure = Figure(figsize=(9.5, 3.4))
    figure.subplots_adjust(left=0.08, right=0.99, top=0.91, bottom=0.2)
    axes = figure.subplots()
    x = np.arange(len(table))
    numbers = table[["worst", "mean", "envelope"]].to_numpy()
    positive = numbers[numbers > 0]
    low, high = (positive.min(), positive.max()) if positive.size else (1e-16, 1e-15)
    bottom = low / 10  # identical states have no place on a log axis: they are drawn hollow down here
    axes.set_yscale("log")
    axes.set_ylim(bottom / 2, high * 5)
    envelope = np.where(table["envelope"] > 0, table["envelope"], bottom)
    axes.fill_between(x, bottom / 2, envelope, color="#bfc9ca", label="envelope: worst token of any legal plan", lw=0)
    for column, label, colour, marker in (("worst", "worst token", "#c0392b", "o"), ("mean", "mean", "#2471a3", "s")):
        curve = table[column].to_numpy()
        axes.plot(x, np.where(curve > 0, curve, np.nan), color=colour, marker=marker, ms=3.5, lw=1.3, label=label)
        axes.plot(x[curve <= 0], np.full((curve <= 0).sum(), bottom), marker, mfc="none", mec=colour, ms=6)
    shown = {i: str(block[1]) for i, name in enumerate(table["hookpoint"]) if (block := block_of(name))}
    step = max(1, len(table) // 15)
    shown = {i: label for i, label in shown.items() if i % step == 0}
    shown |= {i: name.split(".")[-1] for i, name in enumerate(table["hookpoint"]) if block_of(name) is None}
    shown |= {i: "in" for i, name in enumerate(table["hookpoint"]) if name.endswith("resid_pre")}
    axes.set_xticks(list(shown), list(shown.values()), fontsize=8, rotation=45)
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    axes.set_title(title, fontsize=10, loc="left")
    return figure


def plot_steps(curves: Mapping[str, Sequence[float]], ylabel: str, title: str, mark: int | None = None) -> Figure:
    """Figures of an answer over its steps, on a log axis. What is 0 is drawn hollow at its foot.

    Args: curves: label to one number a step; NaN leaves a gap. ylabel, title: text. mark: step of a line, or None.
    Returns: Figure. Raises: VlmlabError: nothing to draw.
    """
    values = {label: np.asarray(curve, float) for label, curve in curves.items()}
    drawn = np.concatenate([curve[np.isfinite(curve)] for curve in values.values()] or [np.empty(0)])
    if not drawn.size:
        raise VlmlabError("no evidence: no step has a number to draw")
    positive = drawn[drawn > 0]
    bottom = positive.min() / 10 if positive.size else 1e-16
    figure = Figure(figsize=(9.5, 3.4))
    figure.subplots_adjust(left=0.08, right=0.76, top=0.91, bottom=0.15)
    axes = figure.subplots()
    axes.set_yscale("log")
    axes.set_ylim(bottom / 2, (positive.max() if positive.size else bottom) * 5)
    for label, curve in values.items():
        x = np.arange(len(curve))
        (line,) = axes.plot(x, np.where(curve > 0, curve, np.nan), marker=".", ms=4, lw=1.0, label=label)
        axes.plot(x[curve <= 0], np.full((curve <= 0).sum(), bottom), "o", mfc="none", mec=line.get_color(), ms=4)
    if mark is not None:
        axes.axvline(mark, color="#c0392b", ls="--", lw=1, label="the texts part")
    axes.set(xlabel="step", ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
    axes.set_title(title, fontsize=10, loc="left")
    return figure


def plot_sums(sums: Sequence[float], exact: float, spacing: float, title: str) -> Figure:
    """How the sums of the same numbers in different orders are distributed.

    Args: sums: one per order. exact: rounded nowhere. spacing: of the format there. title: text.

    The grid is one such spacing, or as small a power of two of them as still can be seen; bars are as wide.
    """
    values = np.asarray(sums, float)
    low, high = min(values.min(), exact), max(values.max(), exact)
    ulps = 1
    while (high - low) / (ulps * spacing) > 60:
        ulps *= 2
    step = ulps * spacing
    places, counts = np.unique(np.round(values / step), return_counts=True)
    figure = Figure(figsize=(8, 3))
    axes = figure.subplots()
    axes.bar(places * step, counts, width=0.8 * step, color="#d35400", label="orders")
    axes.axvline(exact, color="#2e86c1", label=f"exact {exact:.6g}")
    axes.set_xticks(np.arange(np.floor(low / step), np.ceil(high / step) + 1) * step, minor=True)
    axes.xaxis.remove_overlapping_locs = False  # a labelled tick would take the grid line away
    axes.grid(axis="x", which="minor", alpha=0.4)
    axes.set_axisbelow(True)
    axes.set(title=title, xlabel=f"sum; a grid line every {ulps} ulp", ylabel="random orders")
    axes.legend()
    figure.tight_layout()
    return figure


def plot_growth(errors: pd.DataFrame, unit: float, title: str) -> Figure:
    """How a sum's error grows with the number of summands, against what theory bounds.

    Args: errors: one column per order, indexed by n; relative to the sum of absolute values. unit: half the format's
    spacing at 1. title: text.
    """
    figure = Figure(figsize=(8, 3.5))
    axes = figure.subplots()
    for name in errors:
        axes.loglog(errors.index, errors[name], marker="o", label=name)
    n = errors.index.to_numpy(float)
    axes.loglog(n, unit * n, "--", color="#808080", label="worst-case bound: n u")
    axes.loglog(n, unit * np.sqrt(n), ":", color="#808080", label="random errors: sqrt(n) u")
    axes.set(title=title, xlabel="n", ylabel="error / sum of |x|")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    return figure


BOX_STYLES = {  # kind: fill, edge, line width, corners
    "number": ("#f4f6f7", "#7f8c8d", 0.8, "square,pad=0"),
    "add": ("#ffffff", "#2c3e50", 1.0, "round,pad=0,rounding_size=0.1"),
    "sequence": ("#d6eaf8", "#2471a3", 1.0, "round,pad=0,rounding_size=0.1"),
    "pairwise": ("#d5f5e3", "#1e8449", 1.0, "round,pad=0,rounding_size=0.1"),
    "fused": ("#fdebd0", "#ca6f1e", 2.6, "square,pad=0"),
    "below": ("#ffffff", "#c0392b", 1.0, "square,pad=0"),
}


def plot_tree(tree: Tree, title: str) -> Figure:
    """An addition tree: the result on the left, the numbers on the right; what repeats is drawn once.

    Args: tree: of summation, up to some thousand leaves. title: text.
    Returns: Figure with at most MOST_BOXES boxes; where more would be needed, a box says how many numbers hang below.
    """
    from matplotlib.patches import FancyBboxPatch

    drawn = boxes(tree)
    children: list[list[int]] = [[] for _ in drawn]
    for index, (_, _, parent, _) in enumerate(drawn[1:], start=1):
        children[parent].append(index)
    heights, stack, order = [0.0] * len(drawn), [0], []
    while stack:
        order.append(stack.pop())
        stack.extend(reversed(children[order[-1]]))
    slots = itertools.count()
    for index in order:
        if not children[index]:
            heights[index] = -0.5 * next(slots)
    for index in reversed(order):
        if children[index]:
            heights[index] = (heights[children[index][0]] + heights[children[index][-1]]) / 2
    texts = [f"{box.text}\n{box.size} numbers" if box.size > 2 else box.text for box, *_ in drawn]
    lefts, widths, right = [], [], 0.1  # inches
    for level in range(1 + max(level for _, level, *_ in drawn)):
        here = [i for i, box in enumerate(drawn) if box[1] == level]
        lefts.append(right + (0.3 + 0.075 * max(len(drawn[i][3]) for i in here) if level else 0.0))
        widths.append(0.2 + 0.078 * max(len(line) for i in here for line in texts[i].split("\n")))
        right = lefts[-1] + widths[-1]
    low = min(heights) - 0.3
    figure = Figure(figsize=(max(right + 0.1, 0.1 + 0.09 * len(title)), 0.65 - low))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, figure.get_figwidth()), ylim=(low, 0.65))
    axes.axis("off")
    axes.text(0.1, 0.45, title, fontsize=10, va="center")
    for (box, level, parent, words), y, text in zip(drawn, heights, texts, strict=True):
        x, (fill, edge, line, corners) = lefts[level], BOX_STYLES[box.kind]
        if parent >= 0:
            begin = lefts[level - 1] + widths[level - 1]
            axes.plot((begin, begin + 0.12, x), (heights[parent], y, y), color="#7f8c8d", lw=0.9, zorder=0)
            axes.text(x - 0.06, y + 0.02, words, fontsize=8, ha="right", va="bottom")
        axes.add_patch(FancyBboxPatch((x, y - 0.19), widths[level], 0.38, boxstyle=corners, fc=fill, ec=edge, lw=line,
                                      ls="--" if box.kind == "below" else "-"))  # fmt: skip
        axes.text(x + widths[level] / 2, y, text, fontsize=8, ha="center", va="center")
    return figure


def _draw_points(axes: Axes, case: Case, outcomes: Mapping[str, Outcome]) -> None:
    """Picture, target and answered points; a way without a point is named in the legend alone."""
    from matplotlib.patches import Rectangle

    width, height = case.image.size
    x1, y1, x2, y2 = case.box
    axes.imshow(case.image, extent=(0, width, height, 0), interpolation="nearest")
    axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, ec="black", ls=":", lw=1, label="target"))
    marks, colors = itertools.cycle("ovs^D<>pP*X"), itertools.cycle(SHIFT_COLORS)
    for (name, outcome), mark, color in zip(outcomes.items(), marks, colors, strict=False):
        points = [] if outcome.point is None else [outcome.point]
        xs, ys, label = [x for x, _ in points], [y for _, y in points], name if points else f"{name}: {outcome.status}"
        axes.scatter(xs, ys, marker=mark, s=42, fc=color, ec="black", lw=0.6, label=label, zorder=3)
    axes.set(xlim=(0, width), ylim=(height, 0), xlabel="px", ylabel="px")


def plot_points(case: Case, outcomes: Mapping[str, Outcome]) -> Figure:
    """The picture with the target and the answered points. Args: case. outcomes: way to its outcome."""
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    _draw_points(axes, case, outcomes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
    figure.tight_layout()
    return figure


def plot_reach(case: Case, reach: Reach, others: Mapping[str, Outcome]) -> Figure:
    """The picture with the target, the box that rounding can reach and the answers of other ways; right, a close-up.

    Args: case. reach: of the case. others: way to its outcome.
    """
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(11, 5.2))
    whole, close = figure.subplots(1, 2)
    for axes in (whole, close):
        _draw_points(axes, case, others)
        if reach.box is not None:
            left, top, right, bottom = reach.box
            axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, ec="#7d3c98", lw=2,
                                     label="what rounding can reach", zorder=4))  # fmt: skip
    if reach.box is not None:
        half = max(right - left, bottom - top, case.image.width / 100)
        x, y = (left + right) / 2, (top + bottom) / 2
        close.set(xlim=(x - half, x + half), ylim=(y + half, y - half))
    whole.set_title(case.question, fontsize=10)
    close.set_title("around what rounding can reach", fontsize=10)
    close.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
    figure.tight_layout()
    return figure


def plot_shifts(lengths: Mapping[str, Sequence[float]], mark: float, title: str) -> Figure:
    """How far each condition moves points, a dot a case, on an axis that is linear below 1.

    Args: lengths: condition to shifts, thousandths of the picture's sides. mark: the reported shift. title: text.
    """
    figure = Figure(figsize=(9, 0.6 + 0.28 * len(lengths)))
    axes = figure.subplots()
    for row, values in enumerate(lengths.values()):
        spread = row + (np.linspace(-0.28, 0.28, len(values)) if len(values) > 1 else np.zeros(len(values)))
        axes.scatter(values, spread, s=5, alpha=0.6, color=SHIFT_COLORS[row % len(SHIFT_COLORS)])
        if len(values):
            axes.plot([np.median(values)] * 2, [row - 0.36, row + 0.36], color="black", lw=1.6)
    axes.axvline(mark, color="#c0392b", ls="--", label=f"reported: {mark:g}")
    axes.set_xscale("symlog", linthresh=1)
    axes.set(yticks=range(len(lengths)), yticklabels=list(lengths), xlim=(-0.2, 1500), title=title)
    axes.set_xlabel("shift of the answered point, thousandths of the picture's sides; a bar is the median")
    axes.invert_yaxis()
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    return figure


def to_png(figure: Figure, dpi: int = 80) -> bytes:
    """A figure as PNG. Args: dpi: dots per inch. Returns: file content."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi)
    return stream.getvalue()
