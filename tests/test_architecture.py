"""The rules that keep the package readable, each shown to be able to fail."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vlmlab"
HEAVY = ("transformers", "sglang", "ipywidgets", "matplotlib", "plotly", "altair")
SOLE_IMPORTERS = {
    "sglang": "sglang_worker",
    "ipywidgets": "dashboard",
    "papermill": "notebooks",
    "nbconvert": "notebooks",
    "matplotlib": "plots",
    "altair": "charts",
    "vl_convert": "charts",
}


def modules_in_order():
    """The modules as the package's docstring lists them, lowest first."""
    text = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text())) or ""
    return re.findall(r"^(\w+) {2,}\S", text, flags=re.MULTILINE)


def imports_of(source):
    """Every module a source text imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def upward(name, source, order):
    """Modules of the package that `source` imports although they stand at or above it."""
    own = {i.split(".")[1] for i in imports_of(source) if i.startswith("vlmlab.")} & set(order)
    return {other for other in own if order.index(other) >= order.index(name)}


def test_every_module_is_listed():
    assert sorted(modules_in_order()) == sorted(f.stem for f in PACKAGE.glob("*.py") if f.stem != "__init__")


@pytest.mark.parametrize("name", modules_in_order())
def test_arrows_point_down(name):
    assert upward(name, (PACKAGE / f"{name}.py").read_text(), modules_in_order()) == set()


def test_the_arrow_check_can_fail():
    order = ["low", "high"]
    assert upward("low", "from vlmlab.high import x", order) == {"high"}
    assert upward("low", "def f():\n    from vlmlab import high", order) == {"high"}
    assert upward("high", "import vlmlab.low", order) == set()


@pytest.mark.parametrize("library", SOLE_IMPORTERS)
def test_one_module_imports_each_engine_and_renderer(library):
    importers = {
        file.stem
        for file in PACKAGE.glob("*.py")
        if any(name.split(".")[0] == library for name in imports_of(file.read_text()))
    }
    assert importers == {SOLE_IMPORTERS[library]}


@pytest.mark.parametrize("name", modules_in_order())
def test_every_module_has_a_test_of_its_own(name):
    elsewhere = {"errors": "test_cli", "machine": "test_cli", "sglang_worker": "test_engine_sglang"}
    assert (Path(__file__).parent / f"{elsewhere.get(name, f'test_{name}')}.py").is_file()


def loaded_by(statement):
    """The heavy libraries that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import vlmlab") == []
    assert loaded_by("import vlmlab.capture, vlmlab.compare, vlmlab.cli") == []


def test_the_import_check_can_fail():
    assert loaded_by("import matplotlib") == ["matplotlib"]
