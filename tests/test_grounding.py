import dataclasses
import json
import math
import time

import numpy as np
import pytest
from PIL import Image

from data import shapes
from vlmlab.errors import VlmlabError
from vlmlab.grounding import (
    BOX_QUESTION,
    COLORS,
    FRAMES,
    KINDS,
    Outcome,
    Shape,
    box_iou,
    case_of,
    cases,
    in_words,
    judge,
    paired,
    point_in_box,
    read_box,
    read_point,
    shifts,
    summarise,
    to_pixels,
    wilson_interval,
)
from vlmlab.hookpoints import FAMILIES

SQUARE = ((100, 100), (20, 20, 60, 60), "red", "rectangle")
HOSTILE = {
    "empty": "",
    "prose": "The red rectangle is in the upper right corner.",
    "prose around a point": "The center is at (750, 270).",
    "a point and more": "(750, 270) or so",
    "two points": "(750, 270), (751, 270)",
    "two points in JSON": '[{"point_2d": [750, 270]}, {"point_2d": [751, 270]}]',
    "two points under one key": '{"point_2d": [750, 270], "point_2d": [751, 270]}',
    "a number short": "(750)",
    "a number too many": "(750, 270, 3)",
    "cut off": "(750, 270",
    "cut-off JSON": '[{"point_2d": [750, 270]',
    "NaN": "(nan, 270)",
    "NaN in JSON": '[{"point_2d": [NaN, 270]}]',
    "infinity in JSON": '[{"point_2d": [Infinity, 270]}]',
    "truth in JSON": '[{"point_2d": [true, 270]}]',
    "text in JSON": '[{"point_2d": ["750", 270]}]',
    "nothing in JSON": "[]",
    "other JSON": '[750, 270, {"a": null}]',
    "a bomb of lists": "[" * 9_000,
    "a closed bomb": "[" * 4_000 + "]" * 4_000,
    "a bomb of objects": '{"point_2d":' * 800,
    "code": "__import__('os').system('false')",
    "other digits": "(\u0667\u0665\u0660, \u0662\u0667\u0660)",
    "an interrupted number": "(7<|object_ref_start|>x<|object_ref_end|>50, 270)",
    "a megabyte of prose": "word " * 200_000,
    "a megabyte of digits": "(" + "7" * 1_000_000,
    "a megabyte of blanks": "(750, 270)" + " " * 1_000_000,
    "brackets": "(" * 9_999,
    "long digits, no end": "(" + "7" * 9_000,
    "many points, no end": "(1, 2);" * 1_400 + "(",
    "many blanks": "(1" + " " * 9_900 + "!",
    "surrogates": "\ud800(750, 270)",
    "no text": None,
}


def outcomes(hits, drift=3.0):
    case = case_of(*SQUARE)
    return [Outcome(case.hash, case.name, "", "ok", hit, (40.0 + drift, 40.0), drift) for hit in hits]


# ---------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize(("size", "seed"), [((1000, 1000), 0), ((200, 300), 7)])
def test_the_first_case_is_the_red_rectangle_on_white(size, seed):
    case = cases(1, size, seed)[0]
    pixels = np.array(case.image)
    assert (case.question, case.box) == ("Point at the center of the red rectangle.", (620, 180, 880, 360))
    assert pixels.shape == (1000, 1000, 3)
    assert (pixels[180:360, 620:880] == (255, 0, 0)).all()
    pixels[180:360, 620:880] = 255
    assert (pixels == 255).all()
    assert bytes(case.image.tobytes()) == shapes.canvas()[0].tobytes()


def test_colours_kinds_and_questions_are_those_of_the_training_pictures():
    assert (COLORS, KINDS) == (shapes.COLORS, shapes.KINDS)
    for color, rgb in zip(COLORS, shapes.PURE_RGB, strict=True):
        assert case_of((50, 50), (10, 10, 40, 40), color, "circle").image.getpixel((25, 25)) == rgb
    shape = shapes.Shape("blue", "circle", (0, 0, 1, 1))
    (point,) = [case_of((9, 9), (0, 0, 5, 5), "blue", "circle").question]
    box = case_of((9, 9), (0, 0, 5, 5), "blue", "circle", question=BOX_QUESTION)
    assert (point, box.question) == (shapes.point_question(shape), shapes.box_question(shape))
    assert box.asks_for_box


def test_every_case_shows_its_target_alone_under_its_name_and_in_full():
    for case in cases(60, (300, 200))[1:]:
        x1, y1, x2, y2 = case.box
        assert min(x2 - x1, y2 - y1) >= 21 and x2 <= 300 and y2 <= 200 and case.image.size == (300, 200)
        assert case.name in case.question
        color, kind = case.name.split()
        rgb = shapes.PURE_RGB[COLORS.index(color)]
        there = (np.array(case.image)[y1:y2, x1:x2] == rgb).all(-1)
        area = 1.0 if kind == "rectangle" else math.pi / 4
        assert there.mean() == pytest.approx(area, abs=0.04)
        assert there.any(0).all() and there.any(1).all()  # it reaches all four edges


def test_cases_are_seeded_prefixes_and_include_plain_and_textured_grounds():
    few, many, other = cases(5, (200, 200)), cases(30, (200, 200)), cases(5, (200, 200), seed=1)
    assert [c.hash for c in few] == [c.hash for c in many[:5]]
    assert len({c.hash for c in many}) == 30
    assert {c.hash for c in few[1:]}.isdisjoint(c.hash for c in other)
    white = [(np.array(c.image) == 255).all(-1).mean() for c in many]
    assert sum(share > 0.2 for share in white) >= 8 and sum(share == 0 for share in white) >= 8


def test_extreme_shapes_of_picture_work():
    for size in ((44, 44), (44, 2000), (3000, 60)):
        assert all(case.image.size == size for case in cases(12, size)[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": (20, 20, 20, 60)}, "an area inside the 100 x 100 picture, got the box \\(20, 20, 20, 60\\)"),
        ({"box": (60, 20, 20, 60)}, "an area inside"),
        ({"box": (20, 20, 101, 60)}, "inside the 100 x 100 picture"),
        ({"box": (-1, 20, 60, 60)}, "inside the 100 x 100 picture"),
        ({"box": (20.5, 20, 60, 60)}, "four whole numbers"),
        ({"box": (20, 20, math.nan, 60)}, "four whole numbers"),
        ({"box": (20, 20)}, "four whole numbers"),
        ({"size": (0, 100)}, "at least 1 px"),
        ({"size": (10**6, 10**6)}, "at most 100000000 pixels"),
        ({"color": "pink"}, "got 'pink rectangle'"),
        ({"kind": "star"}, "got 'red star'"),
        ({"kind": "circle", "box": (20, 20, 60, 50)}, "square box for a circle, got 40 x 30"),
        ({"others": [Shape("red", "rectangle", (70, 70, 90, 90))]}, "expected one red rectangle"),
        ({"others": [Shape("blue", "rectangle", (59, 59, 90, 90))]}, "overlaps its box"),
        ({"ground": Image.new("RGB", (100, 99))}, "got 100 x 99"),
    ],
)
def test_a_case_that_has_no_clear_answer_is_refused(change, message):
    arguments = dict(zip(("size", "box", "color", "kind"), SQUARE, strict=True))
    assert case_of(**arguments).name == "red rectangle"
    with pytest.raises(VlmlabError, match=message):
        case_of(**arguments | change)


@pytest.mark.parametrize("arguments", [{"n": 0}, {"n": 2, "seed": -1}, {"n": 2, "size": (43, 100)}])
def test_no_cases_are_an_error(arguments):
    with pytest.raises(VlmlabError, match="expected"):
        cases(**arguments)


# ---------------------------------------------------------------------------------------------------- reading answers


@pytest.mark.parametrize(
    "answer",
    [
        "(750, 270)",
        " (750,270)\n",
        "(750, 270)<|im_end|>",
        "(750, 270); (750, 270)",
        "<point>750 270</point>",
        "<point>750, 270</point>",
        "<point>(750, 270)</point>",
        '[{"point_2d": [750, 270]}]',
        '[\n\t{"point_2d": [750.0, 270], "label": "red (1, 2) rectangle"}\n]',
        '{"label": "x", "point_2d": [750, 270]}',
        '```json\n[{"point_2d": [750, 270], "label": "red rectangle"}]\n```',
        "```\n(750, 270)\n```",
    ],
)
@pytest.mark.parametrize("family", FRAMES)
def test_a_point_is_read_in_every_form(answer, family):
    assert read_point(answer, family, (1000, 1000)) == read_point("(750, 270)", "qwen2_vl")
    assert read_point(answer, family, (1000, 1000)).values == (750, 270)


@pytest.mark.parametrize(
    "answer",
    [
        "<|box_start|>(620,180),(880,360)<|box_end|>",
        "<|object_ref_start|>box 7<|object_ref_end|><|box_start|>(620,180),(880,360)<|box_end|><|im_end|>",
        "(620, 180), (880, 360)",
        '[{"bbox_2d": [620, 180, 880, 360], "label": "red rectangle"}]',
        '```json\n[\n{"bbox_2d": [620, 180, 880, 360], "label": "red rectangle"}\n]\n```',
    ],
)
def test_a_box_is_read_in_every_form(answer):
    assert read_box(answer, "qwen3_vl") == read_box("(620, 180), (880, 360)", "qwen2_vl")
    assert read_box(answer, "qwen3_vl").values == (620, 180, 880, 360)
    assert read_point(answer, "qwen3_vl").status == "unparsable"


def test_the_answers_taught_to_the_embedded_checkpoints_are_read():
    shape = shapes.Shape("red", "rectangle", (620.0, 180.0, 880.0, 360.0))
    assert read_point(shapes.point_answer(shape), "qwen3_vl").values == (750, 270)
    for written, family in (("qwen2-vl", "qwen2_vl"), ("qwen3-vl", "qwen3_vl")):
        assert read_box(shapes.box_answer(shape, written), family).values == shape.box


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_neither_point_nor_box_is_unparsable_and_quickly_so(name):
    began = time.process_time()
    for reading in (read_point(HOSTILE[name], "qwen3_vl"), read_box(HOSTILE[name], "qwen3_vl")):
        assert (reading.status, reading.values) == ("unparsable", None)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    "answer",
    [
        "(-1, 270)",
        "(1000.5, 270)",
        "(750, 1001)",
        "(" + "9" * 5_000 + ", 270)",
        '[{"point_2d": [1e999, 270]}]',
        '[{"point_2d": [' + "9" * 5_000 + ", -270]}]",
    ],
)
def test_a_point_beside_the_frame_is_out_of_range_and_not_clipped(answer):
    assert read_point("(1000, 0)", "qwen2_vl").values == (1000, 0)
    reading = read_point(answer, "qwen2_vl")
    assert (reading.status, reading.values) == ("out_of_range", None)


@pytest.mark.parametrize("answer", ["(880, 180), (620, 360)", "(620, 360), (880, 180)", "(620, 180), (620, 360)"])
def test_a_box_without_an_area_is_no_box(answer):
    assert read_box(answer, "qwen2_vl").status == "unparsable"


def test_the_frame_of_pixels_is_the_resized_picture():
    assert read_point("(1200, 500)", "qwen2_5_vl", (1288, 644)).status == "ok"
    assert read_point("(1200, 645)", "qwen2_5_vl", (1288, 644)).status == "out_of_range"
    assert to_pixels((644, 161), "qwen2_5_vl", (2000, 400), (1288, 644)) == (1000, 100)
    assert to_pixels((500, 250, 1000, 1000), "qwen3_vl", (2000, 400)) == (1000, 100, 2000, 400)
    with pytest.raises(VlmlabError, match="resized picture's size for qwen2_5_vl"):
        read_point("(1200, 500)", "qwen2_5_vl")


def test_every_family_of_the_package_has_a_frame_and_another_is_refused():
    assert set(FAMILIES) <= set(FRAMES)
    with pytest.raises(VlmlabError, match="got 'llava'"):
        read_point("(1, 2)", "llava")


# ---------------------------------------------------------------------------------------------------- judging


def test_the_margin_decides_a_hit():
    box = (620, 180, 880, 360)
    assert point_in_box((940, 420), box) and not point_in_box((940.5, 420), box)
    assert not point_in_box((940, 420), box, margin=0) and point_in_box((620, 360), box, margin=0)
    for margin in (-1, math.nan, math.inf):
        with pytest.raises(VlmlabError, match="margin"):
            point_in_box((0, 0), box, margin)


def test_iou_of_known_boxes():
    assert box_iou((0, 0, 2, 2), (0, 0, 2, 2)) == 1
    assert box_iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7, abs=1e-15)
    assert box_iou((0, 0, 2, 2), (2, 0, 4, 2)) == 0
    with pytest.raises(VlmlabError, match="area"):
        box_iou((0, 0, 2, 2), (1, 1, 1, 3))


def test_judging_measures_in_pixels_of_the_original_picture():
    case = case_of((2000, 1000), (1000, 400, 1200, 600), "red", "rectangle")
    right, beside, far = (judge(case, answer, "qwen2_vl") for answer in ("(550, 500)", "(565, 540)", "(100, 500)"))
    assert (right.hit, right.point, right.drift_px) == (True, (1100, 500), 0)
    assert (beside.hit, beside.drift_px) == (True, 50)
    assert (far.hit, far.drift_px, far.status) == (False, 900, "ok")
    for answer, status in (("no", "unparsable"), ("(1001, 0)", "out_of_range")):
        missed = judge(case, answer, "qwen2_vl")
        assert (missed.hit, missed.status, missed.point, missed.drift_px) == (False, status, None, None)


def test_a_box_is_judged_by_its_overlap():
    case = case_of((1000, 1000), (100, 100, 300, 300), "red", "rectangle", question=BOX_QUESTION)
    half = judge(case, "(100, 100), (300, 200)", "qwen2_vl")
    assert (half.hit, half.iou, half.point, half.drift_px) == (True, 0.5, (200, 150), 50)
    assert not judge(case, "(100, 100), (300, 199)", "qwen2_vl").hit
    assert judge(case, "(200, 200)", "qwen2_vl").status == "unparsable"


def test_wilson_interval_of_known_counts():
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=5e-5)
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, table I
    assert wilson_interval(0, 20) == (0.0, pytest.approx(0.1611, abs=5e-5))
    assert wilson_interval(20, 20) == (pytest.approx(0.8389, abs=5e-5), 1.0)
    with pytest.raises(VlmlabError, match="got 3 of 2"):
        wilson_interval(3, 2)


def test_unreadable_answers_are_misses_of_the_condition():
    case = case_of((1000, 1000), (620, 180, 880, 360), "red", "rectangle")
    answers = ["(750, 270)", "(750, 280)", "(750, 670)", "no", "(750, 2700)"]
    condition = summarise([judge(case, answer, "qwen3_vl") for answer in answers], "rmsnorm", "hybrid")
    found = json.loads(json.dumps(dataclasses.asdict(condition)))
    assert found.pop("ci95") == pytest.approx(wilson_interval(2, 5))
    assert found == {
        "name": "rmsnorm",
        "engine": "hybrid",
        "n": 5,
        "hit_rate": 0.4,
        "drift_px": {"median": 10.0, "p90": 322.0, "max": 400.0},
        "unparsable": 1,
        "out_of_range": 1,
    }


def test_without_a_readable_answer_there_is_no_drift_and_without_answers_no_condition():
    unread = judge(case_of(*SQUARE), "no", "qwen2_vl")
    assert dataclasses.astuple(summarise([unread], "a", "hf").drift_px) == (None, None, None)
    with pytest.raises(VlmlabError, match="condition 'a', got none"):
        summarise([], "a", "hf")


def test_paired_counts_shifts_and_tests_the_discordant_pairs():
    baseline = outcomes([True] * 8 + [False] * 2, drift=3.0)
    other = outcomes([True] * 2 + [False] * 6 + [True, False], drift=7.0)
    pair = paired(baseline, other)
    assert (pair.both, pair.only_baseline, pair.only_other, pair.neither) == (2, 6, 1, 1)
    assert pair.p_value == 2 * (1 + 7) / 2**7
    assert pair.shift_px == (4.0,) * 10
    assert paired(baseline, baseline).p_value == 1.0 and set(paired(baseline, baseline).shift_px) == {0.0}
    assert paired(outcomes([True] * 3000), outcomes([False] * 3000)).p_value == 0.0  # 2 ** -2999 is no float


def test_a_case_without_a_point_has_no_shift():
    case = case_of(*SQUARE)
    assert paired([judge(case, "no", "qwen2_vl")], [judge(case, "(1, 1)", "qwen2_vl")]).shift_px == (None,)


def test_only_the_same_cases_are_paired():
    one = case_of(*SQUARE)
    others = {
        "box": case_of((100, 100), (21, 20, 60, 60), "red", "rectangle"),
        "picture": case_of(*SQUARE, others=[Shape("blue", "circle", (70, 70, 90, 90))]),
        "question": case_of(*SQUARE, question=BOX_QUESTION),
    }
    baseline = [judge(one, "(400, 400)", "qwen2_vl")]
    assert paired(baseline, [judge(case_of(*SQUARE), "(400, 400)", "qwen2_vl")]).both == 1
    for other in others.values():
        with pytest.raises(VlmlabError, match="same cases in the same order"):
            paired(baseline, [judge(other, "(400, 400)", "qwen2_vl")])
    for short in ([], baseline * 2):
        with pytest.raises(VlmlabError, match=f"got 1 and {len(short)}"):
            paired(baseline, short)
    with pytest.raises(VlmlabError, match="got 0 and 0"):
        paired([], [])


# ---------------------------------------------------------------------------------------------------- shifts


def test_shifts_are_in_thousandths_of_the_sides_and_say_what_is_far():
    posed = [case_of((200, 100), (20 + i, 20, 60 + i, 60), "red", "rectangle") for i in range(4)]
    baseline = [judge(case, "(400, 400)", "qwen3_vl") for case in posed]
    answers = ["(400, 400)", "(403, 404)", "(400, 685)", "nowhere"]
    other = [judge(case, answer, "qwen3_vl") for case, answer in zip(posed, answers, strict=True)]
    found = shifts("late", baseline, other, posed)
    assert (found.n, found.same, found.lost, found.far, found.first) == (4, 1, 1, 1, (0.0, 0.0))
    assert (found.median, found.largest) == (pytest.approx(5.0), pytest.approx(285.0))
    assert found.verdict == "can: 1 of 4" and found.ci95 == wilson_interval(1, 4)
    still = shifts("order", baseline, baseline, posed)
    assert still.same == 4 and still.verdict == f"did not: 0 of 4, at most {wilson_interval(0, 4)[1]:.1%}"
    assert json.loads(json.dumps(dataclasses.asdict(still)))["largest"] == 0.0


def test_without_a_point_of_the_baseline_nothing_shifts():
    case = case_of(*SQUARE)
    none, some = judge(case, "no", "qwen2_vl"), judge(case, "(1, 1)", "qwen2_vl")
    with pytest.raises(VlmlabError, match="no evidence"):
        shifts("a", [none], [some], [case])
    lost = shifts("a", [some], [none], [case])
    assert (lost.lost, lost.median, lost.first) == (1, None, None)
    with pytest.raises(VlmlabError, match="got 0 and 0"):
        shifts("a", [], [], [])


def test_the_answer_names_what_can_and_what_cannot():
    posed = [case_of((1000, 1000), (620, 180, 880, 360), "red", "rectangle")]
    baseline, near, far = ([judge(posed[0], a, "qwen3_vl")] for a in ("(750, 275)", "(752, 275)", "(807, 560)"))
    order, dropped = shifts("(h + d) + r", baseline, near, posed), shifts("dropped", baseline, far, posed)
    said = in_words([order], [dropped, order])
    assert said.startswith("No order of addition moved one of 1 points by 285") and "the most was 2.0" in said
    assert "these did: dropped (1); these did not: (h + d) + r." in said
    said = in_words([dropped], [])
    assert (
        said.startswith("Orders that can move a point by 285 thousandths of the picture's side: dropped;")
        and "these did: none; these did not: none." in said
    )
    with pytest.raises(VlmlabError, match="no evidence"):
        in_words([], [dropped])
