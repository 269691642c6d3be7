"""Faults planted in a running Transformers model, as context managers that take the hook away again.

Used by the evaluation only: training never sees a fault.
"""

from contextlib import contextmanager

import torch


@contextmanager
def scaled_deepstack(witness, factors):
    """Multiplies the deepstack features of each level: 0 drops a level, 2 counts it twice."""

    def hook(module, args, output):
        for level, factor in enumerate(factors):
            output.deepstack_features[level] = output.deepstack_features[level] * factor
        return output

    handle = witness.visual.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def wrong_text_positions(witness, fault):
    """fault: "1-D" (time, height and width all count tokens), "rows swapped" (height for width), "width is time"."""
    seen = 0

    def hook(module, args):
        nonlocal seen
        x, positions = args[0], args[1].expand(3, -1, -1)
        length = positions.shape[-1]
        seen = length if length > 1 else seen + 1
        if fault == "1-D":
            positions = torch.arange(seen - length, seen, device=x.device).expand_as(positions)
        else:
            positions = positions[[0, 2, 1] if fault == "rows swapped" else [0, 1, 0]]
        return (x, positions, *args[2:])

    handle = witness.language.rotary_emb.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def swapped_vision_rotary(witness):
    """Height for width in the rotary positions of the vision blocks."""

    def hook(module, args):
        return (args[0], args[1].flip(-1), *args[2:])  # positions: [P, 2]

    handle = witness.visual.rotary_pos_emb.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def faults(witness):
    """Returns: {name: context manager factory}."""
    found = {
        name: lambda name=name: wrong_text_positions(witness, name) for name in ("1-D", "rows swapped", "width is time")
    }
    found["vision rotary swapped"] = lambda: swapped_vision_rotary(witness)
    levels = len(witness.arch.deepstack_layers)
    if levels:
        found["deepstack dropped"] = lambda: scaled_deepstack(witness, [0] * levels)
        found["deepstack counted twice"] = lambda: scaled_deepstack(witness, [2] * levels)
        for level in range(levels):
            factors = [0 if i == level else 1 for i in range(levels)]
            found[f"deepstack level {level} dropped"] = lambda factors=factors: scaled_deepstack(witness, factors)
    return found
