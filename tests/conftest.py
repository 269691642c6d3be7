"""Fixtures: one loaded Transformers model and one started SGLang engine serve the whole session."""

import contextlib
import functools
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from data.shapes import draw_layout, render, to_images
from vlmlab import engines
from vlmlab.capture import capture_hf, capture_sglang
from vlmlab.checkpoint import DATA, load_checkpoint
from vlmlab.compare import compare_traces
from vlmlab.engine_hf import open_hf, vision_output
from vlmlab.engine_sglang import open_sglang
from vlmlab.hybrid import Hybrid
from vlmlab.inputs import REFERENCE_QUESTION, prepare_inputs, reference_inputs
from vlmlab.machine import has_sglang


@pytest.fixture(scope="session")
def checkpoint():
    return load_checkpoint()


@pytest.fixture(scope="session")
def inputs(checkpoint):
    return reference_inputs(checkpoint)


@pytest.fixture(scope="session")
def small_inputs(checkpoint):
    """A picture of noise, 112 x 140 pixels, for what needs few tokens."""
    noise = np.random.default_rng(0).integers(0, 256, (112, 140, 3), dtype=np.uint8)
    return prepare_inputs(checkpoint, Image.fromarray(noise), f"<image>{REFERENCE_QUESTION}")


@pytest.fixture(scope="session")
def hf_engine(checkpoint):
    with open_hf(checkpoint) as engine:
        yield engine


CHECKPOINTS = {"qwen2_vl": "qwen2-vl-tiny", "qwen3_vl": "qwen3-vl-tiny", "qwen3_vl_moe": "qwen3-vl-moe-tiny"}


@pytest.fixture(scope="session")
def checkpoints():
    """By family."""
    return {family: load_checkpoint(DATA / "checkpoints" / name) for family, name in CHECKPOINTS.items()}


@pytest.fixture(scope="session")
def hf_engines(checkpoints):
    """(family, "sdpa" or "eager") to a loaded Transformers model; each loaded once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def opened(family, attention="sdpa"):
            return stack.enter_context(open_hf(checkpoints[family], attention=attention))

        yield opened


@pytest.fixture(scope="session")
def hybrids(checkpoints):
    """(family, dtype or None for the checkpoint's own) to a Hybrid; each loaded once."""
    return functools.cache(lambda family, dtype=None: Hybrid(checkpoints[family], dtype))


@pytest.fixture(scope="session")
def ask(checkpoints):
    """(family, grid in image tokens or None, seed, question, texture) to Inputs, a picture of shapes from the seed."""

    def prepared(family, grid=None, seed=0, question=REFERENCE_QUESTION, texture=None):
        checkpoint, image = checkpoints[family], None
        if grid is not None:
            vision = checkpoint.config["vision_config"]
            unit = vision["patch_size"] * vision["spatial_merge_size"]
            generator = torch.Generator().manual_seed(seed)
            layout = draw_layout(1, grid[0] * unit, grid[1] * unit, generator)
            image = to_images(render(layout, generator, texture=texture))[0]
        inputs = prepare_inputs(checkpoint, image, question if image is None else f"<image>{question}")
        assert inputs.image_tokens == (grid[0] * grid[1] if grid else 0), "the processor resized the picture"
        return inputs

    return prepared


@pytest.fixture(scope="session")
def sglang_engine(checkpoint):
    if not has_sglang():
        pytest.skip('SGLang is not installed: pip install "vlmlab[sglang]"')
    with open_sglang(checkpoint) as engine:
        yield engine


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """The folder of stored captures for this session, in the environment for child processes too."""
    folder = tmp_path_factory.mktemp("captures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLMLAB_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def traces(store, checkpoint, inputs, sglang_engine):
    """(HF trace, SGLang trace) of the reference input, stored as `make report` stores them."""

    @contextlib.contextmanager
    def already_open(*_, **__):
        yield sglang_engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "open_sglang", already_open)
        hf = capture_hf(checkpoint, inputs)
        return hf, capture_sglang(checkpoint, inputs, hf)


@pytest.fixture(scope="session")
def comparison(traces):
    return compare_traces(*traces)


@pytest.fixture(scope="session")
def small_traces(hf_engines, sglang_engine, ask, tmp_path_factory):
    """(HF trace, SGLang trace) of 8 x 10 image tokens, for what takes long on the reference input."""
    folder, inputs = tmp_path_factory.mktemp("small"), ask("qwen2_vl", (8, 10), seed=34)
    hf = hf_engines("qwen2_vl").capture(inputs, folder / "hf")
    return hf, sglang_engine.capture(inputs, folder / "sglang", vision_output(hf))


CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)


@pytest.fixture
def browser():
    """A headless Chromium. Without one: a skip on a developer's machine, a failure in CI, which sets CI."""
    if CHROMIUM is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "NO CHROMIUM HERE: reports and dashboard are not tested in a browser (Debian: apt install chromium)"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield started
        finally:
            started.close()


@pytest.fixture
def one_thread():
    """Small tensors: with a busy neighbour on the machine, waiting for a second thread costs up to forty times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
