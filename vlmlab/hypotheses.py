"""What else than rounding could have moved an answer, each as one change of what the language model is given.

HYPOTHESES      name to change
ORDERS          name to the plan's way of adding deepstack features
of_family       those that a family can have

A change of deepstack features stands for code that drops, repeats or misplaces them, without a patched engine.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vlmlab.hybrid import Seen
from vlmlab.replay import Asked

ORDERS = {
    "(h + r) + d": "hf",
    "(h + d) + r": "sglang",
    "h + (r + d)": "residual_first",
    "one sum": "once",
}

Change = Callable[[Asked], Asked]


def _deepstack(change: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> Change:
    def changed(asked: Asked) -> Asked:
        if asked.seen is None:
            return asked
        return replace(asked, seen=Seen(asked.seen.features, change(asked.seen.deepstack)))

    return changed


def _without(level: int) -> Change:
    return _deepstack(lambda d: tuple(torch.zeros_like(x) if i == level else x for i, x in enumerate(d)))


def _times(factor: float) -> Change:
    return _deepstack(lambda d: tuple(x * factor for x in d))


HYPOTHESES: dict[str, Change] = {
    "deepstack dropped": _times(0.0),
    "deepstack dropped at its first layer": _without(0),
    "deepstack dropped at its second layer": _without(1),
    "deepstack dropped at its third layer": _without(2),
    "deepstack times 2": _times(2.0),
    "deepstack times 4": _times(4.0),
    "deepstack times 8": _times(8.0),
    "deepstack one layer late": _deepstack(lambda d: (torch.zeros_like(d[0]), *d)),
    "deepstack one row off": _deepstack(lambda d: tuple(x.roll(1, 0) for x in d)),
    "1-D positions": lambda asked: replace(asked, positions=torch.arange(len(asked.input_ids)).expand(3, -1)),
    "M-RoPE rows lost": lambda asked: replace(asked, positions=asked.positions[:1].expand(3, -1)),
}


def of_family(family: str) -> dict[str, Change]:
    """The hypotheses a family can have. Args: family: of FAMILIES. Returns: name to change."""
    return {name: change for name, change in HYPOTHESES.items() if family != "qwen2_vl" or "deepstack" not in name}
