"""What the repository promises: one set of pins, a README that works, nothing of this machine in tracked files."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _tracked():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name]


def conda_pins(text):
    return set(re.findall(r"^ {6}- (\w.*)$", text, flags=re.MULTILINE))


def test_conda_pins_equal_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"], *project["optional-dependencies"]["sglang"]}
    assert conda_pins((ROOT / "environment.yml").read_text()) == wanted


def test_the_pin_check_can_fail():
    assert conda_pins("  - pip:\n      - torch==1\n      - --editable .\n") == {"torch==1"}


def test_every_make_target_in_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert {"report", "test", "test-all"} <= targets
    for target in targets:
        assert re.search(rf"^(?:[a-z]+ )*{target}[ :]", makefile, flags=re.MULTILINE), target


def test_every_command_in_the_readme_parses(capsys):
    from vlmlab.cli import _parser

    lines = re.findall(r"^(?:\.venv/bin/)?vlmlab ([a-z].*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert lines
    for line in lines:
        _parser().parse_args(line.split("#")[0].split())


def test_the_readme_names_every_notebook():
    readme = (ROOT / "README.md").read_text()
    assert [f.name for f in (ROOT / "notebooks").glob("*.ipynb") if f.name not in readme] == []


def private_paths(text):
    """Absolute paths of somebody's machine."""
    return re.findall(r"(?<![\w.])/(?:work|root|home|Users|tmp)/[\w./-]+", text)


def test_tracked_files_name_no_folder_of_a_machine():
    found = {}
    for file in _tracked():
        if file.suffix in (".py", ".md", ".ipynb", ".json", ".toml", ".yml", ".jinja", "") and file != Path(__file__):
            paths = private_paths(file.read_text(encoding="utf-8"))
            if paths and file.name != "test_engine_sglang.py":
                found[file.name] = paths
    assert found == {}


def test_the_path_check_can_fail():
    assert private_paths("see /home/me/secret.txt") == ["/home/me/secret.txt"]
    assert private_paths("https://example/home/x") == []


def test_the_tracked_tree_stays_small():
    assert sum(file.stat().st_size for file in _tracked()) < 40 * 2**20
