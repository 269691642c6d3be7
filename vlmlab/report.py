"""One HTML file that a maintainer can open: offline, live without a kernel, and readable with scripts off.

investigate     everything a report says about one pair of traces
write_report    one or several of them as one file

Every number in it is computed from the traces; figures of other machines stand in a table of their own, each with its
source. Whatever came from outside is escaped, and the page forbids every network access.
"""

import base64
import io
import itertools
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmlab import arithmetic, charts
from vlmlab.attribution import Attribution, Explanation, explain
from vlmlab.causes import CAUSES, Cause, causes_of
from vlmlab.checkpoint import DATA, Checkpoint
from vlmlab.compare import Comparison, Row, compare_inputs, compare_traces, next_token, public_figures
from vlmlab.explorer import BASELINES, METRICS, Explorer
from vlmlab.hookpoints import is_stream
from vlmlab.inputs import picture_of, reference_inputs, token_texts
from vlmlab.page import assemble, embed_json, number, text, write_page
from vlmlab.passes import Passes
from vlmlab.trace import RunInfo, Trace
from vlmlab.verdict import MARGIN, TOKEN_MARGIN

TITLES = {"vision": "ViT", "language": "Language model"}
SHOWN_BASELINES = ("sglang", "hf", "truth")
SHOWN_CHANNELS = SHOWN_TOKENS = 8

Picture = tuple[str, int, int]  # JPEG as a data URL, rows and columns of merged tokens
MEASURE = "1 - cosine"

STYLE = """
:root { color-scheme: light dark; --line: #80808055; --mark: #2e86c1; --bug: #c0392b; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1, h2, h3 { line-height: 1.2; }
.answer { border-left: 5px solid var(--mark); padding: 0.3rem 1rem; }
.answer.bug { border-color: var(--bug); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; margin: 0.5rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: 0.2rem 0.6rem; text-align: left; vertical-align: top; }
td { max-width: 24rem; overflow-wrap: anywhere; }
td:first-child { overflow-wrap: break-word; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; }
pre, code { font: 0.85rem/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
img, svg { max-width: 100%; }
img { height: auto; }
input[type="number"] { width: 8em; }
.vega-bindings label { display: block; margin: 0.2rem 0; font-size: 0.9rem; }
@media print { details::details-content { content-visibility: visible; display: block; } }
"""


@dataclass(frozen=True)
class Investigation:
    """One pair of traces, explained.

    Attributes: checkpoint: weights of both. hf, sglang: traces. comparison: hook point by hook point. explanation:
    verdict, causes, closure. explorer: any plan on the same input. steps: (HF trace, SGLang trace) of each decode step.
    """

    checkpoint: Checkpoint
    hf: Trace
    sglang: Trace
    comparison: Comparison
    explanation: Explanation
    explorer: Explorer
    steps: Sequence[tuple[Trace, Trace]] = ()


def investigate(
    passes: Passes,
    hf: Trace,
    sglang: Trace,
    steps: Sequence[tuple[Trace, Trace]] = (),
    say: Callable[[str], None] = print,
    unexplained: Path | None = None,
) -> Investigation:
    """Compare and explain two traces of one input.

    Args: passes, hf, sglang, say, unexplained: as in attribution.explain. steps: decode steps after them, if captured.
    Returns: Investigation. Raises: VlmlabError: different weights or inputs, or nothing to compare.
    """
    explanation = explain(passes, hf, sglang, say, unexplained)
    explorer = Explorer(passes, hf, sglang)
    return Investigation(passes.hybrid.checkpoint, hf, sglang, compare_traces(hf, sglang), explanation, explorer, steps)


def write_report(file: str | os.PathLike, investigations: Sequence[Investigation]) -> Path:
    """Write one HTML file about one or several pairs of traces.

    Args: file: to write. investigations: one section each.
    Returns: file. Raises: VlmlabError: disk full, or the page would load something or name a folder of this machine.
    """
    script = resources.files("vlmlab").joinpath("report.js").read_text(encoding="utf-8")
    sections = [_section(investigation, k) for k, investigation in enumerate(investigations)]
    contents = ""
    if len(investigations) > 1:
        entries = (
            f'<li><a href="#run-{k}">{text(i.hf.info.model)}: {text(i.explanation.word)}</a></li>'
            for k, i in enumerate(investigations)
        )
        contents = f"<nav aria-label='runs'><ol>{''.join(entries)}</ol></nav>"
    title = f"{' and '.join(i.hf.info.model for i in investigations)}: Transformers and SGLang"
    body = f"<main><h1>{text(title)}</h1>{contents}{''.join(sections)}</main>"
    page = assemble(title, body, STYLE, (charts.bundle(), script))
    private = {str(i.checkpoint.folder): i.checkpoint.name for i in investigations}
    return write_page(page, Path(file), private)


# ---------------------------------------------------------------------------------------------------- pieces


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """A table; floats are right-aligned, undefined ones are "n/a"."""

    def cell(value: Any) -> str:
        if isinstance(value, bool):
            return f"<td>{'yes' if value else 'no'}</td>"
        if isinstance(value, float):
            return f'<td class="n">{number(value)}</td>'
        if isinstance(value, int):
            return f'<td class="n">{value}</td>'
        return f"<td>{'n/a' if value is None else text(value)}</td>"

    head = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
    lines = "".join(f"<tr>{''.join(cell(value) for value in row)}</tr>" for row in rows)
    title = f"<caption>{text(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{title}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def _chart(spec: charts.Spec, label: str, many_marks: bool = False) -> str:
    """A still picture, and the specification that takes its place where scripts run."""
    if many_marks:
        still = f'<img alt="{text(label)}" src="{_data_url(charts.jpeg(spec), "image/jpeg")}">'
    else:
        still = charts.svg(spec)
    data = f'<script type="application/vnd.vegalite+json">{embed_json(spec)}</script>'
    return f'<div class="wide"><div class="chart" role="group" aria-label="{text(label)}">{still}</div>{data}</div>'


def _data_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


# ---------------------------------------------------------------------------------------------------- one run


def _section(run: Investigation, k: int) -> str:
    tokens, picture = token_texts(run.checkpoint, run.hf["inputs.input_ids"]), _picture(run)
    parts = run.explorer.parts
    pieces = [
        _head(run),
        _facts(run),
        _asked(run, tokens, picture),
        *(_plans(run, part) for part in parts),
        *(_tokens(run, part, tokens, picture) for part in parts),
        _steps(run),
        _operations(run),
        _experts(run),
        _causes(run),
        _truth(run),
        _recomputed(run),
        _public(run),
    ]
    return f'<section id="run-{k}" aria-label="run {k + 1}">{"".join(pieces)}</section>'


def _head(run: Investigation) -> str:
    """The verdict, the one number, what would overturn it."""
    explanation, floor = run.explanation, run.comparison.floor("language")
    total = sum(closed.total for closed in explanation.closures.values())
    found = explanation.first_outside
    said = {
        "bug": "It is a bug.",
        "rounding": "It is rounding.",
        "no evidence": "No evidence: an engine could not be judged.",
    }[explanation.word]
    where = ""
    if found is not None:
        engine, first = found
        release = {"hf": run.hf, "sglang": run.sglang}[engine].info.release
        where = f" First in {release} at {first.hookpoint}, token {first.token}: {first.operation}."
    lowest = "n/a" if floor is None or floor.cosine_min is None else f"{floor.cosine_min:.6f}"
    at = "" if floor is None else f" ({floor.hookpoint}, token {floor.cosine_min_token})"
    same = len(set(explanation.next_tokens.values())) == 1
    answer = (
        f"<p><strong>{text(said + where)}</strong> Lowest cosine of any token in the language model: "
        f"<strong>{lowest}</strong>{text(at)}. {total - explanation.remainder} of {total} tensors are reproduced bit "
        f"for bit. Live causes: {text(', '.join(explanation.live) or 'none')}. "
        f"{'Both engines choose the same next token' if same else 'The engines choose different next tokens'}"
        f"{' (a near-tie)' if any(explanation.near_tie.values()) else ''}.</p>"
    )
    overturned = (
        "an operation outside the rounding envelope in either engine (table of operations), a tensor that its engine's "
        "plan does not reproduce (remainder), or an input that the engines did not share (table of inputs)."
    )
    kind = "bug" if explanation.word == "bug" else "rounding"
    model = f"<h2>{text(run.hf.info.model)}: {text(run.hf.info.release)} and {text(run.sglang.info.release)}</h2>"
    return f'{model}<div class="answer {kind}">{answer}<p>Overturned by {text(overturned)}</p></div>'


def _facts(run: Investigation) -> str:
    a, b = run.hf.info, run.sglang.info

    def said(info: RunInfo) -> tuple[Any, ...]:
        device = f"{info.device['type']} {info.device['name']} {info.device['capability']}"
        versions = ", ".join(f"{name} {version}" for name, version in info.versions.items() if version)
        flags = ", ".join(f"{name}={value}" for name, value in info.flags.items())
        return device, info.dtype, info.attention, str(info.threads), versions, flags, info.created

    names = ("device", "dtype", "attention", "CPU threads", "versions", "flags", "captured")
    rows = list(zip(names, said(a), said(b), strict=True))
    kernels = ", ".join(f"{cause}: {kernel}" for cause, kernel in run.explanation.kernels.items())
    rows += [
        ("weights (sha256)", a.weights_hash, b.weights_hash),
        ("input (sha256)", a.input_hash, b.input_hash),
        ("SGLang's kernels stand in", "", kernels or "none; every formula in plain torch"),
    ]
    seen = compare_inputs(run.hf, run.sglang)
    inputs = _table(list(seen.columns), seen.itertuples(index=False), "Did both engines see the same input?")
    return (
        f"<h3>What ran</h3>{_table(('', 'Transformers', 'SGLang'), rows)}"
        f"<p>To reproduce: <code>{text(command_of(run))}</code></p>{inputs}"
    )


def command_of(run: Investigation) -> str:
    """The command that captures and explains the same again, from this project's folder. Returns: one shell line."""
    folder, model = run.checkpoint.folder, run.hf.info.model
    if folder.is_relative_to(DATA):
        model = str(folder.relative_to(DATA.parent))
    words = ["vlmlab", "explain", "--model", model]
    if run.hf.info.input_hash != reference_inputs(run.checkpoint).hash:
        words += ["--image", "PICTURE", "--prompt", "PROMPT"]
    if run.hf.info.attention != "sdpa":
        words += ["--attention", run.hf.info.attention]
    if run.steps:
        words += ["--decode", str(len(run.steps))]
    return shlex.join(words)


def _asked(run: Investigation, tokens: Sequence[str], picture: Picture | None) -> str:
    """Picture, prompt and next tokens."""
    lines = []
    for token, group in itertools.groupby(tokens):
        count = len(list(group))
        lines.append(text(token) if count == 1 else f"{text(token)} <small>x {count}</small>")
    ids = torch.tensor(list(run.explanation.next_tokens.values()))
    following = [
        (engine, int(token), word, run.explanation.near_tie[engine])
        for (engine, token), word in zip(
            run.explanation.next_tokens.items(), token_texts(run.checkpoint, ids), strict=True
        )
    ]
    shown = "" if picture is None else f'<img alt="the picture as the engines saw it" width="420" src="{picture[0]}">'
    return (
        f"<h3>What was asked</h3>{shown}<p>{len(tokens)} tokens:</p><pre>{''.join(lines)}</pre>"
        f"{_table(('engine', 'id', 'next token', 'near-tie'), following)}"
    )


def _picture(run: Investigation) -> Picture | None:
    """The picture, from the pixels that were captured."""
    pixels, grid = (run.hf.tensors.get(f"inputs.{name}") for name in ("pixel_values", "image_grid_thw"))
    if pixels is None or grid is None:
        return None
    image = picture_of(run.checkpoint, pixels, grid)
    image.thumbnail((charts.WIDTH, charts.WIDTH))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=80)
    merge = run.explorer.hybrid.merge
    return _data_url(content.getvalue(), "image/jpeg"), int(grid[0, 1]) // merge, int(grid[0, 2]) // merge


def _live(run: Investigation, part: str) -> list[Cause]:
    return [cause for cause in causes_of(run.explorer.hybrid.family, part) if cause.name in run.explanation.live]


def _plans(run: Investigation, part: str) -> str:
    """Every combination of the live causes of a part."""
    live, explorer = _live(run, part), run.explorer
    curves, envelopes, remainders, rows = [], [], [], []
    hookpoints: list[str] = []
    for plan in range(2 ** len(live)):
        chosen = [cause for bit, cause in enumerate(live) if plan >> bit & 1]
        ends: list[Any] = []
        for baseline, metric in itertools.product(SHOWN_BASELINES, METRICS):
            curve = explorer.curve(part, explorer.plan({c.name: None for c in chosen}), baseline, metric)
            table = curve.table
            hookpoints = list(table["hookpoint"])
            about = {"baseline": BASELINES[baseline], "metric": metric}
            curves.append(
                {"plan": plan, **about, "token": table["token"].tolist()}
                | {name: charts.rounded(table[name].tolist()) for name in ("worst", "mean")}
            )
            if plan == 0:
                envelopes.append({**about, "envelope": charts.rounded(table["envelope"].tolist())})
            if metric == MEASURE:
                ends.append(float(table["worst"].iloc[-1]))
        left = f"not yet SGLang's bits: {curve.remainder} of {curve.total} tensors"
        remainders.append({"plan": plan, "text": left})
        rows.append((", ".join(c.name for c in chosen) or "none", *ends, f"{curve.remainder} of {curve.total}"))
    title = f"{TITLES[part]}: causes switched to SGLang's way"
    spec = charts.plan_chart(title, {c.name: c.title for c in live}, hookpoints, curves, envelopes, remainders)
    ends_of = [f"{MEASURE} to {BASELINES[baseline]}, worst token" for baseline in SHOWN_BASELINES]
    combinations = _table(("as SGLang", *ends_of, "tensors not SGLang's"), rows)
    start = explorer.curve(part, explorer.plan({}), "sglang", MEASURE).table
    envelope = dict(zip(start["hookpoint"], start["envelope"], strict=True))
    columns = ("hook point", f"worst {MEASURE}", "token", "mean", "envelope", "norm ratio", "its worst", "token")
    decay = _table(columns, [_decay(row, envelope.get(row.hookpoint)) for row in run.comparison.part(part)])
    return (
        f"<h3>{text(title)}</h3><p>Band: the worst token of any legal plan. Line: worst token; dashed: mean.</p>"
        f"{_chart(spec, title)}{_folded(f'{len(rows)} combinations, at {hookpoints[-1]}', combinations)}"
        f"{_folded(f'Transformers against SGLang, every hook point ({MEASURE})', decay)}"
    )


def _decay(row: Row, envelope: float | None) -> tuple[Any, ...]:
    worst, mean = (None if c is None else 1 - c for c in (row.cosine_min, row.cosine_mean))
    ratios = row.norm_ratio, row.norm_ratio_worst, row.norm_ratio_token
    return row.hookpoint, worst, row.cosine_min_token, mean, envelope, *ratios


def _tokens(run: Investigation, part: str, texts: Sequence[str], picture: Picture | None) -> str:
    """Every token of the two traces at every hook point of the stream."""
    cosines = run.comparison.cosines
    names = [row.hookpoint for row in run.comparison.part(part) if is_stream(row.hookpoint)]
    names = [name for name in names if name in cosines]
    title = f"{TITLES[part]}: every token, Transformers against SGLang"
    if part == "vision":
        size = run.hf["vision.merger"].shape[0]
        values = [_per_merged_token(1 - cosines[name], size) for name in names]
        texts = ()
    else:
        picture = None
        values = [(1 - cosines[name]).clamp(min=0).tolist() for name in names]
    spec = charts.token_charts(title, names, values, MEASURE, _visible(texts), picture)
    worst = sorted(range(len(values[-1])), key=lambda t: -(values[-1][t] or 0))[:10]
    listed = [(t, texts[t] if texts else "", values[-1][t]) for t in worst]
    table = _table(("merged token" if part == "vision" else "token", "text", MEASURE), listed, f"Worst at {names[-1]}")
    return f"<h3>{text(title)}</h3>{_chart(spec, title, many_marks=True)}{table}"


def _steps(run: Investigation) -> str:
    """The decode steps: both engines were given the same tokens, so every step asks both the same question."""
    if not run.steps:
        return "<h3>Decode steps</h3><p>None were captured with this run.</p>"
    rows, values, spoken = [], [], []
    for k, pair in enumerate(run.steps):
        comparison = compare_traces(*pair)
        floor = comparison.floor("language")
        worst = None if floor is None or floor.cosine_min is None else max(0.0, 1 - floor.cosine_min)
        chosen = torch.tensor([int(pair[0]["inputs.input_ids"][0]), *(next_token(trace) for trace in pair)])
        given, hf, sglang = token_texts(run.checkpoint, chosen)
        rows.append((k, given, hf, sglang, hf == sglang, worst, None if floor is None else floor.hookpoint))
        values.append(worst)
        spoken.append(f"after {given!r}")
    title = f"Decode steps: the lowest cosine of each ({MEASURE})"
    columns = ("step", "token given", "next: Transformers", "next: SGLang", "same", MEASURE, "at")
    chart = _chart(charts.step_chart(title, values, _visible(spoken), MEASURE), title)
    return f"<h3>Decode steps</h3><p>Both engines were given Transformers' tokens.</p>{chart}{_table(columns, rows)}"


def _visible(texts: Sequence[str]) -> list[str]:
    """Text for a chart's tooltip, which is set as text: control characters made visible."""
    return [t.encode("unicode_escape").decode() if not t.isprintable() else t for t in texts]


def _per_merged_token(values: Tensor, count: int) -> list[float]:
    """The worst of the patches that were merged into a token. Args: values: [P] or [N]. count: N."""
    return values.clamp(min=0).view(count, -1).amax(1).tolist()


def _operations(run: Investigation) -> str:
    """Every operation against the envelope, summed up by kind; those outside one by one."""
    kinds: dict[tuple[str, str], list[Any]] = {}
    outside = []
    for engine, verdict in run.explanation.verdicts.items():
        for f in verdict.findings:
            kinds.setdefault((engine, f.operation), []).append(f)
            if f.outside:
                outside.append((engine, f.hookpoint, f.token, f.error, f.allowed, f.ratio, f.token_ratio))
    rows = []
    for (engine, operation), found in kinds.items():
        worst = max(f.ratio for f in found), max(f.token_ratio for f in found)
        rows.append((engine, operation, len(found), sum(f.exact for f in found), *worst, sum(f.outside for f in found)))
    columns = ("engine", "operation", "hook points", "bit-equal", "worst ratio", "worst token's ratio", "outside")
    listed = ""
    if outside:
        names = ("engine", "hook point", "token", "error", "allowed", "ratio", "token's ratio")
        listed = _table(names, outside, "Outside the envelope")
    closed = _table(
        ("engine", "tensors bit-equal", "of", "elements that differ", "first"),
        [(e, c.equal, c.total, c.elements, c.first or "none") for e, c in run.explanation.closures.items()],
        "Closure: the whole forward pass under each engine's plan",
    )
    return (
        "<h3>Bug or rounding: every operation from its own captured input</h3><p>Ratio: error to float64 over that of "
        f"the worst legal plan. Up to {MARGIN:g} (any token: {TOKEN_MARGIN:g}) is rounding.</p>"
        f"{_table(columns, rows)}{listed}{closed}"
    )


def _experts(run: Investigation) -> str:
    """Where the engines' routers choose other experts; nothing for dense decoders."""
    flips = run.comparison.flips
    if not flips:
        return ""
    other = sorted({token for layer in flips for token in layer.experts})
    rows = []
    for layer in flips:
        first = ", ".join(map(str, layer.experts[:SHOWN_TOKENS])) + ", ..." * (len(layer.experts) > SHOWN_TOKENS)
        rows.append((layer.layer, len(layer.experts), len(layer.order), layer.ties, first))
    columns = ("layer", "other experts", "another order alone", "of these at equal logits", "tokens with other experts")
    return (
        f"<h3>Which experts were chosen</h3><p>{len(other)} of {flips[0].tokens} tokens go to other experts in SGLang "
        f"than in Transformers in some layer; {sum(len(layer.experts) for layer in flips)} such choices over "
        f"{len(flips)} layers, and {sum(len(layer.order) for layer in flips)} more in which the order alone differs."
        f"</p>{_folded('Every layer', _table(columns, rows))}"
    )


def _causes(run: Investigation) -> str:
    tables = []
    for part in run.explanation.attributions:
        tables.append(_shares(part))
    live = [cause for part in run.explorer.parts for cause in _live(run, part)]
    formulas = _table(
        ("cause", "what", "Transformers", "SGLang", "where in Transformers", "where in SGLang"),
        [(c.name, c.explanation, c.hf, c.sglang, c.hf_source, c.sglang_source) for c in live],
    )
    return f"<h3>Which causes</h3>{''.join(tables)}{_folded('Formulas and source locations', formulas)}"


def _shares(part: Attribution) -> str:
    rows = []
    for e in part.effects:
        here = "live" if e.live else "dead, and its switch acts" if e.acts else "dead, no proof that its switch acts"
        alone = e.alone.tensors, e.alone.first or "", e.alone.distance
        rows.append((e.name, here, *alone, e.left_out, e.cumulative, e.share))
    distances = ("alone: from Transformers", "all but it: to SGLang", "up to it: to SGLang")
    columns = ("cause", "here", "tensors changed", "first at", *distances, "share")
    note = (
        f"<p>{TITLES[part.part]}: distance {number(part.total)} at {text(part.end)}, explained "
        f"{number(part.explained)}, of it interaction {number(part.interaction)}; {part.plans} plans; {part.flipped} "
        f"tokens routed differently are left out; the distance at these alone: {number(part.flipped_total)}.</p>"
    )
    return _table(columns, rows) + note


def _truth(run: Investigation) -> str:
    rows = [vars(row) for row in run.explanation.nearness]
    ends = [r for r in rows if r["hookpoint"] in ("vision.merger", "final_norm", "logits")]
    columns = ["hookpoint", "hf", "sglang", "closer", "sglang_share"]
    if any(row["flipped"] for row in rows):  # tokens routed to other experts than in float64 stand apart
        columns += ["flipped", "hf_flipped", "sglang_flipped"]

    def table(chosen: Sequence[Mapping[str, Any]]) -> str:
        return _table(columns, [[row[column] for column in columns] for row in chosen])

    return (
        "<h3>Which engine is closer to float64</h3><p>Relative L2 error, root mean square over tokens.</p>"
        f"{table(ends)}{_folded('Every layer', table(rows))}"
    )


def _public(run: Investigation) -> str:
    figures = public_figures(run.comparison)
    figures["lowest cosine"] = [None if c is None or c != c else f"{c:.6g}" for c in figures["lowest cosine"]]
    return (
        "<h3>Figures of other machines</h3><p>Each with its own model, device and versions; none was measured here "
        f"unless it says so.</p>{_table(list(figures.columns), figures.itertuples(index=False))}"
    )


# ---------------------------------------------------------------------------------------------------- recomputing


def operation_rows(run: Investigation) -> list[dict[str, Any]]:
    """Real rows of the first operations on which the engines part, for the page to compute again.

    Returns: one dict per operation: name, where, token, inputs ([D] lists), eps, results of both ways, and the
    channels to show. The row is that of the token with most differing channels.
    """
    hybrid, trace = run.explorer.hybrid, run.hf
    weights = hybrid.weights
    found: list[tuple[str, str, list[Tensor], dict[str, Tensor], Tensor | None]] = []
    before, attn_out = trace["layers.0.resid_pre"], trace["layers.0.attn_out"]
    norm = weights["model.layers.0.input_layernorm.weight"].cpu()
    ways = ("hf", "sglang")
    results = [arithmetic.rms_norm(before, norm, hybrid.eps, how) for how in ways]
    found.append(("rms_norm", "layers.0, input norm", results, {"x": before}, norm))
    norm = weights["model.layers.0.post_attention_layernorm.weight"].cpu()
    reads = [arithmetic.residual_sum(before, attn_out, how)[1] for how in ways]
    results = [arithmetic.rms_norm(read, norm, hybrid.eps, "sglang") for read in reads]
    inputs = {"residual": before, "x": attn_out}
    found.append(("residual_sum", "layers.0, norm after attention", results, inputs, norm))
    if run.hf.deepstack:
        image = hybrid.image_rows(trace["inputs.input_ids"]).cpu()
        residual, x, features = trace["layers.0.resid_mid"][image], trace["layers.0.mlp_out"][image], trace.deepstack[0]
        everywhere = torch.ones(len(x), dtype=torch.bool)
        sums = [arithmetic.deepstack_sum(residual, x, features, everywhere, how) for how in ways]
        results = [stream + left for stream, left in sums]
        inputs = {"residual": residual, "x": x, "features": features}
        found.append(("deepstack_order", "layers.0, first deepstack addition (image tokens)", results, inputs, None))
    rows = []
    for name, where, (hf, sglang), inputs, weight in found:
        differs = hf.ne(sglang)
        token = int(differs.sum(1).argmax())
        channels = sorted(range(hf.shape[1]), key=lambda c: not bool(differs[token, c]))[:SHOWN_CHANNELS]
        row: dict[str, Any] = {"name": name, "where": where, "token": token, "shown": sorted(channels)}
        row |= {key: value[token].tolist() for key, value in inputs.items()}
        if weight is not None:
            row |= {"weight": weight.tolist(), "eps": hybrid.eps}
        rows.append(row | {"hf": hf[token].tolist(), "sglang": sglang[token].tolist()})
    return rows


def _recomputed(run: Investigation) -> str:
    known, pieces = {cause.name: cause for cause in CAUSES}, []
    for row in operation_rows(run):
        cause = known[row["name"]]
        inputs = [key for key in ("residual", "x", "features", "weight") if key in row]
        still = _table(
            ("channel", *inputs, "Transformers", "SGLang"),
            [[str(c), *(row[key][c] for key in (*inputs, "hf", "sglang"))] for c in row["shown"]],
        )
        pieces.append(
            f"<h4>{text(cause.title)}: {text(row['where'])}, row {row['token']}</h4><p>Transformers: <code>"
            f"{text(cause.hf)}</code><br>SGLang: <code>{text(cause.sglang)}</code></p><div class='wide'>{still}</div>"
            f'<script type="application/json" class="operation">{embed_json(row)}</script>'
        )
    return (
        "<h3>Compute it yourself</h3><p>Rows as captured, computed both ways in this page in exact bfloat16. Change an "
        f"input and see both results.</p>{''.join(pieces)}"
    )
