"""One prompt and one picture as exact ids, pixels and grid, with a content hash.

load_image          a file as an upright opaque RGB picture, or one clear sentence
load_prompt         a text file as a prompt
prepare_inputs      picture and prompt through the checkpoint's own processor
reference_inputs    the shipped 720-token picture and a prompt of exactly 830 tokens, for any supported checkpoint
picture_of          captured pixels as a picture again
token_texts         token ids as text
"""

import functools
import hashlib
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vlmlab.checkpoint import DATA, Checkpoint
from vlmlab.errors import VlmlabError

IMAGE_PLACE = "<image>"
MAX_ASPECT_RATIO = 200  # Source: transformers@5.19.0: models/qwen2_vl/image_processing_qwen2_vl.py, smart_resize
MAX_PIXELS = 100_000_000
MAX_PROMPT_BYTES = 4_000_000

REFERENCE_GRID = (24, 30)  # merged tokens, rows x columns: 720
REFERENCE_TOKENS = 830
REFERENCE_QUESTION = "List every shape with its color and center."
SYSTEM_SENTENCE = "You are a helpful assistant."


@dataclass(frozen=True)
class Inputs:
    """What both engines are asked.

    Attributes: text: whole prompt with one image place. image: upright RGB picture, or None for text only.
    input_ids: [T] int64. pixel_values: [P, C * t * p * p] float32 or None. image_grid_thw: [1, 3] int64 patches or
    None. image_token_id: id at image positions. merge_size: patches per merged token and side. hash: sha256 of text and
    pixels. answer: tokens at the end of input_ids that are not in the text.
    """

    text: str
    image: Image.Image | None = field(repr=False)
    input_ids: Tensor = field(repr=False)
    pixel_values: Tensor | None = field(repr=False)
    image_grid_thw: Tensor | None
    image_token_id: int
    merge_size: int
    hash: str
    answer: tuple[int, ...] = ()

    def followed_by(self, tokens: Sequence[int]) -> "Inputs":
        """The same with an answer's tokens after the prompt. Returns: Inputs of T + len(tokens) tokens."""
        ids = torch.cat((self.input_ids, torch.tensor(tokens, dtype=torch.int64)))
        content = hashlib.sha256(f"{self.hash} {list(tokens)}".encode()).hexdigest()
        return replace(self, input_ids=ids, answer=(*self.answer, *tokens), hash=content)

    @property
    def tokens(self) -> int:
        """Prefill length T."""
        return self.input_ids.numel()

    @property
    def image_positions(self) -> Tensor:
        """[T] bool: where an image token stands."""
        return self.input_ids == self.image_token_id

    @property
    def image_tokens(self) -> int:
        """Number of merged image tokens."""
        return int(self.image_positions.sum())

    @property
    def patches(self) -> int:
        """Number of patches P."""
        return 0 if self.pixel_values is None else self.pixel_values.shape[0]


def load_image(file: str | os.PathLike) -> Image.Image:
    """Read a picture: EXIF orientation applied, transparency laid on white, RGB.

    Args: file: path. Returns: RGB picture.
    Raises: VlmlabError: missing, not a picture, truncated, or more than 100 million pixels.
    """
    file = Path(file)
    if not file.is_file():
        raise VlmlabError(f"expected an image file, found none called {file.name!r}; check the path")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is checked before decoding
            with Image.open(file) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    size = f"{opened.width} x {opened.height}"
                    raise VlmlabError(f"image {file.name!r} has {size} pixels; at most {MAX_PIXELS} are read")
                image = ImageOps.exif_transpose(opened)
                image.load()
    except UnidentifiedImageError as error:
        raise VlmlabError(f"{file.name!r} is not an image that Pillow can read; expected PNG, JPEG or alike") from error
    except Image.DecompressionBombError as error:
        raise VlmlabError(f"image {file.name!r} has too many pixels; at most {MAX_PIXELS} are read") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise VlmlabError(f"image {file.name!r} is broken or truncated ({error}); expected a whole file") from error
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image.convert("RGB")


def load_prompt(file: str | os.PathLike) -> str:
    """Read a prompt from a UTF-8 text file.

    Args: file: path. Returns: text. Raises: VlmlabError: missing, empty, too large or not UTF-8.
    """
    file = Path(file)
    if not file.is_file():
        raise VlmlabError(f"expected a prompt file, found none called {file.name!r}; check the path")
    if file.stat().st_size > MAX_PROMPT_BYTES:
        raise VlmlabError(f"prompt {file.name!r} has {file.stat().st_size} bytes; expected at most {MAX_PROMPT_BYTES}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise VlmlabError(f"prompt {file.name!r} is not UTF-8 text ({error.reason}); save it as UTF-8") from error
    if not text.strip():
        raise VlmlabError(f"prompt {file.name!r} is empty; expected a question and the image place {IMAGE_PLACE}")
    return text


@functools.lru_cache(maxsize=4)
def _processor(folder: Path) -> Any:
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(folder)
    except Exception as error:  # the library raises many unrelated types for broken files
        raise VlmlabError(
            f"the checkpoint's tokenizer or image processor does not load ({type(error).__name__}: {error}); "
            "expected the files its family ships with"
        ) from error


def prepare_inputs(checkpoint: Checkpoint, image: Image.Image | None, prompt: str) -> Inputs:
    """Run picture and prompt through the checkpoint's processor, once for all engines.

    Args: checkpoint: the checkpoint. image: RGB picture, or None for text only. prompt: either a question with one
    `<image>` place, which gets the chat template, or a whole prompt holding the checkpoint's own image token.
    Returns: Inputs.
    Raises: VlmlabError: empty prompt, no or several image places, picture too small or too elongated, too many tokens.
    """
    processor = _processor(checkpoint.folder)
    text = _prompt_text(processor, prompt, image is not None)
    if image is not None:
        _check_size(image, processor.image_processor)
    batch = processor(text=[text], images=None if image is None else [image], return_tensors="pt")
    input_ids = batch["input_ids"][0]
    limit = (checkpoint.config.get("text_config") or checkpoint.config).get("max_position_embeddings")
    if limit is not None and len(input_ids) >= limit:
        raise VlmlabError(f"the prompt has {len(input_ids)} tokens, the model takes fewer than {limit}; use less")
    digest = hashlib.sha256(text.encode())
    if image is not None:
        digest.update(f"|{image.width}x{image.height}|".encode() + image.tobytes())
    return Inputs(
        text=text,
        image=image,
        input_ids=input_ids,
        pixel_values=batch.get("pixel_values"),
        image_grid_thw=batch.get("image_grid_thw"),
        image_token_id=checkpoint.config["image_token_id"],
        merge_size=processor.image_processor.merge_size,
        hash=digest.hexdigest(),
    )


def _prompt_text(processor: Any, prompt: str, with_image: bool) -> str:
    if not prompt.strip():
        raise VlmlabError(f"the prompt is empty; expected a question and the image place {IMAGE_PLACE}")
    own = processor.image_token
    places = prompt.count(own) + prompt.count(IMAGE_PLACE)
    if places != int(with_image):
        raise VlmlabError(
            f"expected {int(with_image)} image place in the prompt, found {places}; write {IMAGE_PLACE} where the "
            f"picture goes in a question, or {own} in a whole prompt"
        )
    if own in prompt or (not with_image and "<|im_start|>" in prompt):
        return prompt
    parts = prompt.strip().split(IMAGE_PLACE)
    content: list[dict[str, str]] = []
    for number, part in enumerate(parts):
        content += [{"type": "image"}] if number else []
        content += [{"type": "text", "text": part}] if part else []
    return _chat(processor, content)


def _chat(processor: Any, content: list[dict[str, str]], system: str | None = None) -> str:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    return processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def _check_size(image: Image.Image, image_processor: Any) -> None:
    smallest = image_processor.patch_size * image_processor.merge_size
    if min(image.size) < smallest:
        raise VlmlabError(
            f"the image is {image.width} x {image.height} pixels; expected at least {smallest} on each side, "
            "one merged token"
        )
    ratio = max(image.size) / min(image.size)
    if ratio > MAX_ASPECT_RATIO:
        raise VlmlabError(f"the image's aspect ratio is {ratio:.0f}; the processor takes at most {MAX_ASPECT_RATIO}")


def reference_inputs(checkpoint: Checkpoint, question: str = REFERENCE_QUESTION) -> Inputs:
    """The reference picture and prompt: exactly 720 image tokens and 830 tokens in all, checked.

    The picture's size follows from the checkpoint's patch size. The prompt is lengthened word by word in its system
    message, so it has the wanted length under any tokenizer that has those words.

    Args: checkpoint: the checkpoint. question: what is asked about the picture. Returns: Inputs.
    Raises: VlmlabError: no shipped picture has this size, or the prompt cannot be made exactly 830 tokens long.
    """
    image_processor = _processor(checkpoint.folder).image_processor
    unit = image_processor.patch_size * image_processor.merge_size
    height, width = REFERENCE_GRID[0] * unit, REFERENCE_GRID[1] * unit
    image = load_image(DATA / "reference" / f"shapes_{height}x{width}.png")
    content = [{"type": "image"}, {"type": "text", "text": question}]
    inputs = _pad_prompt(checkpoint, image, content)
    if inputs.image_tokens != REFERENCE_GRID[0] * REFERENCE_GRID[1] or inputs.tokens != REFERENCE_TOKENS:
        raise VlmlabError(
            f"expected {REFERENCE_GRID[0] * REFERENCE_GRID[1]} image tokens of {REFERENCE_TOKENS}, got "
            f"{inputs.image_tokens} of {inputs.tokens}: this checkpoint's processor resizes the picture, or its "
            "tokenizer splits the padding words; pass --image and --prompt instead"
        )
    return inputs


def _pad_prompt(checkpoint: Checkpoint, image: Image.Image, content: list[dict[str, str]]) -> Inputs:
    """Repeat the system sentence, cut it at the word that gives the length, and mend a leftover token with a tail."""
    processor = _processor(checkpoint.folder)
    words = re.findall(r" \w+|\.", " " + SYSTEM_SENTENCE)
    image_tokens = REFERENCE_GRID[0] * REFERENCE_GRID[1]

    def text(count: int, tail: str) -> str:
        more = "".join(words[i % len(words)] for i in range(count))
        return _chat(processor, content, SYSTEM_SENTENCE + more + tail)

    def length(prompt: str) -> int:
        return len(processor.tokenizer(prompt).input_ids) - 1 + image_tokens

    count = next((n for n in range(REFERENCE_TOKENS) if length(text(n, "")) > REFERENCE_TOKENS), 1) - 1
    candidates = [text(max(n, 0), tail) for n in (count, count - 1) for tail in ("", ".", " a", " helpful")]
    prompt = next((c for c in candidates if length(c) == REFERENCE_TOKENS), candidates[0])
    return prepare_inputs(checkpoint, image, prompt)


def distinct_patches(inputs: Inputs) -> int:
    """How many of the patches differ from all others, bit for bit.

    Args: inputs: with a picture. Returns: count, at most `inputs.patches`.
    """
    if inputs.pixel_values is None:
        return 0
    return len(np.unique(inputs.pixel_values.numpy(), axis=0))


def picture_of(checkpoint: Checkpoint, pixel_values: Tensor, grid_thw: Tensor) -> Image.Image:
    """Captured pixels as the picture they were cut from, after resizing.

    Args: checkpoint: whose processor cut it. pixel_values: [P, C * t * p * p] normalised. grid_thw: [1, 3] patches.
    Returns: RGB picture.
    """
    processor = _processor(checkpoint.folder).image_processor
    merge, patch = processor.merge_size, processor.patch_size
    _, rows, columns = grid_thw[0].tolist()
    x = pixel_values.float().view(rows // merge, columns // merge, merge, merge, 3, -1, patch, patch)[:, :, :, :, :, 0]
    x = x.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)
    mean, std = (torch.tensor(v)[:, None, None] for v in (processor.image_mean, processor.image_std))
    bytes_ = ((x * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(bytes_.permute(1, 2, 0).numpy())


def token_texts(checkpoint: Checkpoint, ids: Tensor) -> list[str]:
    """Every token as text. One that is no whole character alone stands as its vocabulary entry between angle brackets.

    Args: checkpoint: whose tokenizer. ids: [T] int64. Returns: T strings, unescaped.
    """
    tokenizer = _processor(checkpoint.folder).tokenizer
    texts = [tokenizer.decode([token]) for token in ids.tolist()]
    return [
        f"⟨{tokenizer.convert_ids_to_tokens(token)}⟩" if "\ufffd" in words or not words else words
        for token, words in zip(ids.tolist(), texts, strict=True)
    ]
