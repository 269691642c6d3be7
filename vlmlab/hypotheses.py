"""What else than rounding could have moved an answer, each as one change of an input.

HYPOTHESES      name to Hypothesis
UNCHANGED       none of them
ORDERS          name to the plan's way of adding deepstack features
of_family       those that a family can have
orders_of       the orders that it can

A change of deepstack features stands for code that drops, repeats or misplaces them, without a patched engine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor

from vlmlab.hybrid import Seen
from vlmlab.replay import Asked

ORDERS = {
    "(h + r) + d": "hf",
    "(h + d) + r": "sglang",
    "h + (r + d)": "residual_first",
    "one sum": "once",
}
CHUNK = 64  # tokens of a prefill chunk that keeps its place in the prompt but not in the deepstack features

Change = Callable[[Asked], Asked]


@dataclass(frozen=True)
class Hypothesis:
    """One change; what is None stays as it is.

    Attributes: asked: of what the language model is given. picture: of the picture before the checkpoint's processor.
    family: in whose frame the answer is read.
    """

    asked: Change | None = None
    picture: Callable[[Image.Image], Image.Image] | None = None
    family: str | None = None


UNCHANGED = Hypothesis()


def _deepstack(change: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> Hypothesis:
    def changed(asked: Asked) -> Asked:
        if asked.seen is None:
            return asked
        return replace(asked, seen=Seen(asked.seen.features, change(asked.seen.deepstack)))

    return Hypothesis(changed)


def _without(level: int) -> Hypothesis:
    return _deepstack(lambda d: tuple(torch.zeros_like(x) if i == level else x for i, x in enumerate(d)))


def _times(factor: float) -> Hypothesis:
    return _deepstack(lambda d: tuple(x * factor for x in d))


def _each_chunk_from_the_start(features: Tensor) -> Tensor:
    """[N, D] rows, of which every chunk of CHUNK begins with the first again."""
    return features[torch.arange(len(features)) % CHUNK]


def _smaller_first(image: Image.Image) -> Image.Image:
    """Three quarters of each side, as a client does to save bytes; the processor resizes what is left."""
    width, height = (max(1, side * 3 // 4) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


HYPOTHESES: dict[str, Hypothesis] = {
    "deepstack dropped": _times(0.0),
    "deepstack dropped at its first layer": _without(0),
    "deepstack dropped at its second layer": _without(1),
    "deepstack dropped at its third layer": _without(2),
    "deepstack times 2": _times(2.0),
    "deepstack times 4": _times(4.0),
    "deepstack times 8": _times(8.0),
    "deepstack one layer late": _deepstack(lambda d: (torch.zeros_like(d[0]), *d)),
    "deepstack one row off": _deepstack(lambda d: tuple(x.roll(1, 0) for x in d)),
    f"deepstack misaligned in chunks of {CHUNK}": _deepstack(lambda d: tuple(map(_each_chunk_from_the_start, d))),
    "1-D positions": Hypothesis(lambda a: replace(a, positions=torch.arange(len(a.input_ids)).expand(3, -1))),
    "M-RoPE rows lost": Hypothesis(lambda a: replace(a, positions=a.positions[:1].expand(3, -1))),
    "picture resized twice": Hypothesis(picture=_smaller_first),
    "read in pixels of the resized picture": Hypothesis(family="qwen2_5_vl"),
}


def of_family(family: str) -> dict[str, Hypothesis]:
    """The hypotheses a family can have. Args: family: of FAMILIES. Returns: name to change."""
    return {name: change for name, change in HYPOTHESES.items() if family != "qwen2_vl" or "deepstack" not in name}


def orders_of(family: str) -> dict[str, str]:
    """The orders a family can have. Args: family: of FAMILIES. Returns: of ORDERS."""
    return {} if family == "qwen2_vl" else ORDERS
