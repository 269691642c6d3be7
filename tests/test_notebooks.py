from pathlib import Path

import nbformat
import pytest

from vlmlab.inputs import REFERENCE_QUESTION
from vlmlab.notebooks import parameter_names, run_notebook, write_html
from vlmlab.page import addresses

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def faults(notebook):
    """What a notebook of this project may not be, in words."""
    code = _code(notebook)
    title = notebook.cells[0].source.splitlines()[0]
    found = []
    if not (title.startswith("# ") and title.endswith("?")):
        found.append("its title is not a question")
    if "parameters" not in code[0].metadata.get("tags", []):
        found.append("its first code cell is not the parameters cell")
    if "show_answer(" not in code[1].source + code[2].source:
        found.append("it does not begin with its answer")
    if any(cell.outputs or cell.execution_count for cell in code):
        found.append("it keeps outputs")
    if any(len(cell.source.splitlines()) > 15 for cell in code):
        found.append("a cell has more than 15 lines")
    whole = "\n".join(cell.source for cell in code)
    if "class " in whole or whole.count("def ") > 1:
        found.append("it defines a class or several functions")
    return found


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_are_thin_and_ask_one_question(file):
    assert faults(nbformat.read(file, 4)) == []


def test_the_check_can_fail():
    notebook = nbformat.read(NOTEBOOKS[0], 4)
    notebook.cells[0].source = "# A statement"
    _code(notebook)[0].metadata["tags"] = []
    _code(notebook)[1].source = "class A: pass\n" * 16
    _code(notebook)[2].source = ""
    _code(notebook)[3].execution_count = 1
    assert len(faults(notebook)) == 6


@pytest.mark.engine
@pytest.mark.timeout(1800)  # several engine starts and a picture of 1000 x 1000, on two slow cores
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_run_and_export(file, traces, tmp_path):
    report, names = tmp_path / "report.html", parameter_names(file)
    has_report = "report" in names
    given = {"report": str(report), "question": REFERENCE_QUESTION, "steps": 24}  # the question of the stored captures
    given |= {"boxes": 2, "predicted": 1, "side": 160}
    executed = run_notebook(file, {name: value for name, value in given.items() if name in names})
    assert not [o for cell in _code(executed) for o in cell.outputs if o.output_type == "error"]
    page = write_html(executed, tmp_path / "page.html", {str(report): report.name}).read_text()
    assert "Answer." in page and addresses(page) == []
    if any("capture_both(" in cell.source for cell in _code(executed)):
        assert "stored capture of" in page, "a notebook must reuse the session's captures"
    assert report.exists() == has_report
    if has_report:
        assert report.stat().st_size <= 1_500_000  # of one comparison on the reference input
        assert "State when the notebook was executed" in page
