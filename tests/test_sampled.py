"""Every claim is proven in `make test`, and the README of the tests says what is left to `make test-all`."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from sampled import Claim, claims, sampled, table, unproven

HERE = Path(__file__).parent


@pytest.fixture
def found(request):
    """The claims of the whole suite, also of what this run leaves out."""
    items = request.config.collected
    if {item.path.name for item in items} < {file.name for file in HERE.glob("test_*.py")}:
        pytest.skip("needs the whole suite: make test")
    return claims(items)


def test_every_claim_is_proven_in_make_test(found):
    assert unproven(found) == []


def test_the_readme_lists_what_is_left_out(found):
    wanted = table(found)
    lines = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("|")] == wanted, "expected in tests/README.md:\n" + "\n".join(
        wanted
    )


def test_workers_are_given_groups(request):
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("needs workers: pytest -n 2 --dist loadgroup")
    assert request.node.nodeid.endswith("@test_sampled")


def item(name, *marks):
    return SimpleNamespace(
        nodeid=f"tests/test_x.py::{name}",
        path=Path("tests/test_x.py"),
        originalname=name.split("[")[0],
        iter_markers=lambda _: [mark.mark for mark in marks],
    )


def test_a_claim_that_nothing_proves_is_named():
    left_out, instead = pytest.mark.exhaustive, pytest.mark.exhaustive(instead="test_a")
    items = [item("test_a[1]"), item("test_a[2]", left_out), item("test_b", left_out), item("test_c", instead)]
    found = claims(items)
    assert found["test_x.py::test_a"] == Claim(1, 1, set())
    assert unproven(found) == ["test_x.py::test_b"]
    assert unproven(claims([item("test_c", instead)])) == ["test_x.py::test_c"]
    assert unproven(claims([item("test_a", left_out), item("test_c", instead)])) == [
        "test_x.py::test_a",
        "test_x.py::test_c",
    ]
    assert table(found)[2:] == [
        "| `test_x.py::test_a` | 1 | 1 |",
        "| `test_x.py::test_b` |  | 1 |",
        "| `test_x.py::test_c` | 0; `test_a` | 1 |",
    ]


def test_all_but_the_chosen_cases_are_marked():
    cases = sampled([("a", 1), ("b", 2)], keep=lambda name, number: name == "b")
    assert [case.values for case in cases] == [("a", 1), ("b", 2)]
    assert [[mark.name for mark in case.marks] for case in cases] == [["exhaustive"], []]
    slow = pytest.param("c", id="named", marks=pytest.mark.gpu)
    (case,) = sampled([slow], keep=lambda name: False)
    assert case.id == "named" and [mark.name for mark in case.marks] == ["gpu", "exhaustive"]
    (case,) = sampled(["d"], keep=lambda name: name == "d")
    assert case.values == ("d",) and not case.marks
