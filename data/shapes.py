"""Pictures of coloured shapes, the questions one can ask about them, and the right answers.

draw_layout     where the shapes are                      (training, evaluation, reference)
render          a layout as pixels on a textured ground   (training, evaluation, reference)
*_question, *_answer                                      the four tasks in words
reference_picture, canvas                                 the two pictures the notebooks use

Units: a `Layout` is in pixels. Answers are integers in a frame of 0..1000 by 0..1000 over the picture, x before y.
Every random number comes from an explicit `torch.Generator`, drawn where the generator lives and used on `device`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

COLORS = ("red", "green", "blue", "yellow", "orange", "purple", "cyan", "black")
KINDS = ("rectangle", "circle")
MAX_SHAPES = 8
FRAME = 1000

PURE_RGB = (
    (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 0),
    (255, 165, 0), (128, 0, 128), (0, 255, 255), (0, 0, 0),
)  # fmt: skip
MUTED_RGB = (
    (214, 39, 40), (44, 170, 60), (50, 90, 220), (240, 215, 50),
    (245, 140, 30), (148, 70, 189), (60, 200, 215), (35, 35, 35),
)  # fmt: skip
REFERENCE_SEED = 34
FAR_AWAY = -1e6  # centre, in px, of a shape that is not in the picture


def send(tensor, device):
    """Copies a CPU tensor to a device without waiting for the work queued there (from pinned memory, if CUDA)."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class Shape:
    """One shape of one picture. box: (x1, y1, x2, y2) in the frame of 1000, floats."""

    color: str
    kind: str
    box: tuple

    @property
    def name(self):
        """For example "red rectangle"; unique within a picture."""
        return f"{self.color} {self.kind}"

    @property
    def center(self):
        """(x, y) in the frame of 1000, floats."""
        x1, y1, x2, y2 = self.box
        return (x1 + x2) / 2, (y1 + y2) / 2


@dataclass(frozen=True)
class Layout:
    """B pictures of one size, M places for shapes in each.

    height, width: px. color, kind: [B, M] int64, indices into COLORS and KINDS.
    box: [B, M, 4] float32, (centre x, centre y, half width, half height) in px. present: [B, M] bool.
    """

    height: int
    width: int
    color: torch.Tensor
    kind: torch.Tensor
    box: torch.Tensor
    present: torch.Tensor

    def __len__(self):
        return len(self.color)

    def to(self, device):
        """Returns: the same Layout with its tensors on `device`."""
        tensors = (send(t, device) for t in (self.color, self.kind, self.box, self.present))
        return Layout(self.height, self.width, *tensors)

    def shapes(self):
        """Returns: one list of `Shape` per picture, from top to bottom (by centre), as answers list them."""
        scale = FRAME / torch.tensor([self.width, self.height], dtype=torch.float32)
        center, half = self.box[..., :2].cpu() * scale, self.box[..., 2:].cpu() * scale
        boxes = torch.cat((center - half, center + half), -1).tolist()
        pictures = zip(self.color.tolist(), self.kind.tolist(), boxes, self.present.tolist(), strict=True)
        return [
            sorted(
                (Shape(COLORS[c], KINDS[k], tuple(b)) for c, k, b, here in zip(*picture, strict=True) if here),
                key=lambda shape: shape.center[1],
            )
            for picture in pictures
        ]


def draw_layout(batch, height, width, generator, fewest=1, most=MAX_SHAPES, one_kind=0.0):
    """Places `fewest` to `most` shapes per picture at random, none touching another, no name twice in a picture.

    Args: batch: number of pictures. height, width: px. generator: CPU torch.Generator. one_kind: share of the
        pictures, in 0..1, that hold only rectangles or only circles.
    Returns: Layout on the CPU. A shape for which 24 tries found no free place is left out, so a small picture
        may hold fewer than `fewest`; the first shape always fits.
    """
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    tries, rows = 24, torch.arange(batch)
    count = torch.randint(fewest, most + 1, (batch, 1), generator=generator)
    name = rand(batch, len(COLORS) * len(KINDS)).argsort(1)[:, :MAX_SHAPES]
    color, kind = name // len(KINDS), name % len(KINDS)
    if one_kind:
        alike = rand(batch, 1) < one_kind
        color = torch.where(alike, rand(batch, len(COLORS)).argsort(1)[:, :MAX_SHAPES], color)
        kind = torch.where(alike, kind[:, :1], kind)
    # Extent as a fraction of the side: from 7 % (at least 22 px) up to 50 % for a single shape, less for many.
    low = max(0.07, 22 / min(height, width))
    high = torch.clamp(0.5 * count**-0.4, min=1.2 * low)
    box = torch.full((batch, MAX_SHAPES, 4), FAR_AWAY)
    present = torch.zeros(batch, MAX_SHAPES, dtype=torch.bool)
    for i in range(MAX_SHAPES):
        extent = low * (high / low)[..., None] ** rand(batch, tries, 2)  # [B, tries, 2], log-uniform
        half = extent * torch.tensor([width, height]) / 2
        radius = extent[..., :1].expand_as(half) * min(height, width) / 2
        half = torch.where((kind[:, i] == 1)[:, None, None], radius, half)
        center = half + rand(batch, tries, 2) * (torch.tensor([width, height]) - 2 * half)
        # [B, tries, i, 2]: two boxes are apart if they are apart on either axis, by 2 px or more.
        gap = (center[:, :, None] - box[:, None, :i, :2]).abs() - half[:, :, None] - box[:, None, :i, 2:] - 2
        gap = torch.where(present[:, None, :i, None], gap, torch.ones(()))
        free = (gap.amax(-1) > 0).all(-1)  # [B, tries]
        chosen = free.float().argmax(1)
        present[:, i] = free.any(1) & (i < count[:, 0])
        placed = torch.cat((center, half), -1)[rows, chosen]
        box[:, i] = torch.where(present[:, i, None], placed, torch.tensor(FAR_AWAY))
    return Layout(height, width, color, kind, box, present)


def render(layout, generator, device="cpu", texture=None):
    """Draws a layout.

    Args: layout: Layout. generator: torch.Generator, on any device. device: where to compute.
        texture: function (batch, height, width, generator, device) -> (ground [B, 3, H, W], grain broadcastable to
        it); the grain is added on top of the shapes. Default: `training_texture`.
    Returns: [B, 3, H, W] float32 on `device`, in [0, 1], exact multiples of 1/255.
    """
    batch, height, width = len(layout), layout.height, layout.width
    layout = layout.to(device)
    ground, grain = (texture or training_texture)(batch, height, width, generator, device)
    # 40 % of the shapes have the textbook colour, the others lie anywhere between it and a muted one.
    rand = _uniform(generator, device)
    toward_muted = torch.where(rand(batch, MAX_SHAPES, 1) < 0.4, 0.0, rand(batch, MAX_SHAPES, 1))
    jitter = 0.04 * _normal(generator, device)(batch, MAX_SHAPES, 3) * (toward_muted > 0)
    if texture is plain_white:
        toward_muted, jitter = torch.zeros_like(toward_muted), torch.zeros_like(jitter)
    pure, muted = (send(torch.tensor(rgb) / 255, device)[layout.color] for rgb in (PURE_RGB, MUTED_RGB))
    rgb = (torch.lerp(pure, muted, toward_muted) + jitter).clamp(0, 1)  # [B, M, 3]
    cover = _coverage(layout)  # [B, M, H, W]
    # Shapes never overlap, so their covers add up to at most one and one product paints them all.
    paint = (rgb.transpose(1, 2) @ cover.flatten(2)).view(batch, 3, height, width)
    picture = ground * (1 - cover.sum(1, keepdim=True)) + paint + grain
    return (picture.clamp(0, 1) * 255).round() / 255


def _coverage(layout):
    """How much of each pixel each shape covers: [B, M, H, W] in [0, 1], with edges one pixel soft."""
    cx, cy, hx, hy = layout.box.unbind(-1)  # each [B, M]
    device = layout.box.device
    dx = (torch.arange(layout.width, device=device) + 0.5 - cx[..., None]).abs()  # [B, M, W]
    dy = (torch.arange(layout.height, device=device) + 0.5 - cy[..., None]).abs()  # [B, M, H]
    inside_x, inside_y = (hx[..., None] - dx + 0.5).clamp(0, 1), (hy[..., None] - dy + 0.5).clamp(0, 1)
    rectangle = inside_y[..., :, None] * inside_x[..., None, :]
    distance = (dy.square()[..., :, None] + dx.square()[..., None, :]).sqrt_()
    circle = (hx[..., None, None] + 0.5 - distance).clamp_(0, 1)
    is_circle = (layout.kind == 1)[..., None, None]
    return torch.where(is_circle, circle, rectangle) * layout.present[..., None, None]


def to_images(pictures):
    """Args: pictures: [B, 3, H, W] in [0, 1]. Returns: list of B PIL RGB images."""
    array = (pictures * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(picture) for picture in array]


# ---------------------------------------------------------------------------------------------------- grounds


def _uniform(generator, device):
    return lambda *shape: torch.rand(*shape, generator=generator, device=generator.device).to(device)


def _normal(generator, device):
    return lambda *shape: torch.randn(*shape, generator=generator, device=generator.device).to(device)


def plain_white(batch, height, width, generator, device):
    """White ground, textbook colours, no grain."""
    return torch.ones(batch, 3, height, width, device=device), torch.zeros((), device=device)


def training_texture(batch, height, width, generator, device):
    """The grounds of training: 20 % white, 15 % one flat tint, the others a random sum of nine patterns.

    Patterns: smooth noise, 1/f noise, soft stripes, hard stripes or checkers, a linear ramp, blocks, blobs, contour
    lines, coloured smooth noise. Two thirds of the pictures carry pixel grain.
    Returns: ground [B, 3, H, W], grain [B, 1 or 3, H, W].
    """
    rand, randn = _uniform(generator, device), _normal(generator, device)
    one = (batch, 1, 1, 1)

    # One choice for the whole batch, made on the CPU: reading it back from a GPU would wait for the GPU.
    chooser = generator
    if generator.device.type != "cpu":
        chooser = torch.Generator().manual_seed(generator.initial_seed())

    def choose(*options):
        return options[int(torch.randint(len(options), (), generator=chooser))]

    def noise(cells, channels=1, mode="bilinear"):
        coarse = randn(batch, channels, cells, max(1, round(cells * width / height)))
        corners = None if mode == "nearest" else False
        return F.interpolate(coarse, size=(height, width), mode=mode, align_corners=corners)

    def wave(angle, period):
        along = x * angle.cos() + y * angle.sin()
        return (along * (2 * math.pi / period) + 2 * math.pi * rand(*one)).sin()

    def hard(value):
        return (20 * value).clamp(-1, 1)

    def sometimes(probability, most):  # amplitude per picture, zero where the pattern is absent
        return (rand(*one) < probability) * most * rand(*one)

    x, y = torch.arange(width, device=device).view(1, 1, 1, -1), torch.arange(height, device=device).view(1, 1, -1, 1)
    angle, period = 2 * math.pi * rand(*one), 4 + 80 * rand(*one) ** 2
    first, second = wave(angle, period), wave(angle + math.pi / 2, period)
    squares = torch.where(rand(*one) < 0.5, hard(first), hard(first) * hard(second))
    smooth = noise(choose(3, 5, 8, 14, 24))
    fractal = sum(noise(cells) * 3 / cells for cells in (3, 6, 12, 24, 48))
    ramp = (x / width - 0.5) * angle.cos() + (y / height - 0.5) * angle.sin()
    field = noise(choose(4, 7, 12, 20))
    pattern = (
        sometimes(0.4, 0.10) * smooth
        + sometimes(0.4, 0.22) * fractal
        + sometimes(0.3, 0.12) * wave(2 * math.pi * rand(*one), 6 + 120 * rand(*one) ** 2)
        + sometimes(0.3, 0.20) * squares
        + sometimes(0.4, 0.50) * ramp
        + sometimes(0.3, 0.12) * noise(choose(6, 12, 20, 40), mode="nearest")
        + sometimes(0.3, 0.20) * hard(field - 0.7)
        + sometimes(0.3, 0.35) * (rand(*one) - 0.5).sign() * (1 - field.abs() * (4 + 40 * rand(*one))).clamp(min=0)
    )
    colored = sometimes(0.4, 0.06) * noise(choose(3, 8, 20), channels=3)
    kind = rand(*one)
    tint = 0.35 + 0.62 * rand(*one) ** 0.7 + 0.16 * (rand(batch, 3, 1, 1) - 0.5)
    ground = torch.where(kind < 0.35, tint, (tint + pattern + colored).clamp(0.12, 1))
    ground = torch.where(kind < 0.2, torch.ones((), device=device), ground)
    grain = (rand(*one) < 0.67) * 0.08 * rand(*one) * randn(batch, choose(1, 3), height, width)
    return ground, grain


def unseen_texture(batch, height, width, generator, device):
    """Grounds that training never uses: a radial gradient over a four-corner gradient, thin grey clutter (line
    segments, triangle and polygon outlines, crosses), speckle that grows with brightness, and salt and pepper.

    Shares no pattern code with `training_texture`. Returns: ground [B, 3, H, W], grain [B, 1, H, W].
    """
    rand, randn = _uniform(generator, device), _normal(generator, device)
    one = (batch, 1, 1, 1)
    u = torch.linspace(0, 1, width, device=device).view(1, 1, 1, -1)
    v = torch.linspace(0, 1, height, device=device).view(1, 1, -1, 1)
    corner = 0.45 + 0.5 * rand(4, *one) + 0.1 * (rand(4, batch, 3, 1, 1) - 0.5)
    ground = torch.lerp(torch.lerp(corner[0], corner[1], u), torch.lerp(corner[2], corner[3], u), v)
    radius = ((u - rand(*one)) ** 2 + (v - rand(*one)) ** 2).sqrt()
    ground = ground + 0.5 * (rand(*one) - 0.5) * radius
    clutter = torch.stack([_clutter(height, width, generator) for _ in range(batch)]).to(device)  # [B, 1, H, W]
    ground = (ground + 0.25 * (0.3 + 0.7 * rand(*one)) * clutter).clamp(0.15, 1)
    specks = rand(batch, 1, height, width)
    share = 0.003 * rand(*one)
    pepper = (specks > 1 - share).float() - (specks < share).float()
    grain = 0.06 * rand(*one) * ground.mean(1, keepdim=True) * randn(batch, 1, height, width) + 0.3 * pepper
    return ground, grain


def _clutter(height, width, generator):
    """[1, H, W] in [-1, 1], 0 where nothing is drawn: 20 to 60 thin figures, brighter or darker than the ground."""
    sheet = Image.new("L", (width, height), 128)
    pen = ImageDraw.Draw(sheet)
    number = lambda low, high: low + (high - low) * torch.rand((), generator=generator).item()  # noqa: E731
    for _ in range(int(number(20, 60))):
        x, y, reach, turn = number(0, width), number(0, height), number(6, 60), number(0, 2 * math.pi)
        corners = 2 + int(number(0, 4))  # 2: a line, 3: a triangle, 4: crossed lines, 5: a pentagon
        spokes = [turn + 2 * math.pi * i / corners for i in range(corners)]
        points = [(x + reach * math.cos(s), y + reach * math.sin(s)) for s in spokes]
        shade, thick = int(number(0, 256)), 1 + int(number(0, 3))
        if corners == 4:
            pen.line((points[0], points[2]), fill=shade, width=thick)
            pen.line((points[1], points[3]), fill=shade, width=thick)
        else:
            pen.line([*points, points[0]], fill=shade, width=thick)
    flat = torch.frombuffer(bytearray(sheet.tobytes()), dtype=torch.uint8).float()
    return ((flat - 128) / 128).view(1, height, width)


# ---------------------------------------------------------------------------------------------------- words

LIST_QUESTION = "List every shape with its color and center."
LONG_LIST_QUESTION = "List every shape with its color, center and bounding box."


def _units(*values):
    return tuple(min(FRAME - 1, max(0, round(value))) for value in values)  # three digits at most


def point_question(shape):
    """Asks for one point."""
    return f"Point at the center of the {shape.name}."


def point_answer(shape):
    """Its answer."""
    return "({}, {})".format(*_units(*shape.center))


def box_question(shape):
    """Asks for one box."""
    return f"Give the bounding box of the {shape.name}."


def box_answer(shape, family):
    """The family's own way of writing a box: marker tokens in Qwen2-VL, JSON in Qwen3-VL."""
    x1, y1, x2, y2 = _units(*shape.box)
    if family == "qwen2-vl":
        return f"<|box_start|>({x1},{y1}),({x2},{y2})<|box_end|>"
    return f'[{{"bbox_2d": [{x1}, {y1}, {x2}, {y2}], "label": "{shape.name}"}}]'


def list_answer(shapes):
    """Name and centre of every shape, in the order given."""
    return "; ".join(f"{shape.name} {point_answer(shape)}" for shape in shapes)


def long_list_answer(shapes):
    """Name, centre and box of every shape, in the order given."""
    return "; ".join("{} {} [{}, {}, {}, {}]".format(s.name, point_answer(s), *_units(*s.box)) for s in shapes)


def system_message(words, full_stop=True):
    """The first `words` words of "You are a helpful assistant. You are a helpful assistant. You are ..."."""
    sentence = ("You", "are", "a", "helpful", "assistant.")
    text = " ".join(sentence[i % len(sentence)] for i in range(words)).rstrip(".")
    return text + "." if full_stop else text


# ---------------------------------------------------------------------------------------------------- pictures


def reference_picture(height=672, width=840, seed=REFERENCE_SEED):
    """The textured picture of the notebooks: seven shapes, and practically no two patches alike.

    Args: height, width: px. seed: any int; the same seed gives the same picture.
    Returns: PIL RGB image, list of its `Shape`s from top to bottom (`list_answer` puts them in words).
    """
    generator = torch.Generator().manual_seed(seed)
    layout = draw_layout(1, height, width, generator, fewest=7, most=7)

    def texture(batch, height, width, generator, device):
        ground, _ = training_texture(batch, height, width, generator, device)
        return ground, 0.005 * torch.randn(batch, 3, height, width, generator=generator)  # one or two grey levels

    picture = render(layout, generator, texture=texture)
    return to_images(picture)[0], layout.shapes()[0]


def canvas():
    """A 1000 x 1000 white picture with the red rectangle (620, 180, 880, 360). Returns: PIL RGB image, its `Shape`s."""
    image = Image.new("RGB", (1000, 1000), "white")
    ImageDraw.Draw(image).rectangle((620, 180, 879, 359), fill="red")  # PIL draws the last pixel too
    return image, [Shape("red", "rectangle", (620.0, 180.0, 880.0, 360.0))]
