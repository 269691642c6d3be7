"""Which experts a router chooses, and where two traces choose others.

chosen_experts      by the router's logits, likeliest first
expert_flips        per layer, the tokens whose experts, or their order alone, differ between two traces
flipped_tokens      the tokens with other experts in any layer

Captured are the logits; the choice follows from them as both engines make it. An engine that chose otherwise is found
by the verdict at the layer's `mlp_out`, which is computed from the captured logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmlab.arithmetic import route
from vlmlab.trace import Trace


@dataclass(frozen=True)
class Flips:
    """One layer of two traces.

    Attributes: layer. tokens: compared. experts: tokens whose sets of experts differ. order: tokens whose experts are
    the same in another order of likelihood. ties: how many of either hang on logits that are equal in one trace, where
    the choice is the kernel's.
    """

    layer: int
    tokens: int
    experts: tuple[int, ...]
    order: tuple[int, ...]
    ties: int


def chosen_experts(logits: Tensor, count: int) -> Tensor:
    """The experts of every token, likeliest first.

    Args: logits: [T, X]. count: experts per token.
    Returns: [T, count] indices. Among equal logits it is torch.topk's choice.
    Source: transformers@5.19.0: models/qwen3_vl_moe/modeling_qwen3_vl_moe.py, Qwen3VLMoeTextTopKRouter.
    """
    return route(logits, count, "sglang")[1]


def expert_flips(baseline: Trace, target: Trace) -> tuple[Flips, ...]:
    """Where the routers of two traces choose other experts.

    Args: baseline, target: traces of the same weights and input.
    Returns: one Flips per layer whose router logits both hold, finite and of one shape; empty for dense decoders.
    """
    config, found = baseline.info.config, []
    count = (config.get("text_config") or config).get("num_experts_per_tok", 0)
    for name in baseline.hook_points:
        if not name.endswith(".router_logits") or name not in target:
            continue
        a, b = baseline[name], target[name]
        if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()):
            continue
        experts, order = (torch.nonzero(flipped).flatten().tolist() for flipped in _flipped(a, b, count))
        ties = int((_tied(a, count) | _tied(b, count))[experts + order].sum())
        found.append(Flips(int(name.split(".")[1]), len(a), tuple(experts), tuple(order), ties))
    return tuple(found)


def flipped_tokens(a: Mapping[str, Tensor], b: Mapping[str, Tensor], count: int) -> Tensor | None:
    """Tokens for which some layer chose other experts.

    Args: a, b: hook point to tensor. count: experts per token. Returns: [T] bool, or None for dense decoders.
    """
    names = [name for name in a if name.endswith(".router_logits")]
    return torch.stack([_flipped(a[n], b[n], count)[0] for n in names]).any(0) if names else None


def _flipped(a: Tensor, b: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[T] bool: other experts; the same in another order."""
    x, y = chosen_experts(a, count), chosen_experts(b, count)
    other = (x.sort(-1).values != y.sort(-1).values).any(-1)
    return other, (x != y).any(-1) & ~other


def _tied(logits: Tensor, count: int) -> Tensor:
    """[T] bool: two of the experts chosen, or the last of them and the next, have equal logits."""
    best = logits.topk(min(count + 1, logits.shape[-1]), -1).values
    return (best[:, 1:] == best[:, :-1]).any(-1)
