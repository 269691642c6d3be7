"""Fixtures: each Transformers model is loaded, and each SGLang engine started, once for the whole session.

With several workers, all tests of one engine run in one of them (see GROUPS), so that each engine starts once.
"""

import contextlib
import functools
import os
import shutil

import numpy as np
import pytest
import torch
from _pytest.nodeid import NodeId
from PIL import Image

from data.shapes import draw_layout, render, to_images
from vlmlab import engines
from vlmlab.capture import capture_hf, capture_sglang
from vlmlab.checkpoint import DATA, load_checkpoint
from vlmlab.compare import compare_traces
from vlmlab.engine_hf import open_hf, vision_output
from vlmlab.engine_sglang import open_sglang
from vlmlab.generation import capture_answers
from vlmlab.hybrid import Hybrid
from vlmlab.inputs import REFERENCE_QUESTION, prepare_inputs, reference_inputs
from vlmlab.machine import has_sglang

# Of tests that share what took long to make: the engine of Qwen2-VL and the reference captures; other engines; files.
GROUPS = ("reference", "engines", "test_attribution", "test_notebooks", "test_data", "test_verdict", "test_planted")


def group_of(item):
    """The tests that run in the same worker as this one."""
    chosen = [mark.args[0] for mark in item.iter_markers("xdist_group")]
    if chosen or "sglang_engine" in item.fixturenames:
        return chosen[0] if chosen else GROUPS[0]
    return GROUPS[1] if item.get_closest_marker("engine") else item.path.stem


@pytest.hookimpl(wrapper=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Sort by group, those that take longest first, and remember what `-m` will leave out."""
    config.collected = list(items)
    groups = {item: group_of(item) for item in items}
    order = {name: place for place, name in enumerate([*GROUPS, *dict.fromkeys(groups.values())][::-1])}
    items.sort(key=lambda item: -order[groups[item]])
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
        # xdist 3.8 marks a group in a field that pytest 9.2 no longer reads (pytest-xdist#1386)
        if getattr(config.option, "loadgroup", False):
            item._id = NodeId.parse(f"{item.nodeid}@{group}")
    return (yield)


def pytest_terminal_summary(terminalreporter):
    """How the work was divided: seconds by worker."""
    seconds = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if hasattr(report, "duration") and hasattr(report, "worker_id"):
            seconds[report.worker_id] = seconds.get(report.worker_id, 0.0) + report.duration
    if seconds:
        terminalreporter.write_line("seconds: " + ", ".join(f"{k} {v:.0f}" for k, v in sorted(seconds.items())))


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
def sglang_engines(checkpoints):
    """Family to a started SGLang engine; each started once."""
    if not has_sglang():
        pytest.skip('SGLang is not installed: pip install "vlmlab[sglang]"')
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda family: stack.enter_context(open_sglang(checkpoints[family])))


@pytest.fixture(scope="session")
def sglang_first(sglang_engines, ask, tmp_path_factory):
    """What a fresh process of Qwen2-VL gives: (inputs of a text alone, its decode steps, their tokens, its prefill)."""
    engine, folder, text = sglang_engines("qwen2_vl"), tmp_path_factory.mktemp("first"), ask("qwen2_vl")
    steps, tokens = engine.capture_decode(text, folder / "decode", 3)
    return text, steps, tokens, engine.capture(text, folder / "prefill")


@pytest.fixture(scope="session")
def sglang_engine(sglang_engines, sglang_first):
    """The engine of Qwen2-VL; what it did first is kept."""
    return sglang_engines("qwen2_vl")


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """The folder of stored captures for this session, in the environment for child processes too."""
    folder = tmp_path_factory.mktemp("captures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLMLAB_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def on_session_engine(sglang_engine):
    """A context in which the package finds the session's engine started, and starts those with further arguments."""

    @contextlib.contextmanager
    def started(checkpoint, extra=None, *others, **options):
        if extra:
            with open_sglang(checkpoint, extra, *others, **options) as other:
                yield other
        else:
            yield sglang_engine

    @contextlib.contextmanager
    def patched():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engines, "open_sglang", started)
            yield

    return patched


@pytest.fixture(scope="session")
def traces(store, checkpoint, inputs, on_session_engine):
    """(HF trace, SGLang trace) of the reference input, stored as `make report` stores them."""
    with on_session_engine():
        hf = capture_hf(checkpoint, inputs)
        return hf, capture_sglang(checkpoint, inputs, hf)


STEPS = 12


@pytest.fixture(scope="session")
def answers(traces, checkpoint, inputs, on_session_engine):
    """Both engines' answers to the reference input, STEPS decode steps, stored for the notebooks."""
    with on_session_engine():
        return capture_answers(checkpoint, inputs, *traces, STEPS, restarts=True, say=lambda line: None)


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
