"""Trace from Transformers, in process.

open_hf         a loaded model as a context
HFEngine        capture one input; every hook it sets is gone afterwards, also after an exception
vision_output   the vision tower's output in the form SGLang accepts as precomputed embeddings
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmlab.checkpoint import Checkpoint
from vlmlab.errors import VlmlabError
from vlmlab.hookpoints import HookPoint, hook_points, read
from vlmlab.inputs import Inputs
from vlmlab.machine import device_info, has_cuda, versions
from vlmlab.trace import Recorder, RunInfo, Trace, load_trace, write_run, write_trace


@contextlib.contextmanager
def recording(model: nn.Module, points: tuple[HookPoint, ...], add: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `add(name, tensor)` for every hook point reached inside the block; remove all hooks at its end.

    Args: model: Transformers model. points: what to read. add: receives the live [T, D] tensor and must copy it.
    Raises: VlmlabError: a module path of `points` is not in the model; no hook is left behind.
    """
    handles: list[Any] = []
    try:
        by_module: dict[str, list[HookPoint]] = {}
        for point in points:
            by_module.setdefault(point.hf, []).append(point)
        for path, here in by_module.items():
            try:
                module = model.get_submodule(path)
            except AttributeError as error:
                raise VlmlabError(
                    f"expected a module {path!r} in {type(model).__name__}, found none; the hook points were written "
                    "for transformers 5.19.0"
                ) from error

            def hook(module, inputs, output, here=here):
                for point in here:
                    add(point.name, read(point.slot, inputs, output))

            handles.append(module.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


class HFEngine:
    """A loaded Transformers model that captures traces.

    Attributes: checkpoint, model, seconds: load time by phase.
    """

    name = "hf"

    def __init__(self, checkpoint: Checkpoint, device: str | None = None, attention: str = "sdpa") -> None:
        from transformers import AutoModelForImageTextToText

        start = time.perf_counter()
        self.checkpoint = checkpoint
        self.attention = attention
        self.device = device or ("cuda" if has_cuda() else "cpu")
        try:
            loaded: Any = AutoModelForImageTextToText.from_pretrained(
                checkpoint.folder, dtype=checkpoint.dtype, attn_implementation=attention, output_loading_info=True
            )
        except Exception as error:  # the library raises many unrelated types for broken checkpoints
            raise VlmlabError(
                f"Transformers does not load checkpoint {checkpoint.name!r} ({type(error).__name__}: {error})"
            ) from error
        model, loading = loaded
        # Transformers only warns about these and fills them with random numbers.
        invented = sorted([*loading["missing_keys"], *map(str, loading["mismatched_keys"])])
        if invented:
            raise VlmlabError(
                f"checkpoint {checkpoint.name!r} lacks {len(invented)} weights its config.json asks for, first "
                f"{invented[0]}; the model would run on random numbers there"
            )
        self.model = model.eval().to(self.device)
        self.seconds = {"load": time.perf_counter() - start}

    @torch.no_grad()
    def forward(self, inputs: Inputs) -> Tensor:
        """One plain prefill.

        Args: inputs: what to ask. Returns: [1, V] logits of the last position.
        """
        batch: dict[str, Any] = {"input_ids": inputs.input_ids[None]}
        batch["mm_token_type_ids"] = inputs.image_positions[None].int()
        if inputs.pixel_values is not None:
            batch |= {"pixel_values": inputs.pixel_values, "image_grid_thw": inputs.image_grid_thw}
        batch = {key: value.to(self.device) for key, value in batch.items()}
        return self.model(**batch, use_cache=False, logits_to_keep=1).logits[0]

    def capture(self, inputs: Inputs, folder: Path) -> Trace:
        """One prefill with every hook point copied to disk.

        Args: inputs: what to ask. folder: trace folder to write.
        Returns: Trace. Raises: VlmlabError: disk full, or a hook point was never reached.
        """
        start = time.perf_counter()
        points = hook_points(self.checkpoint.config)
        if inputs.pixel_values is None:
            points = tuple(point for point in points if point.part != "vision")
        with write_trace(folder) as partial:
            recorder = Recorder(partial)
            recorder.add("inputs.input_ids", inputs.input_ids)
            recorder.add("inputs.positions", self.positions(inputs))
            if inputs.pixel_values is not None and inputs.image_grid_thw is not None:
                recorder.add("inputs.pixel_values", inputs.pixel_values.to(self.model.dtype))
                recorder.add("inputs.image_grid_thw", inputs.image_grid_thw)
            with recording(self.model, points, recorder.add):
                self.forward(inputs)
            recorder.flush()
            unreached = [point.name for point in points if point.name not in recorder.shards]
            if unreached:
                raise VlmlabError(f"Transformers never reached {unreached[0]} (and {len(unreached) - 1} more)")
            seconds = {**self.seconds, "capture": time.perf_counter() - start}
            write_run(partial, self._run_info(inputs, seconds), recorder.shards)
        return load_trace(folder)

    def positions(self, inputs: Inputs) -> Tensor:
        """M-RoPE positions as the model computes them.

        Args: inputs: what to ask. Returns: [3, T] int64: temporal, height, width.
        """
        ids = inputs.input_ids[None]
        grid = inputs.image_grid_thw
        if grid is None:
            return torch.arange(inputs.tokens).expand(3, -1)
        kinds = inputs.image_positions[None].int()
        positions, _ = self.model.model.get_rope_index(ids, kinds, image_grid_thw=grid)
        return positions[-3:, 0]

    def _run_info(self, inputs: Inputs, seconds: dict[str, float]) -> RunInfo:
        return RunInfo(
            model=self.checkpoint.name,
            family=self.checkpoint.family,
            weights_hash=self.checkpoint.weights_hash,
            input_hash=inputs.hash,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=self.checkpoint.config,
            seconds=seconds,
            **hf_settings(self.checkpoint, self.attention, self.device),
        )


def hf_settings(checkpoint: Checkpoint, attention: str, device: str | None = None) -> dict[str, Any]:
    """Everything about an engine so loaded that can change a bit, without loading it.

    Args: checkpoint: gives the dtype. attention: implementation. device: "cuda", "cpu" or None for what is here.
    Returns: JSON-ready settings.
    """
    return {
        "engine": "hf",
        "dtype": checkpoint.dtype,
        "attention": attention,
        "device": device_info(device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "flags": {"attn_implementation": attention},
    }


@contextlib.contextmanager
def open_hf(checkpoint: Checkpoint, device: str | None = None, attention: str = "sdpa") -> Iterator[HFEngine]:
    """A loaded model, released at the end of the block.

    Args: checkpoint: what to load. device: "cuda" or "cpu", None for what is here. attention: "sdpa" or "eager".
    """
    engine = HFEngine(checkpoint, device, attention)
    try:
        yield engine
    finally:
        del engine.model
        if has_cuda():
            torch.cuda.empty_cache()


def vision_output(trace: Trace) -> Tensor | None:
    """The vision tower's output, deepstack features beside it, as SGLang takes precomputed embeddings.

    Args: trace: captured with a picture or not. Returns: [image tokens, D * (1 + deepstack layers)], or None.
    Source: sglang@0.5.23: srt/models/qwen3_vl.py, get_image_feature (features concatenated on the last axis).
    """
    if "vision.merger" not in trace:
        return None
    deepstack = [trace[name] for name in trace.hook_points if name.startswith("vision.deepstack.")]
    return torch.cat([trace["vision.merger"], *deepstack], dim=1)
