"""What runs outside the notebook: the process that owns `sglang.Engine`, and the hooks inside its scheduler process.

serve           start the engine, then answer requests from standard input until it closes
record          hook factory that SGLang's `forward_hooks` argument names; runs in the scheduler process
finish          hook factory for the last module of a forward pass; completes its recording
deepstack_order hook factory that makes the engine add deepstack features in another order, and changes nothing else

Only this module imports sglang. A recording is asked for through a file: the scheduler looks for `request.json` in the
control folder when a forward pass starts, and renames it `taken.json`. It names one folder for each forward pass to
come, null for a pass that is not recorded; with `rows`, a pass over another number of rows has none. The scheduler
streams each pass into its folder and writes `recorded.json`, one entry a folder, after the last. A request is over when
its owner removes its file, or writes the next.

Source: sglang@0.5.23: srt/model_executor/hook_manager.py (factory and hook signatures).
"""

import contextlib
import importlib.metadata
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vlmlab.hookpoints import read
from vlmlab.trace import Recorder, dtype_name, write_json

REQUEST_FILE = "request.json"
TAKEN_FILE = "taken.json"
RECORDED_FILE = "recorded.json"
SHUTDOWN_GRACE_S = 10.0


class _Request:
    """The request in progress in this scheduler process; tensor parallel ranks other than 0 never have one."""

    def __init__(self, folders: list[str | None], parts: list[str], rows: int | None = None) -> None:
        self.folders, self.parts, self.rows = folders, parts, rows
        self.facts: list[dict[str, Any] | None] = []


class _Recording:
    """The forward pass in progress, the next of its request; without a folder it has no parts to record."""

    def __init__(self, request: _Request) -> None:
        folder = request.folders.pop(0)
        self.request = request
        self.recorder = Recorder(Path(folder)) if folder else None
        self.parts = request.parts if folder else []
        self.error: str | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self.recorder is not None and self.error is None:
            try:
                self.recorder.add(name, tensor)
            except Exception as error:  # an exception here would kill the scheduler; the owner raises it instead
                self.error = str(error)

    def finish(self, logits: torch.Tensor) -> None:
        """Write what is pending and note the facts of this pass."""
        if self.recorder is None:
            self.request.facts.append(None)
            return
        try:
            self.recorder.flush()
        except Exception as error:
            self.error = self.error or str(error)
        facts = {
            "shards": self.recorder.shards,
            "error": self.error,
            "threads": torch.get_num_threads(),
            "logits_dtype": dtype_name(logits.dtype),
            "device": str(logits.device),
        }
        self.request.facts.append(facts)


_request: _Request | None = None
_current: _Recording | None = None
_inside = False


def _recording(control: Path, rows: int | None = None) -> _Recording | None:
    """The recording of this forward pass; its first hook decides, so that no request begins half-way."""
    global _request, _current, _inside
    if not _inside:
        _inside = True
        if _rank() == 0:
            _request = _requested(control)
            wanted = _request is not None and _request.folders and _request.rows in (None, rows)
            _current = _Recording(_request) if _request is not None and wanted else None
    return _current


def _requested(control: Path) -> _Request | None:
    taken = control / TAKEN_FILE
    try:
        os.replace(control / REQUEST_FILE, taken)
        return _Request(**json.loads(taken.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return _request if taken.exists() else None


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def record(config: dict[str, Any]) -> Callable:
    """Hook factory: record the hook points of one module.

    Args: config: {"control": folder, "reads": [[name, part, slot], ...]}.
    Returns: forward hook.
    """
    control, reads = Path(config["control"]), config["reads"]

    def hook(module, inputs, output):
        recording = _recording(control, len(read(reads[0][2], inputs, output)))
        if recording is None:
            return
        for name, part, slot in reads:
            if part not in recording.parts:
                continue
            if name == "vision.patch_embed":
                recording.add("inputs.pixel_values", inputs[0])
            recording.add(name, read(slot, inputs, output))

    return hook


def first_layer(config: dict[str, Any]) -> Callable:
    """Hook factory for the first decoder layer: what the scheduler made of ids and positions.

    Args: config: {"control": folder}. Returns: forward hook.
    """
    control = Path(config["control"])

    def hook(module, inputs, output):
        recording = _recording(control)
        if recording is None or "inputs" not in recording.parts:
            return
        positions, _, batch = inputs[:3]
        recording.add("inputs.input_ids", batch.input_ids)
        recording.add("inputs.positions", positions if positions.dim() == 2 else positions.expand(3, -1))

    return hook


def finish(config: dict[str, Any]) -> Callable:
    """Hook factory for the logits processor: record the logits and complete the forward pass.

    Args: config: {"control": folder}. Returns: forward hook.
    """
    control = Path(config["control"])

    def hook(module, inputs, output):
        global _current, _inside
        recording = _recording(control)
        _current, _inside = None, False
        if recording is None:
            return
        if "language" in recording.parts:
            recording.add("logits", read("logits", inputs, output))
        recording.finish(output.next_token_logits)
        if not recording.request.folders:
            write_json(control / RECORDED_FILE, recording.request.facts)

    return hook


def _to_residual(hidden: torch.Tensor, residual: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return residual + features


def _to_sum(hidden: torch.Tensor, residual: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return _in_place_of_sum(hidden, residual, features, (hidden + residual) + features)


def _all_at_once(hidden: torch.Tensor, residual: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return _in_place_of_sum(hidden, residual, features, hidden.float() + residual + features)


def _in_place_of_sum(hidden: torch.Tensor, residual: torch.Tensor, features: torch.Tensor, total: torch.Tensor):
    """Make `hidden` the total at image tokens, those with features; leave the other tokens' sum to the norm."""
    image = features.any(-1, keepdim=True)
    hidden.copy_(torch.where(image, total.to(hidden.dtype), hidden))
    return residual.masked_fill(image, -0.0)  # added to anything it keeps every bit


# As `deepstack_sum` of vlmlab.arithmetic names them: (MLP output, which may be changed in place, residual, features),
# [T, D] each, to the residual; the next norm adds the two. "sglang" is SGLang's own `hidden.add_(features)`.
DEEPSTACK_ORDERS: dict[str, Callable[..., torch.Tensor] | None] = {
    "sglang": None,
    "hf": _to_sum,
    "residual_first": _to_residual,
    "once": _all_at_once,
}


def deepstack_order(config: dict[str, Any]) -> Callable:
    """Hook factory that adds deepstack features in another order; in effect once SGLang has called it.

    The hook itself does nothing: SGLang accepts no other tensor as a layer's output, and a layer does not see the
    features. Both models add them by one function, called in passes with a picture only, and that is replaced here, in
    this scheduler process. SGLang's own flag `use_hf_deepstack_order` is none of these orders: its norms add all three
    in float32 on CPU and normalise the unrounded sum, and add residual + features first on CUDA.

    Args: config: {"order": of DEEPSTACK_ORDERS, not "sglang"}. Returns: forward hook.
    Source: sglang@0.5.23: srt/layers/layer_boundary/residual/batch.py, add_to_output; stream.py, ResidualStream.check;
    srt/models/qwen3_vl.py, Qwen3LLMModel.forward; srt/models/qwen3_vl_moe.py, Qwen3MoeLLMModel.forward.
    """
    from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

    add = DEEPSTACK_ORDERS[config["order"]]
    assert add is not None

    def add_to_output(hidden_states, forward_batch, extra):
        stream = residual_batch.stream_of(forward_batch)
        hidden_states = stream.complete(hidden_states)
        stream.residual = add(hidden_states, stream.residual, extra)
        return hidden_states

    residual_batch.add_to_output = add_to_output
    return lambda module, inputs, output: None


def _generate(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One request. Precomputed embeddings travel as a safetensors file."""
    image = request.get("image")
    if isinstance(image, str):
        image = [image]
    elif image:
        from safetensors.torch import load_file

        stored = load_file(image["file"])
        image = [{"format": "processor_output", "modality": "IMAGE", **stored}]
    arguments = {key: request[key] for key in ("prompt", "input_ids") if request.get(key) is not None}
    sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": request["max_new_tokens"]}
    arguments |= {"image_data": image, "sampling_params": sampling}
    if request.get("forced"):
        sampling["custom_params"] = {"forced": request["forced"]}
        arguments["custom_logit_processor"] = _forcing()
    copies = request.get("copies", 1)
    if copies > 1:
        arguments = {key: [value] * copies for key, value in arguments.items()}
    answers = engine.generate(**arguments)
    answer = answers[0] if copies > 1 else answers
    return {"output_ids": list(answer["output_ids"]), "prompt_tokens": answer["meta_info"]["prompt_tokens"]}


def _forcing() -> str:
    """SGLang's own way to choose tokens: a logit processor that leaves nothing but the next forced one.

    It goes to the scheduler by value; what the hooks record is from before it.
    """
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class Forced(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list=None):
            for row, given in enumerate(custom_param_list or []):
                place = len(given["__req__"].output_ids)
                if place < len(given["forced"]):
                    logits[row, :] = -float("inf")
                    logits[row, given["forced"][place]] = 0.0
            return logits

    return Forced.to_str()


def _read_requests(requests: "queue.Queue[str | None]", started: threading.Event) -> None:
    """Pass on the owner's lines. When they end, because the owner closed them or died, see to it that all of us end."""
    for line in sys.stdin:
        requests.put(line)
    requests.put(None)
    if started.is_set():
        time.sleep(SHUTDOWN_GRACE_S)  # an orderly shutdown ends this process, and this daemon thread with it
    os.killpg(os.getpgid(0), signal.SIGKILL)  # the owner made this group for the engine alone


def serve() -> None:
    """Start the engine described by the first line of standard input, then answer one request a line.

    Standard output carries one JSON object a line; everything the engine prints goes to standard error, its log. When
    standard input closes the engine is shut down, also while it is still starting.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def reply(**content: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            replies.write(json.dumps(content) + "\n")
            replies.flush()

    requests: queue.Queue[str | None] = queue.Queue()
    started = threading.Event()
    threading.Thread(target=_read_requests, args=(requests, started), daemon=True).start()
    arguments = json.loads(requests.get() or "{}")
    try:
        import sglang

        engine = sglang.Engine(**arguments)
    except BaseException as error:
        traceback.print_exc()
        reply(error=f"{type(error).__name__}: {error}")
        return
    try:
        started.set()
        reply(ready=importlib.metadata.version("sglang"))
        for line in iter(requests.get, None):
            try:
                reply(**_generate(engine, json.loads(line)))
            except Exception as error:
                traceback.print_exc()
                reply(error=f"{type(error).__name__}: {error}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    serve()
