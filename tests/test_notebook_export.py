import base64
import os
import re
import time

import ipywidgets as widgets
import nbformat
import psutil
import pytest

from vlmlab import notebooks, store
from vlmlab.errors import VlmlabError
from vlmlab.notebooks import (
    WIDGET_STATE,
    WIDGET_VIEW,
    export_notebook,
    exporting,
    run_notebook,
    show_answer,
    write_html,
)
from vlmlab.page import addresses, policy

NOTE = "State when the notebook was executed; the live controls need JupyterLab."
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def _notebook(folder, *cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.cells[0]["metadata"]["tags"] = ["parameters"]
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    file = folder / "question.ipynb"
    nbformat.write(notebook, file)
    return file


def _showing(html):
    """An executed notebook whose only output is a piece of HTML."""
    output = nbformat.v4.new_output("display_data", {"text/html": html})
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x", outputs=[output])])


def test_a_notebook_becomes_one_offline_page(tmp_path):
    executed = run_notebook(_notebook(tmp_path, "x = 1", "print('value', x * 21)"), {"x": 2})
    page = write_html(executed, tmp_path / "out" / "question.html").read_text()
    assert "value 42" in page and NOTE not in page
    assert addresses(page) == [] and "<script" not in page
    assert page.index(policy()) < page.index("<style") and "script-src 'none'" in policy()
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["question.html"]


def test_a_failing_cell_fails_by_name(tmp_path):
    with pytest.raises(VlmlabError, match=r"question\.ipynb: cell 1 failed: ZeroDivisionError"):
        run_notebook(_notebook(tmp_path, "x = 1", "x / 0"), {})


def test_a_cell_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(VlmlabError, match="took longer than 2 s"):
        run_notebook(_notebook(tmp_path, "x = 1", "import time; time.sleep(60)"), {}, timeout_s=2)


def test_scripts_of_an_output_are_left_out(tmp_path):
    page = write_html(_showing("<p>kept</p><SCRIPT\nid=x>alert(1)</Script >"), tmp_path / "page.html").read_text()
    assert "<p>kept</p>" in page and "alert(1)" not in page


def test_a_page_that_loads_or_leaks_is_not_written(tmp_path, monkeypatch):
    with pytest.raises(VlmlabError, match="would load https://example"):
        write_html(_showing('<img src="https://example/x.png">'), tmp_path / "loads.html")
    monkeypatch.chdir(tmp_path)
    leaking = _showing(f"<p>{tmp_path}/secret</p>")
    with pytest.raises(VlmlabError, match="name a folder of this machine"):
        write_html(leaking, tmp_path / "leaks.html")
    assert not list(tmp_path.iterdir())
    assert "<p>FOLDER/secret" in write_html(leaking, tmp_path / "fine.html", {str(tmp_path): "FOLDER"}).read_text()


def test_an_answer_is_text(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda page: shown.append(page.data))
    show_answer("1 < 2\x1b", "<script>")
    assert r"1 &lt; 2\x1b" in shown[0] and "&lt;script&gt;" in shown[0]


@pytest.fixture
def body(tmp_path):
    """Of the page of a notebook that shows a widget, what the widget became."""

    def export(widget, drop=()):
        state = widgets.Widget.get_manager_state(widgets=None)
        for dropped in drop:
            del state["state"][dropped.model_id]
        view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
        output = nbformat.v4.new_output("display_data", {WIDGET_VIEW: view, "text/plain": "EMPTY BOX"})
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x", outputs=[output])])
        notebook.metadata["widgets"] = {WIDGET_STATE: state}
        page = write_html(notebook, tmp_path / "page.html").read_text()
        assert WIDGET_VIEW in notebook.cells[0].outputs[0].data, "the caller's notebook is left as it was"
        assert page.count(NOTE) == 1 and "EMPTY BOX" not in page and "<script" not in page
        return page.split(NOTE)[1]

    yield export
    widgets.Widget.close_all()


@pytest.mark.parametrize(
    "make, shown",
    [
        (lambda: widgets.ToggleButton(description="a<b", value=True), "a&lt;b: on</span>"),
        (lambda: widgets.ToggleButton(description="a<b"), "a&lt;b: off</span>"),
        (lambda: widgets.Checkbox(description="c", value=True), "c: on<"),
        (lambda: widgets.Dropdown(description="d", options=[("One", 1), ("T<o", 2)], value=2), "d: T&lt;o<"),
        (lambda: widgets.Dropdown(description="d", options=[("One", 1)], value=None), "d: empty<"),
        (lambda: widgets.SelectMultiple(options=["u", "v", "w"], value=["u", "w"]), "SelectMultiple: u, w<"),
        (lambda: widgets.IntRangeSlider(description="layers", value=(0, 7)), "layers: 0 to 7<"),
        (lambda: widgets.FloatSlider(description="s", value=0.0, min=-1), "s: 0.0<"),
        (lambda: widgets.SelectionRangeSlider(options=["u", "v", "w"], index=(0, 2)), "SelectionRangeSlider: u to w<"),
        (lambda: widgets.Text(description="t", value="<i>\u202e"), r"t: &lt;i&gt;\u202e<"),
        (lambda: widgets.Text(), "Text: empty<"),
        (lambda: widgets.Label("<l>"), ">&lt;l&gt;<"),
        (lambda: widgets.HTML("<b>whole</b>", description="h"), ">h: <b>whole</b><"),
        (lambda: widgets.HTML(), "HTML: empty<"),
        (lambda: widgets.Password(value="hunter2"), "Password: hidden<"),
        (lambda: widgets.IntProgress(3, description="p"), "p: 3<"),
        (lambda: widgets.DatePicker(), "DatePicker: empty<"),
        (lambda: widgets.Button(description="go"), "go (Button): nothing to show outside JupyterLab<"),
        (lambda: widgets.Output(), "Output: nothing to show outside JupyterLab<"),
        (lambda: widgets.Image(), "Image: nothing to show outside JupyterLab<"),
        (lambda: widgets.Image(format="url", value=b"//x/y.png"), "Image: nothing to show outside JupyterLab<"),
        (lambda: widgets.VBox(), "VBox: empty<"),
        (lambda: widgets.Tab([widgets.Label("in")], titles=["<i>T"]), "<b>&lt;i&gt;T</b><div>in<"),
    ],
)
def test_every_widget_says_what_it_is_set_to(body, make, shown):
    assert shown in body(make())


def test_a_picture_keeps_its_bytes_and_caption(body):
    page = body(widgets.Image(value=PNG, format="png", tooltip="the <worst> tokens"))
    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(data) == PNG and "<figcaption>the &lt;worst&gt; tokens<" in page


def test_boxes_keep_their_order_and_direction(body):
    page = body(widgets.VBox([widgets.HBox([widgets.Label("one"), widgets.Label("two")]), widgets.Label("three")]))
    assert re.findall(r"flex-flow:([\w ]+)", page)[:2] == ["column", "row wrap"]
    assert page.index(">one<") < page.index(">two<") < page.index(">three<")


def test_a_widget_without_stored_state_says_so(body, tmp_path):
    lost = widgets.Label("lost")
    page = body(widgets.VBox([widgets.Label("kept"), lost]), drop=[lost])
    assert "kept" in page and "lost" not in page and "The state of this widget was not stored" in page
    assert "The state of this widget was not stored" in body(lost, drop=[lost])


def test_an_executed_notebook_shows_its_widgets_as_they_stood_at_the_end(tmp_path):
    shown = f"""import ipywidgets as w
toggle, layers = w.ToggleButton(description="rms_norm"), w.IntRangeSlider(value=(0, 9), max=9, description="layers")
baseline, picture = w.Dropdown(options=[("One", 1), ("Two", 2)], description="baseline"), w.Image(value={PNG[:8]!r})
w.VBox([w.HBox([toggle, baseline]), layers, picture])"""
    changed = f"toggle.value, layers.value, baseline.value, picture.value = True, (3, 5), 2, {PNG!r}"
    executed = run_notebook(_notebook(tmp_path, "x = 1", shown, changed), {})
    page = write_html(executed, tmp_path / "page.html").read_text().split(NOTE)[1]
    assert all(text in page for text in ("rms_norm: on<", "baseline: Two<", "layers: 3 to 5<"))
    assert f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in page


# ---------------------------------------------------------------------------------------------------- several, again


@pytest.fixture
def own_store(monkeypatch, tmp_path):
    monkeypatch.setenv("VLMLAB_CACHE", str(tmp_path / "store"))


def test_a_page_is_made_once_says_when_and_is_made_again_when_anything_changed(own_store, tmp_path, monkeypatch):
    notebook = _notebook(tmp_path, "x = 1", "import uuid\nprint('drawn', uuid.uuid4().hex)")

    def export(parameters=(), **options):
        file, seconds, earlier = export_notebook(notebook, dict(parameters), tmp_path / "page.html", {}, **options)
        page = file.read_text()
        assert seconds > 0 and f"Executed {earlier or ''}" in page
        return re.search("drawn (\\w+)", page)[1], earlier

    first, earlier = export()
    assert earlier is None
    again, earlier = export()
    assert again == first and earlier is not None
    drawn = {first, export(fresh=True)[0], export({"x": 2})[0]}
    with monkeypatch.context() as patch:
        patch.setattr(store, "_code_hash", lambda modules: "changed code")
        drawn.add(export()[0])
    with monkeypatch.context() as patch:
        patch.setattr(notebooks, "versions", lambda: {"torch": "0"})
        drawn.add(export()[0])
    _notebook(tmp_path, "x = 1", "import uuid\nprint('drawn', uuid.uuid4().hex)  # other text")
    drawn.add(export()[0])
    assert len(drawn) == 6


def test_notebooks_beside_each_other_wait_without_spinning_and_a_failure_ends_their_kernels(
    own_store, tmp_path, monkeypatch
):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    quick = _notebook(tmp_path, "x = 1", "import os\nprint('waits', os.environ['OMP_WAIT_POLICY'])")
    with exporting(tmp_path, 2) as export:
        futures = [export(quick, {"x": x}, tmp_path / f"{x}.html", {}) for x in (1, 2)]
        assert all("waits passive" in future.result()[0].read_text() for future in futures)
    assert "OMP_WAIT_POLICY" not in os.environ
    slow = _notebook(tmp_path, "x = 1", "import time\ntime.sleep(60)")
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), exporting(tmp_path, 2) as export:
        future = export(slow, {}, tmp_path / "slow.html", {})
        while not any("ipykernel" in " ".join(child.cmdline()) for child in psutil.Process().children()):
            time.sleep(0.1)
        raise KeyboardInterrupt
    assert time.perf_counter() - began < 40 and isinstance(future.exception(), Exception)
    assert not [child for child in psutil.Process().children() if "ipykernel" in " ".join(child.cmdline())]
