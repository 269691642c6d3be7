from pathlib import Path

import nbformat
import pytest
from conftest import STEPS

from vlmlab import store
from vlmlab.inputs import REFERENCE_QUESTION
from vlmlab.notebooks import parameter_names, run_notebook, write_html
from vlmlab.page import addresses
from vlmlab.passes import Passes, counted
from vlmlab.report import investigate, write_report

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


# `make test` keeps every question, and gives small sizes to those that take one; the rest is on the stored captures.
SMALL = {"question": REFERENCE_QUESTION, "steps": STEPS, "boxes": 2, "predicted": 1, "side": 160, "n": 128, "rows": 64}


def cases(files):
    """(notebook, fixture that made what it reads); captures of both engines are read beside the engine."""

    def case(file):
        source = file.read_text(encoding="utf-8")
        if "capture_both(" not in source:
            return pytest.param(file, "store", marks=pytest.mark.xdist_group("test_notebooks"), id=file.stem)
        made = "answers" if "capture_answers(" in source else "traces"
        return pytest.param(file, made, marks=pytest.mark.xdist_group("reference"), id=file.stem)

    return [case(file) for file in files]


def sized(files):
    """The notebooks that take a size."""
    parameters = {file: _code(nbformat.read(file, 4))[0].source for file in files}
    return [file for file, source in parameters.items() if any(f"\n{name} = " in f"\n{source}" for name in SMALL)]


def execute(file, parameters, folder):
    report, names = folder / "report.html", parameter_names(file)
    has_report = "report" in names
    given = {**parameters, "report": str(report)}
    executed = run_notebook(file, {name: value for name, value in given.items() if name in names})
    assert not [o for cell in _code(executed) for o in cell.outputs if o.output_type == "error"]
    page = write_html(executed, folder / "page.html", {str(report): report.name}).read_text()
    assert "Answer." in page and addresses(page) == []
    if any("capture_both(" in cell.source for cell in _code(executed)):
        assert "stored capture of" in page, "a notebook must reuse the session's captures"
    assert report.exists() == has_report
    if has_report:
        assert report.stat().st_size <= 1_500_000  # of one comparison on the reference input
        assert "State when the notebook was executed" in page


@pytest.mark.engine
@pytest.mark.timeout(1800)  # on two slow cores
@pytest.mark.parametrize(("file", "made"), cases(NOTEBOOKS))
def test_notebooks_run_and_export(file, made, request, tmp_path):
    request.getfixturevalue(made)
    execute(file, SMALL, tmp_path)


@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("reference")
def test_no_forward_pass_is_computed_twice(answers, traces, checkpoint, tmp_path, monkeypatch):
    """By any process that used this store: this one, the notebooks' kernels, the commands that were tested before."""
    run = investigate(Passes.of(checkpoint), *traces, answers.pairs)
    write_report(tmp_path / "first.html", [run])
    for question in ("04_", "05_"):
        (file,) = (file for file in NOTEBOOKS if file.name.startswith(question))
        folder = tmp_path / question
        folder.mkdir()
        execute(file, SMALL, folder)
    counts = counted("")
    assert len(counts) > 20 and set(counts.values()) == {1}
    lines = [line for line in store.noted() if "pass" in line]
    monkeypatch.setattr(store, "noted", lambda: [*lines, lines[0]])  # shows that the check can fail
    assert set(counted("").values()) == {1, 2}


@pytest.mark.engine
@pytest.mark.timeout(5400)
@pytest.mark.exhaustive(instead="test_notebooks_run_and_export")
@pytest.mark.parametrize(("file", "made"), cases(sized(NOTEBOOKS)))
def test_notebooks_run_at_full_size(file, made, request, tmp_path):
    request.getfixturevalue(made)
    execute(file, {"question": REFERENCE_QUESTION}, tmp_path)
