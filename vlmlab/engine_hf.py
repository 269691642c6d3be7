"""Trace from Transformers, in process.

open_hf         a loaded model as a context
HFEngine        capture one input or decode steps after it; its hooks are gone afterwards, also after an exception
vision_output   the vision tower's output in the form SGLang accepts as precomputed embeddings
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    Raises: VlmlabError: the checkpoint does not load, or is in FP8 on a CPU.
    Source: transformers@5.19.0: quantizers/quantizer_finegrained_fp8.py,
    FineGrainedFP8HfQuantizer.validate_environment; quantizers/quantizer_compressed_tensors.py,
    CompressedTensorsHfQuantizer.
    """

    name = "hf"

    def __init__(self, checkpoint: Checkpoint, device: str | None = None, attention: str = "sdpa") -> None:
        from transformers import AutoModelForImageTextToText

        start = time.perf_counter()
        self.checkpoint = checkpoint
        self.attention = attention
        self.device = device or ("cuda" if has_cuda() else "cpu")
        if checkpoint.fp8 and self.device == "cpu":
            raise VlmlabError(
                f"expected a CUDA device for the FP8 checkpoint {checkpoint.name!r}, got a CPU, on which Transformers "
                "at best turns the weights back into bfloat16 and computes without FP8; ask the hybrid forward instead"
            )
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
    def forward(self, inputs: Inputs, cache: Any = None) -> Tensor:
        """One plain prefill.

        Args: inputs: what to ask. cache: an empty Transformers cache to fill, or None.
        Returns: [1, V] logits of the last position.
        """
        batch: dict[str, Any] = {"input_ids": inputs.input_ids[None]}
        batch["mm_token_type_ids"] = inputs.image_positions[None].int()
        if inputs.pixel_values is not None:
            batch |= {"pixel_values": inputs.pixel_values, "image_grid_thw": inputs.image_grid_thw}
        batch = {key: value.to(self.device) for key, value in batch.items()}
        use_cache = cache is not None
        return self.model(**batch, past_key_values=cache, use_cache=use_cache, logits_to_keep=1).logits[0]

    @torch.no_grad()
    def _decode(self, input_ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """One plain decode step: [1] ids at [3, 1] positions, [1, V] logits."""
        # Left to itself the model adds the rope delta of its last picture, also when this prompt has none.
        batch = {"input_ids": input_ids[None].to(self.device), "position_ids": positions[:, None].to(self.device)}
        return self.model(**batch, past_key_values=cache, use_cache=True).logits[0]

    def capture(self, inputs: Inputs, folder: Path) -> Trace:
        """One prefill with every hook point copied to disk.

        Args: inputs: what to ask. folder: trace folder to write.
        Returns: Trace. Raises: VlmlabError: disk full, or a hook point was never reached.
        """
        given = {"inputs.input_ids": inputs.input_ids, "inputs.positions": self.positions(inputs)}
        parts = ["language"]
        if inputs.pixel_values is not None and inputs.image_grid_thw is not None:
            given["inputs.pixel_values"] = inputs.pixel_values.to(self.model.dtype)
            given["inputs.image_grid_thw"] = inputs.image_grid_thw
            parts.append("vision")
        return self._record(folder, parts, inputs, given, lambda: self.forward(inputs))

    def capture_decode(
        self, inputs: Inputs, folder: Path, steps: int, forced: Sequence[int] = ()
    ) -> tuple[tuple[Trace, ...], list[int]]:
        """Decode steps after an unrecorded prefill, the language model's hook points copied to disk.

        Args: inputs: what to ask. folder: gets one trace folder a step, `step_0` and on. steps: how many. forced:
        tokens to follow; past them the likeliest.
        Returns: one Trace a step, and the tokens; token k is the input of step k. There is one token more than steps;
        where logits are not finite both end early.
        Raises: VlmlabError: disk full, or a hook point was never reached.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config.get_text_config())
        logits, first = self.forward(inputs, cache), int(self.positions(inputs).max()) + 1
        traces: list[Trace] = []
        tokens: list[int] = []
        while len(tokens) < len(forced) or logits.isfinite().all():
            k = len(tokens)
            tokens.append(forced[k] if k < len(forced) else int(logits[0].argmax()))
            if k == steps:
                break
            ids, positions = torch.tensor(tokens[-1:]), torch.full((3, 1), first + k)
            given = {"inputs.input_ids": ids, "inputs.positions": positions}
            step = functools.partial(self._decode, ids, positions, cache)
            traces.append(self._record(folder / f"step_{k}", ["language"], inputs, given, step, decode_step=k))
            logits = traces[-1]["logits"]
        return tuple(traces), tokens

    def _record(
        self,
        folder: Path,
        parts: Sequence[str],
        inputs: Inputs,
        given: Mapping[str, Tensor],
        forward: Callable[[], Any],
        **flags: Any,
    ) -> Trace:
        start = time.perf_counter()
        points = tuple(point for point in hook_points(self.checkpoint.config) if point.part in parts)
        with write_trace(folder) as partial:
            recorder = Recorder(partial)
            for name, tensor in given.items():
                recorder.add(name, tensor)
            with recording(self.model, points, recorder.add):
                forward()
            recorder.flush()
            unreached = [point.name for point in points if point.name not in recorder.shards]
            if unreached:
                raise VlmlabError(f"Transformers never reached {unreached[0]} (and {len(unreached) - 1} more)")
            seconds = {**self.seconds, "capture": time.perf_counter() - start}
            write_run(partial, self._run_info(inputs, seconds, flags), recorder.shards)
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

    def _run_info(self, inputs: Inputs, seconds: dict[str, float], flags: Mapping[str, Any]) -> RunInfo:
        settings = hf_settings(self.checkpoint, self.attention, self.device)
        settings["flags"] = settings["flags"] | flags
        return RunInfo(
            model=self.checkpoint.name,
            family=self.checkpoint.family,
            weights_hash=self.checkpoint.weights_hash,
            input_hash=inputs.hash,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=self.checkpoint.config,
            seconds=seconds,
            **settings,
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
    return torch.cat([trace["vision.merger"], *trace.deepstack], dim=1)
