"""Every hypothesis changes what it says and nothing else; every order is the arithmetic of its name."""

import pytest
import torch
from PIL import Image

from vlmlab import hypotheses
from vlmlab.arithmetic import deepstack_sum, residual_sum
from vlmlab.floats import FORMATS, round_to
from vlmlab.hybrid import Seen
from vlmlab.hypotheses import HYPOTHESES, ORDERS, of_family, orders_of
from vlmlab.replay import Asked
from vlmlab.summation import add

BF16 = FORMATS["bf16"]


def asked():
    features = torch.arange(12.0).view(4, 3) + 1
    ids, positions = torch.arange(9), torch.stack((torch.arange(9), torch.arange(9) * 2, torch.arange(9) * 3))
    return Asked(ids, positions, None, None, Seen(features, (features, features * 10, features * 100)))


def test_deepstack_changes_are_exact_and_leave_the_rest():
    before = asked()
    d = before.seen.deepstack
    wanted = {
        "deepstack dropped": (d[0] * 0, d[1] * 0, d[2] * 0),
        "deepstack dropped at its second layer": (d[0], d[1] * 0, d[2]),
        "deepstack times 4": (d[0] * 4, d[1] * 4, d[2] * 4),
        "deepstack one layer late": (d[0] * 0, *d),
        "deepstack one row off": tuple(torch.cat((x[-1:], x[:-1])) for x in d),
    }
    for name, deepstack in wanted.items():
        after = HYPOTHESES[name].asked(before)
        assert all(torch.equal(a, b) for a, b in zip(after.seen.deepstack, deepstack, strict=True)), name
        assert torch.equal(after.seen.features, before.seen.features)
        assert torch.equal(after.positions, before.positions) and after.input_ids is before.input_ids


def test_position_changes_keep_the_picture():
    before = asked()
    assert HYPOTHESES["1-D positions"].asked(before).positions.tolist() == [list(range(9))] * 3
    assert HYPOTHESES["M-RoPE rows lost"].asked(before).positions.tolist() == [list(range(9))] * 3
    assert HYPOTHESES["1-D positions"].asked(before).seen is before.seen


def test_every_hypothesis_switches(monkeypatch):
    monkeypatch.setattr(hypotheses, "CHUNK", 3)  # the picture has four rows
    before = asked()
    for name, change in HYPOTHESES.items():
        if change.asked is None:
            assert change.picture or change.family, name
            continue
        after = change.asked(before)
        pairs = zip(after.seen.deepstack, before.seen.deepstack, strict=False)
        same = len(after.seen.deepstack) == 3 and all(torch.equal(a, b) for a, b in pairs)
        assert not (same and torch.equal(after.positions, before.positions)), name


def test_families_without_deepstack_have_no_such_hypothesis():
    assert not any("deepstack" in name for name in of_family("qwen2_vl")) and orders_of("qwen2_vl") == {}
    assert of_family("qwen3_vl_moe") == HYPOTHESES and orders_of("qwen3_vl_moe") == ORDERS


def test_every_chunk_begins_with_the_first_features_again(monkeypatch):
    monkeypatch.setattr(hypotheses, "CHUNK", 3)
    (name,) = (name for name in HYPOTHESES if "chunks" in name)
    before = asked()
    after = HYPOTHESES[name].asked(before).seen.deepstack
    assert torch.equal(after[1], before.seen.deepstack[1][[0, 1, 2, 0]])


def test_a_picture_resized_twice_has_lost_detail_before_the_processor():
    picture = Image.frombytes("RGB", (40, 80), torch.arange(9600).to(torch.uint8).numpy().tobytes())
    assert HYPOTHESES["picture resized twice"].picture(picture).size == (30, 60)


TREES = {"(h + r) + d": ((0, 1), 2), "(h + d) + r": ((0, 2), 1), "h + (r + d)": (0, (1, 2))}


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_an_order_is_the_arithmetic_of_its_name(name):
    generator = torch.Generator().manual_seed(0)
    h, r, d = (torch.randn(64, 32, generator=generator).bfloat16() for _ in range(3))
    rows = torch.ones(64, dtype=torch.bool)
    stream, pending = deepstack_sum(r, h, d, rows, ORDERS[name])
    stream, _ = residual_sum(stream, pending, "hf")
    parts = torch.stack((h, r, d), -1).double()
    wanted = add(TREES[name], parts, BF16) if name in TREES else round_to(parts.sum(-1), BF16)
    assert torch.equal(stream.double(), wanted)


def test_orders_differ_in_bf16_touch_image_rows_only_and_agree_in_float64():
    generator = torch.Generator().manual_seed(1)
    h, r, d = (torch.randn(8, 512, generator=generator).bfloat16() for _ in range(3))
    rows = torch.arange(8) % 2 == 0

    def total(way, dtype):
        stream, pending = deepstack_sum(r.to(dtype), h.to(dtype), d[rows].to(dtype), rows, way)
        return residual_sum(stream, pending, "hf")[0]

    found = {way: total(way, torch.bfloat16) for way in ORDERS.values()}
    for way, other in (("hf", "sglang"), ("hf", "residual_first"), ("sglang", "once")):
        assert not torch.equal(found[way][rows], found[other][rows])
        assert torch.equal(found[way][~rows], found[other][~rows])
    exact = [total(way, torch.float64) for way in ORDERS.values()]
    assert all(torch.allclose(one, exact[0], rtol=0, atol=1e-14) for one in exact)
