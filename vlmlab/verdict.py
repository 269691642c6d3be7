"""Bug or rounding, and where first: every operation of a trace against what legal arithmetic can do there.

judge           the verdict on one prefill
judge_steps     the verdicts on a prefill and the decode steps after it
verdict_on      the word that findings give
legal_plans     the ensemble of plans that are right

Local envelope: each operation is run again from the input that the target itself captured, by every legal plan and in
float64. How far the legal plans lie from float64 is what rounding explains; a small fault cannot hide in the drift
that was there before it. A target beyond that, by more than the margins, is a bug.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmlab.causes import Plan, causes_of, hf_plan, sglang_plan
from vlmlab.hookpoints import block_of
from vlmlab.hybrid import Cache, Hybrid
from vlmlab.kernels import available
from vlmlab.metrics import ulp_diff
from vlmlab.replay import Asked, differing, local_states
from vlmlab.trace import Trace

# What a legal computation that is not among the plans may do more than the worst plan does, at one operation. Leaving
# out each plan in turn, the ones left gave at most 1.84 and 3.5 on the embedded checkpoints; see LOG.
MARGIN = 2.0  # on the root mean square over tokens of the relative error
TOKEN_MARGIN = 4.0  # on its largest value over tokens

OPERATIONS = {
    "patch_embed": "patch embedding",
    "resid_pre": "embedding",
    "attn_out": "attention (norm, q/k/v, rotary, attention, output projection)",
    "resid_mid": "residual sum after attention",
    "router_logits": "router (norm, logits of the experts)",
    "mlp_out": "MLP (norm, gate/up, activation, down)",
    "before_deepstack": "residual sum after the MLP, before the deepstack addition",
    "after_deepstack": "residual sum after the MLP and deepstack addition",
    "resid_post": "residual sum after the MLP",
    "merger": "merger",
    "deepstack": "deepstack merger",
    "final_norm": "final norm",
    "logits": "language-model head",
}

Alternatives = list[tuple[Tensor, Tensor]]  # rows [T] bool, what could stand there instead [rows, D]


def legal_plans(kernels: Iterable[str] = ()) -> tuple[Plan, ...]:
    """The ensemble: each engine's own way, and mixtures of what is live in norms and residual sums.

    Args: kernels: causes that SGLang computed with a kernel of its own, which is then legal, too.
    """
    hf, sglang = hf_plan(), sglang_plan()
    mixed = (hf.switched("rms_norm", "sglang"), hf.switched("residual_sum", "sglang"))
    own = (sglang_plan(kernels),) if kernels else ()
    return (hf, hf_plan("eager"), sglang, *mixed, *own)


@dataclass(frozen=True)
class Finding:
    """One operation of the target against the envelope.

    Attributes: hookpoint, layer. operation: in words. token: the worst one. error: relative L2 error to float64, root
    mean square over tokens. allowed: of the worst legal plan. ratio: error over allowed. token_error, token_ratio: of
    the worst token, against the worst token of any legal plan. outside: beyond the margins. exact: bit-equal to a legal
    plan. ulps: units in the last place, of the storage dtype, at most to the nearest legal plan. ties: tokens at
    which experts have equal captured logits and the other choice was granted.
    """

    hookpoint: str
    layer: int | None
    operation: str
    token: int
    error: float
    allowed: float
    ratio: float
    token_error: float
    token_ratio: float
    outside: bool
    exact: bool
    ulps: int
    ties: int = 0


@dataclass(frozen=True)
class Verdict:
    """Computed, never typed. word: "rounding", "bug" or "no evidence". findings: every operation, in forward order."""

    word: str
    findings: tuple[Finding, ...]

    @property
    def outside(self) -> tuple[Finding, ...]:
        """Operations outside the envelope."""
        return tuple(finding for finding in self.findings if finding.outside)

    @property
    def first(self) -> Finding | None:
        """The first of them in forward order."""
        return next(iter(self.outside), None)

    def sentence(self) -> str:
        """One sentence."""
        if self.first is None:
            exact = sum(finding.exact for finding in self.findings)
            said = f"{self.word}: {exact} of {len(self.findings)} operations bit-equal to a legal plan, none outside"
            if exact < len(self.findings) and max(finding.ulps for finding in self.findings) <= 1:
                said += "; nowhere more than one unit in the last place from one: a fault here is not observable"
            return said
        first = self.first
        return (
            f"{self.word}: first at {first.hookpoint}, token {first.token}, {first.operation}; relative error "
            f"{first.error:.2e} where legal plans err {first.allowed:.2e} at most"
        )


def operation_of(hookpoint: str, others: Collection[str] = ()) -> str:
    """The operation that produces a hook point, in words. Args: others: hook points beside it."""
    stem, _, half = hookpoint.rpartition(".")
    if half == "resid_post" and f"{stem}.before_deepstack" in others:
        return OPERATIONS["after_deepstack"]
    return next(words for key, words in OPERATIONS.items() if key in hookpoint.split("."))


def judge(hybrid: Hybrid, exact: Hybrid, trace: Trace, asked: Asked) -> Verdict:
    """Bug or rounding: every operation of a prefill, re-run from its own captured input, against the envelope.

    Args: hybrid: the checkpoint in the trace's dtype. exact: the same in float64. trace: the target. asked: its input.
    Returns: Verdict. "no evidence" when the trace holds no operation with its input.
    """
    (verdict,) = judge_steps(hybrid, exact, [(trace, asked)])
    return verdict


def judge_steps(hybrid: Hybrid, exact: Hybrid, steps: Sequence[tuple[Trace, Asked]]) -> tuple[Verdict, ...]:
    """As `judge`, for a prefill and the decode steps after it.

    Keys and values of earlier tokens are computed from what the target captured for them, so that a step is judged by
    its own arithmetic.

    Args: hybrid, exact: as in judge. steps: (trace, its input) of the prefill and of each decode step, in order.
    Returns: one Verdict per step.
    """
    exact_cache, plans = Cache(), legal_plans(available(hybrid.device, steps[0][0].info.flags) if steps else ())
    caches, seeing = [Cache() for _ in plans], causes_of(hybrid.family, "vision")
    verdicts = []
    for trace, asked in steps:
        truth = local_states(exact, trace, asked, hf_plan(), exact_cache)
        distinct = {p.key(seeing): p for p in plans}  # the ViT is slow, and few plans differ there
        vision = {key: local_states(hybrid, trace, asked, p, part="vision") for key, p in distinct.items()}
        legal = [
            vision[p.key(seeing)] | local_states(hybrid, trace, asked, p, c, "language")
            for p, c in zip(plans, caches, strict=True)
        ]
        ties = _router_ties(exact, trace)
        findings = [
            _find(n, operation_of(n, truth), trace[n], truth[n], [states[n] for states in legal], ties.get(n, []))
            for n in truth
        ]
        verdicts.append(verdict_on(findings))
    return tuple(verdicts)


def verdict_on(findings: Sequence[Finding]) -> Verdict:
    """The word that findings give. Args: findings: of every operation, in forward order."""
    word = "no evidence" if not findings else "bug" if any(f.outside for f in findings) else "rounding"
    return Verdict(word, tuple(findings))


def _errors(x: Tensor, truth: Tensor, alternatives: Alternatives) -> Tensor:
    """[T] relative L2 error to the truth; at ties of the router, to the nearest outcome."""
    length = truth.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    errors = (x.double() - truth).norm(dim=-1) / length
    for rows, other in alternatives:
        errors[rows] = torch.minimum(errors[rows], (x.double()[rows] - other).norm(dim=-1) / other.norm(dim=-1))
    return errors.nan_to_num(torch.inf, torch.inf)


def _find(
    name: str, operation: str, target: Tensor, truth: Tensor, legal: Sequence[Tensor], alternatives: Alternatives
) -> Finding:
    errors = _errors(target, truth, alternatives)
    envelope = torch.stack([_errors(x, truth, alternatives) for x in legal])
    rms, allowed = errors.square().mean().sqrt().item(), envelope.square().mean(1).sqrt().max().item()
    worst, worst_allowed = errors.max().item(), envelope.max().item()
    block = block_of(name)
    return Finding(
        hookpoint=name,
        layer=block[1] if block else None,
        operation=operation,
        token=int(errors.argmax()),
        error=rms,
        allowed=allowed,
        ratio=_over(rms, allowed),
        token_error=worst,
        token_ratio=_over(worst, worst_allowed),
        outside=rms > MARGIN * allowed or worst > TOKEN_MARGIN * worst_allowed,
        exact=any(not differing(x, target) for x in legal),
        ulps=min(ulp_diff(x, target.to(x.dtype)) for x in legal),
        ties=int(torch.stack([rows for rows, _ in alternatives]).any(0).sum()) if alternatives else 0,
    )


def _over(a: float, b: float) -> float:
    return a / b if b else (1.0 if a == 0 else float("inf"))


@torch.no_grad()
def _router_ties(exact: Hybrid, trace: Trace) -> dict[str, Alternatives]:
    """What the MLP would put out at tokens where a chosen expert ties with one that was not chosen.

    Which of them a kernel takes is its own. Considered are the last two chosen and the next two. Returns: by hook
    point; empty for dense decoders.
    """
    ties: dict[str, Alternatives] = {}
    for i in range(exact.depth) if exact.sparse else ():
        names = [f"layers.{i}.{name}" for name in ("resid_pre", "attn_out", "router_logits")]
        if any(name not in trace for name in names):
            continue
        plan, count = hf_plan(), exact.experts_per_token
        before, attn_out, logits = (trace[name].to(exact.device, exact.dtype) for name in names)
        read, _ = exact.add(before, attn_out, i, plan)
        best, order = logits.topk(min(count + 2, logits.shape[1]), dim=-1)
        for drop, take in itertools.product(range(max(0, count - 2), count), range(count, best.shape[1])):
            rows = best[:, drop] == best[:, take]
            for expert in (drop, take) if rows.any() else ():  # whichever of the two the truth took
                chosen = order[rows, :count].clone()
                chosen[:, drop] = order[rows, expert]
                outcome = rows.cpu(), exact.mlp(i, read[rows], plan, logits[rows], chosen).cpu()
                ties.setdefault(f"layers.{i}.mlp_out", []).append(outcome)
    return ties
