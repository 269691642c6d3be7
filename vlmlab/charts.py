"""Vega-Lite specifications of a report: live in a browser without a kernel, and the same drawn as SVG for scripts off.

bundle          the JavaScript library, to be put into a page
svg, jpeg       a specification, drawn
plan_chart      one part: a check box per live cause, baseline, metric; decay curve, envelope, remainder
token_charts    every token at one layer, on the picture where there is one, and one token through all layers
step_chart      one value per decode step

Numbers travel as one array per curve and are unfolded in the browser, which keeps a page of some hundred plans small.
Zeros are bit-equal values; a logarithmic axis cannot show them, so they lie on its lower edge.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import vl_convert

Spec = dict[str, Any]
Values = Sequence[float | None]

FLOOR = 1e-9
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
WIDTH, HEIGHT = 620, 260
BLUE, ORANGE = "#2e86c1", "#d35400"
GREY = "#808080"  # readable on white and on black


def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which sets `vegaEmbed`."""
    return vl_convert.javascript_bundle()  # type: ignore[call-arg]


def svg(spec: Spec) -> str:
    """The specification as it looks at first, as an SVG element without a background."""
    return vl_convert.vegalite_to_svg(spec)


def jpeg(spec: Spec) -> bytes:
    """As `svg`, in pixels on white, where thousands of marks would make a large SVG."""
    return vl_convert.vegalite_to_jpeg({**spec, "background": "white"}, quality=40)


def rounded(values: Values) -> list[float | None]:
    """Three significant digits, which is what a curve can show; undefined numbers become None."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.2e}") for v in values]


def _finished(chart: Any) -> Spec:
    axis = {"labelColor": GREY, "titleColor": GREY, "domainColor": GREY, "tickColor": GREY, "gridColor": "#80808020"}
    legend = {"labelColor": GREY, "titleColor": GREY}
    chart = chart.properties(background="transparent").configure_view(stroke=None)
    return chart.configure(axis=axis, legend=legend, title={"color": GREY}).to_dict()


def _x(field: str) -> alt.X:
    return alt.X(f"{field}:Q", title="hook point, in forward order", axis=alt.Axis(format="d", grid=False))


def _data(rows: Sequence[Mapping[str, Any]]) -> alt.Data:
    return alt.Data(values=list(rows))


def _y(field: str, title: str) -> alt.Y:
    scale, axis = alt.Scale(type="log", domainMin=FLOOR, clamp=True), alt.Axis(format=".0e", tickCount=5)
    return alt.Y(f"{field}:Q", title=title, scale=scale, axis=axis)


def _shown(field: str) -> str:
    return f"max(datum.{field}, {FLOOR})"


def plan_chart(
    title: str,
    causes: Mapping[str, str],
    hookpoints: Sequence[str],
    curves: Sequence[Mapping[str, Any]],
    envelopes: Sequence[Mapping[str, Any]],
    remainders: Sequence[Mapping[str, Any]],
) -> Spec:
    """Decay of one part under any combination of its live causes.

    Args: causes: live, name to title; the k-th switches bit k of a plan. hookpoints: L names. curves: rows of plan
    (bits), baseline, metric, worst, mean, token ([L] each). envelopes: rows of baseline, metric, envelope ([L]).
    remainders: rows of plan and text.
    Returns: Vega-Lite specification with parameters `cause_NAME`, `baseline` and `metric`.
    """
    toggles = [
        alt.param(name=f"cause_{name}", value=False, bind=alt.binding_checkbox(name=f"{words}, as SGLang "))
        for name, words in causes.items()
    ]
    baselines, metrics = ([row[key] for row in curves] for key in ("baseline", "metric"))
    choices = []
    for name, options in (("baseline", list(dict.fromkeys(baselines))), ("metric", list(dict.fromkeys(metrics)))):
        choices.append(
            alt.param(name=name, value=options[0], bind=alt.binding_select(options=options, name=f"{name} "))
        )
    bits = " + ".join(f"(cause_{name} ? {2**k} : 0)" for k, name in enumerate(causes)) or "0"
    chosen = "datum.baseline == baseline && datum.metric == metric"
    names = alt.LookupData(_data([{"i": i + 1, "hook": hook} for i, hook in enumerate(hookpoints)]), "i", ["hook"])
    x = _x("i")

    def unfolded(chart: Any, fields: list[str]) -> Any:
        chart = chart.transform_flatten(fields).transform_window(i="row_number()")
        return chart.transform_lookup("i", from_=names)

    band = unfolded(alt.Chart(_data(envelopes)).transform_filter(chosen), ["envelope"])
    band = band.transform_calculate(top=_shown("envelope"), bottom=f"{FLOOR}")
    band = band.mark_area(opacity=0.2, color=BLUE).encode(x=x, y=_y("top", "worst token"), y2="bottom:Q")
    lines = alt.Chart(_data(curves)).transform_filter(f"datum.plan == {bits} && {chosen}")
    lines = unfolded(lines, ["worst", "mean", "token"])
    lines = lines.transform_calculate(high=_shown("worst"), middle=_shown("mean"))
    tooltip = [
        alt.Tooltip("hook:N", title="hook point"),
        alt.Tooltip("worst:Q", title="worst token's", format=".3e"),
        alt.Tooltip("token:Q", title="worst token"),
        alt.Tooltip("mean:Q", title="mean", format=".3e"),
    ]
    worst = lines.mark_line(color=ORANGE, point=alt.OverlayMarkDef(color=ORANGE)).encode(
        x=x, y=_y("high", "worst token"), tooltip=tooltip
    )
    mean = lines.mark_line(color=ORANGE, strokeDash=[4, 3], opacity=0.7).encode(x=x, y=_y("middle", "worst token"))
    note = alt.Chart(_data(remainders)).transform_filter(f"datum.plan == {bits}")
    note = note.mark_text(align="right", dx=-4, dy=-6, color=GREY).encode(
        x=alt.value(WIDTH), y=alt.value(0), text="text:N"
    )
    chart = alt.layer(band, mean, worst, note).properties(width=WIDTH, height=HEIGHT, title=title)
    return _finished(chart.add_params(*choices, *toggles))


def _slider(name: str, count: int, start: int, words: str) -> Any:
    return alt.param(name=name, value=start, bind=alt.binding_range(min=0, max=count - 1, step=1, name=f"{words} "))


def packed(values: Values) -> str:
    """Two digits per value, to base 36: hundredths of a decade above the floor, which keep 2 % of it; zero is 00.

    Undefined values become "--", values beyond the last two digits the largest.
    """

    def digits(v: float | None) -> str:
        if v is None or not math.isfinite(v):
            return "--"
        level = round(100 * math.log10(v / FLOOR)) if v > 0 else 0
        return "".join(DIGITS[digit] for digit in divmod(min(max(0, level), 36**2 - 1), 36))

    return "".join(digits(v) for v in values)


def _unpacked(token: str) -> str:
    """Vega expression of a token's value. Args: token: expression of its number."""
    high, low = (f"indexof('{DIGITS}', datum.values[2 * {token} + {k}])" for k in (0, 1))
    return f"{low} < 0 ? null : {FLOOR} * pow(10, (36 * {high} + {low}) / 100)"


def token_charts(
    title: str,
    hookpoints: Sequence[str],
    values: Sequence[Values],
    measure: str,
    texts: Sequence[str] = (),
    picture: tuple[str, int, int] | None = None,
) -> Spec:
    """Every token at one hook point, and one token through all of them.

    Args: hookpoints: L names. values: [L][N]. measure: what the values are. texts: [N], where tokens have one. picture:
    data URL, rows and columns of its N tokens; None draws a bar per token.
    Returns: specification with the parameters `layer` and `token`, which starts at the worst token of the last.
    """
    last = [-math.inf if v is None else v for v in values[-1]]
    rows = [{"i": i, "hook": h, "values": packed(v)} for i, (h, v) in enumerate(zip(hookpoints, values, strict=True))]
    data, words = alt.NamedData("values"), alt.NamedData("texts")
    parameters = (
        _slider("layer", len(hookpoints), len(hookpoints) - 1, "hook point"),
        _slider("token", len(last), last.index(max(last)), "token"),
    )

    at_layer = alt.Chart(data).transform_filter("datum.i == layer")
    cells = at_layer.transform_calculate(t=f"sequence({len(last)})").transform_flatten(["t"])
    cells = cells.transform_calculate(value=_unpacked("datum.t"))
    tooltip = ["hook:N", alt.Tooltip("t:Q", title="token"), alt.Tooltip("value:Q", title=measure, format=".2e")]
    named = at_layer.mark_text(align="right", dx=-4, dy=-6, color=GREY)
    named = named.encode(x=alt.value(WIDTH), y=alt.value(0), text="hook:N")
    if picture is None:
        cells = cells.mark_bar(color=ORANGE, width=1.5).encode(
            x=alt.X("t:Q", title="token", scale=alt.Scale(nice=False)),
            y=_y("value", measure),
            y2=alt.Y2Datum(FLOOR),
            tooltip=tooltip,
        )
        upper, tall = alt.layer(cells, named), HEIGHT
    else:
        url, height, width = picture
        tall = round(WIDTH * height / width)
        ground = alt.Chart(_data([{"url": url}])).mark_image(width=WIDTH, height=tall, aspect=False)
        ground = ground.encode(url="url:N", x=alt.value(WIDTH / 2), y=alt.value(tall / 2))
        cells = cells.transform_calculate(
            left=f"datum.t % {width}",
            right=f"datum.t % {width} + 1",
            top=f"floor(datum.t / {width})",
            bottom=f"floor(datum.t / {width}) + 1",
        )
        color = alt.Color("value:Q", title=measure, scale=alt.Scale(type="log", scheme="inferno"))
        cells = cells.mark_rect(opacity=0.6).encode(
            x=alt.X("left:Q", axis=None, scale=alt.Scale(domain=[0, width], nice=False)),
            x2="right:Q",
            y=alt.Y("top:Q", axis=None, scale=alt.Scale(domain=[height, 0], nice=False)),
            y2="bottom:Q",
            color=color,
            tooltip=tooltip,
        )
        upper = alt.layer(ground, cells, named)

    line = alt.Chart(data).transform_calculate(value=_unpacked("token"))
    line = line.mark_line(color=ORANGE, point=alt.OverlayMarkDef(color=ORANGE)).encode(
        x=_x("i"), y=_y("value", measure), tooltip=["hook:N", alt.Tooltip("value:Q", title=measure, format=".2e")]
    )
    named = alt.Chart(words).transform_calculate(label="'token ' + token + '  ' + (datum.texts[token] || '')")
    named = named.mark_text(align="right", dx=-4, dy=-6, color=GREY)
    lower = alt.layer(line, named.encode(x=alt.value(WIDTH), y=alt.value(0), text="label:N"))
    upper = upper.properties(width=WIDTH, height=tall, title=title)
    chart = alt.vconcat(upper, lower.properties(width=WIDTH, height=HEIGHT, title="one token"))
    spec = _finished(chart.add_params(*parameters))
    spec["datasets"] = spec.get("datasets", {}) | {
        "values": rows,
        "texts": [{"texts": list(texts)}],
    }
    return spec


def step_chart(title: str, values: Values, labels: Sequence[str], measure: str) -> Spec:
    """One value per decode step. Args: values: [K]. labels: [K] words for a step. Returns: specification."""
    rows = [{"step": k, "value": v, "label": w} for k, (v, w) in enumerate(zip(values, labels, strict=True))]
    line = alt.Chart(_data(rows)).transform_calculate(shown=_shown("value"))
    line = line.mark_line(color=ORANGE, point=alt.OverlayMarkDef(color=ORANGE)).encode(
        x=alt.X("step:Q", title="decode step", axis=alt.Axis(format="d")),
        y=_y("shown", measure),
        tooltip=["step:Q", "label:N", alt.Tooltip("value:Q", format=".3e")],
    )
    return _finished(line.properties(width=WIDTH, height=HEIGHT, title=title))
