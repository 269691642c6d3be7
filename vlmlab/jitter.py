"""How far rounding can move an answered point, told before any other plan decodes.

ensemble        the legal plans, all with one order of adding deepstack features
legal_reach     one case: every answer that legal arithmetic can reach, and the rectangle around their points
Reach           these, and whether another answer lies inside
coverage        how often answers of another way lie inside

The baseline's own tokens are forced on every legal plan, so that all logits answer the same question. How far the plans
move the difference of two logits is the jitter of that step; a token that it can lift to the top is followed, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmlab.ask import Forward, Reply, Way
from vlmlab.errors import VlmlabError
from vlmlab.grounding import Case, Coordinates, Outcome, judge, wilson_interval
from vlmlab.verdict import legal_plans

# What legal arithmetic outside the ensemble may do more than the plans in it do. Compared with what other orders of
# adding deepstack features do, of which the ensemble has none; see LOG.
MARGIN = 2.0
LIKELY = 10  # tokens whose logits are watched at each step
MOST_ANSWERS = 64


@dataclass(frozen=True)
class Reach:
    """Where rounding can move one answered point.

    Attributes: baseline: its outcome. answers: every outcome in reach, the baseline's first. box: the smallest that
    holds their points, (x1, y1, x2, y2), px of the picture; None without a point. complete: whether all of them were
    followed; False where there are more than MOST_ANSWERS.
    """

    baseline: Outcome
    answers: tuple[Outcome, ...]
    box: Coordinates | None
    complete: bool

    def holds(self, other: Outcome) -> bool:
        """Whether rounding can explain an answer to the same case: its point lies in the box, or its text is in reach.

        Raises: VlmlabError: it is of another case.
        """
        if other.case != self.baseline.case:
            raise VlmlabError("expected an answer to the same case, got another case's")
        if other.point is None or self.box is None:
            return any((o.answer, o.point) == (other.answer, other.point) for o in self.answers)
        (x, y), (x1, y1, x2, y2) = other.point, self.box
        return x1 <= x <= x2 and y1 <= y <= y2


def ensemble(scheme: str | None = None) -> list[Way]:
    """The legal plans, the baseline first. All add deepstack features as Transformers does: how far another order moves
    an answer is to be predicted, not shown to the prediction.

    Args: scheme: of fp8_weights.SCHEMES, for all of them.
    """
    plans = [plan.switched("deepstack_order", "hf") for plan in legal_plans()]
    return [Way(plan if scheme is None else plan.switched("fp8", scheme)) for plan in plans]


def legal_reach(forward: Forward, case: Case, baseline: Way, plans: Sequence[Way]) -> Reach:
    """Every answer to one case that legal arithmetic can reach.

    Args: forward: of the checkpoint. case: to ask. baseline: way. plans: the ensemble, at least one.
    Returns: Reach. Raises: VlmlabError: no plan.
    """
    if not plans:
        raise VlmlabError("no evidence: expected at least one legal plan, got none")
    first = forward.ask(case, baseline)
    taken = _less_taken(first.logits, first.tokens)
    likely = first.logits.topk(min(LIKELY, first.logits.shape[1])).indices
    moved = [(_less_taken(forward.ask(case, way, first.tokens).logits, first.tokens) - taken).abs() for way in plans]
    jitter = MARGIN * torch.stack(moved).gather(2, likely.expand(len(plans), -1, -1)).amax((0, 2))  # [S]

    replies, todo, complete = [first], [(first, 0)], True
    while todo and complete:
        reply, start = todo.pop(0)
        for step, token in _within(reply, jitter, start):
            complete = complete and len(replies) < MOST_ANSWERS
            if complete:
                replies.append(forward.ask(case, baseline, (*reply.tokens[:step], token)))
                todo.append((replies[-1], step + 1))
    outcomes = tuple(judge(case, reply.answer, forward.checkpoint.family, reply.resized) for reply in replies)
    points = [outcome.point for outcome in outcomes if outcome.point is not None]
    box = None
    if points:
        xs, ys = zip(*points, strict=True)
        box = (min(xs), min(ys), max(xs), max(ys))
    return Reach(outcomes[0], outcomes, box, complete)


def _less_taken(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """[S, V] float32: every logit less that of the token taken."""
    rows = logits.float()
    return rows - rows.gather(1, torch.tensor(tokens)[:, None])


def _within(reply: Reply, jitter: Tensor, start: int) -> list[tuple[int, int]]:
    """(step, token) of every token that jitter can lift to the top, from a step on. Beyond the baseline's length and
    after it was left, the largest jitter holds."""
    below = -_less_taken(reply.logits, reply.tokens)
    legal = jitter if start == 0 else jitter.max().expand(len(below))
    near = (below <= legal[:, None]).nonzero().tolist()
    return [(step, token) for step, token in near if step >= start and token != reply.tokens[step]]


@dataclass(frozen=True)
class Coverage:
    """Answers of one way against the reach of their cases; JSON-ready.

    Attributes: n: cases. moved: answered otherwise than the baseline. outside: of them, beyond the reach.
    outside_share: of n, in [0, 1]. ci95: its Wilson interval.
    """

    n: int
    moved: int
    outside: int
    outside_share: float
    ci95: tuple[float, float]


def coverage(reaches: Sequence[Reach], outcomes: Sequence[Outcome]) -> Coverage:
    """How often rounding cannot explain the answers of another way.

    Args: reaches, outcomes: of the same cases in the same order. Returns: Coverage.
    Raises: VlmlabError: nothing to compare, or different cases.
    """
    if not reaches or len(reaches) != len(outcomes):
        raise VlmlabError(f"expected the same cases twice, at least one, got {len(reaches)} and {len(outcomes)}")
    pairs = list(zip(reaches, outcomes, strict=True))
    outside = sum(not reach.holds(outcome) for reach, outcome in pairs)
    moved = sum((r.baseline.answer, r.baseline.point) != (o.answer, o.point) for r, o in pairs)
    return Coverage(len(pairs), moved, outside, outside / len(pairs), wilson_interval(outside, len(pairs)))
