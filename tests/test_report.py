"""One file for a maintainer, opened in a real browser that may not reach anything."""

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest
import torch

from vlmlab import charts, engines, report
from vlmlab.cli import main
from vlmlab.engine_hf import vision_output
from vlmlab.explorer import BASELINES, METRICS
from vlmlab.generation import capture_answers
from vlmlab.hybrid import Hybrid
from vlmlab.passes import Passes
from vlmlab.report import SHOWN_BASELINES, command_of, investigate, operation_rows, write_report
from vlmlab.routing import Flips
from vlmlab.trace import save_trace

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]
SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"
HOSTILE = (
    "<script>window.pwned = 1</script>",
    "\u202eevil\u202c",
    "\x1b[31m",
    "\udce2",
    "مرحبا",
    "</script>",
    "&lt;b&gt;",
)


def unstored(checkpoint):
    return Passes(Hybrid(checkpoint), Hybrid(checkpoint, torch.float64))


@pytest.fixture(scope="module")
def investigation(checkpoint, small_traces):
    return investigate(unstored(checkpoint), *small_traces, say=lambda line: None)


@pytest.fixture(scope="module")
def file(investigation, tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("report") / "report.html", [investigation])


@pytest.fixture
def opened(browser):
    """(file, options of the context) to a page that was loaded; nothing may be fetched or complain."""
    complaints = []

    def load(file, **options):
        context = browser.new_context(offline=True, **options)
        page = context.new_page()
        page.on("request", lambda request: complaints.append(request.url) if request.url != file.as_uri() else None)
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(file.as_uri())
        if options.get("java_script_enabled", True):
            count = page.locator(".chart").count()
            page.wait_for_function(
                "n => [...document.querySelectorAll('.chart')].filter(c => c.view).length == n", arg=count
            )
        return page

    yield load
    # Pictures inside the page are requests for data, not for an address.
    assert [complaint for complaint in complaints if not complaint.startswith("data:")] == []


# What a chart shows: one field of the rows that have the marked field. Args: number of the chart, mark, field.
SHOWN = """([k, mark, field]) => {
  const view = document.querySelectorAll('.chart')[k].view;
  const names = Object.keys(view.getState({ data: () => true, signals: () => false }).data);
  const rows = names.map((name) => view.data(name)).find((rows) => rows.length && mark in rows[0]);
  return rows.map((row) => row[field]);
}"""


@pytest.mark.parametrize("part", [0, 1])
def test_a_toggle_shows_the_precomputed_curve(investigation, file, opened, part):
    page, name = opened(file), ("vision", "language")[part]
    chart, explorer = page.locator(".chart").nth(part), investigation.explorer
    live = report._live(investigation, name)
    switched = {}
    for cause in [None, *live]:
        if cause is not None:
            chart.get_by_label(f"{cause.title}, as SGLang").check()
            switched[cause.name] = None
        for baseline in SHOWN_BASELINES:
            chart.get_by_label("baseline").select_option(BASELINES[baseline])
            for metric in METRICS:
                chart.get_by_label("metric").select_option(metric)
                page.wait_for_timeout(50)
                curve = explorer.curve(name, explorer.plan(switched), baseline, metric)
                assert page.evaluate(SHOWN, [part, "high", "worst"]) == charts.rounded(curve.table["worst"].tolist())
                assert f"{curve.remainder} of {curve.total} tensors" in chart.text_content()
    assert curve.remainder == 0 and len(live) == 2


def test_layer_and_token_are_picked(investigation, file, opened):
    page = opened(file)
    chart, cosines = page.locator(".chart").nth(3), investigation.comparison.cosines
    layer, token = (chart.get_by_role("slider").nth(i) for i in (0, 1))
    layer.fill("5")
    page.wait_for_timeout(200)
    shown = page.evaluate(SHOWN, [3, "t", "value"])
    values = (1 - cosines["layers.4.resid_post"]).clamp(min=charts.FLOOR).tolist()
    assert shown == pytest.approx(values, rel=0.012)
    before = chart.text_content()
    token.fill("2")
    page.wait_for_timeout(200)
    assert "token 2" in chart.text_content() != before


def test_the_page_computes_the_engines_bits_and_takes_edits(investigation, file, opened):
    page, rows = opened(file), operation_rows(investigation)
    assert [row["name"] for row in rows] == ["rms_norm", "residual_sum"]
    said = page.get_by_role("status").all_text_contents()
    for row, sentence in zip(rows, said, strict=True):
        count, differ = len(row["hf"]), sum(a != b for a, b in zip(row["hf"], row["sglang"], strict=True))
        assert f"{count} of {count} channels have the bits of Transformers' way, {count} those" in sentence
        assert differ > 0 and sentence.endswith(f"differ in {differ}.")
    field = page.get_by_label(f"x of channel {rows[0]['shown'][0]}", exact=True).first
    field.fill("123.456")
    field.press("Tab")
    assert field.input_value() == "123.5"  # the nearest bfloat16
    assert page.get_by_role("status").first.text_content() != said[0]


def test_deepstack_is_computed_in_the_page_too(checkpoints, hf_engines, ask, tmp_path, opened, monkeypatch):
    hf = hf_engines("qwen3_vl").capture(ask("qwen3_vl", (8, 10), seed=34), tmp_path / "hf")
    other = dataclasses.replace(hf.info, engine="sglang", versions={**hf.info.versions, "sglang": "0"})
    found = investigate(
        unstored(checkpoints["qwen3_vl"]), hf, dataclasses.replace(hf, info=other), say=lambda line: None
    )
    assert found.explanation.word == "rounding"  # Transformers against itself: closure of the other side fails
    rows = operation_rows(found)
    assert [row["name"] for row in rows] == ["rms_norm", "residual_sum", "deepstack_order"]
    page = opened(write_report(tmp_path / "report.html", [found]))
    for row, sentence in zip(rows, page.get_by_role("status").all_text_contents(), strict=True):
        count = len(row["hf"])
        assert f"{count} of {count} channels have the bits of Transformers' way, {count} those" in sentence


def test_a_run_without_a_picture_is_a_report_too(checkpoints, hf_engines, ask, tmp_path, opened):
    hf = hf_engines("qwen2_vl").capture(ask("qwen2_vl"), tmp_path / "hf")
    other = dataclasses.replace(hf.info, engine="sglang", versions={**hf.info.versions, "sglang": "0"})
    found = investigate(
        unstored(checkpoints["qwen2_vl"]), hf, dataclasses.replace(hf, info=other), say=lambda line: None
    )
    page = opened(write_report(tmp_path / "report.html", [found]))
    assert page.locator(".chart").count() == 2 and page.locator("img").count() == 0


def test_it_reads_without_scripts_on_a_phone_and_in_the_dark(investigation, file, opened):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page = opened(file, java_script_enabled=False)
    assert page.locator(".chart svg").count() == 2 and page.locator(".chart img").count() == 2
    text = page.locator("main").text_content()
    live = [effect for part in investigation.explanation.attributions for effect in part.effects if effect.live]
    assert all(effect.name in text and report.number(effect.share) in text for effect in live)
    for name, width, scheme in (("phone", 390, "light"), ("desktop", 1280, "dark")):
        page = opened(file, viewport={"width": width, "height": 900}, color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=SCREENSHOTS / f"report_{name}.png", full_page=True)
        assert (SCREENSHOTS / f"report_{name}.png").stat().st_size > 10_000
    assert len(page.pdf()) > 50_000


def test_what_came_from_outside_is_text(investigation, tmp_path, opened, monkeypatch):
    monkeypatch.setattr(
        report, "token_texts", lambda checkpoint, ids: [HOSTILE[i % len(HOSTILE)] for i in range(len(ids))]
    )
    hostile = HOSTILE[0] + HOSTILE[1]
    info = dataclasses.replace(investigation.hf.info, model=hostile, flags={hostile: HOSTILE[2]})
    hf = dataclasses.replace(investigation.hf, info=info)
    file = write_report(tmp_path / "report.html", [dataclasses.replace(investigation, hf=hf)])
    page = opened(file)
    assert page.evaluate("window.pwned") is None
    body = page.locator("main").text_content()
    assert "<script>window.pwned = 1</script>" in body and "\\u202eevil" in body and "\\x1b[31m" in body
    assert not set("\u202e\u202c\x1b") & set(file.read_text())


def strict(constant):
    raise AssertionError(constant)


def test_every_number_in_it_is_strict_json_and_nothing_private_travels(file, checkpoint):
    page = file.read_text()
    blocks = re.findall(r'<script type="application/[^"]*json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        json.loads(block, parse_constant=strict)
    assert str(checkpoint.folder) not in page and str(Path.home()) not in page
    assert ">nan<" not in page.lower() and ">inf<" not in page.lower()


def test_chosen_experts_are_told_of_a_mixture_only(investigation):
    assert report._experts(investigation) == ""
    flips = (Flips(0, 70, (3, 9), (4,), 1), Flips(1, 70, tuple(range(9)), (), 0))
    mixture = dataclasses.replace(investigation, comparison=dataclasses.replace(investigation.comparison, flips=flips))
    said = report._experts(mixture)
    assert "10 of 70 tokens go to other experts" in said and "11 such choices over 2 layers, and 1 more" in said
    assert "<td>3, 9</td>" in said and "<td>0, 1, 2, 3, 4, 5, 6, 7, ...</td>" in said


def test_every_hook_point_has_its_norm_ratio(investigation, file):
    page = file.read_text()
    assert page.count(">norm ratio</th>") == 2
    row = investigation.comparison.row("layers.3.attn_out")
    said = page[page.index("<td>layers.3.attn_out</td>") :].split("</tr>", 1)[0]
    assert f">{report.number(row.norm_ratio)}<" in said and f">{report.number(row.norm_ratio_worst)}<" in said


def test_undefined_numbers_are_na():
    table = report._table(["a"], [(float("nan"),), (float("inf"),), (None,), (0.5,)])
    assert table.count("n/a") == 3 and "0.5" in table


def test_writing_takes_at_most_five_seconds_beyond_the_computation(investigation, file, tmp_path):
    start = time.perf_counter()
    write_report(tmp_path / "again.html", [investigation])
    assert time.perf_counter() - start < 5


def test_several_runs_stand_in_one_file(investigation, tmp_path, opened):
    page = opened(write_report(tmp_path / "report.html", [investigation, investigation]))
    assert page.locator("nav a").count() == 2 and page.locator("section").count() == 2


def test_decode_steps_are_captured_with_a_run_and_stored(
    traces, checkpoint, inputs, on_session_engine, tmp_path, monkeypatch
):
    with on_session_engine():
        assert main(["compare", "--decode", "3", "--out", str(tmp_path)]) == 0  # the prefill is stored
    for engine in ("hf", "sglang"):
        assert sorted(step.name for step in (tmp_path / "decode" / engine).iterdir()) == ["step_0", "step_1", "step_2"]
    monkeypatch.setattr(engines, "open_sglang", lambda *_, **__: pytest.fail("stored steps must not start an engine"))
    stored = capture_answers(checkpoint, inputs, *traces, 3, shapes=False).pairs
    assert len(stored) == 3
    assert all(torch.equal(a["inputs.input_ids"], b["inputs.input_ids"]) for a, b in stored)
    assert main(["compare", "--decode", "-1", "--out", str(tmp_path)]) == 2


def test_a_run_folder_becomes_a_report(small_traces, sglang_engine, hf_engines, ask, tmp_path, capsys, opened):
    run, inputs = tmp_path / "run", ask("qwen2_vl", (8, 10), seed=34)
    for trace in small_traces:
        save_trace(trace, run / trace.info.engine)
    given = vision_output(small_traces[0])
    _, tokens = sglang_engine.capture_decode(inputs, run / "decode" / "sglang", 3, given)
    hf_engines("qwen2_vl").capture_decode(inputs, run / "decode" / "hf", 3, tokens)
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert "rounding" in capsys.readouterr().out
    page = opened(tmp_path / "report.html")
    assert page.get_by_role("heading", name="Decode steps").count() == 1
    assert page.locator(".chart").count() == 5
    assert len(page.evaluate(SHOWN, [4, "shown", "value"])) == 3


def test_a_run_of_unknown_weights_is_refused_in_one_sentence(traces, tmp_path, capsys):
    for trace in traces:
        info = dataclasses.replace(trace.info, weights_hash="0" * 64)
        save_trace(dataclasses.replace(trace, info=info), tmp_path / trace.info.engine)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 2
    assert "pass --model" in capsys.readouterr().err and not (tmp_path / "r.html").exists()


def test_the_command_reproduces_the_run(investigation):
    command = "vlmlab explain --model data/checkpoints/qwen2-vl-tiny --image PICTURE --prompt PROMPT"
    assert command_of(investigation) == command
    stepped = dataclasses.replace(investigation, steps=[(investigation.hf, investigation.sglang)])
    assert command_of(stepped) == f"{command} --decode 1"


def test_a_bug_stands_at_the_head(investigation, tmp_path, opened):
    hf, sglang = investigation.hf, investigation.sglang
    tensors = {name: sglang.tensors[name] for name in sglang.tensors}
    tensors["layers.5.mlp_out"] = tensors["layers.5.mlp_out"] * torch.tensor(1.5, dtype=torch.bfloat16)
    broken = dataclasses.replace(sglang, tensors=tensors)
    found = investigate(unstored(investigation.checkpoint), hf, broken, say=lambda line: None)
    page = opened(write_report(tmp_path / "report.html", [found]))
    answer = page.locator(".answer.bug").text_content()
    assert "It is a bug." in answer and "layers.5.mlp_out" in answer and "MLP" in answer
