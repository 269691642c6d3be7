"""Fixtures: one loaded Transformers model and one started SGLang engine serve the whole session."""

import contextlib

import numpy as np
import pytest
from PIL import Image

from vlmlab import capture
from vlmlab.capture import capture_hf, capture_sglang
from vlmlab.checkpoint import load_checkpoint
from vlmlab.compare import compare_traces
from vlmlab.engine_hf import open_hf
from vlmlab.engine_sglang import open_sglang
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
        patch.setattr(capture, "open_sglang", already_open)
        hf = capture_hf(checkpoint, inputs)
        return hf, capture_sglang(checkpoint, inputs, hf)


@pytest.fixture(scope="session")
def comparison(traces):
    return compare_traces(*traces)
