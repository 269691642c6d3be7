"""The widgets: by themselves, and in a real JupyterLab in a real browser."""

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

from vlmlab.dashboard import Dashboard, show_three_numbers
from vlmlab.explorer import Explorer
from vlmlab.hybrid import Hybrid

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def dashboard(checkpoint, ask, small_traces):
    explorer = Explorer(Hybrid(checkpoint), Hybrid(checkpoint, torch.float64), *small_traces)
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


@pytest.mark.timeout(600)
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
    toggle.wait_for(timeout=400_000)
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
    *numbers, form, shown = box.children
    assert "(a + b) + c = 256.0" in shown.value and "a + (b + c) = 258.0" in shown.value
    form.value = "fp32"
    assert shown.value.count("c = 258.0") == 1 and "a + (b + c) = 258.0" in shown.value
    numbers[0].value = 100.0
    assert "exactly 102.0" in shown.value
