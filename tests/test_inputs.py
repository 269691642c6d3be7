import pytest
from PIL import Image

from vlmlab.errors import VlmlabError
from vlmlab.inputs import distinct_patches, load_image, load_prompt, prepare_inputs

QUESTION = "<image>Point at the center of the red rectangle."


def test_the_reference_input_has_exactly_its_tokens(inputs):
    assert (inputs.tokens, inputs.image_tokens, inputs.patches) == (830, 720, 2880)
    assert distinct_patches(inputs) >= 2870
    assert inputs.text.count("<|image_pad|>") == 1


def test_the_reference_picture_exists_for_other_patch_sizes(inputs):
    from vlmlab.checkpoint import DATA

    assert load_image(DATA / "reference" / "shapes_768x960.png").size == (960, 768)
    assert inputs.image.size == (840, 672)


def test_the_hash_sees_one_pixel_and_one_letter(checkpoint, inputs):
    changed = inputs.image.copy()
    changed.putpixel((0, 0), (1, 2, 3))
    hashes = {
        prepare_inputs(checkpoint, inputs.image, QUESTION).hash,
        prepare_inputs(checkpoint, changed, QUESTION).hash,
        prepare_inputs(checkpoint, inputs.image, QUESTION.replace("red", "Red")).hash,
    }
    assert len(hashes) == 3


def test_a_question_gets_the_chat_template_and_a_whole_prompt_stays(checkpoint, inputs):
    text = prepare_inputs(checkpoint, inputs.image, QUESTION).text
    assert text.startswith("<|im_start|>system\n") and "<|image_pad|>" in text
    assert prepare_inputs(checkpoint, inputs.image, text).text == text


def test_text_only(checkpoint):
    prepared = prepare_inputs(checkpoint, None, "List every shape with its color and center.")
    assert (prepared.patches, prepared.image_tokens, prepared.pixel_values) == (0, 0, None)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("no place", "expected 1 image place in the prompt, found 0"),
        ("<image><image>two", "found 2"),
        ("<image>" + "word " * 9000, "the model takes fewer than 4096"),
    ],
)
def test_bad_prompts(checkpoint, inputs, prompt, message):
    with pytest.raises(VlmlabError, match=message):
        prepare_inputs(checkpoint, inputs.image, prompt)


@pytest.mark.parametrize(
    ("size", "message"), [((1, 1), "at least 28"), ((27, 500), "at least 28"), ((28, 5800), "207")]
)
def test_bad_sizes(checkpoint, size, message):
    with pytest.raises(VlmlabError, match=message):
        prepare_inputs(checkpoint, Image.new("RGB", size), QUESTION)


def test_bad_files(tmp_path):
    with pytest.raises(VlmlabError, match=r"found none called 'gone\.png'"):
        load_image(tmp_path / "gone.png")
    (tmp_path / "text.png").write_text("not a picture")
    with pytest.raises(VlmlabError, match="not an image"):
        load_image(tmp_path / "text.png")
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:1500])
    with pytest.raises(VlmlabError, match="broken or truncated"):
        load_image(tmp_path / "half.png")
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    with pytest.raises(VlmlabError, match="at most 100000000"):
        load_image(tmp_path / "bomb.png")


def test_bad_prompt_files(tmp_path):
    with pytest.raises(VlmlabError, match="found none"):
        load_prompt(tmp_path / "gone.txt")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(VlmlabError, match="empty"):
        load_prompt(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(VlmlabError, match="not UTF-8"):
        load_prompt(tmp_path / "latin.txt")


def test_orientation_and_transparency_are_settled_before_any_engine(tmp_path):
    image = Image.new("RGB", (40, 20), "red")
    exif = image.getexif()
    exif[0x0112] = 6  # rotate by 90 degrees
    image.save(tmp_path / "rotated.jpg", exif=exif)
    assert load_image(tmp_path / "rotated.jpg").size == (20, 40)
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert load_image(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)
