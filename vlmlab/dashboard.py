"""A toggle per cause, a layer range per part, and what they do: figure, picture, remainder and table at once.

show_dashboard      the widgets, ready to display
Dashboard           the same with its parts at hand
show_three_numbers  (a + b) + c against a + (b + c), step by step

It computes nothing itself: `explorer` gives the numbers, `plots` the figures. Figures are drawn without pyplot and
shown as PNG, so none stays open.
"""

import math
from html import escape
from typing import Any

import ipywidgets as widgets
import pandas as pd
from PIL import Image

from vlmlab.causes import causes_of
from vlmlab.explorer import BASELINES, METRICS, Curve, Explorer
from vlmlab.floats import FORMATS
from vlmlab.plots import plot_plan, plot_worst_tokens, to_png
from vlmlab.summation import steps

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


def show_three_numbers(a: float = 256.0, b: float = 1.0, c: float = 1.0, form: str = "bf16") -> widgets.Widget:
    """Three sliders and a format: both orders, every addition, what was rounded away.

    Args: a, b, c: to begin with. form: of floats.FORMATS. Returns: widget.
    """
    numbers = [
        widgets.FloatSlider(value=v, min=-512, max=512, step=0.125, description=name, continuous_update=False)
        for name, v in (("a", a), ("b", b), ("c", c))
    ]
    chosen, shown = widgets.Dropdown(options=list(FORMATS), value=form, description="format"), widgets.HTML()

    def show(change: Any = None) -> None:
        values, tables = [number.value for number in numbers], []
        for title, tree in (("(a + b) + c", ((0, 1), 2)), ("a + (b + c)", (0, (1, 2)))):
            found = pd.DataFrame([vars(step) for step in steps(tree, values, FORMATS[chosen.value])])
            tables.append(f"<b>{title} = {found['rounded'].iloc[-1]}</b>{found.to_html(index=False, border=0)}")
        shown.value = f"{''.join(tables)}<p>exactly {math.fsum(values)}</p>"

    for control in (*numbers, chosen):
        control.observe(show, names="value")
    show()
    return widgets.VBox([*numbers, chosen, shown])
