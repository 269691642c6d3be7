"""What happens as the output grows: two engines generate, and every number of every step is at hand.

step_table              KL, total variation, margins, ranks and a label per step
margins                 how close every choice is
summary                 the steps in a few numbers; what is not finite is counted and enters no mean
first_divergence        where two free-running texts part, and whether that is a near-tie
state_drift             hidden states per step, against each other and against the truth
grows                   whether a figure grows with the steps
spread                  several ways to compute the same states, against one of them
in_words                where the texts part, whether drift grows, and whether it is rounding

Shapes: S steps, V vocabulary, D channels. Logarithms are natural: KL and log-probabilities are in nats. The baseline is
Transformers, the target SGLang.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from vlmlab.errors import VlmlabError
from vlmlab.floats import Format, format_of, round_to, ulp
from vlmlab.metrics import bit_patterns, cosine_similarity, rel_l2_error

# Storage alone moves each of two logits by half a step: a gap in the truth up to one step may close. What the layers
# before add is not in it, so "not a near-tie" asks for an explanation and is no verdict.
TIE_STEPS = 1.0
SAME, NEAR_TIE, NOT_NEAR_TIE = "same", "near-tie", "not a near-tie"
NOT_GREEDY = "not the likeliest token"
STATUSES = ("ok", "one_sided_inf", "non_finite")

FEWEST_STEPS = 8
ALPHA = 0.01


# ---------------------------------------------------------------------------------------------------- logits per step


@dataclass(frozen=True)
class Step:
    """The next-token distributions of one step. `pandas.DataFrame(steps)` makes a table of them.

    Attributes: step: from 0. token: the one that both were given next. status: one of STATUSES; "one_sided_inf" where
    one engine alone rules out a token with -inf, "non_finite" where a row holds NaN, +inf or nothing but -inf, and then
    every number is None. kl: KL(baseline || target) in nats; inf where the target rules out what the baseline does not.
    total_variation: in [0, 1]. baseline_logprob, target_logprob: of `token`, nats, untempered. baseline_token,
    target_token: the likeliest. truth_token: of the truth, None without one. agree: they are one. baseline_margin,
    target_margin: largest logit less the second. target_token_rank: of the target's token in the baseline's logits, 1
    the first; baseline_token_rank: of the baseline's in the target's. gap: how far the less likely of the two tokens
    lies below the largest logit of the truth, or of the baseline without a truth. storage_step: spacing of the storage
    format just below that logit. label: SAME, NEAR_TIE (gap <= TIE_STEPS * storage_step) or NOT_NEAR_TIE.
    """

    step: int
    token: int
    status: str
    kl: float | None = None
    total_variation: float | None = None
    baseline_logprob: float | None = None
    target_logprob: float | None = None
    baseline_token: int | None = None
    target_token: int | None = None
    truth_token: int | None = None
    agree: bool | None = None
    baseline_margin: float | None = None
    target_margin: float | None = None
    target_token_rank: int | None = None
    baseline_token_rank: int | None = None
    gap: float | None = None
    storage_step: float | None = None
    label: str | None = None


def step_table(
    baseline: Tensor,
    target: Tensor,
    truth: Tensor | None,
    tokens: Tensor | Sequence[int],
    storage: torch.dtype | None = None,
) -> tuple[Step, ...]:
    """Compare the full next-token logits of every step, in float64.

    Args: baseline, target: [S, V] logits. truth: [S, V] float32 or float64 logits, or None. tokens: [S] ids fed next.
    storage: dtype in which the logits were stored; by default the coarser of the two, since SGLang's are float32 copies
    of bfloat16 values. Say it when both are such copies.
    Returns: one Step per step. Equal logits give exactly 0. Nothing is clamped: a KL near 1e-15 may be negative. A
    token that both rule out adds 0 to the KL, and so does one that the baseline alone rules out.
    Raises: VlmlabError: shapes differ, nothing to compare, a vocabulary below 2, no floats, a token outside.
    """
    logits = {"baseline": baseline, "target": target} | ({} if truth is None else {"truth": truth})
    check_shapes(logits)
    steps, vocabulary = baseline.shape
    if vocabulary < 2:
        raise VlmlabError(f"expected a vocabulary of at least 2 tokens, got {vocabulary}")
    if storage is not None and not storage.is_floating_point:
        raise VlmlabError(f"expected a floating-point storage dtype, got {storage}")
    forms = [format_of(dtype) for dtype in ([storage] if storage else [baseline.dtype, target.dtype])]
    form = min(forms, key=lambda form: form.precision)
    fed = token_ids(tokens, steps, vocabulary)
    rows = (truth[s] if truth is not None else None for s in range(steps))
    return tuple(_step(s, fed[s], baseline[s], target[s], row, form) for s, row in enumerate(rows))


def _step(step: int, token: int, baseline: Tensor, target: Tensor, truth: Tensor | None, form: Format) -> Step:
    x, y = baseline.double(), target.double()
    judge = x if truth is None else truth.double()
    if not (_usable(x) and _usable(y) and _usable(judge)):
        return Step(step, token, "non_finite")
    log_p, log_q = x.log_softmax(-1), y.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    a, b = int(x.argmax()), int(y.argmax())
    top = judge.max()
    gap = float(top - torch.minimum(judge[a], judge[b]))
    spacing = float(_spacing_below(top, form))
    return Step(
        step=step,
        token=token,
        status="ok" if torch.equal(x.isneginf(), y.isneginf()) else "one_sided_inf",
        kl=float(torch.where(x.isneginf(), 0.0, torch.where(y.isneginf(), torch.inf, p * (log_p - log_q))).sum()),
        total_variation=float((p - q).abs().sum() / 2),
        baseline_logprob=float(log_p[token]),
        target_logprob=float(log_q[token]),
        baseline_token=a,
        target_token=b,
        truth_token=None if truth is None else int(judge.argmax()),
        agree=a == b,
        baseline_margin=_margin(x),
        target_margin=_margin(y),
        target_token_rank=_rank(x, b),
        baseline_token_rank=_rank(y, a),
        gap=gap,
        storage_step=spacing,
        label=SAME if a == b else NEAR_TIE if gap <= TIE_STEPS * spacing else NOT_NEAR_TIE,
    )


def _usable(row: Tensor) -> bool:
    return not row.isnan().any() and bool(row.max().isfinite())


def _margin(row: Tensor) -> float:
    first, second = row.topk(2).values
    return float(first - second)


def margins(logits: Tensor, storage: torch.dtype) -> list[float]:
    """How close every choice is: largest logit less the second, in storage steps just below it.

    Args: logits: [S, V]. storage: dtype in which they were stored. Returns: S numbers; NaN where a row is not usable.
    """
    form = format_of(storage)
    return [
        _margin(row) / float(_spacing_below(row.max(), form)) if _usable(row) else math.nan for row in logits.double()
    ]


def _rank(row: Tensor, token: int) -> int:
    return 1 + int((row > row[token]).sum())


def _spacing_below(value: Tensor, form: Format) -> Tensor:
    """From the stored value to the next one below; at a power of two that is half of what floats.ulp says."""
    stored = round_to(value, form).clamp(-form.largest, form.largest)
    return ulp(torch.nextafter(stored, torch.tensor(-torch.inf, dtype=stored.dtype, device=stored.device)), form)


def check_shapes(tensors: Mapping[str, Tensor]) -> None:
    """Args: tensors: by name. Raises: VlmlabError: not all [S, N] floats of one shape, or empty."""
    said = ", ".join(f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors.items())
    shapes = {tuple(x.shape) for x in tensors.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2 or not all(x.is_floating_point() for x in tensors.values()):
        raise VlmlabError(f"expected floating-point tensors of one shape with two axes, got {said}")
    if not next(iter(tensors.values())).numel():
        raise VlmlabError(f"nothing to compare: {said}")


def token_ids(tokens: Tensor | Sequence[int], steps: int, vocabulary: int) -> list[int]:
    """Ids as integers. Raises: VlmlabError: not `steps` of them, or one outside the vocabulary."""
    ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    if len(ids) != steps or not all(type(i) is int and 0 <= i < vocabulary for i in ids):
        raise VlmlabError(f"expected {steps} token ids from 0 to {vocabulary - 1}, got {len(ids)}: {ids[:8]}")
    return ids


@dataclass(frozen=True)
class Summary:
    """Steps in a few numbers; JSON-ready.

    Attributes: steps: all. ok, one_sided_inf, non_finite: by status. kl_mean, kl_max, total_variation_mean,
    total_variation_max: over the ok steps, None without one. same, near_ties, not_near_ties: by label, of all finite
    steps.
    """

    steps: int
    ok: int
    one_sided_inf: int
    non_finite: int
    kl_mean: float | None
    kl_max: float | None
    total_variation_mean: float | None
    total_variation_max: float | None
    same: int
    near_ties: int
    not_near_ties: int


def summary(table: Sequence[Step]) -> Summary:
    """Count and average a step table. Args: table: from step_table. Raises: VlmlabError: no steps."""
    if not table:
        raise VlmlabError("nothing to summarise: expected at least one step, got none")
    status = [step.status for step in table]
    labels = [step.label for step in table]
    kl = [step.kl for step in table if step.status == "ok" and step.kl is not None]
    variation = [step.total_variation for step in table if step.status == "ok" and step.total_variation is not None]
    return Summary(
        steps=len(table),
        ok=status.count("ok"),
        one_sided_inf=status.count("one_sided_inf"),
        non_finite=status.count("non_finite"),
        kl_mean=_mean(kl),
        kl_max=max(kl, default=None),
        total_variation_mean=_mean(variation),
        total_variation_max=max(variation, default=None),
        same=labels.count(SAME),
        near_ties=labels.count(NEAR_TIE),
        not_near_ties=labels.count(NOT_NEAR_TIE),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


@dataclass(frozen=True)
class Divergence:
    """The first step at which two texts differ.

    Attributes: step: from 0. baseline_token, target_token: None where that text had ended. stopped: "baseline" or
    "target" when that text is a prefix of the other, else None. gap, storage_step, status: of the step, None where the
    table ends before it. label: of the step; NOT_GREEDY when a text did not take its engine's likeliest token, so that
    no margin explains it; None where there is no finite step.
    """

    step: int
    baseline_token: int | None
    target_token: int | None
    stopped: str | None
    gap: float | None
    storage_step: float | None
    status: str | None
    label: str | None


def first_divergence(
    baseline_tokens: Sequence[int], target_tokens: Sequence[int], table: Sequence[Step]
) -> Divergence | None:
    """Where two free-running texts part.

    Args: baseline_tokens, target_tokens: generated ids, without the prompt. table: steps of the shared prefix and
    the one after it; later ones are not read.
    Returns: None when the texts are equal. When one text ended earlier, the step is the one it does not have: its
    engine chose to stop there, or was told to.
    Raises: VlmlabError: no tokens, or both texts have a token at the step and the table ends before it.
    """
    a, b = [int(i) for i in baseline_tokens], [int(i) for i in target_tokens]
    if not a and not b:
        raise VlmlabError("nothing to compare: expected generated tokens, got none from either engine")
    if a == b:
        return None
    shared = min(len(a), len(b))
    k = next((i for i in range(shared) if a[i] != b[i]), shared)
    stopped = "baseline" if k == len(a) else "target" if k == len(b) else None
    row = next((step for step in table if step.step == k), None)
    if row is None and stopped is None:
        raise VlmlabError(f"expected a table that holds step {k}, where the texts part, got {len(table)} steps")
    mine, theirs = a[k] if k < len(a) else None, b[k] if k < len(b) else None
    if row is None:
        return Divergence(k, mine, theirs, stopped, None, None, None, None)
    label = row.label
    if label is not None and (mine not in (None, row.baseline_token) or theirs not in (None, row.target_token)):
        label = NOT_GREEDY
    return Divergence(k, mine, theirs, stopped, row.gap, row.storage_step, row.status, label)


# ---------------------------------------------------------------------------------------------------- states


@dataclass(frozen=True)
class StateDrift:
    """Hidden states of one layer, step by step.

    Attributes: cosine, rel_l2: [S] float64, target against baseline; NaN where undefined, see metrics.
    baseline_to_truth, target_to_truth: [S] relative L2 distance to the truth, None without one. bitwise_equal: [S].
    """

    cosine: Tensor
    rel_l2: Tensor
    baseline_to_truth: Tensor | None
    target_to_truth: Tensor | None
    bitwise_equal: Tensor


def state_drift(baseline: Tensor, target: Tensor, truth: Tensor | None = None) -> StateDrift:
    """Compare the states of one layer at every step.

    Args: baseline, target: [S, D] states. truth: [S, D] of a float64 forward on the same tokens, or None.
    Raises: VlmlabError: shapes differ, or nothing to compare.
    """
    check_shapes({"baseline": baseline, "target": target} | ({} if truth is None else {"truth": truth}))
    return StateDrift(
        cosine=cosine_similarity(baseline, target),
        rel_l2=rel_l2_error(baseline, target),
        baseline_to_truth=None if truth is None else rel_l2_error(truth, baseline),
        target_to_truth=None if truth is None else rel_l2_error(truth, target),
        bitwise_equal=_equal_rows(baseline, target),
    )


def _equal_rows(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != b.dtype:  # widening is exact
        wider = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(wider), b.to(wider)
    return (bit_patterns(a) == bit_patterns(b)).all(-1)


@dataclass(frozen=True)
class Growth:
    """Whether a figure grows with the steps; JSON-ready.

    Attributes: steps: finite ones. left_out: not finite. rank_correlation: Spearman's, in [-1, 1]; 0 when all values
    are equal. p_value: one-sided. slope_per_100: least squares, in the figure's unit per 100 steps.
    """

    steps: int
    left_out: int
    rank_correlation: float
    p_value: float
    slope_per_100: float

    @property
    def grows(self) -> bool:
        """p_value < ALPHA."""
        return self.p_value < ALPHA


def grows(values: Tensor | Sequence[float]) -> Growth:
    """Spearman's rank correlation of a figure with the step.

    The p-value takes the steps as exchangeable. Neighbouring steps of one text are alike, so it is too small on a curve
    that wanders; read it beside the slope, and over several texts.

    Args: values: [S], one per step; what is not finite is left out, and its step with it.
    Raises: VlmlabError: fewer than FEWEST_STEPS finite values.
    """
    every = torch.as_tensor(values, dtype=torch.float64).cpu().numpy()
    if every.ndim != 1:
        raise VlmlabError(f"expected one value per step, got shape {list(every.shape)}")
    finite = np.isfinite(every)
    x, y = np.flatnonzero(finite), every[finite]
    if len(y) < FEWEST_STEPS:
        raise VlmlabError(f"expected at least {FEWEST_STEPS} finite steps, got {len(y)} of {len(every)}")
    rank, p_value, slope = 0.0, 1.0, 0.0
    if y.min() < y.max():
        scale = np.abs(y).max()
        ranks = stats.spearmanr(x, y, alternative="greater")
        rank, p_value = float(ranks.statistic), float(ranks.pvalue)
        slope = 100 * float(stats.linregress(x, y / scale).slope * scale)
    return Growth(len(y), int((~finite).sum()), rank, p_value, slope)


@dataclass(frozen=True)
class Way:
    """One way to compute states, against the reference way; JSON-ready.

    Attributes: name. rows. max_rel_l2, min_cosine: over rows where they are defined, None without one. bitwise_equal:
    share of rows in [0, 1]. undefined: rows that hold NaN or inf, or are zero.
    """

    name: str
    rows: int
    max_rel_l2: float | None
    min_cosine: float | None
    bitwise_equal: float
    undefined: int


def spread(rows: Mapping[str, Tensor], reference: str) -> tuple[Way, ...]:
    """How far several ways to compute the same states (prefill, chunked, decode, batch) lie from one of them.

    Args: rows: name of the way to [S, D] states, the same rows in the same order. reference: one of the names.
    Returns: one Way for each other name.
    Raises: VlmlabError: no reference, no other way, shapes differ, nothing to compare.
    """
    if reference not in rows:
        raise VlmlabError(f"expected the reference among the ways {sorted(rows)}, got {reference!r}")
    if len(rows) < 2:
        raise VlmlabError(f"nothing to compare: {reference!r} is the only way")
    check_shapes(rows)
    return tuple(_way(name, rows[reference], states) for name, states in rows.items() if name != reference)


def _way(name: str, reference: Tensor, states: Tensor) -> Way:
    drift = state_drift(reference, states)
    defined = drift.cosine.isfinite() & drift.rel_l2.isfinite()
    return Way(
        name=name,
        rows=len(states),
        max_rel_l2=float(drift.rel_l2[defined].max()) if defined.any() else None,
        min_cosine=float(drift.cosine[defined].min()) if defined.any() else None,
        bitwise_equal=float(drift.bitwise_equal.double().mean()),
        undefined=int((~defined).sum()),
    )


# ---------------------------------------------------------------------------------------------------- in words


def in_words(parted: Divergence | None, growth: Growth, unexplained: int) -> str:
    """What happens while it generates, in two sentences.

    Args: parted: of the free-running texts. growth: of the drift on the same tokens. unexplained: tensors of both
    engines' steps that the known causes do not give bit for bit.
    """
    texts = f"The texts part at step {parted.step} ({parted.label or parted.status})" if parted else "Equal texts"
    trend = f"the drift {'grows' if growth.grows else 'does not grow'} over {growth.steps} steps on the same tokens"
    cause = "rounding: the known causes reproduce every tensor"
    if unexplained:
        cause = f"not all rounding: {unexplained} tensors are left"
    return f"{texts}; {trend}. It is {cause}."
