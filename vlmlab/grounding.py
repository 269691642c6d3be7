"""Does a change of arithmetic move the answer? Pictures with a known target, answers read strictly, and the judgement.

cases, case_of          pictures of coloured shapes, each with a question about one of them and its box
read_point, read_box    an answer as coordinates: ok, unparsable or out_of_range; never a guess, never clipped
to_pixels               coordinates of a family's frame in pixels of the picture
point_in_box, box_iou   a hit, and the overlap of two boxes
judge                   case and answer to Outcome
summarise               Outcomes to Condition: hit rate with its interval, drift
paired                  two conditions of the same cases: who moved, and McNemar's test
in_words                which conditions can move a point as far as was reported
shifts                  how far a condition moves the points, and whether it can move one as far as was reported

A size is (width, height) in px, a point (x, y), a box (x1, y1, x2, y2) whose last pixel is x2 - 1, y2 - 1.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from PIL import Image, ImageDraw

from vlmlab.errors import VlmlabError
from vlmlab.inputs import MAX_PIXELS

Coordinates = tuple[float, ...]
Size = tuple[int, int]
Box = tuple[int, int, int, int]

# PIL draws each name in the colour of the embedded checkpoints' training pictures.
COLORS = ("red", "green", "blue", "yellow", "orange", "purple", "cyan", "black")
KINDS = ("rectangle", "circle")
POINT_QUESTION = "Point at the center of the {name}."
BOX_QUESTION = "Give the bounding box of the {name}."

MOST_SHAPES = 8
SMALLEST_SHAPE = 22  # px
SMALLEST_SIDE = 2 * SMALLEST_SHAPE

# Side of the frame a family answers in; None: pixels of the resized picture. Source: Qwen2-VL, arXiv 2409.12191;
# Qwen2.5-VL, arXiv 2502.13923; Qwen3-VL: github.com/QwenLM/Qwen3-VL, cookbooks/2d_grounding.ipynb.
FRAMES = {"qwen2_vl": 1000, "qwen2_5_vl": None, "qwen3_vl": 1000, "qwen3_vl_moe": 1000}

OK, UNPARSABLE, OUT_OF_RANGE = "ok", "unparsable", "out_of_range"
LONGEST_ANSWER = 10_000  # characters; one point or box takes fewer than a hundred
MARGIN = 60.0  # px
# What the other deepstack order is reported to have done to the first case in FP8: the answer at (807, 555), not (750,
# 275). Source: github.com/sgl-project/sglang/pull/34690
REPORTED = 285.0
BOX_HIT = 0.5  # IoU. Source: Everingham et al. 2010, "The PASCAL Visual Object Classes (VOC) Challenge", IJCV 88


# ---------------------------------------------------------------------------------------------------- pictures


@dataclass(frozen=True)
class Shape:
    """One shape of a picture. color: of COLORS. kind: of KINDS. box: px."""

    color: str
    kind: str
    box: Box

    @property
    def name(self) -> str:
        """For example "red rectangle"; what a question calls it."""
        return f"{self.color} {self.kind}"


@dataclass(frozen=True)
class Case:
    """One question with a known answer. image: RGB picture. question. box: of the target, px. name: of the target."""

    image: Image.Image = field(repr=False)
    question: str
    box: Box
    name: str

    @property
    def asks_for_box(self) -> bool:
        """Whether the answer is to be a box: the question speaks of a bounding box."""
        return "bounding box" in self.question.lower()

    @property
    def hash(self) -> str:
        """sha256 of picture, question and box."""
        digest = hashlib.sha256(repr((self.image.size, self.image.mode, self.question, self.box)).encode())
        digest.update(self.image.tobytes())
        return digest.hexdigest()


def case_of(
    size: Size,
    box: Box,
    color: str,
    kind: str,
    others: Sequence[Shape] = (),
    ground: Image.Image | None = None,
    question: str = POINT_QUESTION,
) -> Case:
    """One case of your own.

    Args: size: of the picture, px. box, color, kind: of the target. others: distractors, painted in order. ground:
    picture of that size to paint on, None for white. question: with "{name}" where the target's name goes.
    Returns: Case. Raises: VlmlabError: a shape has no area or leaves the picture, a circle's box is no square, the
    target's name fits two shapes, or a distractor overlaps the target's box.
    """
    _check_size(size, 1)
    target = Shape(color, kind, box)
    for shape in (*others, target):
        _check_shape(shape, size)
    for other in others:
        if other.name == target.name:
            raise VlmlabError(f"expected one {target.name} in the picture, got a second one at {other.box}")
        if not _apart(other.box, box, 0):
            raise VlmlabError(f"expected distractors beside the target, got a {other.name} that overlaps its box {box}")
    if ground is not None and ground.size != tuple(size):
        raise VlmlabError(f"expected a ground of {size[0]} x {size[1]} px, got {ground.width} x {ground.height}")
    image = Image.new("RGB", size, "white") if ground is None else ground.convert("RGB")
    pen = ImageDraw.Draw(image)
    for shape in (*others, target):
        x1, y1, x2, y2 = shape.box
        draw = pen.ellipse if shape.kind == "circle" else pen.rectangle
        draw((x1, y1, x2 - 1, y2 - 1), fill=shape.color)
    return Case(image, question.replace("{name}", target.name), box, target.name)


def cases(n: int, size: Size = (1000, 1000), seed: int = 0, question: str = POINT_QUESTION) -> list[Case]:
    """Pictures of one target among up to seven distractors, on white or on a textured ground, half each.

    The first is always 1000 x 1000, white, with the red rectangle (620, 180, 880, 360). Any other one depends on size,
    seed and its place alone. All pictures are in memory, 4 bytes a pixel.

    Args: n: how many. size: of all but the first, px. seed: 0 or more. question: POINT_QUESTION, BOX_QUESTION or alike.
    Returns: n Cases. Raises: VlmlabError: n or seed is too small, or the size is no picture's.
    """
    if n < 1 or seed < 0:
        raise VlmlabError(f"expected at least one case and a seed of at least 0, got {n} cases and seed {seed}")
    _check_size(size, SMALLEST_SIDE)
    first = case_of((1000, 1000), (620, 180, 880, 360), "red", "rectangle", question=question)
    return [first, *(_draw_case(np.random.default_rng([seed, i]), size, question) for i in range(1, n))]


def _draw_case(random: np.random.Generator, size: Size, question: str) -> Case:
    names = [(color, kind) for color in COLORS for kind in KINDS]
    chosen = [names[i] for i in random.permutation(len(names))[: random.integers(1, MOST_SHAPES + 1)]]
    shapes: list[Shape] = []
    for color, kind in chosen:
        tries = (_draw_box(random, size, kind, len(chosen)) for _ in range(24))
        box = next((b for b in tries if all(_apart(b, shape.box, 2) for shape in shapes)), None)
        if box is not None:
            shapes.append(Shape(color, kind, box))
    target, *others = shapes
    ground = _textured(random, size) if random.random() < 0.5 else None
    return case_of(size, target.box, target.color, target.kind, others, ground, question)


def _draw_box(random: np.random.Generator, size: Size, kind: str, count: int) -> Box:
    """Sides log-uniform, from 7 % of the picture's (at least SMALLEST_SHAPE) to 50 %, less where many are to fit."""
    low = max(0.07, SMALLEST_SHAPE / min(size))
    high = max(0.5 * count**-0.4, 1.2 * low)
    share = low * (high / low) ** random.random(2)
    width, height = (round(s * side) for s, side in zip(share, size, strict=True))
    if kind == "circle":
        width = height = round(share[0] * min(size))
    x, y = int(random.integers(0, size[0] - width + 1)), int(random.integers(0, size[1] - height + 1))
    return x, y, x + width, y + height


def _textured(random: np.random.Generator, size: Size) -> Image.Image:
    """Smooth noise around a pale tint, with grain."""
    cells = random.integers(3, 25)
    coarse = random.integers(0, 51, (cells, cells), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize(size, Image.Resampling.BILINEAR)
    grain = random.integers(0, random.integers(1, 11), (size[1], size[0]), dtype=np.uint8)
    grey = Image.fromarray(np.asarray(smooth) + grain)  # 0 to 59
    tint = random.integers(110, 171) + random.integers(0, 21, 3)
    return Image.merge("RGB", [grey.point([min(int(t) + v, 255) for v in range(256)]) for t in tint])


def _apart(a: Box, b: Box, gap: int) -> bool:
    return a[2] + gap <= b[0] or b[2] + gap <= a[0] or a[3] + gap <= b[1] or b[3] + gap <= a[1]


def _check_size(size: Size, smallest: int) -> None:
    if len(size) != 2 or not all(isinstance(side, int) and side >= smallest for side in size):
        raise VlmlabError(f"expected a size of two whole numbers of at least {smallest} px, got {size}")
    if size[0] * size[1] > MAX_PIXELS:
        raise VlmlabError(f"expected a picture of at most {MAX_PIXELS} pixels, got {size[0]} x {size[1]}")


def _check_shape(shape: Shape, size: Size) -> None:
    if shape.color not in COLORS or shape.kind not in KINDS:
        raise VlmlabError(f"expected one of {', '.join(COLORS)} and one of {', '.join(KINDS)}, got {shape.name!r}")
    if len(shape.box) != 4 or not all(isinstance(edge, int) for edge in shape.box):
        raise VlmlabError(f"expected a box of four whole numbers in px, got {shape.box}")
    x1, y1, x2, y2 = shape.box
    if not (0 <= x1 < x2 <= size[0] and 0 <= y1 < y2 <= size[1]):
        raise VlmlabError(
            f"expected a {shape.name} with an area inside the {size[0]} x {size[1]} picture, got the box {shape.box}"
        )
    if shape.kind == "circle" and x2 - x1 != y2 - y1:
        raise VlmlabError(f"expected a square box for a circle, got {x2 - x1} x {y2 - y1} px")


# ---------------------------------------------------------------------------------------------------- reading answers

_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?"
_PAIR = rf"\( ?{_NUMBER} ?, ?{_NUMBER} ?\)"
_CORNERS = f"{_PAIR} ?, ?{_PAIR}"
_TAGGED = rf"<point> ?(?:{_PAIR}|{_NUMBER}(?: ?, ?| ){_NUMBER}) ?</point>"
_POINT = f"(?:{_PAIR}|{_TAGGED})"
_BOX = rf"(?:<\|box_start\|> ?{_CORNERS} ?<\|box_end\|>|{_CORNERS})"


@dataclass(frozen=True)
class Reading:
    """What an answer says. status: "ok", "unparsable" or "out_of_range". values: in the family's frame if ok, or None.

    Attributes: values: (x, y) of a point, (x1, y1, x2, y2) of a box.
    """

    status: str
    values: Coordinates | None = None


def read_point(answer: str, family: str, resized_size: Size | None = None) -> Reading:
    """An answer that is one point and nothing else: "(750, 270)", "<point>750 270</point>" or JSON with "point_2d".

    May stand in a ``` fence. A point may be repeated; two different ones, or any word beside it, are unparsable.

    Args: answer: as decoded, with or without special tokens. family: of FRAMES. resized_size: px, for a family that
    answers in pixels of the resized picture. Returns: Reading. Raises: VlmlabError: family or its frame unknown.
    """
    return _read(answer, _POINT, "point_2d", 2, _frame(family, resized_size))


def read_box(answer: str, family: str, resized_size: Size | None = None) -> Reading:
    """An answer that is one box and nothing else: "<|box_start|>(x1,y1),(x2,y2)<|box_end|>" or JSON with "bbox_2d".

    The markers may be missing and a leading object reference present, as decoding leaves them. A box whose corners are
    not in order, or that has no area, is unparsable. Otherwise as read_point.
    """
    return _read(answer, _BOX, "bbox_2d", 4, _frame(family, resized_size))


def _frame(family: str, resized_size: Size | None) -> tuple[int, int]:
    """Width and height of the frame a family answers in."""
    if family not in FRAMES:
        raise VlmlabError(f"expected a family of {', '.join(FRAMES)}, got {family!r}")
    side = FRAMES[family]
    if side is not None:
        return side, side
    if resized_size is None:
        raise VlmlabError(f"expected the resized picture's size for {family}, which answers in its pixels, got None")
    _check_size(resized_size, 1)
    return resized_size


def _read(answer: str, pattern: str, key: str, count: int, frame: tuple[int, int]) -> Reading:
    if not isinstance(answer, str) or len(answer) > LONGEST_ANSWER:
        return Reading(UNPARSABLE)
    text = _unwrapped(answer)
    found = _json_items(text, key, count) if text[:1] in ("[", "{") else _text_items(text, pattern)
    if len(found) != 1:
        return Reading(UNPARSABLE)
    (values,) = found
    if count == 4 and not (values[0] < values[2] and values[1] < values[3]):
        return Reading(UNPARSABLE)
    if not all(0 <= value <= frame[i % 2] for i, value in enumerate(values)):
        return Reading(OUT_OF_RANGE)
    return Reading(OK, values)


def _unwrapped(answer: str) -> str:
    """The answer without its end marker, its fence and a leading object reference, every white space one blank."""
    text = " ".join(answer.split()).removesuffix("<|im_end|>").strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json").strip()
    if text.startswith("<|object_ref_start|>"):
        text = text.partition("<|object_ref_end|>")[2].strip()
    return text


def _text_items(text: str, pattern: str) -> set[Coordinates]:
    """The different items of a text of nothing but items. Linear: each begins with a bracket and no gap is elastic."""
    if not re.fullmatch(f"{pattern}(?: ?[,;]? ?{pattern})*", text):
        return set()
    return {tuple(map(float, re.findall(_NUMBER, item[0]))) for item in re.finditer(pattern, text)}


def _json_items(text: str, key: str, count: int) -> set[Coordinates]:
    try:
        parsed = json.loads(text, parse_int=float, parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return set()
    items = parsed if isinstance(parsed, list) else [parsed]
    found = [item.get(key) if isinstance(item, dict) else None for item in items]
    if not all(isinstance(v, list) and len(v) == count and all(type(x) is float for x in v) for v in found):
        return set()
    return {tuple(values) for values in found if values is not None}


def _refuse(constant: str) -> float:
    raise ValueError(constant)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice, with two values to choose from")
    return dict(pairs)


# ---------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Outcome:
    """One judged answer.

    Attributes: case: hash of the Case. name: of its target. answer: as given. status: of the Reading. hit: False unless
    ok. point: answered point, or centre of the answered box, px of the picture. drift_px: from there to the target's
    centre. iou: of the two boxes, if a box was asked for. The last three are None unless ok.
    """

    case: str
    name: str
    answer: str = field(repr=False)
    status: str
    hit: bool
    point: Coordinates | None = None
    drift_px: float | None = None
    iou: float | None = None


@dataclass(frozen=True)
class Drift:
    """Distances to the target's centre over the readable answers, px; each None where no answer was readable."""

    median: float | None
    p90: float | None
    max: float | None


@dataclass(frozen=True)
class Condition:
    """One way of computing, judged on n cases; `dataclasses.asdict` gives its JSON.

    Attributes: name: what was changed. engine. n: cases. hit_rate: in [0, 1]; unparsable and out-of-range answers are
    misses. ci95: Wilson interval of the hit rate. drift_px: Drift. unparsable, out_of_range: counts.
    """

    name: str
    engine: str
    n: int
    hit_rate: float
    ci95: tuple[float, float]
    drift_px: Drift
    unparsable: int
    out_of_range: int


@dataclass(frozen=True)
class Paired:
    """Two conditions of the same cases.

    Attributes: shift_px: per case, from the baseline's point to the other's, px; None where either has none. both,
    only_baseline, only_other, neither: cases hit. p_value: two-sided, of the two `only` counts under equal odds.
    """

    shift_px: tuple[float | None, ...]
    both: int
    only_baseline: int
    only_other: int
    neither: int
    p_value: float


def to_pixels(
    values: Coordinates, family: str, picture_size: Size, resized_size: Size | None = None
) -> tuple[float, ...]:
    """Coordinates of a family's frame in px of the picture.

    Args: values: x and y in turn, in the frame: a point or a box. family: of FRAMES. picture_size: of the original,
    px. resized_size: px, for a family that answers in pixels of the resized picture. Returns: as many floats, px.
    Raises: VlmlabError: family or its frame unknown.
    """
    frame = _frame(family, resized_size)
    return tuple(value * picture_size[i % 2] / frame[i % 2] for i, value in enumerate(values))


def point_in_box(point: Coordinates, box: Coordinates, margin: float = MARGIN) -> bool:
    """Whether a point lies in a box or at most `margin` px beside each of its edges.

    Args: point: px. box: px. margin: px. Raises: VlmlabError: the margin is negative or not finite.
    """
    if not 0 <= margin < math.inf:
        raise VlmlabError(f"expected a finite margin of at least 0 px, got {margin}")
    x, y = point
    return box[0] - margin <= x <= box[2] + margin and box[1] - margin <= y <= box[3] + margin


def box_iou(a: Coordinates, b: Coordinates) -> float:
    """Intersection over union of two boxes of one unit. Returns: in [0, 1]. Raises: VlmlabError: one has no area."""
    for box in (a, b):
        if not (box[0] < box[2] and box[1] < box[3]):
            raise VlmlabError(f"expected a box with an area, got {box}")
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = sum((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (a, b)) - width * height
    return width * height / union


def judge(case: Case, answer: str, family: str, resized_size: Size | None = None, margin: float = MARGIN) -> Outcome:
    """Whether an answer hits: a point inside the target's box, give or take the margin; a box with an IoU of BOX_HIT.

    Args: case. answer: of the model. family: of FRAMES. resized_size: as in read_point. margin: px, of a point.
    Returns: Outcome. Raises: VlmlabError: family or its frame unknown, or the margin is no length.
    """
    read = read_box if case.asks_for_box else read_point
    reading = read(answer, family, resized_size)
    if reading.values is None:
        return Outcome(case.hash, case.name, answer, reading.status, hit=False)
    values = to_pixels(reading.values, family, case.image.size, resized_size)
    point, iou = values, None
    if case.asks_for_box:
        point, iou = _center(values), box_iou(values, case.box)
    hit = point_in_box(point, case.box, margin) if iou is None else iou >= BOX_HIT
    return Outcome(case.hash, case.name, answer, OK, hit, point, math.dist(point, _center(case.box)), iou)


def _center(box: Coordinates) -> Coordinates:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def summarise(outcomes: Sequence[Outcome], name: str, engine: str) -> Condition:
    """Hit rate and drift of one condition.

    Args: outcomes: of judge. name, engine: of the condition. Returns: Condition; p90 interpolates linearly.
    Raises: VlmlabError: nothing was judged.
    """
    if not outcomes:
        raise VlmlabError(f"expected judged answers for the condition {name!r}, got none")
    hits, status = sum(o.hit for o in outcomes), [o.status for o in outcomes]
    drift = [o.drift_px for o in outcomes if o.drift_px is not None]
    return Condition(
        name,
        engine,
        len(outcomes),
        hits / len(outcomes),
        wilson_interval(hits, len(outcomes)),
        Drift(*np.quantile(drift, (0.5, 0.9, 1.0)).tolist()) if drift else Drift(None, None, None),
        status.count(UNPARSABLE),
        status.count(OUT_OF_RANGE),
    )


def wilson_interval(hits: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of a share; unlike the normal one it has a width at 0 and at 1.

    Args: hits: 0..n. n: at least 1. confidence: in (0, 1). Returns: low, high in [0, 1]. Raises: VlmlabError: no share.
    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22, p. 209.
    """
    if not 0 <= hits <= n or n < 1:
        raise VlmlabError(f"expected 0 to n hits of at least one case, got {hits} of {n}")
    z, share = NormalDist().inv_cdf((1 + confidence) / 2), hits / n
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
    return (low if hits else 0.0), (high if hits < n else 1.0)


def paired(baseline: Sequence[Outcome], other: Sequence[Outcome]) -> Paired:
    """The same cases under two conditions, case by case.

    Args: baseline, other: of judge, in the same order. Returns: Paired.
    Raises: VlmlabError: nothing to compare, or picture, question or box differ anywhere.
    Source: McNemar 1947, Psychometrika 12, p. 153; exact form: the two-sided binomial test of the discordant pairs.
    """
    if len(baseline) != len(other) or not baseline:
        raise VlmlabError(f"expected the same cases twice, at least one, got {len(baseline)} and {len(other)}")
    pairs = list(zip(baseline, other, strict=True))
    for i, (a, b) in enumerate(pairs):
        if a.case != b.case:
            raise VlmlabError(f"expected the same cases in the same order, got two different ones at place {i}")
    shift = tuple(math.dist(a.point, b.point) if a.point and b.point else None for a, b in pairs)
    hits = [(a.hit, b.hit) for a, b in pairs]
    only_baseline, only_other = hits.count((True, False)), hits.count((False, True))
    p_value = _mcnemar(only_baseline, only_other)
    return Paired(shift, hits.count((True, True)), only_baseline, only_other, hits.count((False, False)), p_value)


@dataclass(frozen=True)
class Shift:
    """How far a condition moves a baseline's points; JSON-ready. Lengths are in thousandths of the picture's sides.

    Attributes: name. n: cases that the baseline answered with a point. same: of them, with an equal point. lost:
    without a readable one. median, p90, largest: over all that are not lost, None without one. first: (x, y) of the
    first case, None if lost. far: cases moved by REPORTED or more. ci95: Wilson interval of far / n.
    """

    name: str
    n: int
    same: int
    lost: int
    median: float | None
    p90: float | None
    largest: float | None
    first: Coordinates | None
    far: int
    ci95: tuple[float, float]

    @property
    def verdict(self) -> str:
        """Whether it can produce a shift as large as the reported one, on these cases."""
        return f"can: {self.far} of {self.n}" if self.far else f"did not: 0 of {self.n}, at most {self.ci95[1]:.1%}"


def shifts(name: str, baseline: Sequence[Outcome], other: Sequence[Outcome], posed: Sequence[Case]) -> Shift:
    """How far a condition moves the points, on the same cases.

    Args: name: of the other condition. baseline, other: of judge. posed: the cases. Returns: Shift.
    Raises: VlmlabError: nothing to compare, or different cases.
    """
    paired(baseline, other)  # the same cases in the same order
    moves: list[Coordinates | None] = []
    for a, b, case in zip(baseline, other, posed, strict=True):
        if a.point is not None:
            sides = case.image.size
            move = (
                None
                if b.point is None
                else tuple(1000 * (q - p) / side for p, q, side in zip(a.point, b.point, sides, strict=True))
            )
            moves.append(move)
    if not moves:
        raise VlmlabError("no evidence: the baseline answered no case with a point")
    lengths = [math.hypot(*move) for move in moves if move is not None]
    far = sum(length >= REPORTED for length in lengths)
    same, lost, interval = lengths.count(0.0), moves.count(None), wilson_interval(far, len(moves))
    median, p90, largest = np.quantile(lengths, (0.5, 0.9, 1.0)).tolist() if lengths else (None, None, None)
    return Shift(name, len(moves), same, lost, median, p90, largest, moves[0], far, interval)


def in_words(orders: Sequence[Shift], others: Sequence[Shift]) -> str:
    """Which of the conditions can move a point by REPORTED, in three sentences at most.

    Args: orders: of adding deepstack features, without the baseline. others: everything else.
    Raises: VlmlabError: no order.
    """
    if not orders:
        raise VlmlabError("no evidence: expected at least one order beside the baseline, got none")
    far, can = f"{REPORTED:g} thousandths of the picture's side", [shift.name for shift in orders if shift.far]
    said = f"Orders that can move a point by {far}: {', '.join(can)}"
    if not can:
        said = f"No order of addition moved one of {orders[0].n} points by {far}"
    lengths = [shift.largest for shift in orders if shift.largest is not None]
    size = f"the most was {max(lengths):.1f}" if lengths else "no point was readable"
    rate = max(shift.ci95[1] for shift in orders)
    able = ", ".join(f"{shift.name} ({shift.far})" for shift in others if shift.far)
    unable = ", ".join(shift.name for shift in others if not shift.far)
    return (
        f"{said}; {size}, and with 95 % confidence fewer than {rate:.1%} of such points would be. "
        f"Of the other hypotheses, these did: {able or 'none'}; these did not: {unable or 'none'}."
    )


def _mcnemar(b: int, c: int) -> float:
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2 ** (b + c))
