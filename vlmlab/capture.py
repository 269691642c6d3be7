"""Both engines on one input, stored on disk and reused.

capture_both    a prefill in both engines, from the store or fresh
capture_hf, capture_sglang  one of them
capture_key     the name of a capture: a hash of everything that can change a bit of it
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vlmlab import store
from vlmlab.checkpoint import Checkpoint
from vlmlab.engine_hf import hf_settings, vision_output
from vlmlab.engine_sglang import check_deepstack_order, engine_arguments, engine_settings
from vlmlab.engines import Engines, borrowed
from vlmlab.errors import VlmlabError
from vlmlab.inputs import Inputs
from vlmlab.metrics import digest
from vlmlab.trace import Trace, load_trace

CODE = ("hookpoints", "inputs", "trace", "engine_hf", "engine_sglang", "sglang_worker")

Say = Callable[[str], None]


def capture_key(settings: Mapping[str, Any], checkpoint: Checkpoint, inputs: Inputs, given: torch.Tensor | None) -> str:
    """The name of a capture.

    Args: settings: of the engine. checkpoint, inputs: what runs on what. given: vision output for the language model.
    Returns: see store.key_of.
    """
    content = {
        "settings": settings,
        "weights": checkpoint.weights_hash,
        "input": inputs.hash,
        "pixels": None if inputs.pixel_values is None else digest(inputs.pixel_values),
        "ids": digest(inputs.input_ids),
        "given": None if given is None else digest(given),
    }
    return store.key_of(settings["engine"], content, CODE)


def is_stored(checkpoint: Checkpoint, inputs: Inputs, attention: str = "sdpa") -> bool:
    """Whether Transformers' capture of an input is in the store. Args: see capture_both."""
    return store.use(capture_key(hf_settings(checkpoint, attention), checkpoint, inputs, None)) is not None


def _stored(name: str, fresh: bool) -> Trace | None:
    folder = None if fresh else store.use(name)
    try:
        return None if folder is None else load_trace(folder)
    except VlmlabError:  # from an interrupted disk or a hand-edited store: capture again
        return None


def capture_hf(
    checkpoint: Checkpoint,
    inputs: Inputs,
    *,
    fresh: bool = False,
    attention: str = "sdpa",
    say: Say = print,
    engines: Engines | None = None,
) -> Trace:
    """One input from Transformers, from the store unless `fresh`.

    Args: see capture_both. Returns: Trace. Raises: VlmlabError: the engine fails.
    """
    name = capture_key(hf_settings(checkpoint, attention), checkpoint, inputs, None)
    stored = _stored(name, fresh)
    if stored is not None:
        say(f"Transformers: stored capture of {stored.info.created}")
        return stored
    with borrowed(engines, checkpoint, attention) as engines:
        say("Transformers: loading")
        engine = engines.hf()
        say("Transformers: capturing")
        return _kept(engine.capture(inputs, store.store_folder() / name))


def capture_sglang(
    checkpoint: Checkpoint,
    inputs: Inputs,
    baseline: Trace,
    *,
    fresh: bool = False,
    engine_args: Mapping[str, Any] | None = None,
    deepstack_order: str = "sglang",
    say: Say = print,
    engines: Engines | None = None,
) -> Trace:
    """One input from SGLang, its language model given the baseline's vision output; from the store unless `fresh`.

    Args: baseline: Transformers' trace of the same input. deepstack_order: see open_sglang. Others: see capture_both.
    Returns: Trace. Raises: VlmlabError: SGLang cannot run here or fails, or has no such order.
    """
    check_deepstack_order(checkpoint, deepstack_order)
    given = vision_output(baseline)
    settings = engine_settings(checkpoint, engine_arguments(checkpoint, engine_args), deepstack_order)
    name = capture_key(settings, checkpoint, inputs, given)
    stored = _stored(name, fresh)
    if stored is not None:
        say(f"SGLang: stored capture of {stored.info.created}")
        return stored
    with borrowed(engines, checkpoint, "sdpa", engine_args, deepstack_order) as engines:
        say("SGLang: starting the engine")
        engine = engines.sglang()
        say("SGLang: capturing")
        return _kept(engine.capture(inputs, store.store_folder() / name, given))


def _kept(trace: Trace) -> Trace:
    store.prune()
    return trace


def capture_both(
    checkpoint: Checkpoint,
    inputs: Inputs,
    *,
    fresh: bool = False,
    attention: str = "sdpa",
    engine_args: Mapping[str, Any] | None = None,
    say: Say = print,
    engines: Engines | None = None,
) -> tuple[Trace, Trace]:
    """Capture one input from both engines.

    SGLang sees the picture for its vision part. Its language model is given Transformers' vision output, so that the
    prefill part differs by the language model alone.

    Args: checkpoint, inputs: what runs on what. fresh: capture even when stored. attention: of Transformers.
    engine_args: further `sglang.Engine` arguments. say: called with one line per phase. engines: of this checkpoint
    with these arguments, to be used and left open; None opens what is needed and closes it.
    Returns: (HF trace, SGLang trace).
    Raises: VlmlabError: an engine cannot run here or fails.
    """
    with borrowed(engines, checkpoint, attention, engine_args) as engines:
        if fresh or not is_stored(checkpoint, inputs, attention):
            engines.sglang_soon()
        hf = capture_hf(checkpoint, inputs, fresh=fresh, attention=attention, say=say, engines=engines)
        return hf, capture_sglang(
            checkpoint, inputs, hf, fresh=fresh, engine_args=engine_args, say=say, engines=engines
        )
