"""What `make test` runs of a claim that is proven many times over; `make test-all` runs all of it.

sampled         the parameters of a test, all but the chosen ones marked `exhaustive`
claims          the collected tests, by the claim they prove
unproven        claims that nothing would prove in `make test`
table           what is left out, as the lines of a Markdown table
"""

from dataclasses import dataclass, field

import pytest


def sampled(cases, keep):
    """Parameters for `parametrize`. Args: cases: values, tuples of them or pytest.param. keep: (*values) to whether
    `make test` runs them, on the family where the claim bites most."""

    def marked(case):
        values = case if isinstance(case, (tuple, list)) else (case,)
        name, marks = None, ()
        if hasattr(case, "marks"):
            values, name, marks = case.values, case.id, case.marks
        return pytest.param(*values, id=name, marks=marks if keep(*values) else (*marks, pytest.mark.exhaustive))

    return [marked(case) for case in cases]


@dataclass
class Claim:
    """A test function. kept, rest: how many of its cases `make test` runs and leaves out. instead: the tests named in
    its own marks, of the same file, that prove it there."""

    kept: int = 0
    rest: int = 0
    instead: set[str] = field(default_factory=set)


def claims(items):
    """{"file::function": Claim} of collected tests, in order of name."""
    found = {}
    for item in sorted(items, key=lambda item: item.nodeid):
        claim = found.setdefault(f"{item.path.name}::{item.originalname}", Claim())
        marks = list(item.iter_markers("exhaustive"))
        claim.rest, claim.kept = claim.rest + bool(marks), claim.kept + (not marks)
        claim.instead |= {mark.kwargs["instead"] for mark in marks if "instead" in mark.kwargs}
    return found


def unproven(found):
    """Claims without a case in `make test` and without a test there that is named instead. Args: found: of claims."""

    def stands_in(name, other):
        claim = found.get(f"{name.split('::')[0]}::{other}")
        return claim is not None and claim.kept > 0

    return [
        name
        for name, claim in found.items()
        if not claim.kept and not (claim.instead and all(stands_in(name, other) for other in claim.instead))
    ]


def table(found):
    """Lines of a Markdown table of every claim with cases that `make test` leaves out. Args: found: of claims."""
    lines = ["| test | in `make test` | only in `make test-all` |", "|---|---|---|"]
    for name, claim in found.items():
        if claim.rest:
            kept = str(claim.kept) if claim.kept else ", ".join(f"0; `{other}`" for other in sorted(claim.instead))
            lines.append(f"| `{name}` | {kept} | {claim.rest} |")
    return lines
