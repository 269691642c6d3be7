"""Measures a checkpoint on pictures it has never seen: greedy, bfloat16, plain Transformers.

    python -m data.evaluate data/checkpoints/qwen3-vl-tiny --n 256

Writes `evaluation.json` into the checkpoint's folder and `README.md`, the model card, from it and `training.json`.
All errors are in the frame of 1000; a picture's size is height x width in px.
"""

import argparse
import json
import math
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from data import shapes
from data.card import write_card
from data.faults import faults
from data.make_checkpoint import ARCHITECTURES
from data.train import HELD_OUT_GRIDS, describe_machine
from vlmlab.checkpoint import load_checkpoint
from vlmlab.inputs import reference_inputs

FIRST_PICTURE = 1_000_000_000  # seeds of evaluation pictures start here

NAME = "(?:{}) (?:{})".format("|".join(shapes.COLORS), "|".join(shapes.KINDS))
POINT = r"\((\d{1,3}), (\d{1,3})\)"
BOX = r"\[(\d{1,3}), (\d{1,3}), (\d{1,3}), (\d{1,3})\]"
LIST_ITEM = f"({NAME}) {POINT}"
LONG_LIST_ITEM = f"({NAME}) {POINT} {BOX}"


# ---------------------------------------------------------------------------------------------------- reading answers


def parse_point(answer):
    """Returns: (x, y), or None when the answer is anything but one point."""
    match = re.fullmatch(POINT, answer)
    return match and tuple(map(int, match.groups()))


def parse_box(answer, family, name):
    """Returns: (x1, y1, x2, y2), or None when the answer is not one box in the family's format."""
    if family == "qwen2-vl":
        match = re.fullmatch(r"<\|box_start\|>\((\d+),(\d+)\),\((\d+),(\d+)\)<\|box_end\|>", answer)
        return match and tuple(map(int, match.groups()))
    match = re.fullmatch(rf'\[\{{"bbox_2d": {BOX}, "label": "{name}"\}}\]', answer)
    return match and tuple(map(int, match.groups()))


def parse_list(answer, item=LIST_ITEM):
    """Returns: list of (name, numbers ...), or None when the answer is not a list of such items."""
    if not re.fullmatch(f"{item}(?:; {item})*", answer):
        return None
    return [(found[0], *map(int, found[1:])) for found in re.findall(item, answer)]


def overlap(a, b):
    """Intersection over union of two boxes (x1, y1, x2, y2)."""
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]))
    union = sum(max(0, x2 - x1) * max(0, y2 - y1) for x1, y1, x2, y2 in (a, b)) - width * height
    return width * height / union if union else 0.0


def quantile(values, share):
    """Returns: the value below which `share` of the values lie; None without values."""
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 2) if values else None


def share(flags):
    """Returns: the share of true values, in 0..1."""
    return round(sum(map(bool, flags)) / len(flags), 4)


# ---------------------------------------------------------------------------------------------------- asking


class Witness:
    """A checkpoint under questioning. family is read from its config."""

    def __init__(self, folder, device="cpu", dtype=torch.bfloat16):
        self.folder = folder
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.device = torch.device(device)
        model_type = self.model.config.model_type
        (self.family,) = (f for f, arch in ARCHITECTURES.items() if arch.model_type == model_type)
        self.arch = ARCHITECTURES[self.family]

    @property
    def visual(self):
        """The vision tower."""
        return self.model.model.visual

    @property
    def language(self):
        """The language model without its head."""
        return self.model.model.language_model

    def look(self, images):
        """Args: images: PIL images of one size. Returns: pixel_values and image_grid_thw, on the device."""
        return self.processor.image_processor(images=images, return_tensors="pt").to(self.device)

    def inputs(self, seen, questions):
        """Returns: keyword arguments of the model for one question per picture; all prompts must be equally long."""
        tokens = int(seen["image_grid_thw"][0].prod()) // self.arch.merge**2
        rows = []
        for question in questions:
            messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
            text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            text = text.replace("<|image_pad|>", "<|image_pad|>" * tokens)
            rows.append(self.processor.tokenizer(text, add_special_tokens=False).input_ids)
        return self._with_ids(torch.tensor(rows), seen)

    def _with_ids(self, ids, seen):
        ids = ids.to(self.device)
        is_image = (ids == self.model.config.image_token_id).int()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": is_image, **seen}

    def ask(self, seen, questions, longest):
        """Greedy answers. Args: seen: of `look`. longest: most new tokens. Returns: one string per picture."""
        return self._generate(self.inputs(seen, questions), longest)

    def answer(self, ids, seen, longest):
        """As `ask`, for prompts that are token ids already. Args: ids: [B, T] int64."""
        return self._generate(self._with_ids(ids, seen), longest)

    @torch.inference_mode()
    def _generate(self, inputs, longest):
        out = self.model.generate(**inputs, max_new_tokens=longest, do_sample=False)
        texts = self.processor.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :])
        # An answer without its end marker was cut off and has no format.
        return [text.split("<|im_end|>")[0] if "<|im_end|>" in text else text + "..." for text in texts]


def draw_pictures(arch, grid, count, texture=None, first=FIRST_PICTURE):
    """Args: grid: rows and columns of image tokens. Returns: PIL images, one list of Shape per image."""

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        layout = shapes.draw_layout(1, grid[0] * arch.cell, grid[1] * arch.cell, generator)
        return shapes.to_images(shapes.render(layout, generator, texture=texture))[0], layout.shapes()[0]

    with ThreadPoolExecutor() as pool:
        drawn = list(pool.map(draw, range(first, first + count)))
    return [image for image, _ in drawn], [picture for _, picture in drawn]


# ---------------------------------------------------------------------------------------------------- grounding


def measure_points(answers, targets):
    """Args: answers: strings. targets: the Shape asked for. Returns: dict of shares and errors."""
    points = [parse_point(answer) for answer in answers]
    errors = [math.dist(p, s.center) if p else float(shapes.FRAME) for p, s in zip(points, targets, strict=True)]
    return {
        "format": share(points),
        "error_median": quantile(errors, 0.5),
        "error_p90": quantile(errors, 0.9),
        "error_max": quantile(errors, 1.0),
        "error_above_20": share([e > 20 for e in errors]),
    }


def measure_lists(answers, pictures, item=LIST_ITEM):
    """Complete: every shape named exactly once and nothing else. Errors: of the centres of the shapes named."""
    parsed = [parse_list(answer, item) for answer in answers]
    complete, errors, overlaps = [], [], []
    for found, picture in zip(parsed, pictures, strict=True):
        truth = {shape.name: shape for shape in picture}
        complete.append(found and sorted(f[0] for f in found) == sorted(truth))
        for name, x, y, *box in found or ():
            if name in truth:
                errors.append(math.dist((x, y), truth[name].center))
                overlaps += [overlap(box, truth[name].box)] if box else []
    result = {
        "format": share(parsed),
        "complete": share(complete),
        "error_median": quantile(errors, 0.5),
        "error_p90": quantile(errors, 0.9),
    }
    return result | {"iou_median": quantile(overlaps, 0.5), "iou_p10": quantile(overlaps, 0.1)} if overlaps else result


def measure_boxes(answers, targets, family):
    """Args: answers: strings. targets: the Shape asked for. Returns: dict of shares and overlaps."""
    boxes = [parse_box(answer, family, shape.name) for answer, shape in zip(answers, targets, strict=True)]
    ious = [overlap(box, shape.box) if box else 0.0 for box, shape in zip(boxes, targets, strict=True)]
    return {"format": share(boxes), "iou_median": quantile(ious, 0.5), "iou_p10": quantile(ious, 0.1)}


def one_of_each(pictures):
    """Which shape of each picture is asked for: the first, the second, ... in turn."""
    return [picture[i % len(picture)] for i, picture in enumerate(pictures)]


def measure_grounding(witness, grid, count, texture=None, batch=256):
    """All four tasks on `count` new pictures of one size. Returns: dict, one entry per task."""
    answers, pictures = {"point": [], "list": [], "box": [], "long_list": []}, []
    for start in range(0, count, batch):
        images, drawn = draw_pictures(witness.arch, grid, min(batch, count - start), texture, FIRST_PICTURE + start)
        seen, targets = witness.look(images), one_of_each(drawn)
        answers["point"] += witness.ask(seen, [shapes.point_question(s) for s in targets], 16)
        answers["list"] += witness.ask(seen, [shapes.LIST_QUESTION] * len(images), 110)
        answers["box"] += witness.ask(seen, [shapes.box_question(s) for s in targets], 48)
        answers["long_list"] += witness.ask(seen, [shapes.LONG_LIST_QUESTION] * len(images), 270)
        pictures += drawn
    targets = one_of_each(pictures)
    many = [i for i, picture in enumerate(pictures) if len(picture) >= 6]
    tokens = [len(witness.processor.tokenizer(answers["long_list"][i]).input_ids) for i in many]
    return {
        "height": grid[0] * witness.arch.cell,
        "width": grid[1] * witness.arch.cell,
        "image_tokens": grid[0] * grid[1],
        "n": count,
        "point": measure_points(answers["point"], targets),
        "list": measure_lists(answers["list"], pictures),
        "box": measure_boxes(answers["box"], targets, witness.family),
        "long_list": measure_lists(answers["long_list"], pictures, LONG_LIST_ITEM)
        | {"shortest_with_six_shapes_tokens": min(tokens, default=None)},
        "example": {"truth": shapes.list_answer(pictures[0]), "answer": answers["list"][0]},
    }


def measure_canvas(witness):
    """One exact picture: the red box on white. Returns: truth, answer and error (None without a point)."""
    image, (box,) = shapes.canvas()
    (answer,) = witness.ask(witness.look([image]), [shapes.point_question(box)], 16)
    point = parse_point(answer)
    return {"truth": shapes.point_answer(box), "answer": answer, "error": point and math.dist(point, box.center)}


def measure_reference_prompt(witness):
    """The notebooks' own prompt: the reference picture under a long system message, 830 tokens together."""
    checkpoint, result = load_checkpoint(witness.folder), {}
    _, picture = shapes.reference_picture(24 * witness.arch.cell, 30 * witness.arch.cell)
    for name, question, item in (
        ("list", shapes.LIST_QUESTION, LIST_ITEM),
        ("long_list", shapes.LONG_LIST_QUESTION, LONG_LIST_ITEM),
    ):
        prepared = reference_inputs(checkpoint, question)
        seen = {"pixel_values": prepared.pixel_values, "image_grid_thw": prepared.image_grid_thw}
        seen = {key: value.to(witness.device) for key, value in seen.items()}
        (answer,) = witness.answer(prepared.input_ids[None], seen, 270)
        result[name] = {"answer": answer} | measure_lists([answer], [picture], item)
    return result | {"truth": shapes.long_list_answer(picture)}


# ---------------------------------------------------------------------------------------------------- faults


@torch.inference_mode()
def last_hidden(witness, seen, questions):
    """Returns: [B, T, D] float64, the input of the final norm."""
    caught = []
    handle = witness.language.norm.register_forward_pre_hook(lambda module, args: caught.append(args[0].double()))
    try:
        witness.model(**witness.inputs(seen, questions), use_cache=False)
    finally:
        handle.remove()
    return caught[0]


def measure_faults(witness, grid, count):
    """What each planted fault does to the answers. Training never showed one, so nothing here was taught.

    Moved: the point changed by more than 5 or lost its format. Cosine: of the last layer's output with and without
    the fault, the worst token of four pictures.
    """
    images, pictures = draw_pictures(witness.arch, grid, count)
    seen, targets = witness.look(images), one_of_each(pictures)
    questions = [shapes.point_question(s) for s in targets]
    few = witness.look(images[:4])
    right = [parse_point(answer) for answer in witness.ask(seen, questions, 16)]
    clean = last_hidden(witness, few, questions[:4])
    results = {}
    for name, fault in faults(witness).items():
        with fault():
            answers = witness.ask(seen, questions, 16)
            lists = witness.ask(seen, [shapes.LIST_QUESTION] * count, 110)
            broken = last_hidden(witness, few, questions[:4])
        points = [parse_point(answer) for answer in answers]
        moved = [not p or not q or math.dist(p, q) > 5 for p, q in zip(points, right, strict=True)]
        results[name] = {
            "n": count,
            "moved": share(moved),
            "point": measure_points(answers, targets),
            "list": measure_lists(lists, pictures),
            "worst_cosine": round(torch.cosine_similarity(clean, broken, dim=-1).min().item(), 4),
        }
    return results


# ---------------------------------------------------------------------------------------------------- hidden states


@torch.inference_mode()
def run_hooked(witness, grid, count, hooks):
    """One forward over `count` pictures with forward hooks in place, which are gone afterwards.

    Args: hooks: list of (module, forward hook).
    """
    images, _ = draw_pictures(witness.arch, grid, count)
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        witness.model(**witness.inputs(witness.look(images), [shapes.LIST_QUESTION] * count), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def measure_hidden_states(witness, grid, count=4):
    """Size of the residual stream after every block, over all tokens of `count` pictures.

    Returns: per part a list with one dict per block: rms; peak, the largest |value| over the rms; channel, the one
        that carries most of the energy, and its share.
    """
    result = {"vision": [], "language": []}

    def record(part):
        def hook(module, args, output):
            x = (output[0] if isinstance(output, tuple) else output).double().flatten(0, -2)  # [T, D]
            rms, energy = x.square().mean().sqrt().item(), x.square().sum(0)
            top = energy.argmax().item()
            result[part].append(
                {
                    "rms": round(rms, 3),
                    "peak": round(x.abs().max().item() / rms, 2),
                    "channel": top,
                    "energy_share": round((energy[top] / energy.sum()).item(), 3),
                }
            )

        return hook

    parts = (("vision", witness.visual.blocks), ("language", witness.language.layers))
    run_hooked(witness, grid, count, [(block, record(part)) for part, blocks in parts for block in blocks])
    return result


def measure_expert_load(witness, grid, count=4):
    """Returns: per layer the least and the most used expert's share of all choices; an even load is 1 / experts."""
    result = []

    def hook(module, args, output):
        chosen = output[2].flatten()  # [T * experts per token]
        load = torch.bincount(chosen, minlength=witness.arch.experts) / len(chosen)
        result.append({"least": round(load.min().item(), 4), "most": round(load.max().item(), 4)})

    run_hooked(witness, grid, count, [(layer.mlp.gate, hook) for layer in witness.language.layers])
    return result


# ---------------------------------------------------------------------------------------------------- reports


def evaluate(folder, count, device="cpu"):
    """Returns: everything that `evaluation.json` holds, but the command."""
    began, witness = time.time(), Witness(folder, device)
    side = math.isqrt(witness.arch.max_merged_tokens)
    report = {"family": witness.family, "dtype": "bfloat16", "first_picture_seed": FIRST_PICTURE}
    report |= describe_machine(witness.device)
    report["canvas"] = measure_canvas(witness)
    report["reference_prompt"] = measure_reference_prompt(witness)
    conditions = {
        "720 image tokens": ((24, 30), None),
        "largest": ((side, side), None),
        "unseen size, small": (HELD_OUT_GRIDS[0], None),
        "unseen size, large": (HELD_OUT_GRIDS[1], None),
        "unseen textures": ((24, 30), shapes.unseen_texture),
    }
    report["grounding"] = {}
    for name, (grid, texture) in conditions.items():
        report["grounding"][name] = measure_grounding(witness, grid, count, texture)
        print(f"{time.time() - began:.0f} s  {name}: {json.dumps(report['grounding'][name])}", flush=True)
    report["faults"] = measure_faults(witness, (24, 30), max(4, count // 2))
    report["hidden_states"] = measure_hidden_states(witness, (24, 30))
    if witness.arch.experts:
        report["expert_load"] = measure_expert_load(witness, (24, 30))
    return report


def main(arguments=None):
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m data.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--n", type=int, default=256, help="pictures per size")
    parser.add_argument("--out", type=Path, help="default: evaluation.json in the checkpoint's folder, and its card")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    options = parser.parse_args(arguments)
    report = evaluate(options.checkpoint, options.n, options.device)
    report["command"] = " ".join(["python -m data.evaluate", *(arguments or sys.argv[1:])])
    (options.out or options.checkpoint / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    if options.out is None:
        write_card(options.checkpoint)


if __name__ == "__main__":
    main()
