"""Tokens that one engine drew and another scores: what people log who roll out with one and train with the other.

logprobs_of         log-probabilities of the chosen tokens, at a temperature that is said
rollout_numbers     importance ratios and KL estimators

S steps, V vocabulary. Logarithms are natural: log-probabilities and KL are in nats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmlab.drift import check_shapes, token_ids
from vlmlab.errors import VlmlabError

RATIO_BAND = (0.8, 1.2)  # the clip range of PPO (Schulman et al. 2017, arXiv:1707.06347, section 3)


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of chosen tokens. Attributes: values: [S] float64, nats. temperature: said."""

    values: Tensor
    temperature: float


def logprobs_of(logits: Tensor, tokens: Tensor | Sequence[int], temperature: float = 1.0) -> LogProbs:
    """Log-probabilities of the chosen tokens, over the full vocabulary, by float64 log_softmax.

    Args: logits: [S, V], raw: before temperature, penalties and truncation. tokens: [S] ids. temperature: 1 leaves the
    logits as they are.
    Returns: LogProbs; NaN where a row holds NaN or +inf, -inf where the token was ruled out.
    Raises: VlmlabError: nothing to score, a temperature that is not positive, a token outside the vocabulary.
    """
    check_shapes({"logits": logits})
    if not (math.isfinite(temperature) and temperature > 0):
        raise VlmlabError(f"expected a temperature above 0, got {temperature}")
    ids = torch.tensor(token_ids(tokens, *logits.shape), device=logits.device)
    scores = (logits.double() / temperature).log_softmax(-1)
    return LogProbs(scores.gather(1, ids[:, None])[:, 0], float(temperature))


@dataclass(frozen=True)
class RolloutNumbers:
    """What people log who roll out with one engine and train with the other; JSON-ready.

    Attributes: tokens: in the numbers. non_finite: left out of all of them. temperature: of both, None when not said.
    mean_abs_diff, max_abs_diff: of the log-probabilities, nats. ratio_min, ratio_max, ratio_mean: importance ratio
    exp(new - old). k1, k2, k3: means of the estimators of KL(old || new), nats. outside_band: share of tokens whose
    ratio lies outside RATIO_BAND. A number beyond float64 is None.
    """

    tokens: int
    non_finite: int
    temperature: float | None
    mean_abs_diff: float | None
    max_abs_diff: float | None
    ratio_min: float | None
    ratio_max: float | None
    ratio_mean: float | None
    k1: float | None
    k2: float | None
    k3: float | None
    outside_band: float


def rollout_numbers(old_logprobs: Tensor | LogProbs, new_logprobs: Tensor | LogProbs) -> RolloutNumbers:
    """Log-probability differences, importance ratios and KL estimators of tokens drawn from the old policy.

    With q the old policy, which drew the tokens, p the new one, and log r = log p - log q: k1 = -log r,
    k2 = (log r)^2 / 2, k3 = (r - 1) - log r. k1 and k3 are unbiased for KL(q || p) only if the tokens were drawn from q
    untruncated and at the temperature of these log-probabilities.

    Args: old_logprobs: [S] of the chosen tokens, by the engine that drew them. new_logprobs: [S], by the other.
    Raises: VlmlabError: shapes differ, nothing finite to compare, different temperatures, a log-probability above 0.
    Source: Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html.
    """
    (old, old_temperature), (new, new_temperature) = _values_of(old_logprobs), _values_of(new_logprobs)
    if old.shape != new.shape or old.ndim != 1:
        raise VlmlabError(f"expected two [S] tensors of one length, got {list(old.shape)} and {list(new.shape)}")
    if None not in (old_temperature, new_temperature) and old_temperature != new_temperature:
        raise VlmlabError(f"expected one temperature, got {old_temperature} for old and {new_temperature} for new")
    if (old > 1e-6).any() or (new > 1e-6).any():
        largest = float(torch.maximum(old, new).nan_to_num(-torch.inf).max())
        raise VlmlabError(f"expected log-probabilities, at most 0, got {largest:g}")
    finite = old.isfinite() & new.isfinite()
    if not finite.any():
        raise VlmlabError(f"nothing to compare: none of {len(old)} tokens has two finite log-probabilities")
    d = (new - old)[finite]
    ratio = d.exp()
    low, high = RATIO_BAND
    k3 = (d.expm1() - d).clamp(min=0.0)  # never negative; the last bit of expm1 could make it so
    return RolloutNumbers(
        tokens=len(d),
        non_finite=int((~finite).sum()),
        temperature=old_temperature if old_temperature == new_temperature else None,
        mean_abs_diff=_finite(d.abs().mean()),
        max_abs_diff=_finite(d.abs().max()),
        ratio_min=_finite(ratio.min()),
        ratio_max=_finite(ratio.max()),
        ratio_mean=_finite(ratio.mean()),
        k1=_finite((-d).mean()),
        k2=_finite((d.square() / 2).mean()),
        k3=_finite(k3.mean()),
        outside_band=float(((ratio < low) | (ratio > high)).double().mean()),
    )


def _values_of(logprobs: Tensor | LogProbs) -> tuple[Tensor, float | None]:
    if isinstance(logprobs, LogProbs):
        return logprobs.values.double(), logprobs.temperature
    return logprobs.double(), None


def _finite(value: Tensor) -> float | None:
    return float(value) if value.isfinite() else None
