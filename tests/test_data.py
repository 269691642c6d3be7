"""The recipe: pictures, words, the training forward against Transformers, a few training steps, the shipped results."""

import json
import random
from pathlib import Path

import pytest
import torch
from sampled import sampled
from transformers import AutoModelForImageTextToText, AutoProcessor

from data import shapes
from data.evaluate import (
    LONG_LIST_ITEM,
    Witness,
    draw_pictures,
    measure_canvas,
    measure_lists,
    measure_points,
    one_of_each,
    overlap,
    parse_box,
    parse_list,
    parse_point,
)
from data.make_checkpoint import ARCHITECTURES, TOKEN_ID, make_tokenizer, write_checkpoint
from data.model import Model, patchify, position_weights, text_rotary, vision_rotary
from data.train import ANSWER_SPAN, HELD_OUT_GRIDS, Parameters, Writer, grids, main

FAMILIES = list(ARCHITECTURES)
CHECKPOINTS = Path(__file__).parent.parent / "data" / "checkpoints"


pytestmark = pytest.mark.usefixtures("one_thread")


def test_no_two_shapes_touch_and_no_name_comes_twice():
    layout = shapes.draw_layout(64, 252, 336, torch.Generator().manual_seed(0))
    for picture in layout.shapes():
        assert all(0 <= edge <= shapes.FRAME for shape in picture for edge in shape.box)
        assert 1 <= len({shape.name for shape in picture}) == len(picture) <= shapes.MAX_SHAPES
        for i, a in enumerate(picture):
            for b in picture[:i]:
                apart_x = a.box[2] < b.box[0] or b.box[2] < a.box[0]
                apart_y = a.box[3] < b.box[1] or b.box[3] < a.box[1]
                assert apart_x or apart_y


def test_pictures_of_one_kind_differ_in_colour_only():
    mixed, alike = (
        shapes.draw_layout(64, 252, 336, torch.Generator().manual_seed(0), one_kind=share).shapes() for share in (0, 1)
    )
    assert all(len({shape.kind for shape in picture}) == 1 for picture in alike)
    assert all(len({shape.color for shape in picture}) == len(picture) for picture in alike)
    assert any(len({shape.kind for shape in picture}) == 2 for picture in mixed)


def test_rendered_shapes_are_where_the_layout_says():
    layout = shapes.draw_layout(8, 140, 168, torch.Generator().manual_seed(1))
    pictures = shapes.render(layout, torch.Generator().manual_seed(2), texture=shapes.plain_white)
    assert pictures.shape == (8, 3, 140, 168)
    assert torch.equal((pictures * 255).round() / 255, pictures)
    for b in range(8):
        for m in range(shapes.MAX_SHAPES):
            if layout.present[b, m]:
                x, y = layout.box[b, m, :2].int().tolist()
                expected = torch.tensor(shapes.PURE_RGB[layout.color[b, m]]) / 255
                torch.testing.assert_close(pictures[b, :, y, x], expected)
    inked = (pictures < 1).any(1).flatten(1).float().mean(1)
    half = layout.box[..., 2:] * layout.present[..., None]
    area = (half.prod(-1) * torch.where(layout.kind == 1, torch.pi, 4.0)).sum(1) / (140 * 168)
    torch.testing.assert_close(inked, area, atol=0.02, rtol=0.1)


def test_the_reference_picture_is_the_same_each_time_and_has_distinct_patches():
    image, picture = shapes.reference_picture()
    again, _ = shapes.reference_picture()
    assert image.size == (840, 672) and image.tobytes() == again.tobytes()
    assert len(picture) >= 6
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(48, 14, 60, 14, 3)
    patches = pixels.transpose(1, 2).reshape(48 * 60, -1)
    assert len(patches.unique(dim=0)) >= 2870


def test_every_answer_survives_the_tokenizer_and_digits_stay_single():
    tokenizer = make_tokenizer()
    picture = shapes.draw_layout(1, 672, 840, torch.Generator().manual_seed(3), fewest=8).shapes()[0]
    answers = [shapes.list_answer(picture), shapes.long_list_answer(picture), shapes.point_answer(picture[0])]
    answers += [shapes.box_answer(picture[0], family) for family in FAMILIES]
    for answer in answers:
        ids = tokenizer(answer).input_ids
        assert tokenizer.decode(ids) == answer
        assert sum(c.isdigit() for c in answer) == sum(t.isdigit() for t in tokenizer.convert_ids_to_tokens(ids))
    assert len(tokenizer(shapes.long_list_answer(picture[:6])).input_ids) >= 128
    assert len(tokenizer(shapes.long_list_answer(picture)).input_ids) < ANSWER_SPAN


@pytest.mark.parametrize("family", FAMILIES)
def test_written_conversations_equal_the_chat_template(family):
    """Ids put together piece by piece equal the tokenizer's own on the whole text; labels are exactly the answers."""
    writer = Writer(family)
    picture = shapes.draw_layout(1, 252, 336, torch.Generator().manual_seed(4), fewest=3, most=3).shapes()
    system = shapes.system_message(20, full_stop=False)
    prefix = writer.prefix(system)
    ids, _ = writer.write(picture, prefix, 2, length=len(prefix) + 2 + 600, rng=random.Random(0), single_first=0.5)
    text = writer.tokenizer.decode(ids[0].tolist()).split("<|endoftext|>")[0]
    text = text.replace("<|image_pad|><|image_pad|>", "<|image_pad|>")
    turns = [turn.split("<|im_end|>")[0].split("\n", 1) for turn in text.split("<|im_start|>")[1:]]
    messages = [{"role": role, "content": content} for role, content in turns]
    messages[1]["content"] = [
        {"type": "image"},
        {"type": "text", "text": messages[1]["content"].split("<|vision_end|>")[1]},
    ]
    assert [m["role"] for m in messages[:3]] == ["system", "user", "assistant"] and messages[0]["content"] == system
    whole = writer.tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
    pads = [TOKEN_ID["<|image_pad|>"]] * 2
    expected = writer.tokenizer(whole.replace("<|image_pad|>", "<|image_pad|><|image_pad|>"), add_special_tokens=False)
    assert pads[0] in expected.input_ids and ids[0].tolist()[: len(expected.input_ids)] == expected.input_ids
    answers = "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")
    short, labels = writer.write(
        picture, prefix, 2, length=len(prefix) + 2 + ANSWER_SPAN, rng=random.Random(0), single_first=0.5
    )
    assert torch.equal(short, ids[:, : short.shape[1]])
    learned = writer.tokenizer.decode(labels[0][labels[0] >= 0])
    assert len(learned) > 100 and answers.startswith(learned)
    following = ids[0, short.shape[1] - ANSWER_SPAN + 1 : short.shape[1] + 1]
    assert torch.equal(labels[0][labels[0] >= 0], following[labels[0] >= 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_training_forward_equals_transformers(family, tmp_path):
    """float32 logits on random weights, every norm, bias and table made non-trivial first."""
    arch, writer = ARCHITECTURES[family], Writer(family)
    parameters = Parameters(arch, 448, seed=0, device="cpu", dtype=torch.float32)
    noise = torch.randn(parameters.size, generator=torch.Generator().manual_seed(1))
    parameters.state["master"].add_(0.03 * noise).copy_(parameters.state["master"].bfloat16())
    parameters.refresh()
    write_checkpoint(tmp_path, arch, parameters.export())
    reference = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(tmp_path)
    model = Model(arch, parameters.weights)
    for rows, columns, words in ((5, 7, 5), (6, 5, 40)):
        layout = shapes.draw_layout(1, rows * arch.cell, columns * arch.cell, torch.Generator().manual_seed(rows))
        picture = shapes.render(layout, torch.Generator().manual_seed(0))
        prefix = writer.prefix(shapes.system_message(words))
        length = len(prefix) + rows * columns + 320
        ids, labels = writer.write(layout.shapes(), prefix, rows * columns, length, random.Random(0), single_first=0.5)
        axes = [position_weights(arch, 2 * n) for n in (rows, columns)] if arch.positions_per_side else None
        with torch.no_grad():
            features = model.see(patchify(picture, arch), vision_rotary(arch, rows, columns), axes)
            places = torch.arange(len(prefix), len(prefix) + rows * columns)
            rotary = text_rotary(arch, len(prefix), rows, columns, length)
            logits, router_loss = model.answer(features, ids, places, rotary, ANSWER_SPAN)
            text = writer.tokenizer.decode(ids[0]).replace("<|image_pad|>" * (rows * columns), "<|image_pad|>")
            inputs = processor(text=[text], images=shapes.to_images(picture), return_tensors="pt")
            assert torch.equal(inputs.input_ids, ids)
            expected = reference(**inputs).logits[:, -ANSWER_SPAN:]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
        assert expected.std() > 0.1 and labels.shape == (1, ANSWER_SPAN)
        assert (router_loss > 0.99) == (arch.experts > 0)


@pytest.mark.parametrize("family", sampled(FAMILIES, keep=lambda family: family == "qwen3-vl-moe"))  # trains a router
def test_a_few_steps_of_training_run_resume_and_leave_a_loadable_checkpoint(family, tmp_path):
    common = ["--family", family, "--device", "cpu", "--batch-tokens", "2000", "--out", str(tmp_path)]
    main([*common, "--steps", "1"])
    first = torch.load(tmp_path / "state.pt", weights_only=True)
    main([*common, "--steps", "2", "--resume"])
    second = torch.load(tmp_path / "state.pt", weights_only=True)
    assert (first["done"], second["done"]) == (1, 2) and not torch.equal(first["master"], second["master"])
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] == 2 and record["samples"] == second["samples"] > first["samples"]
    AutoModelForImageTextToText.from_pretrained(tmp_path)


def test_a_run_set_in_steps_is_repeatable(tmp_path):
    for name in ("once", "twice"):
        options = ["--device", "cpu", "--batch-tokens", "2000", "--steps", "2"]
        main(["--family", "qwen3-vl-moe", *options, "--out", str(tmp_path / name)])
    once, twice = (torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("once", "twice"))
    assert torch.equal(once["master"], twice["master"])


def test_held_out_sizes_are_never_trained_on():
    for arch in ARCHITECTURES.values():
        small, large = grids(arch)
        assert not set(HELD_OUT_GRIDS) & {*small, *large}
        assert (24, 30) in large


@pytest.mark.parametrize("family", FAMILIES)
def test_no_weight_layout_is_ambiguous(family):
    arch = ARCHITECTURES[family]
    assert 2 * arch.text_mlp != arch.width or not arch.experts


# ---------------------------------------------------------------------------------------------------- results


def test_answers_are_read_strictly():
    assert parse_point("(750, 270)") == (750, 270)
    assert parse_point("(750,270)") is None and parse_point("(750, 270) ") is None
    box = shapes.Shape("blue", "circle", (1.0, 2.0, 30.0, 400.0))
    for family in FAMILIES:
        assert parse_box(shapes.box_answer(box, family), family, box.name) == (1, 2, 30, 400)
        assert parse_box("[1, 2, 30, 400]", family, box.name) is None
    assert parse_list(shapes.list_answer([box, box])) == [("blue circle", 16, 201)] * 2
    assert parse_list(shapes.long_list_answer([box]), LONG_LIST_ITEM) == [("blue circle", 16, 201, 1, 2, 30, 400)]
    assert parse_list("blue circle (16, 201); pink circle (1, 1)") is None
    assert overlap((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)


def test_a_list_is_complete_only_if_every_shape_is_named_once():
    picture = shapes.draw_layout(1, 252, 336, torch.Generator().manual_seed(5), fewest=3, most=3).shapes()[0]
    right = shapes.list_answer(picture)
    assert measure_lists([right], [picture])["complete"] == 1
    for wrong in (shapes.list_answer(picture[1:]), f"{right}; {shapes.list_answer(picture[:1])}", right + "..."):
        assert measure_lists([wrong], [picture])["complete"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shipped_checkpoint_points_where_it_should(family):
    witness = Witness(CHECKPOINTS / f"{family}-tiny")
    assert witness.family == family
    assert measure_canvas(witness)["error"] <= 3
    images, pictures = draw_pictures(witness.arch, HELD_OUT_GRIDS[0], 4)
    targets = one_of_each(pictures)
    answers = witness.ask(witness.look(images), [shapes.point_question(s) for s in targets], 16)
    measured = measure_points(answers, targets)
    assert measured["format"] == 1 and measured["error_median"] <= 5


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_results_meet_the_targets(family):
    report = json.loads((CHECKPOINTS / f"{family}-tiny" / "evaluation.json").read_text())
    recorded = min(result["n"] for result in report["grounding"].values())
    if recorded < 256:
        pytest.skip(f"recorded on {recorded} pictures per size; the targets are for 256: python -m data.evaluate")
    assert report["canvas"]["error"] <= 3
    for name, result in report["grounding"].items():
        strange = name == "unseen textures"
        formats = [result[task]["format"] for task in ("point", "list", "box", "long_list")]
        assert min(formats) >= (0.99 if strange else 0.995), name
        assert result["list"]["complete"] >= (0.9 if strange else 0.98), name
        if name in ("720 image tokens", "largest"):
            assert result["point"]["error_median"] <= 2 and result["point"]["error_p90"] <= 5, name
    if "deepstack dropped" in report["faults"]:
        assert report["faults"]["deepstack dropped"]["moved"] > 0.5
    assert all(fault["worst_cosine"] < 0.99 for fault in report["faults"].values())
