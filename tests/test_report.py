import nbformat
import pytest

from vlmlab.errors import VlmlabError
from vlmlab.report import addresses, run_notebook, write_html


def _notebook(folder, *cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.cells[0]["metadata"]["tags"] = ["parameters"]
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    file = folder / "question.ipynb"
    nbformat.write(notebook, file)
    return file


def test_a_notebook_becomes_one_offline_page(tmp_path):
    executed = run_notebook(_notebook(tmp_path, "x = 1", "print('value', x * 21)"), {"x": 2})
    page = write_html(executed, tmp_path / "out" / "question.html").read_text()
    assert "value 42" in page
    assert addresses(page) == [] and "<script" not in page
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["question.html"]


def test_a_failing_cell_fails_by_name(tmp_path):
    with pytest.raises(VlmlabError, match=r"question\.ipynb: cell 1 failed: ZeroDivisionError"):
        run_notebook(_notebook(tmp_path, "x = 1", "x / 0"), {})


def test_a_cell_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(VlmlabError, match="took longer than 2 s"):
        run_notebook(_notebook(tmp_path, "x = 1", "import time; time.sleep(60)"), {}, timeout_s=2)


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/x.js"></script>',
        "<img alt='' src='//example/x.png'>",
        '<link rel="stylesheet" href="http://example/x.css">',
        "<style>a { background: url(https://example/x.png) }</style>",
        '<style>@import "https://example/x.css";</style>',
        '<script type="module">import("https://example/x.js")</script>',
    ],
)
def test_every_way_to_load_is_seen(page):
    assert addresses(page)


def test_links_and_data_are_not_loads():
    assert addresses('<a href="https://example">x</a><img src="data:image/png;base64,AA">') == []


def test_a_page_that_loads_or_leaks_is_not_written(tmp_path, monkeypatch):
    loading = run_notebook(
        _notebook(tmp_path, "x = 1", "from IPython.display import HTML; HTML('<img src=\"https://example/x.png\">')"),
        {},
    )
    with pytest.raises(VlmlabError, match="would load https://example"):
        write_html(loading, tmp_path / "loads.html")
    monkeypatch.chdir(tmp_path)
    leaking = run_notebook(_notebook(tmp_path, "x = 1", f"print({str(tmp_path)!r} + '/secret')"), {})
    with pytest.raises(VlmlabError, match="name a folder of this machine"):
        write_html(leaking, tmp_path / "leaks.html")
    assert not list(tmp_path.glob("*.html"))
    assert write_html(leaking, tmp_path / "fine.html", {str(tmp_path): "FOLDER"}).is_file()
