"""The widgets: by themselves, and in a real JupyterLab in a real browser."""

import math
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

from vlmlab.ask import Forward
from vlmlab.dashboard import PRESETS, WAYS, Dashboard, show_grounding, show_sum, show_three_numbers
from vlmlab.explorer import Explorer
from vlmlab.floats import FORMATS, round_to
from vlmlab.hybrid import Hybrid
from vlmlab.passes import Passes
from vlmlab.summation import ORDERS, add, kahan

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def dashboard(checkpoint, ask, small_traces):
    explorer = Explorer(Passes(Hybrid(checkpoint), Hybrid(checkpoint, torch.float64)), *small_traces)
    return Dashboard(explorer, ask("qwen2_vl", (8, 10), seed=34).image, (8, 10))


def shown(dashboard):
    figures = [image.value for image in dashboard.figures.values()]
    return [*figures, dashboard.picture.value, dashboard.facts.value, dashboard.status.value]


def test_a_toggle_redraws_its_part_and_back_is_the_same(dashboard):
    before = shown(dashboard)
    dashboard.toggles["rms_norm"].value = True
    after = shown(dashboard)
    vision, language = list(dashboard.figures).index("vision"), list(dashboard.figures).index("language")
    assert after[vision] == before[vision] and after[language] != before[language]
    assert after[3] != before[3] and after[4] != before[4]
    dashboard.toggles["rms_norm"].value = False
    assert shown(dashboard) == before


def test_layers_baseline_and_metric_redraw(dashboard):
    dashboard.toggles["rms_norm"].value = True
    for control, value in (
        (dashboard.ranges["language"], (3, 9)),
        (dashboard.baseline, "sglang"),
        (dashboard.metric, "relative L2 error"),
    ):
        before, kept = shown(dashboard), control.value
        control.value = value
        assert shown(dashboard)[:4] != before[:4]
        control.value = kept
        assert shown(dashboard) == before
    dashboard.toggles["rms_norm"].value = False


def test_all_live_causes_leave_no_remainder(dashboard):
    assert "language model 114 of 115" in dashboard.status.value
    for name in ("rms_norm", "residual_sum"):
        dashboard.toggles[name].value = True
    assert "language model 0 of 115" in dashboard.status.value
    for name in ("rms_norm", "residual_sum"):
        dashboard.toggles[name].value = False


def test_an_error_stands_on_the_page_and_marks_the_rest_stale(dashboard, monkeypatch):
    before = shown(dashboard)

    def broken(*_):
        raise RuntimeError("<out of memory>")

    monkeypatch.setattr(dashboard._explorer, "curve", broken)
    dashboard.toggles["qkv_linear"].value = True
    assert "RuntimeError: &lt;out of memory&gt;" in dashboard.status.value and "stale" in dashboard.status.value
    assert shown(dashboard)[:4] == before[:4]
    monkeypatch.undo()
    dashboard.toggles["qkv_linear"].value = False
    assert shown(dashboard) == before


def test_no_figure_stays_open_and_the_facts_are_a_table(dashboard):
    before = plt.get_fignums()
    for value in (True, False) * 3:
        dashboard.toggles["residual_sum"].value = value
    assert plt.get_fignums() == before
    assert dashboard.facts.value.count("<table") == 2 and "layers.27.resid_post" in dashboard.facts.value
    assert all(toggle.tooltip for toggle in dashboard.toggles.values())


@pytest.fixture
def lab(tmp_path, store):
    """A JupyterLab on a copy of the notebook: (address, folder). Ended by its own process group."""
    shutil.copy(ROOT / "notebooks" / "04_which_cause_explains_it.ipynb", tmp_path)
    token, log = secrets.token_hex(8), tmp_path / "lab.log"
    settings = {
        "port": 0,
        "token": token,
        "open_browser": False,
        "root_dir": str(tmp_path),
        "allow_root": True,
        "ip": "127.0.0.1",
    }
    options = [f"--ServerApp.{name}={value}" for name, value in settings.items()]
    environment = os.environ | {"JUPYTER_CONFIG_DIR": str(tmp_path / "config"), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            stdout=output,
            stderr=output,
            env=environment,
            cwd=tmp_path,
            start_new_session=True,
        )
    try:
        for _ in range(120):
            found = re.search(r"http://127\.0\.0\.1:(\d+)/lab", log.read_text())
            if found or process.poll() is not None:
                break
            time.sleep(0.5)
        assert found, log.read_text()[-2000:]
        yield f"http://127.0.0.1:{found[1]}", token
        request = urllib.request.Request(
            f"http://127.0.0.1:{found[1]}/api/shutdown", method="POST", headers={"Authorization": f"token {token}"}
        )
        urllib.request.urlopen(request, timeout=20).close()
        process.wait(30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 15)
            process.wait(30)


@pytest.mark.timeout(1200)  # the notebook explains and draws first: some minutes, on two slow cores
def test_the_dashboard_answers_to_clicks_in_jupyterlab(lab, traces, browser):
    from playwright.sync_api import TimeoutError, expect

    address, token = lab
    screenshot = ROOT / ".cache" / "dashboard.png"
    screenshot.parent.mkdir(exist_ok=True)
    page = browser.new_page(viewport={"width": 1400, "height": 2400})
    page.goto(f"{address}/lab/tree/04_which_cause_explains_it.ipynb?token={token}")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=120_000)
    page.locator(".jp-StatusBar-TextItem", has_text="Idle").first.wait_for(timeout=120_000)
    started = page.locator(".jp-InputArea-prompt", has_text=re.compile(r"\[(\*|\d+)\]"))
    for _ in range(3):  # a kernel that is still connecting can drop the command
        page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
        page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()
        try:
            started.first.wait_for(timeout=20_000)
            break
        except TimeoutError:
            continue
    toggle = page.get_by_role("button", name="rms_norm", exact=True)
    toggle.wait_for(timeout=900_000)
    toggle.scroll_into_view_if_needed()
    status = page.get_by_text("not yet SGLang's bits")
    expect(status).to_contain_text("language model 114 of 115")
    figures = page.locator(".jp-OutputArea-output img.widget-image")

    def sources():
        return [figures.nth(i).get_attribute("src") for i in range(figures.count())]

    before = sources()
    assert len(before) == 3
    toggle.click()
    expect(status).to_contain_text("language model 112 of 115", timeout=30_000)
    expect(page.get_by_role("cell", name="layers.27.resid_post")).to_have_count(1)
    toggled = sources()
    assert toggled[1] != before[1] and toggled[0] == before[0]
    handle = page.locator(".noUi-handle-lower").nth(1)
    handle.focus()
    handle.press("ArrowRight")
    page.wait_for_function("old => document.querySelectorAll('img.widget-image')[1].src !== old", arg=toggled[1])
    toggle.scroll_into_view_if_needed()
    page.screenshot(path=screenshot)
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert screenshot.stat().st_size > 10_000


def test_three_numbers_show_both_orders_and_follow_the_controls():
    box = show_three_numbers()
    _, *numbers, form, shown = box.children
    assert "(a + b) + c = 256.0" in shown.value and "a + (b + c) = 258.0" in shown.value
    form.value = "fp32"
    assert shown.value.count("c = 258.0") == 1 and "a + (b + c) = 258.0" in shown.value
    numbers[0].value = 100.0
    assert "exactly (as float64) 102.0" in shown.value


def results(box):
    return [float(value) for value in re.findall(r" = (\S+)</b>", box.children[-1].value)]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_case_where_the_order_matters_and_has_the_known_answers(preset):
    known = {
        "a tie goes to the even neighbour, below": [256.0, 258.0],
        "the same mirrored": [-256.0, -258.0],
        "a tie goes to the even neighbour, above": [260.0, 258.0],
        "overflow on the way": [math.inf, 65504.0],
        "saturation on the way": [416.0, 448.0],
        "too small to be noticed": [2.0**24, 2.0**24 + 2],
        "cancellation": [1.0, 0.0],
    }
    box = show_three_numbers()
    box.children[0].value = preset
    assert results(box) == known[preset]
    assert results(show_three_numbers(preset)) == known[preset]


def test_a_number_beyond_the_format_is_said_in_place():
    box = show_three_numbers()
    box.children[4].value = "e4m3"
    box.children[1].value = 500.0
    assert "expected numbers up to 448 in size (e4m3), got 500.0" in box.children[-1].value
    box.children[1].value = 0.1
    assert results(box) and "rounded to e4m3 before any addition: 0.1 is 0.1015625" in box.children[-1].value


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_a_sum_ends_where_summation_ends(way, form):
    values = torch.tensor([3.0, 0.1, -7.25, 11.0, 0.7, 1e-3, -2.5, 40.0, 0.3], dtype=torch.float64)
    held = round_to(values, FORMATS[form])
    if way == "Kahan":
        wanted = kahan(held, FORMATS[form])
    elif way.startswith("fp32"):
        wanted = round_to(add(ORDERS["sequential"](9), held, FORMATS["fp32"]), FORMATS[form])
    else:
        held = held[held.abs().argsort()] if way == "smallest first" else held
        wanted = add(ORDERS.get(way, ORDERS["sequential"])(9), held, FORMATS[form])
    text = ", ".join(map(str, values.tolist()))
    shown = show_sum(text, form, way).children[-1].value
    assert f"<b>sum {wanted.item()}, exactly (as float64) {math.fsum(held.tolist())}, error " in shown
    assert shown.count("<tr") == (10 if way == "Kahan" else 9)


def test_a_sum_shows_every_addition_and_its_error_in_ulp():
    box = show_sum("256 1 1")
    shown = box.children[-1].value
    assert "sum 256.0, exactly (as float64) 258.0, error -1 ulp (1 ulp = 2.0)" in shown
    cells = re.findall(r"<td>(.*?)</td>", shown)
    assert cells == ["256.0", "1.0", "257.0", "256.0", "1.0", "2.0"] * 2
    box.children[2].value = "reversed"
    assert "sum 258.0, exactly (as float64) 258.0, error 0 ulp" in box.children[-1].value


def test_what_float64_rounds_away_is_shown_too():
    assert re.findall(r"<td>(.*?)</td>", show_sum("1e16 1", "fp64").children[-1].value)[4] == "1.0"
    assert "error 0.75 ulp" in show_sum("0.1 0.2 0.3", "fp64").children[-1].value


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "expected 2 to 64 numbers, separated by commas or spaces, got 0"),
        ("1", "got 1"),
        ("1 " * 65, "got 65"),
        ("1, __import__('os').abort()", "expected numbers, separated by commas or spaces, got"),
        ("1 <script>", "&lt;script&gt;"),
        ("nan 1", "got nan"),
        ("1e400 1", "got inf"),
        ("1e5 1", "expected numbers up to 65504 in size (fp16), got 100000.0"),
    ],
)
def test_bad_numbers_give_a_sentence_and_good_ones_bring_the_table_back(text, sentence):
    box = show_sum("1 2", "fp16")
    box.children[0].value = text
    shown = box.children[-1].value
    assert sentence in shown and "<table" not in shown and "<script" not in shown
    box.children[0].value = "1,,  2"
    assert "sum 3.0, exactly (as float64) 3.0" in box.children[-1].value


@pytest.mark.parametrize("way", WAYS)
def test_infinities_on_the_way_are_shown_and_break_nothing(way):
    shown = show_sum("65504 65504 -65504 -65504", "fp16", way).children[-1].value
    assert "exactly (as float64) 0.0" in shown and "<table" in shown


def test_a_box_is_asked_under_the_chosen_order_dtype_and_hypothesis(checkpoints):
    box = show_grounding(Forward(checkpoints["qwen3_vl"]), side=160)
    order, dtype, hypothesis, color, x, _, shown = box.children
    cells = re.findall(r"<td>(.*?)</td>", shown.value)
    assert cells[1] == cells[5] and "(119.5, 42.5) px" in shown.value and "data:image/png;base64," in shown.value
    hypothesis.value = "deepstack dropped"
    dropped = re.findall(r"<td>(.*?)</td>", shown.value)
    assert dropped[:4] == cells[:4] and dropped[5] != cells[5]
    hypothesis.value, order.value, dtype.value = "none", "one sum", "float64"
    assert re.findall(r"<td>(.*?)</td>", shown.value)[3] == "True"
    x.value, color.value = (10, 50), "blue"
    assert "(30, 42.5) px" in shown.value
    x.value = (30, 30)
    assert "expected a blue rectangle with an area" in shown.value


def test_a_family_without_deepstack_has_no_order_to_choose(checkpoint):
    order, *_, shown = show_grounding(Forward(checkpoint), side=160).children
    assert order.options == ("no deepstack",) and "<td>" in shown.value
