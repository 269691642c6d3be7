"""Both engines on one input. Traces are stored on disk under a key of everything that can change them, and reused.

capture_both    (HF trace, SGLang trace), from the store or fresh
capture_steps   the decode steps after them, both engines on SGLang's tokens
store_folder    where traces are kept: $VLMLAB_CACHE, else a folder in the user's cache
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from vlmlab.checkpoint import Checkpoint
from vlmlab.engine_hf import hf_settings, open_hf, vision_output
from vlmlab.engine_sglang import check_deepstack_order, engine_arguments, engine_settings, open_sglang
from vlmlab.errors import VlmlabError
from vlmlab.inputs import Inputs
from vlmlab.trace import Trace, load_trace

CAPTURE_MODULES = ("hookpoints", "inputs", "trace", "engine_hf", "engine_sglang", "sglang_worker")

ENGINE_LOG = "sglang.log"  # of the last engine started; it names folders of this machine and does not travel

Say = Callable[[str], None]


def store_folder() -> Path:
    """Where captures are kept.

    Returns: $VLMLAB_CACHE when set, else vlmlab in the user's cache folder.
    """
    chosen = os.environ.get("VLMLAB_CACHE")
    return Path(chosen) if chosen else Path("~/.cache/vlmlab").expanduser()


def capture_key(settings: Mapping[str, Any], checkpoint: Checkpoint, inputs: Inputs, given: torch.Tensor | None) -> str:
    """The name of a capture: a hash over everything that can change a bit of it.

    Args: settings: of the engine. checkpoint, inputs: what runs on what. given: vision output for the language model.
    Returns: engine name and 20 hex digits.
    """
    content = {
        "settings": settings,
        "weights": checkpoint.weights_hash,
        "input": inputs.hash,
        "pixels": _hash(inputs.pixel_values),
        "ids": _hash(inputs.input_ids),
        "given": _hash(given),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "MKL_", "SGLANG_", "TORCH_"))},
        "code": _code_hash(),
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    return f"{settings['engine']}-{digest[:20]}"


def _hash(tensor: torch.Tensor | None) -> str | None:
    if tensor is None:
        return None
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _code_hash() -> str:
    digest = hashlib.sha256()
    for module in CAPTURE_MODULES:
        digest.update((Path(__file__).parent / f"{module}.py").read_bytes())
    return digest.hexdigest()


def _stored(folder: Path, fresh: bool) -> Trace | None:
    if fresh or not folder.is_dir():
        return None
    try:
        return load_trace(folder)
    except VlmlabError:  # from an interrupted disk or a hand-edited store: capture again
        return None


def capture_hf(
    checkpoint: Checkpoint, inputs: Inputs, *, fresh: bool = False, attention: str = "sdpa", say: Say = print
) -> Trace:
    """One input from Transformers, from the store unless `fresh`.

    Args: see capture_both. Returns: Trace. Raises: VlmlabError: the engine fails.
    """
    folder = store_folder() / capture_key(hf_settings(checkpoint, attention), checkpoint, inputs, None)
    stored = _stored(folder, fresh)
    if stored is not None:
        say(f"Transformers: stored capture of {stored.info.created}")
        return stored
    say("Transformers: loading")
    with open_hf(checkpoint, attention=attention) as engine:
        say("Transformers: capturing")
        return engine.capture(inputs, folder)


def capture_sglang(
    checkpoint: Checkpoint,
    inputs: Inputs,
    baseline: Trace,
    *,
    fresh: bool = False,
    engine_args: Mapping[str, Any] | None = None,
    deepstack_order: str = "sglang",
    say: Say = print,
) -> Trace:
    """One input from SGLang, its language model given the baseline's vision output; from the store unless `fresh`.

    Args: baseline: Transformers' trace of the same input. deepstack_order: see open_sglang. Others: see capture_both.
    Returns: Trace. Raises: VlmlabError: SGLang cannot run here or fails, or has no such order.
    """
    check_deepstack_order(checkpoint, deepstack_order)
    given = vision_output(baseline)
    settings = engine_settings(checkpoint, engine_arguments(checkpoint, engine_args), deepstack_order)
    folder = store_folder() / capture_key(settings, checkpoint, inputs, given)
    stored = _stored(folder, fresh)
    if stored is not None:
        say(f"SGLang: stored capture of {stored.info.created}")
        return stored
    say("SGLang: starting the engine")
    log = store_folder() / ENGINE_LOG
    with open_sglang(checkpoint, engine_args, log=log, deepstack_order=deepstack_order) as engine:
        say("SGLang: capturing")
        return engine.capture(inputs, folder, given)


def capture_both(
    checkpoint: Checkpoint,
    inputs: Inputs,
    *,
    fresh: bool = False,
    attention: str = "sdpa",
    engine_args: Mapping[str, Any] | None = None,
    say: Say = print,
) -> tuple[Trace, Trace]:
    """Capture one input from both engines, one engine after the other, so that a model needs to fit only once.

    SGLang sees the picture for its vision part. Its language model is given Transformers' vision output, so that the
    prefill part differs by the language model alone.

    Args: checkpoint, inputs: what runs on what. fresh: capture even when stored. attention: of Transformers.
    engine_args: further `sglang.Engine` arguments. say: called with one line per phase.
    Returns: (HF trace, SGLang trace).
    Raises: VlmlabError: an engine cannot run here or fails.
    """
    hf = capture_hf(checkpoint, inputs, fresh=fresh, attention=attention, say=say)
    return hf, capture_sglang(checkpoint, inputs, hf, fresh=fresh, engine_args=engine_args, say=say)


def capture_steps(
    checkpoint: Checkpoint,
    inputs: Inputs,
    baseline: Trace,
    steps: int,
    *,
    fresh: bool = False,
    engine_args: Mapping[str, Any] | None = None,
    say: Say = print,
) -> tuple[tuple[Trace, Trace], ...]:
    """Decode steps after the prefill: SGLang generates greedily, Transformers is given the same tokens.

    Args: baseline: Transformers' trace of the prefill, whose vision output both are given. steps: how many. Others: see
    capture_both.
    Returns: (HF trace, SGLang trace) per step. Raises: VlmlabError: an engine cannot run here or fails.
    """
    given, attention = vision_output(baseline), baseline.info.attention
    settings = {**engine_settings(checkpoint, engine_arguments(checkpoint, engine_args)), "attention": attention}
    folder = store_folder() / f"{capture_key(settings, checkpoint, inputs, given)}-{steps}-steps"
    stored = [_stored(folder / engine / f"step_{k}", fresh) for k in range(steps) for engine in ("hf", "sglang")]
    found = [trace for trace in stored if trace is not None]
    if len(found) < 2 * steps:
        say(f"SGLang: starting the engine for {steps} decode steps")
        with open_sglang(checkpoint, engine_args, log=store_folder() / ENGINE_LOG) as engine:
            sglang, tokens = engine.capture_decode(inputs, folder / "sglang", steps, given)
        say(f"Transformers: the same {steps} decode steps")
        with open_hf(checkpoint, attention=attention) as other:
            hf, _ = other.capture_decode(inputs, folder / "hf", steps, tokens)
        return tuple(zip(hf, sglang, strict=True))
    say(f"stored decode steps of {found[0].info.created}")
    return tuple(zip(found[::2], found[1::2], strict=True))
