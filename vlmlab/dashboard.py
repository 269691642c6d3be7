"""A toggle per cause, a layer range per part, and what they do: figure, picture, remainder and table at once.

show_dashboard      the widgets, ready to display
Dashboard           the same with its parts at hand
show_three_numbers  (a + b) + c against a + (b + c), step by step
show_sum            any numbers in any format and order, step by step
show_grounding      one box of yours under any order, dtype and hypothesis

It computes nothing itself: `explorer` gives the numbers, `plots` the figures. Figures are drawn without pyplot and
shown as PNG, so none stays open.
"""

import base64
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets
import pandas as pd
import torch
from PIL import Image

from vlmlab.ask import Forward, Way
from vlmlab.causes import causes_of, hf_plan
from vlmlab.errors import VlmlabError
from vlmlab.explorer import BASELINES, METRICS, Curve, Explorer
from vlmlab.floats import FORMATS, Format, round_to, ulp
from vlmlab.grounding import COLORS, case_of
from vlmlab.hypotheses import UNCHANGED, of_family, orders_of
from vlmlab.plots import plot_plan, plot_points, plot_worst_tokens, to_png
from vlmlab.summation import ORDERS, Step, kahan, steps

TITLES = {"vision": "ViT", "language": "language model"}


class Dashboard:
    """Widgets over an Explorer.

    Args: explorer: the pair of traces. image: the picture as the engines saw it, or None. grid: its merged tokens
    (rows, columns).
    Attributes: toggles: cause to its button. ranges: part to its layer slider. baseline, metric: choices. figures: part
    to its decay figure. picture: the worst tokens. facts: the same as a table. status: what is going on. widget: all
    of it.
    """

    def __init__(
        self, explorer: Explorer, image: Image.Image | None = None, grid: tuple[int, int] | None = None
    ) -> None:
        self._explorer, self._image, self._grid = explorer, image, grid
        self._drawn: dict[tuple, tuple[bytes, bytes | None, Curve]] = {}
        causes = [cause for part in explorer.parts for cause in causes_of(explorer.hybrid.family, part)]
        wide = widgets.Layout(width="auto")
        self.toggles = {
            cause.name: widgets.ToggleButton(description=cause.name, tooltip=cause.explanation, layout=wide)
            for cause in causes
        }
        self.ranges = {
            part: widgets.IntRangeSlider(
                value=(0, explorer.depths[part] - 1),
                min=0,
                max=explorer.depths[part] - 1,
                description="layers",
                continuous_update=False,
            )
            for part in explorer.parts
        }
        self.baseline = widgets.Dropdown(
            options=[(title, name) for name, title in BASELINES.items()], value="hf", description="baseline"
        )
        self.metric = widgets.Dropdown(options=list(METRICS), description="metric")
        self.figures = {part: widgets.Image(format="png") for part in explorer.parts}
        self.picture = widgets.Image(format="png")
        self.status, self.facts = widgets.HTML(), widgets.HTML()
        for control in (*self.toggles.values(), *self.ranges.values(), self.baseline, self.metric):
            control.observe(self._changed, names="value")
        self.widget = self._arrange()
        self._changed()

    def _arrange(self) -> widgets.Widget:
        rows: list[widgets.Widget] = [widgets.HBox([self.baseline, self.metric]), self.status]
        for part in self._explorer.parts:
            names = [cause.name for cause in causes_of(self._explorer.hybrid.family, part)]
            buttons = widgets.HBox([self.toggles[name] for name in names], layout=widgets.Layout(flex_flow="row wrap"))
            title = widgets.HTML(f"<b>{TITLES[part]}: computed as SGLang does it</b>")
            rows += [title, buttons, self.ranges[part], self.figures[part]]
        if self._image is not None and "vision" in self._explorer.parts:
            rows.append(self.picture)
        return widgets.VBox([*rows, self.facts])

    def switched(self, part: str) -> dict[str, range]:
        """The causes of a part that are switched on, and the layers where."""
        low, high = self.ranges[part].value
        names = [cause.name for cause in causes_of(self._explorer.hybrid.family, part)]
        return {name: range(low, high + 1) for name in names if self.toggles[name].value}

    def _changed(self, change: Any = None) -> None:
        self.status.value = "<i>computing; what is shown below is stale</i>"
        try:
            shown = {part: self._draw(part) for part in self._explorer.parts}
            for part, (decay, tokens, _) in shown.items():
                self.figures[part].value = decay
                if tokens is not None:
                    self.picture.value = tokens
            curves = {part: curve for part, (_, _, curve) in shown.items()}
            self.facts.value, self.status.value = self._table(curves), self._remainder(curves)
        except Exception as error:  # a callback's exception would be lost in a log; here it belongs on the page
            message = escape(f"{type(error).__name__}: {error}")
            self.status.value = f"<b style='color:#c0392b'>{message}. What is shown below is stale.</b>"

    def _draw(self, part: str) -> tuple[bytes, bytes | None, Curve]:
        switched = self.switched(part)
        key = (part, tuple(switched.items()), self.baseline.value, self.metric.value)
        if key not in self._drawn:
            plan = self._explorer.plan(switched)
            curve = self._explorer.curve(part, plan, self.baseline.value, self.metric.value)
            title = (
                f"{TITLES[part]}: {', '.join(switched) or 'nothing switched'}; against {BASELINES[self.baseline.value]}"
            )
            decay, tokens = to_png(plot_plan(curve.table, self.metric.value, title)), None
            if part == "vision" and self._image is not None and self._grid is not None:
                label = f"{self.metric.value} after the merger"
                tokens = to_png(plot_worst_tokens(curve.tokens.numpy(), self._image, self._grid, label))
            self._drawn[key] = decay, tokens, curve
        return self._drawn[key]

    def _remainder(self, curves: dict[str, Curve]) -> str:
        parts = [f"{TITLES[p]} {c.remainder} of {c.total} tensors" for p, c in curves.items()]
        return f"not yet SGLang's bits: {', '.join(parts)}"

    def _table(self, curves: dict[str, Curve]) -> str:
        tables = []
        for part, curve in curves.items():
            table = curve.table.to_html(index=False, float_format=lambda x: f"{x:.3e}", border=0)
            tables.append(f"<details open><summary>{TITLES[part]} as a table</summary>{table}</details>")
        return "".join(tables)


def show_dashboard(
    explorer: Explorer, image: Image.Image | None = None, grid: tuple[int, int] | None = None
) -> widgets.Widget:
    """The widgets, as a notebook cell's last value.

    Args: see Dashboard. Returns: widget.
    """
    return Dashboard(explorer, image, grid).widget


SORTED, KAHAN, WIDE = "smallest first", "Kahan", "fp32 accumulator, round once"
WAYS = [*ORDERS, SORTED, KAHAN, WIDE]
MOST_NUMBERS = 64
PRESETS = {  # what happens: three numbers, format
    "a tie goes to the even neighbour, below": (256.0, 1.0, 1.0, "bf16"),
    "the same mirrored": (-256.0, -1.0, -1.0, "bf16"),
    "a tie goes to the even neighbour, above": (258.0, 1.0, -1.0, "bf16"),
    "overflow on the way": (65504.0, 16.0, -16.0, "fp16"),
    "saturation on the way": (448.0, 32.0, -32.0, "e4m3"),
    "too small to be noticed": (2.0**24, 1.0, 1.0, "fp32"),
    "cancellation": (1e8, -1e8, 1.0, "fp32"),
}


def show_three_numbers(preset: str = next(iter(PRESETS))) -> widgets.Widget:
    """Three sliders and a format: both orders, every addition, what was rounded away.

    Args: preset: of PRESETS, to begin with; the numbers and the format can be changed. Returns: widget.
    """
    numbers = [widgets.FloatSlider(description=name, step=0.125, continuous_update=False) for name in "abc"]
    options = [(f"{what}: {_words(case[:3])} in {case[3]}", what) for what, case in PRESETS.items()]
    chosen = widgets.Dropdown(options=options, value=preset, description="example", layout=widgets.Layout(width="36em"))
    form = widgets.Dropdown(options=list(FORMATS), description="format")

    def page() -> str:
        values, shown = [number.value for number in numbers], ""
        held, note = _held(values, FORMATS[form.value])
        for title, tree in (("(a + b) + c", ((0, 1), 2)), ("a + (b + c)", (0, (1, 2)))):
            found = steps(tree, held, FORMATS[form.value])
            shown += f"<b>{title} = {found[-1].rounded}</b>{_additions(found)}"
        return f"{shown}<p>exactly (as float64) {math.fsum(held)}{note}</p>"

    def take(change: Any = None) -> None:
        *values, name = PRESETS[chosen.value]
        reach = max(512.0, 2 * max(map(abs, values)))
        for number, value in zip(numbers, values, strict=True):
            number.min, number.max, number.value = -reach, reach, value
        form.value = name

    take()
    chosen.observe(take, names="value")
    return widgets.VBox([chosen, *numbers, form, _live(page, (*numbers, form))])


def show_sum(numbers: str = "256, 1, 1, 0.5, -256", form: str = "bf16", order: str = "sequential") -> widgets.Widget:
    """Any numbers, a format and an order: every addition, the final value, the exact one and the error.

    Args: numbers: 2 to MOST_NUMBERS, separated by commas or spaces. form: of floats.FORMATS. order: of WAYS.
    Returns: widget. A text that is no such list gives a sentence in place of the table.
    """
    wide = widgets.Layout(width="36em")
    text = widgets.Text(value=numbers, description="numbers", continuous_update=False, layout=wide)
    forms = widgets.Dropdown(options=list(FORMATS), value=form, description="format")
    orders = widgets.Dropdown(options=WAYS, value=order, description="order")

    def page() -> str:
        held, note = _held(_read(text.value), FORMATS[forms.value])
        total, table = _added(held, FORMATS[forms.value], orders.value)
        exact = math.fsum(held)
        unit = ulp(torch.tensor(exact, dtype=torch.float64), FORMATS[forms.value]).item()
        error = f"error {_error(total, held) / unit:.4g} ulp (1 ulp = {unit})"
        final = f"<b>sum {total}, exactly (as float64) {exact}, {error}</b>"
        return f"{table}<p>{final}{note}</p>"

    return widgets.VBox([text, forms, orders, _live(page, (text, forms, orders))])


GROUNDING_DTYPES = {"as stored": None, "float32": torch.float32, "float64": torch.float64}


def show_grounding(forward: Forward, side: int = 1000) -> widgets.Widget:
    """A box to point at on a white square, and what the hybrid forward answers: any order, dtype and hypothesis.

    Args: forward: of a checkpoint. side: of the picture, px. Returns: widget; it begins with the reported case.
    """
    family, wide = forward.checkpoint.family, widgets.Layout(width="30em")

    def choice(options: Sequence[str], description: str) -> widgets.Dropdown:
        return widgets.Dropdown(options=options, description=description, layout=wide)

    def span(description: str, low: int, high: int) -> widgets.IntRangeSlider:
        ends = (low * side // 1000, high * side // 1000)
        return widgets.IntRangeSlider(
            value=ends, max=side, description=description, continuous_update=False, layout=wide
        )

    orders, dtypes, changes = orders_of(family) or {"no deepstack": "hf"}, GROUNDING_DTYPES, of_family(family)
    order, dtype = choice(list(orders), "order"), choice(list(dtypes), "dtype")
    hypothesis, color = choice(["none", *changes], "hypothesis"), choice(COLORS, "color")
    x, y = span("x", 620, 880), span("y", 180, 360)

    def page() -> str:
        case = case_of((side, side), (x.value[0], y.value[0], x.value[1], y.value[1]), color.value, "rectangle")
        plain = Way(hf_plan(), dtypes[dtype.value])
        plan = hf_plan().switched("deepstack_order", orders[order.value])
        changed = Way(plan, plain.dtype, changes.get(hypothesis.value, UNCHANGED))
        found = {"unchanged, (h + r) + d": forward.judge(case, plain), "as chosen": forward.judge(case, changed)}
        rows = [{"way": name, "answer": o.answer, "drift, px": o.drift_px, "hit": o.hit} for name, o in found.items()]
        table = pd.DataFrame(rows).to_html(index=False, float_format=lambda value: f"{value:.1f}", na_rep="-", border=0)
        box = (x.value[0] + x.value[1]) / 2, (y.value[0] + y.value[1]) / 2
        source = base64.b64encode(to_png(plot_points(case, found), 60)).decode()
        return f"{table}<p>center of the box: ({box[0]:g}, {box[1]:g}) px</p><img src='data:image/png;base64,{source}'>"

    controls = (order, dtype, hypothesis, color, x, y)
    return widgets.VBox([*controls, _live(page, controls)])


def _added(held: list[float], form: Format, way: str) -> tuple[float, str]:
    """The sum in one of WAYS, and its additions as a table."""
    if way == KAHAN:
        begun = [held[:k] for k in range(1, len(held) + 1)]
        sums = [kahan(torch.tensor(some, dtype=torch.float64), form).item() for some in begun]
        rows = {"number": held, "sum so far": sums, "exactly (as float64)": [math.fsum(some) for some in begun]}
        rows["error"] = [_error(total, some) for total, some in zip(sums, begun, strict=True)]
        return sums[-1], _html(pd.DataFrame(rows))
    if way == WIDE:
        found = steps(ORDERS["sequential"](len(held)), held, FORMATS["fp32"])
        total = round_to(torch.tensor(found[-1].rounded, dtype=torch.float64), form).item()
        return total, f"{_additions(found)}<p>{found[-1].rounded} rounded to {form.name} is {total}</p>"
    order = ORDERS.get(way, ORDERS["sequential"])
    found = steps(order(len(held)), sorted(held, key=abs) if way == SORTED else held, form)
    return found[-1].rounded, _additions(found)


def _error(total: float, held: Sequence[float]) -> float:
    """How far a sum is from the exact one, rounded only once."""
    return math.fsum((total, *(-value for value in held))) if math.isfinite(total) else total


def _read(text: str) -> list[float]:
    """Numbers separated by commas or spaces. Raises: VlmlabError: anything else, too few or too many."""
    words = text.replace(",", " ").split()
    if not 2 <= len(words) <= MOST_NUMBERS:
        raise VlmlabError(f"expected 2 to {MOST_NUMBERS} numbers, separated by commas or spaces, got {len(words)}")
    found = []
    for word in words:
        try:
            found.append(float(word))
        except ValueError:
            raise VlmlabError(f"expected numbers, separated by commas or spaces, got {word[:20]!r}") from None
    return found


def _held(values: Sequence[float], form: Format) -> tuple[list[float], str]:
    """Values as the format holds them, and words for those that it changed. Raises: VlmlabError: beyond the format."""
    for value in values:
        if not abs(value) <= min(form.largest, 1e300):  # 64 numbers of 1e300 still have a sum in float64
            raise VlmlabError(
                f"expected numbers up to {min(form.largest, 1e300):.6g} in size ({form.name}), got {value}"
            )
    held = round_to(torch.tensor(values, dtype=torch.float64), form).tolist()
    changed = [f"{a} is {b}" for a, b in zip(values, held, strict=True) if a != b]
    return held, f"<br>rounded to {form.name} before any addition: {', '.join(changed)}" if changed else ""


def _words(values: Sequence[float]) -> str:
    first, *rest = (f"{value:.17g}" for value in values)
    return first + "".join(f" - {word[1:]}" if word.startswith("-") else f" + {word}" for word in rest)


def _additions(found: list[Step]) -> str:
    names = {"exact": "exact (as float64)", "lost": "rounded away", "ulp": "ulp there"}
    return _html(pd.DataFrame([vars(step) for step in found]).rename(columns=names))


def _html(table: pd.DataFrame) -> str:
    table.index = pd.RangeIndex(1, len(table) + 1)
    return table.astype(float).to_html(float_format=lambda value: repr(float(value)), na_rep="-", border=0)


def _live(page: Callable[[], str], controls: Sequence[widgets.Widget]) -> widgets.HTML:
    """A page that follows its controls; what is wrong with them stands in its place."""
    shown = widgets.HTML()

    def show(change: Any = None) -> None:
        try:
            shown.value = page()
        except VlmlabError as error:
            shown.value = f"<b style='color:#c0392b'>{escape(str(error))}</b>"

    for control in controls:
        control.observe(show, names="value")
    show()
    return shown
