import math

import numpy as np
import pytest
import torch

from vlmlab.causes import CAUSES, NOT_SWITCHED
from vlmlab.demos import _last_place, micro_demo

NAMES = [cause.name for cause in CAUSES + NOT_SWITCHED]
LIVE = [
    "patch_embed", "position_precision", "vit_rotary", "vit_norm_eps", "vit_attention", "rms_norm", "residual_sum",
    "qk_norm", "deepstack_order", "router_weights", "expert_combine", "fp8",
]  # fmt: skip
# Farthest a way may lie from the exact value, over the largest exact value shown.
TOLERANCE = {"fp8": 1 / 16, "image_processor": 0.02}


@pytest.mark.parametrize("name", NAMES)
def test_every_cause_has_a_table(name):
    frame = micro_demo(name)
    assert list(frame.columns) == ["what", "hf", "sglang", "exact", "ulps"]
    assert 1 <= len(frame) <= 8
    assert frame["what"].is_unique
    numbers = frame[["hf", "sglang", "exact", "ulps"]].to_numpy()
    assert np.isfinite(numbers).all()
    assert ((frame["ulps"] == 0) == (frame["hf"] == frame["sglang"])).all()
    assert (frame["ulps"] != 0).any() == (frame.attrs["differ"] > 0)  # what differs is shown
    assert 0 <= frame.attrs["differ"] <= frame.attrs["elements"]


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_lie_near_the_exact_value(name):
    frame = micro_demo(name)
    largest = frame["exact"].abs().max()
    for way in ("hf", "sglang"):
        assert (frame[way] - frame["exact"]).abs().max() <= TOLERANCE.get(name, 0.01) * largest


@pytest.mark.parametrize("name", LIVE)
def test_known_live_causes_show_a_difference(name):
    assert micro_demo(name).attrs["differ"] > 0


@pytest.mark.parametrize("name", ["rms_norm", "patch_embed"])
def test_the_same_table_every_time(name):
    assert micro_demo(name).equals(micro_demo(name))


def test_unknown_cause():
    with pytest.raises(KeyError, match="no_such_cause"):
        micro_demo("no_such_cause")


def test_last_place_is_the_distance_of_neighbouring_bf16_values():
    for value in (1.0, 1.5, 0.75, 3.0, 250.0, 2.0**-20):
        above = torch.nextafter(torch.tensor(value).bfloat16(), torch.tensor(math.inf).bfloat16()).item()
        assert _last_place(torch.tensor([value], dtype=torch.float64)).item() == above - value
