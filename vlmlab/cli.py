"""The commands: doctor, compare, explain, report, reveal, ground, store, notebooks.

`vlmlab COMMAND --help` lists their options.

Exit codes: 0 done, 1 doctor found that something cannot run, 2 a problem the user can act on, 130 interrupted.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmlab import __version__
from vlmlab.errors import VlmlabError

if TYPE_CHECKING:
    from vlmlab.attribution import Explanation
    from vlmlab.compare import Comparison
    from vlmlab.engines import Engines
    from vlmlab.grounding import Condition, Paired
    from vlmlab.trace import Trace

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = 2  # notebooks


class Progress:
    """Phases on standard error: a live line with the elapsed time on a terminal, one line a phase elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self.seconds: dict[str, float] = {}
        self._console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
        self._bar = RichProgress(*columns, console=self._console, transient=True)
        self._task: Any = None
        self._phase, self._began, self._start = "", 0.0, 0.0

    def __enter__(self) -> "Progress":
        self._start = time.perf_counter()
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._end()
        self._bar.stop()

    def _end(self) -> None:
        if self._phase:
            self.seconds[self._phase] = time.perf_counter() - self._began
            if self._task is not None:
                self._bar.remove_task(self._task)
                self._print(f"{self._phase} ({self.seconds[self._phase]:.1f} s)")
        self._phase, self._task = "", None

    def __call__(self, phase: str) -> None:
        """Begin a phase; the one before ends."""
        self._end()
        self._phase, self._began = phase, time.perf_counter()
        if self._console.is_terminal:
            self._task = self._bar.add_task(phase, total=None)
        else:
            self._print(f"[{self._began - self._start:5.1f} s] {phase}")

    def line(self, text: str) -> None:
        """A result, on standard output, at once; the phase before it ends."""
        self._end()
        print(text, flush=True)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)


def _doctor(options: argparse.Namespace) -> int:
    from vlmlab.checkpoint import DATA, load_checkpoint
    from vlmlab.machine import inspect

    found = inspect()
    found["checkpoints"] = []
    for folder in sorted((DATA / "checkpoints").glob("*/")):
        try:
            checkpoint = load_checkpoint(folder)
            entry = {"name": checkpoint.name, "ok": True, "detail": f"{checkpoint.family}, {checkpoint.dtype}"}
        except VlmlabError as error:
            entry = {"name": folder.name, "ok": False, "detail": str(error)}
        found["checkpoints"].append(entry)
    usable = bool(found["checkpoints"]) and all(c["ok"] for c in found["checkpoints"])
    ok = all(found["engines"].values()) and usable
    if options.json:
        print(json.dumps(found, allow_nan=False))
    else:
        _print_doctor(found)
    return 0 if ok else 1


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table wide enough for its rows also where there is no terminal; cells are text, never markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=max(120, shutil.get_terminal_size().columns)).print(table)


def _print_doctor(found: dict[str, Any]) -> None:
    device = found["device"]
    described = f"{device['type']}: {device['name']} ({device['capability']}), {found['threads']} threads"
    rows = [("ok" if c["ok"] else "NO", f"{c['engine']}: {c['name']}", c["detail"]) for c in found["checks"]]
    rows += [("ok" if c["ok"] else "NO", f"checkpoint: {c['name']}", c["detail"]) for c in found["checkpoints"]]
    if not found["checkpoints"]:
        rows.append(("NO", "checkpoint", "none in data/checkpoints; pass --model to the other commands"))
    rows.append(("ok", "device", described))
    _print_table(f"vlmlab {__version__}: what can run here", ("", "what", "found"), rows)
    for name, can in found["engines"].items():
        print(f"{name}: {'can run here' if can else 'cannot run here'}")


def _compare(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    with Progress() as say:
        say("importing")
        from vlmlab.compare import compare_inputs, compare_traces, comparison_json
        from vlmlab.trace import load_trace, write_json

        if options.traces:
            out = Path(options.out) if options.out else None
            baseline, target = (load_trace(folder) for folder in options.traces)
        else:
            baseline, target, out = _capture(options, say)
        say("comparing")
        comparison = compare_traces(baseline, target)
        seen = compare_inputs(baseline, target)
        unequal = list(seen.loc[~seen["equal"], "item"])
    seconds = {**say.seconds, "total": time.perf_counter() - start}
    result = comparison_json(comparison, not unequal, seconds)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "comparison.json", result)
    if options.json:
        print(json.dumps(result, allow_nan=False))
    else:
        _print_comparison(comparison, unequal)
        if out:
            print(f"written to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    with Progress() as say:
        say("importing")
        from vlmlab.attribution import explain
        from vlmlab.checkpoint import checkpoint_of
        from vlmlab.passes import Passes
        from vlmlab.trace import load_trace, write_json

        if options.run_folder:
            out = Path(options.run_folder)
            hf, sglang = (load_trace(out / engine) for engine in ("hf", "sglang"))
        else:
            hf, sglang, out = _capture(options, say)
        say("reading the weights")
        checkpoint = checkpoint_of(hf.info.weights_hash, hf.info.model, options.model)
        explanation = explain(Passes.of(checkpoint), hf, sglang, say=say, unexplained=out)
    result = explanation.json() | {"seconds": {**say.seconds, "total": time.perf_counter() - start}}
    write_json(out / "explanation.json", result)
    if options.json:
        print(json.dumps(result, allow_nan=False))
    else:
        _print_explanation(explanation)
        print(f"written to {out}: explanation.json")
    return 0


def _report(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    with Progress() as say:
        say("importing")
        from vlmlab.checkpoint import checkpoint_of
        from vlmlab.passes import Passes
        from vlmlab.report import investigate, write_report
        from vlmlab.trace import load_trace

        investigations = []
        for run in map(Path, options.run_folder):
            hf, sglang = (load_trace(run / engine) for engine in ("hf", "sglang"))
            checkpoint = checkpoint_of(hf.info.weights_hash, hf.info.model, options.model)
            folders = sorted((run / "decode" / "hf").glob("step_*"), key=lambda step: int(step.name[5:]))
            steps = [(load_trace(step), load_trace(run / "decode" / "sglang" / step.name)) for step in folders]
            investigations.append(investigate(Passes.of(checkpoint), hf, sglang, steps, say))
        say("writing the report")
        file = write_report(Path(options.out), investigations)
    words = ", ".join(f"{i.hf.info.model}: {i.explanation.word}" for i in investigations)
    print(f"{file}\n{words} ({time.perf_counter() - start:.0f} s)")
    return 0


def _reveal(options: argparse.Namespace) -> int:
    import torch

    from vlmlab.reveal import reveal_order
    from vlmlab.reveal_ops import OPS
    from vlmlab.summation import flat, text_form

    if options.op not in OPS:
        raise VlmlabError(f"expected one of {', '.join(OPS)}, got {options.op!r}")
    batch = {"tokens": options.rows, "row": options.row} if options.op in ("linear", "matmul", "attention") else {}
    if not batch and (options.rows, options.row) != (1, 0):
        raise VlmlabError(f"--rows and --row are for linear, matmul and attention, not for {options.op}")
    if not 0 <= options.row < options.rows:
        raise VlmlabError(f"expected --row between 0 and {options.rows - 1}, got {options.row}")
    if options.n < 2:
        raise VlmlabError(f"expected --n of at least 2 numbers, got {options.n}")
    found = reveal_order(OPS[options.op](options.n, getattr(torch, options.dtype), options.device, **batch))
    if options.json:
        tree = None if found.tree is None else flat(found.tree)
        print(json.dumps(vars(found) | {"tree": tree}, allow_nan=False))
        return 0
    print("cannot tell: " + found.why if found.tree is None else text_form(found.tree))
    equal = {None: "not replayed", True: "replay bit-equal", False: "REPLAY DIFFERS"}[found.replay_bitwise_equal]
    products = f", products {found.products}" if found.products else ""
    adder = f", fused adder: {found.fused_adder}" if found.fused_adder else ""
    print(
        f"{found.op} of {found.n} {found.dtype}: {found.calls} calls, {found.probes} probes, {equal}{products}{adder}"
    )
    return 0


def _ground(options: argparse.Namespace) -> int:
    engines = _chosen("--engines", options.engines, ("hf", "sglang"))
    forwards = _chosen("--hybrid", options.hybrid, ("hf", "sglang", "float64"))
    if (options.base_url is None) != (options.served_model is None):
        raise VlmlabError("expected --base-url and --served-model together, got one of them")
    if options.fp8 is not None and not (forwards or options.hypotheses):
        raise VlmlabError("expected --hybrid or --hypotheses with --fp8, which says how they compute; got neither")
    if not (engines or forwards or options.hypotheses or options.deepstack_orders) and options.base_url is None:
        engines = ["hf", "sglang"]
    engine_args, size = _engine_args(options.engine_arg), _size(options.size)
    asked: list[tuple[str, str, Sequence[str | VlmlabError]]] = []  # name, engine, answers
    with Progress() as say:
        say("importing")
        import dataclasses

        import torch

        from vlmlab.ask import Forward, Way, ask_hf, ask_hybrid, ask_server, ask_sglang
        from vlmlab.causes import hf_plan, sglang_plan
        from vlmlab.checkpoint import load_checkpoint
        from vlmlab.fp8_weights import SCHEMES
        from vlmlab.grounding import BOX_QUESTION, POINT_QUESTION, cases, judge, paired, summarise
        from vlmlab.hypotheses import ORDERS, of_family, orders_of

        schemes = _chosen("--fp8", options.fp8, list(SCHEMES))
        other_orders = _chosen("--deepstack-orders", options.deepstack_orders, list(ORDERS.values()))
        checkpoint = load_checkpoint(options.model)
        say("drawing the pictures")
        posed = cases(options.n, size, options.seed, BOX_QUESTION if options.question == "box" else POINT_QUESTION)
        if options.base_url is not None:  # first: an unreachable one is known before any engine starts
            say("asking the server")
            served = ask_server(options.base_url, options.served_model, posed)
        if "hf" in engines:
            say("asking hf")
            asked.append(("hf", "hf", ask_hf(checkpoint, posed)))
        if "sglang" in engines:
            say("asking sglang")
            asked.append(("sglang", "sglang", ask_sglang(checkpoint, posed, engine_args)))
        for order in other_orders:
            say(f"asking sglang with the deepstack order {order} and nothing else changed")
            reordered = ask_sglang(checkpoint, posed, engine_args, order)
            asked.append((f"sglang, deepstack order {order}", "sglang", reordered))
        known = {"hf": Way(hf_plan()), "sglang": Way(sglang_plan()), "float64": Way(hf_plan(), torch.float64)}
        ways = {f"hybrid {name}": known[name] for name in forwards}
        if options.hypotheses:
            orders = orders_of(checkpoint.family).items()
            ways |= {name: Way(hf_plan().switched("deepstack_order", way)) for name, way in orders}
        scheme_of = {f"{name}, FP8 {scheme}": scheme for scheme in schemes for name in ways}
        ways |= {
            f"{name}, FP8 {scheme}": Way(way.plan.switched("fp8", scheme), way.dtype)
            for scheme in schemes
            for name, way in ways.items()
        }
        if options.hypotheses:
            ways |= {name: Way(hf_plan(), hypothesis=change) for name, change in of_family(checkpoint.family).items()}
        if ways:
            say(f"asking the hybrid forward in {len(ways)} ways")
        forward = Forward(checkpoint)
        computed = {
            f"{name} ({forward.fp8_by(scheme_of[name])})" if name in scheme_of else name: outcomes
            for name, outcomes in ask_hybrid(forward, posed, ways).items()
        }
        if options.base_url is not None:
            asked.append((options.served_model, "server", served))
    judged = [
        (name, engine, {i: judge(posed[i], a, checkpoint.family) for i, a in enumerate(answers) if isinstance(a, str)})
        for name, engine, answers in asked
    ]
    place = len(engines) + len(other_orders)
    judged[place:place] = [(name, "hybrid", dict(enumerate(found))) for name, found in computed.items()]
    for name, _, answers in asked:
        failed = [a for a in answers if isinstance(a, VlmlabError)]
        if failed:
            left_out = f"{len(failed)} of {len(answers)} cases have no answer and are left out"
            print(f"vlmlab: {name}: {left_out}; the first: {failed[0]}", file=sys.stderr)
    conditions = [summarise(list(outcomes.values()), name, engine) for name, engine, outcomes in judged]
    if options.json:
        print(json.dumps({"conditions": [dataclasses.asdict(c) for c in conditions]}, allow_nan=False))
        return 0
    for condition in conditions:
        _print_condition(condition)
    first, _, baseline = judged[0]
    for name, _, outcomes in judged[1:]:
        both = [i for i in baseline if i in outcomes]
        pair = paired([baseline[i] for i in both], [outcomes[i] for i in both])
        _print_pair(f"{name} against {first}", pair)
    return 0


def _chosen(option: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Names of a comma-separated option, each once."""
    names = [] if text is None else list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise VlmlabError(f"expected {option} with some of {','.join(known)}, got {name!r}")
    return names


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not all(side.isascii() and side.isdigit() and len(side) < 10 for side in (width, height)):
        raise VlmlabError(f"expected --size WIDTHxHEIGHT in px, got {text!r}; for example 560x560")
    return int(width), int(height)


def _print_condition(condition: "Condition") -> None:
    low, high = condition.ci95
    print(
        f"{condition.name} ({condition.engine}): {condition.hit_rate:.1%} of {condition.n} hit, 95 % interval "
        f"{low:.1%} to {high:.1%}; drift {_px(vars(condition.drift_px))}; "
        f"{condition.unparsable} unparsable, {condition.out_of_range} out of range"
    )


def _print_pair(title: str, pair: "Paired") -> None:
    import numpy as np

    shift = [s for s in pair.shift_px if s is not None]
    found = np.quantile(shift, (0.5, 0.9, 1.0)).tolist() if shift else (None, None, None)
    print(
        f"{title}: shift {_px(dict(zip(('median', 'p90', 'max'), found, strict=True)))}; {pair.only_baseline} hits "
        f"lost, {pair.only_other} won, McNemar p = {pair.p_value:.3g}"
    )


def _px(numbers: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {'n/a' if n is None else f'{n:.2f}'}" for name, n in numbers.items()) + " px"


def _print_explanation(explanation: "Explanation") -> None:
    for part in explanation.attributions:
        columns = ("cause", "live", "changes", "first at", "alone", "all but it", "up to it", "share")
        rows = [
            (
                effect.name,
                "yes" if effect.live else "no, switch acts" if effect.acts else "no, and no proof that it acts",
                f"{effect.alone.tensors} tensors",
                effect.alone.first or "",
                f"{part.total - effect.alone.closer:.2e}",
                "" if effect.left_out is None else f"{effect.left_out:.2e}",
                "" if effect.cumulative is None else f"{effect.cumulative:.2e}",
                f"{effect.share:.2e}",
            )
            for effect in part.effects
        ]
        _print_table(f"{part.part}: distance to SGLang at {part.end} with causes switched", columns, rows)
        print(
            f"{part.part}: distance {part.total:.3e}, explained {part.explained:.3e}, of it interaction "
            f"{part.interaction:.3e}; {part.plans} plans; {part.flipped} tokens routed differently are left out"
            + ("" if part.flipped_total is None else f", their distance {part.flipped_total:.3e}")
        )
    for name in ("vision.merger", "final_norm", "logits"):
        for row in explanation.nearness:
            if row.hookpoint == name:
                print(
                    f"truth at {name}: hf errs {row.hf:.3e}, sglang {row.sglang:.3e}; closer: {row.closer}, "
                    f"sglang at {row.sglang_share:.0%} of tokens; {row.flipped} routed differently are left out"
                    + (f", there hf {row.hf_flipped:.3e}, sglang {row.sglang_flipped:.3e}" if row.flipped else "")
                )
    for cause, kernel in explanation.kernels.items():
        print(f"kernel: {cause} by {kernel}")
    for engine, closed in explanation.closures.items():
        equal = f"{closed.equal} of {closed.total} tensors bit-equal, {closed.elements} elements differ"
        kept = f"; first {closed.first}, kept in unexplained-{engine}.safetensors" if closed.first else ""
        print(f"closure {engine}: {equal}{kept}")
    print(f"unexplained remainder: {explanation.remainder} tensors")
    for engine, verdict in explanation.verdicts.items():
        tie = "; its two likeliest next tokens nearly tie" if explanation.near_tie[engine] else ""
        print(f"{engine}: {verdict.sentence()}{tie}")
    print(f"verdict: {explanation.word}")


def _capture(options: argparse.Namespace, say: Progress) -> tuple["Trace", "Trace", Path]:
    from vlmlab.capture import capture_hf, capture_sglang, is_stored
    from vlmlab.checkpoint import load_checkpoint
    from vlmlab.engines import Engines
    from vlmlab.generation import capture_answers
    from vlmlab.inputs import load_image, load_prompt, prepare_inputs, reference_inputs
    from vlmlab.trace import save_trace

    engine_args = _engine_args(options.engine_arg)
    if options.decode < 0:
        raise VlmlabError(f"expected --decode with a number of steps, got {options.decode}")
    image = load_image(options.image) if options.image else None
    prompt = load_prompt(options.prompt) if options.prompt else None
    say("reading the checkpoint")
    checkpoint = load_checkpoint(options.model)
    say("preparing the input")
    if image is None or prompt is None:
        inputs = reference_inputs(checkpoint)
    if image is not None or prompt is not None:
        inputs = prepare_inputs(checkpoint, image or inputs.image, prompt or inputs.text)
    out = Path(options.out) if options.out else Path("runs") / f"{Path(checkpoint.name).name}-{inputs.hash[:8]}"
    about = {"fresh": options.fresh, "engine_args": engine_args, "say": say}
    with Engines(checkpoint, options.attention, engine_args) as engines:
        if options.fresh or not is_stored(checkpoint, inputs, options.attention):
            engines.sglang_soon()
        hf = capture_hf(checkpoint, inputs, fresh=options.fresh, attention=options.attention, say=say, engines=engines)
        save_trace(hf, out / "hf")
        sglang = capture_sglang(checkpoint, inputs, hf, engines=engines, **about)
        save_trace(sglang, out / "sglang")
        if options.decode:
            answers = capture_answers(
                checkpoint, inputs, hf, sglang, options.decode, shapes=False, engines=engines, **about
            )
            for k, pair in enumerate(answers.pairs):
                for trace in pair:
                    save_trace(trace, out / "decode" / trace.info.engine / f"step_{k}")
    return hf, sglang, out


def _engine_args(pairs: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` pairs; the value is JSON where it parses, else text."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name.isidentifier() and equals):
            raise VlmlabError(f"expected --engine-arg NAME=VALUE, got {pair!r}; for example tp_size=2")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def _print_comparison(comparison: "Comparison", unequal: Sequence[str]) -> None:
    cosine = ("cosine min", "at token", "mean", "whole")
    columns = ("hook point", "status", *cosine, "norm ratio", "worst", "rel. L2", "max abs")
    for part, title in (("vision", "ViT"), ("language", "prefill")):
        rows = []
        for row in comparison.part(part):
            lengths = (row.norm_ratio, row.norm_ratio_worst, row.rel_l2_error, row.max_abs_diff)
            numbers = (row.cosine_mean, row.cosine_whole, *lengths)
            worst = "n/a" if row.cosine_min_token is None else str(row.cosine_min_token)
            rows.append((row.hookpoint, row.status, _show(row.cosine_min), worst, *(_show(n) for n in numbers)))
        _print_table(f"{title}: {comparison.baseline.engine} against {comparison.target.engine}", columns, rows)
    print(f"inputs equal: {'NO, the numbers answer different questions: ' + ', '.join(unequal) if unequal else 'yes'}")
    if comparison.flips:
        counts = [f"{layer.layer}: {len(layer.experts)} + {len(layer.order)}" for layer in comparison.flips]
        print(f"tokens with other experts + in another order alone, by layer: {', '.join(counts)}")
    print(comparison.summary())


def _show(number: float | None) -> str:
    return "n/a" if number is None else f"{number:.6g}" if abs(number) < 0.999 else f"{number:.8f}"


def _notebooks(options: argparse.Namespace) -> int:
    """The report first; then every notebook, executed on what is captured and computed by then."""
    start = time.perf_counter()
    with Progress() as say:
        say("importing")
        from concurrent.futures import Future, as_completed

        from vlmlab.checkpoint import load_checkpoint
        from vlmlab.engines import Engines
        from vlmlab.notebooks import exporting, parameter_names
        from vlmlab.passes import counted

        out, began = Path(options.out).resolve(), datetime.now(UTC).isoformat(timespec="seconds")
        checkpoint = load_checkpoint(options.model)
        given = {} if options.model is None else {"model": str(checkpoint.folder)}
        running: dict[Future, str] = {}
        with exporting(ROOT / "notebooks", AT_ONCE) as export:

            def begin(notebook: Path) -> None:
                number, _, question = notebook.stem.partition("_")
                chosen = {name: value for name, value in given.items() if name in names[notebook]}
                page, private = out / f"{notebook.stem}.html", {str(checkpoint.folder): checkpoint.name}
                future = export(notebook, chosen, page, private, options.fresh)
                running[future] = f"{number} {question.replace('_', ' ')}?"

            with Engines(checkpoint) as engines:
                finish = _first_report(engines, out / "report.html", options, say, start)
                names = {file: parameter_names(file) for file in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))}
                for notebook in (file for file in names if "seconds" in names[file]):  # they fill a given time
                    begin(notebook)
                finish()
            for notebook in (file for file in names if "seconds" not in names[file]):
                begin(notebook)
            for k, future in enumerate(as_completed(running), 1):
                left = ", ".join(sorted(words for other, words in running.items() if not other.done()))
                say(f"notebooks: {len(running) - k} to go: {left}" if left else "notebooks: all executed")
                page, seconds, earlier = future.result()
                unchanged = "" if earlier is None else f", nothing changed since {earlier}"
                say.line(f"{options.out}/{page.name} ({seconds:.0f} s{unchanged})")
    computed = counted(began)
    print(f"{len(computed)} forward passes computed, {sum(n > 1 for n in computed.values())} of them more than once")
    print(f"all done ({time.perf_counter() - start:.0f} s)")
    return 0


def _first_report(
    engines: "Engines", file: Path, options: argparse.Namespace, say: Progress, start: float
) -> Callable[[], None]:
    """Capture the reference comparison and write its report. Returns: captures what the notebooks read besides."""
    from vlmlab.attribution import prepare
    from vlmlab.capture import capture_hf, capture_sglang, is_stored
    from vlmlab.generation import STEPS, capture_answers
    from vlmlab.inputs import reference_inputs
    from vlmlab.passes import Passes
    from vlmlab.report import investigate, write_report

    checkpoint = engines.checkpoint
    inputs = reference_inputs(checkpoint)
    if options.fresh or not is_stored(checkpoint, inputs):
        engines.sglang_soon()
    about = {"fresh": options.fresh, "say": say, "engines": engines}
    passes, hf = Passes.of(checkpoint), capture_hf(checkpoint, inputs, **about)
    prepare(passes, hf, say)
    sglang = capture_sglang(checkpoint, inputs, hf, **about)
    answers = capture_answers(checkpoint, inputs, hf, sglang, STEPS, shapes=False, **about)
    run = investigate(passes, hf, sglang, answers.pairs, say)
    say("writing the report")
    write_report(file, [run])
    say.line(f"{options.out}/{file.name}\n{run.comparison.summary()} ({time.perf_counter() - start:.0f} s)")

    def finish() -> None:
        capture_answers(checkpoint, inputs, hf, sglang, STEPS, say=say, engines=engines)

    return finish


def _store(options: argparse.Namespace) -> int:
    from vlmlab import store

    if options.clear:
        removed = store.clear()
        print(f"removed {len(removed)} entries, {sum(entry.bytes for entry in removed) / 2**20:.0f} MiB")
        return 0
    found, limit = store.entries(), store.limit_bytes()
    total = sum(entry.bytes for entry in found)
    if options.json:
        entries = [{"name": e.name, "bytes": e.bytes, "used": e.used} for e in found]
        print(json.dumps({"bytes": total, "limit_bytes": limit, "entries": entries}))
        return 0
    kinds: dict[str, list[store.Entry]] = {}
    for entry in found:
        kinds.setdefault(entry.name.split("-")[0], []).append(entry)
    rows = [
        (kind, str(len(of)), f"{sum(e.bytes for e in of) / 2**20:.1f} MiB", _time(of[0].used), _time(of[-1].used))
        for kind, of in sorted(kinds.items())
    ]
    _print_table("What is kept", ("kind", "entries", "size", "longest unused", "last used"), rows)
    print(f"{len(found)} entries, {total / 2**30:.2f} of {limit / 2**30:g} GiB; --clear removes them")
    return 0


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _parser() -> argparse.ArgumentParser:
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback behind an error")
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument(
        "--model",
        help="checkpoint folder or hub id (default: the embedded checkpoint)",
    )
    model.add_argument("--fresh", action="store_true", help="capture again even where a stored capture fits")

    parser = argparse.ArgumentParser(
        prog="vlmlab", description="Two engines, one vision-language model: where do they part?"
    )
    parser.add_argument("--version", action="version", version=f"vlmlab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    doctor = commands.add_parser("doctor", parents=[debug], help="what can run on this machine, and why not")
    doctor.add_argument("--json", action="store_true", help="one JSON object on standard output")
    doctor.set_defaults(run=_doctor)

    asked = argparse.ArgumentParser(add_help=False)
    asked.add_argument("--image", help="picture (default: the reference picture, 720 image tokens)")
    asked.add_argument("--prompt", help="text file with one <image> place (default: the reference prompt, 830 tokens)")
    asked.add_argument("--out", help="folder for both traces and the result (default: runs/MODEL-INPUT)")
    asked.add_argument("--json", action="store_true", help="one JSON object on standard output and nothing else")
    asked.add_argument("--decode", type=int, default=0, metavar="STEPS", help="capture so many decode steps, too")
    asked.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="Transformers' attention")
    asked.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="passed to sglang.Engine, e.g. tp_size=2",
    )

    compare = commands.add_parser(
        "compare", parents=[debug, model, asked], help="capture from both engines and compare"
    )
    compare.add_argument(
        "--traces", nargs=2, metavar=("BASELINE", "TARGET"), help="compare two trace folders; starts no engine"
    )
    compare.set_defaults(run=_compare)

    explain = commands.add_parser(
        "explain", parents=[debug, model, asked], help="bug or rounding, where first, and which causes"
    )
    explain.add_argument(
        "run_folder", nargs="?", metavar="RUN", help="folder that compare wrote (default: the reference comparison)"
    )
    explain.set_defaults(run=_explain)

    report = commands.add_parser(
        "report", parents=[debug], help="one HTML file about one or several runs, live without a kernel"
    )
    report.add_argument("run_folder", nargs="+", metavar="RUN", help="folder that compare or explain wrote")
    report.add_argument("--out", default="report.html", help="file to write (default: report.html)")
    report.add_argument("--model", help="checkpoint of the runs (default: the embedded one with the same weights)")
    report.set_defaults(run=_report)

    reveal = commands.add_parser("reveal", parents=[debug], help="in which order an operation adds, by probing")
    reveal.add_argument("op", metavar="OP", help="sum, dot, linear, attention, hf_norm, ...")
    reveal.add_argument("--n", type=int, default=64, help="numbers to add (default: 64)")
    reveal.add_argument("--dtype", default="float32", choices=("float64", "float32", "bfloat16", "float16"))
    reveal.add_argument("--rows", type=int, default=1, metavar="M", help="rows of the batch, or queries of attention")
    reveal.add_argument("--row", type=int, default=0, metavar="R", help="which of them (default: 0)")
    reveal.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    reveal.add_argument("--json", action="store_true", help="one JSON object on standard output")
    reveal.set_defaults(run=_reveal)

    ground = commands.add_parser(
        "ground", parents=[debug], help="point at coloured shapes: does a change of arithmetic move the answer?"
    )
    ground.add_argument("--model", help="checkpoint folder or hub id (default: the embedded checkpoint)")
    ground.add_argument("--n", type=int, default=50, help="pictures to ask about (default: 50)")
    ground.add_argument(
        "--size", default="392x392", metavar="WxH", help="of all pictures but the first, px (default: 392x392)"
    )
    ground.add_argument("--seed", type=int, default=0, help="of the pictures (default: 0)")
    ground.add_argument("--question", choices=("point", "box"), default="point", help="what to ask for")
    ground.add_argument(
        "--engines", metavar="NAMES", help="hf, sglang or both, comma-separated (default: both, if nothing is named)"
    )
    ground.add_argument(
        "--hybrid", metavar="NAMES", help="the own forward, computed as hf, sglang or float64, comma-separated"
    )
    ground.add_argument(
        "--hypotheses",
        action="store_true",
        help="the own forward with every deepstack order and with every planted fault",
    )
    ground.add_argument(
        "--fp8", metavar="SCHEMES", help="the same forwards and orders in FP8, too, e.g. channel/token,block/group"
    )
    ground.add_argument(
        "--deepstack-orders",
        metavar="NAMES",
        help="the real SGLang engine with this order alone switched: hf, residual_first, once",
    )
    ground.add_argument("--base-url", metavar="URL", help="OpenAI-compatible server, e.g. http://127.0.0.1:30000/v1")
    ground.add_argument(
        "--served-model", metavar="NAME", help="its model's name; answers are read as those of --model's family"
    )
    ground.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="passed to sglang.Engine, e.g. tp_size=2",
    )
    ground.add_argument("--json", action="store_true", help="one JSON object on standard output and nothing else")
    ground.set_defaults(run=_ground)

    kept = commands.add_parser("store", parents=[debug], help="captures and passes kept on disk: show or clear them")
    kept.add_argument("--clear", action="store_true", help="remove everything that is kept")
    kept.add_argument("--json", action="store_true", help="one JSON object on standard output")
    kept.set_defaults(run=_store)

    notebooks = commands.add_parser("notebooks", parents=[debug, model], help="execute the notebooks and write HTML")
    notebooks.add_argument("--out", default="reports", help="folder for the HTML files (default: reports)")
    notebooks.set_defaults(run=_notebooks)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args: arguments: command line without the program's name; None for sys.argv.
    Returns: exit code.
    """
    options = _parser().parse_args(arguments)
    if "VLMLAB_CACHE" in os.environ:  # notebooks run in another folder
        os.environ["VLMLAB_CACHE"] = str(Path(os.environ["VLMLAB_CACHE"]).absolute())
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    signal.signal(signal.SIGTERM, _interrupt)  # so that contexts end their engines
    try:
        return options.run(options)
    except VlmlabError as error:
        if options.debug:
            raise
        print(f"vlmlab: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if options.debug:
            raise
        name = f" {Path(error.filename).name!r}" if error.filename else ""
        print(f"vlmlab: {error.strerror or error}{name}; check the path and its permissions", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vlmlab: interrupted; engines are shut down, nothing half-written is kept", file=sys.stderr)
        return 130


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
