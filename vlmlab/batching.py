"""What asking several cases at once changes in their logits and answers, counted against each case alone.

batch_effect    cases asked alone and at once in one way
effect_of       the same of replies at hand
BatchEffect     what differs

Matrix products may sum in another order where they have more rows, so a batch is rounding. In bfloat16 on a CPU it is
not even that: no bit differs. In float64, and in emulated FP8, which multiplies in float32, one row takes another
kernel than several.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vlmlab.ask import Forward, Reply, Way
from vlmlab.errors import VlmlabError
from vlmlab.grounding import Case
from vlmlab.replay import differing


@dataclass(frozen=True)
class BatchEffect:
    """How many of the cases alone differ from the same in a batch; JSON-ready.

    Attributes: cases: compared. answers: with another text. prefills: with other bits in the logits after the prompt.
    steps: of decode_steps, those with other bits in their logits. decode_steps: compared; after an answer has left the
    other one's tokens nothing is. largest: difference of two logits compared.
    """

    cases: int
    answers: int
    prefills: int
    steps: int
    decode_steps: int
    largest: float

    @property
    def bitwise_equal(self) -> bool:
        """Whether the batch changed nothing."""
        return self.answers == self.prefills == self.steps == 0


def batch_effect(forward: Forward, cases: Sequence[Case], way: Way) -> BatchEffect:
    """Ask cases alone and at once, and count what differs.

    Args: forward: of the checkpoint. cases: at least two. way: how to compute.
    Returns: BatchEffect. Raises: VlmlabError: fewer than two cases; see Forward.ask.
    """
    if len(cases) < 2:
        raise VlmlabError(f"no evidence: expected at least two cases to batch, got {len(cases)}")
    return effect_of([forward.ask(case, way) for case in cases], forward.ask_at_once(cases, way))


def effect_of(alone: Sequence[Reply], together: Sequence[Reply]) -> BatchEffect:
    """Count what differs. Args: alone, together: replies to the same cases in the same order, at least one."""
    pairs = list(zip(alone, together, strict=True))
    prefills = steps = decode_steps = 0
    largest = 0.0
    for one, other in pairs:
        shared = _shared(one, other)
        changed = [differing(a, b) > 0 for a, b in zip(one.logits[:shared], other.logits[:shared], strict=True)]
        prefills, steps, decode_steps = prefills + changed[0], steps + sum(changed[1:]), decode_steps + shared - 1
        gap = (one.logits[:shared].double() - other.logits[:shared].double()).abs().max()
        largest = max(largest, float(gap))
    answers = sum(one.answer != other.answer for one, other in pairs)
    return BatchEffect(len(pairs), answers, prefills, steps, decode_steps, largest)


def _shared(one: Reply, other: Reply) -> int:
    """Rows of logits that answer the same question: those after the prompt and after every token in common."""
    pairs = list(zip(one.tokens, other.tokens, strict=False))
    same = next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
    return same + 1
