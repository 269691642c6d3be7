"""Which cause explains the difference, and which engine is closer to the truth.

explain             everything about one pair of traces: verdicts, closure, causes, distances to the truth
prepare             what of it hangs on one trace alone
attribute           every cause of a part: live or dead, alone, and its share
explain_steps       an answer's decode steps in float64, in both engines' arithmetic, and under every cause alone
control             proof that a switch without effect acts all the same
closer_to_truth     per layer, which engine is nearer to float64

Shares are Shapley values over the live causes: the average, over all orders of switching them on, of what a cause takes
off the distance between Transformers and SGLang. They sum to what all of them take off.
"""

import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmlab import arithmetic, store
from vlmlab.causes import Cause, Plan, causes_of, hf_plan, sglang_plan
from vlmlab.compare import check_comparable
from vlmlab.errors import VlmlabError
from vlmlab.hybrid import Hybrid
from vlmlab.kernels import available
from vlmlab.metrics import digest, rel_l2_error
from vlmlab.passes import Pass, Passes
from vlmlab.replay import Asked, Closure, asked_of, differing, run_answer, save_difference, walk_plan
from vlmlab.routing import flipped_tokens
from vlmlab.trace import Trace
from vlmlab.verdict import Finding, Verdict, judge, verdict_on

# Where a cause's way is chosen: function of arithmetic, its argument that names the way, and the argument that a
# control moves. The eps of the ViT's norms is no function of its own.
STEPS = {
    "patch_embed": ("patch_embedding", "how", "weight"),
    "position_formula": ("blend_positions", "formula", "table"),
    "position_precision": ("blend_positions", "precision", "table"),
    "vit_rotary": ("rotary_table", "how", "theta"),
    "vit_attention": ("full_attention", "how", "q"),
    "rms_norm": ("rms_norm", "how", "weight"),
    "residual_sum": ("residual_sum", "how", "x"),
    "qkv_linear": ("stacked_linear", "how", "weights"),
    "gate_up_linear": ("stacked_linear", "how", "weights"),
    "rotary": ("rotary_table", "how", "theta"),
    "attention": ("causal_attention", "how", "q"),
    "qk_norm": ("rms_norm", "how", "weight"),
    "deepstack_order": ("deepstack_sum", "how", "features"),
    "router_weights": ("route", "how", "logits"),
    "expert_combine": ("combine", "how", "weights"),
    "head": ("head", "how", "weight"),
}


@dataclass(frozen=True)
class Alone:
    """What one cause does when nothing else is switched away from Transformers' way.

    Attributes: tensors: hook points whose bits it changes. first: the first of them. distance: relative L2 error to
    Transformers at the end of the part, root mean square over tokens. closer: by how much it brings Transformers nearer
    to SGLang there.
    """

    tensors: int
    first: str | None
    distance: float
    closer: float


@dataclass(frozen=True)
class CauseEffect:
    """One cause on one input.

    Attributes: name, part. live: whether it changes any bit, alone or on top of all others. acts: for a dead cause,
    whether its switch was proven to act. share: of the distance, in the distance's unit; 0 when dead. alone: switched
    alone. left_out: distance to SGLang with every live cause switched but this one. cumulative: distance to SGLang with
    the live causes up to this one switched, in the order of the forward pass. None when dead.
    """

    name: str
    part: str
    live: bool
    acts: bool | None
    share: float
    alone: Alone
    left_out: float | None = None
    cumulative: float | None = None


@dataclass(frozen=True)
class Attribution:
    """The causes of one part. end: hook point where distances are taken. total: distance between Transformers and
    SGLang. explained: what all live causes together take off. interaction: what the shares hold beyond the effects
    alone. plans: combinations of live causes computed. flipped: tokens for which any of the plans chose other experts
    somewhere; they are left out of every distance. flipped_total: the distance at these alone, None without any."""

    part: str
    end: str
    total: float
    explained: float
    interaction: float
    plans: int
    flipped: int
    flipped_total: float | None
    effects: tuple[CauseEffect, ...]


def part_end(hybrid: Hybrid, part: str) -> str:
    """The hook point at which a part's distances are taken."""
    return "vision.merger" if part == "vision" else f"layers.{hybrid.depth - 1}.resid_post"


def _distance(a: Tensor, b: Tensor, without: Tensor | None = None) -> float:
    """Root mean square over tokens of the relative L2 error of b to a. Args: without: [T] bool, tokens to leave out."""
    errors = rel_l2_error(a, b)
    if without is not None and len(without) == len(errors):
        errors = errors[~without]
    return _rms(errors)


def _rms(errors: Tensor) -> float:
    return errors.square().mean().sqrt().item() if len(errors) else math.nan


def attribute(
    passes: Passes, asked: Asked, part: str, start: Plan, goal: Plan, say: Callable[[str], None] = print
) -> Attribution:
    """Every cause of a part on one input.

    Args: passes: over the engines' weights. asked: input. part: "vision" or "language". start: Transformers' plan.
    goal: SGLang's. say: called with one line per phase.
    Returns: Attribution. Raises: VlmlabError: the input has no such part.
    """
    hybrid = passes.hybrid
    end, causes = part_end(hybrid, part), causes_of(hybrid.family, part)
    if part not in asked.parts:
        raise VlmlabError(f"no evidence: the input has no {part} part")
    before, after = (passes.get(asked, part, plan) for plan in (start, goal))
    base, target, count = before.states, after.states, hybrid.experts_per_token
    flipped = flipped_tokens(base, target, count)

    def run(plan: Plan) -> Pass:
        """A plan's pass; tokens it routes differently are left out of every distance."""
        nonlocal flipped
        found = passes.get(asked, part, plan)
        flips = flipped_tokens(base, found.states, count)
        flipped = flips if flipped is None or flips is None else flipped | flips
        return found

    say(f"{part}: {len(causes)} causes one at a time")
    ends, changed, live = {frozenset[str](): base[end]}, {}, []
    for cause in causes:
        on = run(start.switched(cause.name, goal.how(cause.name)))
        ends[frozenset({cause.name})] = on.states[end]
        changed[cause.name] = [name for name, bits in on.bits.items() if bits != before.bits[name]]
        off = run(goal.switched(cause.name, start.how(cause.name)))
        if changed[cause.name] or off.bits != after.bits:
            live.append(cause)
    say(f"{part}: {2 ** len(live)} combinations of {len(live)} live causes")
    for chosen in _larger_subsets(live):
        plan = start
        for cause in chosen:
            plan = plan.switched(cause.name, goal.how(cause.name))
        ends[frozenset(c.name for c in chosen)] = run(plan).states[end]
    total = _distance(base[end], target[end], flipped)
    worth = {chosen: total - _distance(state, target[end], flipped) for chosen, state in ends.items()}
    names = [cause.name for cause in live]
    shares = _shapley(names, worth)
    effects = []
    for cause in causes:
        name, is_live, only = cause.name, cause in live, frozenset({cause.name})
        acts = None if is_live else control(passes, asked, cause, start, goal)
        left_out = total - worth[frozenset(names) - only] if is_live else None
        cumulative = total - worth[frozenset(names[: names.index(name) + 1])] if is_live else None
        distance = _distance(base[end], ends[only], flipped)
        alone = Alone(len(changed[name]), next(iter(changed[name]), None), distance, worth[only])
        effects.append(CauseEffect(name, part, is_live, acts, shares.get(name, 0.0), alone, left_out, cumulative))
    explained = worth[frozenset(names)]
    interaction = explained - sum(worth[frozenset({name})] for name in names)
    left, apart = 0, None
    if flipped is not None and flipped.any():
        left, apart = int(flipped.sum()), _distance(base[end], target[end], ~flipped)
    return Attribution(part, end, total, explained, interaction, 2 ** len(live), left, apart, tuple(effects))


@dataclass(frozen=True)
class ExplainedSteps:
    """An answer's decode steps run again.

    Attributes: end: last hook point of the stream. truth, baseline, target: states as of replay.run_answer, in float64
    and in each engine's arithmetic. alone: live cause to [S] relative L2 change of `end` by SGLang's way of it alone.
    """

    end: str
    truth: dict[str, Tensor]
    baseline: dict[str, Tensor]
    target: dict[str, Tensor]
    alone: dict[str, Tensor]


def explain_steps(passes: Passes, baseline: Trace, target: Trace, tokens: Sequence[int]) -> ExplainedSteps:
    """The truth, both engines' arithmetic, and every cause of the language model alone, step by step of an answer.

    Args: passes: over the checkpoint. baseline, target: Transformers' and SGLang's traces of the prefill. tokens: [S]
    input of every step.
    """
    hybrid = passes.hybrid
    asked, end = asked_of(hybrid, baseline, baseline), part_end(hybrid, "language")
    start, goal = hf_plan(baseline.info.attention), sglang_plan(available(hybrid.device, target.info.flags))

    def run(plan: Plan, exact: bool = False) -> dict[str, Tensor]:
        prefill = passes.truth(asked, "language") if exact else passes.get(asked, "language", plan)
        forward, first = passes.exact if exact else hybrid, prefill.states["logits"]
        return run_answer(forward, asked, tokens, plan, prefill.cache.copy(), first)

    before, alone = run(start), {}
    for cause in causes_of(hybrid.family, "language"):
        states = run(start.switched(cause.name, goal.how(cause.name)))
        if any(differing(states[name], before[name]) for name in before):
            alone[cause.name] = rel_l2_error(before[end], states[end])
    return ExplainedSteps(end, run(hf_plan(), exact=True), before, run(goal), alone)


def _larger_subsets(causes: Sequence[Cause]) -> Iterator[tuple[Cause, ...]]:
    """Subsets of two causes and more."""
    for size in range(2, len(causes) + 1):
        yield from itertools.combinations(causes, size)


def _shapley(names: Sequence[str], worth: Mapping[frozenset[str], float]) -> dict[str, float]:
    """Shapley values. Args: worth: value of every subset. Returns: {name: share}, summing to the full set's value.

    Source: Shapley 1953, "A value for n-person games".
    """
    shares, count = {}, len(names)
    for name in names:
        others = [other for other in names if other != name]
        shares[name] = sum(
            (worth[frozenset({*chosen, name})] - worth[frozenset(chosen)]) / (count * math.comb(count - 1, size))
            for size in range(count)
            for chosen in itertools.combinations(others, size)
        )
    return shares


class _Nudging:
    """arithmetic, with one argument of one function moved by one unit in the last place where the way is not HF's."""

    def __init__(self, function: str, way: str, argument: str) -> None:
        self._function, self._way, self._argument = function, way, argument

    def __getattr__(self, name: str) -> Any:
        function = getattr(arithmetic, name)
        if name != self._function:
            return function
        signature = inspect.signature(function)

        def nudging(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            if bound.arguments[self._way] != "hf":
                bound.arguments[self._argument] = _moved(bound.arguments[self._argument])
            return function(*bound.args, **bound.kwargs)

        return nudging


def _moved(value: Any) -> Any:
    """A tensor, or a list of them, one unit in the last place larger; a number by as much as bfloat16 resolves."""
    if isinstance(value, Tensor):
        return torch.nextafter(value, torch.full_like(value, torch.inf))
    return [_moved(part) for part in value] if isinstance(value, list) else value * (1 + 2**-7)


class _Differs(Exception):
    pass


def control(passes: Passes, asked: Asked, cause: Cause, start: Plan, goal: Plan) -> bool:
    """Whether SGLang's way of a cause is really taken and really computes.

    What the step reads is moved by one unit in the last place, in calls that go SGLang's way only: that must show.

    Args: passes, asked, start, goal: as in attribute. cause: any.
    Returns: whether any hook point's bits changed; the pass ends at the first.
    """
    hybrid, plan = passes.hybrid, start.switched(cause.name, goal.how(cause.name))
    before = passes.get(asked, cause.part, plan).bits

    def record(name: str, state: Tensor) -> None:
        if digest(state) != before[name]:
            raise _Differs

    kept, eps = hybrid.by, hybrid.eps
    try:
        if cause.name in STEPS:
            hybrid.by = _Nudging(*STEPS[cause.name])
        else:  # only SGLang's ViT norms read the text model's eps
            hybrid.eps = 1000 * eps
        walk_plan(hybrid, asked, plan, cause.part, record)
    except _Differs:
        return True
    finally:
        hybrid.by, hybrid.eps = kept, eps
    return False


# ---------------------------------------------------------------------------------------------------- truth


@dataclass(frozen=True)
class Nearness:
    """One hook point. hf, sglang: relative L2 error to float64, root mean square over tokens. closer: "hf", "sglang" or
    "tie" (equal). sglang_share: share of tokens at which SGLang is closer. flipped: tokens routed to other experts
    than in float64 by either engine, left out. hf_flipped, sglang_flipped: errors at these alone, None without any."""

    hookpoint: str
    hf: float
    sglang: float
    closer: str
    sglang_share: float
    flipped: int
    hf_flipped: float | None = None
    sglang_flipped: float | None = None


def closer_to_truth(
    truth: Mapping[str, Tensor],
    hf: Mapping[str, Tensor],
    sglang: Mapping[str, Tensor],
    names: Iterable[str],
    count: int = 0,
) -> tuple[Nearness, ...]:
    """Both engines against float64, hook point by hook point.

    Args: truth: of run_plan in float64. hf, sglang: states. names: hook points. count: experts per token.
    Returns: one Nearness each.
    """
    flips = [flip for side in (hf, sglang) if (flip := flipped_tokens(side, truth, count)) is not None]
    flipped = torch.stack(flips).any(0) if flips else None
    rows = []
    for name in names:
        errors = [rel_l2_error(truth[name], side[name]) for side in (hf, sglang)]
        out = torch.zeros(len(errors[0]), dtype=torch.bool)
        if flipped is not None and len(flipped) == len(out):
            out = flipped
        a, b = (_rms(error[~out]) for error in errors)
        share = (errors[1] < errors[0])[~out].double().mean().item()
        closer = "tie" if a == b else "hf" if a < b else "sglang"
        apart = [_rms(error[out]) if out.any() else None for error in errors]
        rows.append(Nearness(name, a, b, closer, share, int(out.sum()), *apart))
    return tuple(rows)


# ---------------------------------------------------------------------------------------------------- explanation


@dataclass(frozen=True)
class Explanation:
    """Everything about one pair of traces.

    Attributes: verdicts: by engine. closures: by engine, the whole forward pass against the trace. kernels: causes for
    which SGLang's way is its own kernel here, and which; all others are plain torch. attributions: by part. nearness:
    streams of both parts. near_tie: whether the two likeliest next tokens of an engine lie within one unit in the last
    place. next_tokens: by engine.
    """

    verdicts: Mapping[str, Verdict]
    closures: Mapping[str, Closure]
    kernels: Mapping[str, str]
    attributions: tuple[Attribution, ...]
    nearness: tuple[Nearness, ...]
    near_tie: Mapping[str, bool]
    next_tokens: Mapping[str, int]

    @property
    def first_outside(self) -> tuple[str, Finding] | None:
        """(engine, the first operation outside the envelope), or None."""
        found = [(engine, verdict.first) for engine, verdict in self.verdicts.items() if verdict.first is not None]
        return next(((engine, first) for engine, first in found if first is not None), None)

    @property
    def word(self) -> str:
        """ "bug" if either engine has one, "rounding" if neither, "no evidence" if an engine was not judged."""
        words = {verdict.word for verdict in self.verdicts.values()}
        return next((word for word in ("bug", "no evidence") if word in words), "rounding")

    @property
    def live(self) -> list[str]:
        """Names of the causes that are live on this input, in the order of the forward pass."""
        return [effect.name for part in self.attributions for effect in part.effects if effect.live]

    @property
    def remainder(self) -> int:
        """Tensors of both engines that their plans do not reproduce bit for bit."""
        return sum(closed.total - closed.equal for closed in self.closures.values())

    def json(self) -> dict[str, Any]:
        """The object that `vlmlab explain --json` prints."""
        first = self.first_outside
        return {
            "verdict": self.word,
            "first_outside": None if first is None else {"engine": first[0], **_finite(asdict(first[1]))},
            "closure": {e: {"tensors_equal": c.equal, "tensors_total": c.total} for e, c in self.closures.items()},
            "remainder": {"tensors": self.remainder, "elements": sum(c.elements for c in self.closures.values())},
            "kernels": dict(self.kernels),
            "causes": [_finite(asdict(effect)) for part in self.attributions for effect in part.effects],
            "closer_to_truth": [_finite(asdict(row)) for row in self.nearness],
            "parts": [_finite({k: v for k, v in asdict(a).items() if k != "effects"}) for a in self.attributions],
            "near_tie": dict(self.near_tie),
            "next_tokens": dict(self.next_tokens),
        }


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Strict JSON has no NaN and no infinity: they become None."""

    def strict(value: Any) -> Any:
        if isinstance(value, dict):
            return _finite(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: strict(value) for key, value in row.items()}


def near_tie(logits: Tensor) -> bool:
    """Whether the two likeliest tokens lie within one unit in the last place of the logits' bfloat16 values.

    Args: logits: [1, V].
    """
    top = logits.float().flatten().topk(2).values
    stored = top[0].bfloat16()
    below = torch.nextafter(stored, torch.tensor(-torch.inf, dtype=stored.dtype))
    return bool(top[0] - top[1] <= stored.float() - below.float())


def explain(
    passes: Passes, hf: Trace, sglang: Trace, say: Callable[[str], None] = print, unexplained: Path | None = None
) -> Explanation:
    """Explain the difference between two traces of one input.

    Args: passes: over the checkpoint, in the traces' dtype and in float64. hf, sglang: traces. say: called with one
    line per phase. unexplained: folder that gets `unexplained-ENGINE.safetensors`, the first operation whose bits its
    engine's plan does not reproduce, with what it read; no file where closure holds.
    Returns: Explanation. Raises: VlmlabError: different weights or inputs, or nothing to compare.
    """
    check_comparable(hf, sglang)
    hybrid, kernels = passes.hybrid, available(passes.hybrid.device, sglang.info.flags)
    start, goal = hf_plan(hf.info.attention), sglang_plan(kernels)
    verdicts, closures, asked = {}, {}, {}
    for trace, plan in ((hf, start), (sglang, goal)):
        engine = trace.info.engine
        asked[engine] = asked_of(hybrid, trace, hf)
        say(f"{trace.info.release}: closure")
        closures[engine], states = passes.closure(trace, asked[engine], plan)
        missed = closures[engine].first
        if unexplained is not None and missed is not None:
            save_difference(unexplained / f"unexplained-{engine}.safetensors", hybrid, trace, states, missed)
        say(f"{trace.info.release}: verdict")
        verdicts[engine] = verdict_of(passes, trace, asked[engine])
    theirs = asked[sglang.info.engine]
    attributions = tuple(attribute(passes, theirs, part, start, goal, say) for part in theirs.parts)
    say("float64: the truth")
    truth, ours, others = (dict[str, Tensor]() for _ in range(3))
    for part in theirs.parts:
        truth |= passes.truth(theirs, part).states
        ours |= passes.get(theirs, part, start).states
        others |= passes.get(theirs, part, goal).states
    names = [name for name in truth if name.endswith("resid_post") or name in ("vision.merger", "final_norm", "logits")]
    return Explanation(
        verdicts,
        closures,
        kernels,
        attributions,
        closer_to_truth(truth, ours, others, names, hybrid.experts_per_token),
        {trace.info.engine: near_tie(trace["logits"]) for trace in (hf, sglang)},
        {trace.info.engine: int(trace["logits"].float().argmax()) for trace in (hf, sglang)},
    )


def prepare(passes: Passes, hf: Trace, say: Callable[[str], None] = print) -> None:
    """What `explain` will ask of Transformers' trace alone, so that it is known when SGLang has started.

    Args: passes, hf, say: see explain. On CUDA nothing is done: there SGLang's ways hang on its own settings.
    """
    if passes.hybrid.device != "cpu":
        return
    asked, start = asked_of(passes.hybrid, hf, hf), hf_plan(hf.info.attention)
    say("while SGLang starts: Transformers' verdict")
    verdict_of(passes, hf, asked)
    for part in asked.parts:
        attribute(passes, asked, part, start, sglang_plan(), lambda line: say(f"while SGLang starts: {line}"))
        passes.truth(asked, part)


def verdict_of(passes: Passes, trace: Trace, asked: Asked) -> Verdict:
    """The verdict on a prefill, from the store where passes are kept there.

    Args: passes: see explain. trace: the target. asked: its input. Returns: Verdict, see verdict.judge.
    """
    captured = [passes.bits_of(trace), *(asked.digest(part) for part in asked.parts), trace.info.flags]
    name = store.key_of("verdict", {"of": passes.key("of", captured)}, ("verdict",)) if passes.stored else None
    findings = None if name is None else store.read_json(name)
    if findings is None:
        began = time.perf_counter()
        verdict = judge(passes.hybrid, passes.exact, trace, asked)
        if name is not None:
            store.write_json(name, [asdict(finding) for finding in verdict.findings])
            store.note({"verdict": trace.info.engine, "seconds": time.perf_counter() - began})
        return verdict
    return verdict_on([Finding(**finding) for finding in findings])
