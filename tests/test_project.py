"""What the repository promises: one set of pins, a README that works, nothing of this machine in tracked files."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

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


def inexact(lock):
    """Lines of a lock that are not `name==version`, with a marker or without; comments aside."""

    def exact(line):
        try:
            pin = Requirement(line)
        except InvalidRequirement:
            return False
        return not pin.url and not pin.extras and re.fullmatch(r"==[\w.!+-]+", str(pin.specifier)) is not None

    return [line for line in lock.splitlines() if not line.startswith("#") and not exact(line)]


def pins(lock):
    """Name and version of every line of a lock that applies to this machine."""
    lines = [Requirement(line) for line in lock.splitlines() if not line.startswith("#")]
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in lines
        if pin.marker is None or pin.marker.evaluate()
    }


def unlocked(requirements, versions):
    """Requirements that no locked version satisfies."""
    wanted = {line: Requirement(line) for line in requirements}
    found = {line: versions.get(canonicalize_name(wanted[line].name)) for line in wanted}
    return [line for line in wanted if found[line] is None or not wanted[line].specifier.contains(found[line], True)]


def differing(versions, installed):
    """`name installed, locked version` wherever the two differ; what is not installed does not count."""
    return [
        f"{name} {installed[name]}, locked {version}"
        for name, version in versions.items()
        if installed.get(name, version) != version
    ]


def test_every_line_of_the_lock_is_an_exact_pin_and_names_no_host():
    lock = (ROOT / "requirements.lock").read_text()
    assert inexact(lock) == []
    assert "://" not in lock


def test_the_exact_pin_check_can_fail():
    right = ["# made by", "a==1", 'b==1.0.post1+cpu ; sys_platform == "linux"']
    wrong = ["a>=1", "a", "a==1.*", "a==1,<2", "a[x]==1", "a @ https://host/a.whl", "--index-url https://host", ""]
    assert inexact("\n".join([*wrong, *right])) == wrong


def test_the_lock_satisfies_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    assert unlocked(wanted, pins((ROOT / "requirements.lock").read_text())) == []


def test_the_lock_check_can_fail():
    versions = pins('a==2\nb==1 ; python_version < "3"\nx-y==1rc1\n')
    assert unlocked(["a>=2,<3", "X_y>=1rc1"], versions) == []
    assert unlocked(["a==1", "a<2", "b", "c", "x-y>=1"], versions) == ["a==1", "a<2", "b", "c", "x-y>=1"]


def test_make_installed_what_is_locked():
    installed = {canonicalize_name(found.metadata["Name"]): found.version for found in metadata.distributions()}
    found = differing(pins((ROOT / "requirements.lock").read_text()), installed)
    if found and Path(sys.prefix).resolve() != ROOT.resolve() / ".venv":
        pytest.skip(f"not the environment that make installs: {'; '.join(found)}")
    assert found == []


def test_the_installed_check_can_fail():
    versions = {"a": "1", "b": "2.0", "c": "3"}
    assert differing(versions, {"a": "1", "b": "2.0+cpu"}) == ["b 2.0+cpu, locked 2.0"]


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
