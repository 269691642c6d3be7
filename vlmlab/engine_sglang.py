"""Trace from SGLang: the real `sglang.Engine`, owned by a child process of ours.

open_sglang         a started engine as a context; nothing it started outlives the block or this process
SGLangEngine        capture one input or decode steps after it; one started engine serves many captures
engine_arguments    the Engine arguments that follow from this machine

The engine gets its own process because importing sglang changes the importer (signal handlers, event loop, torch
settings), because SGLang's answer to a dead scheduler is to kill its parent, and because on a machine without CUDA a
stand-in for `sgl_kernel` must be first on the path of SGLang's processes, and only there.
"""

import base64
import contextlib
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from vlmlab.checkpoint import Checkpoint
from vlmlab.errors import VlmlabError
from vlmlab.hookpoints import hook_points
from vlmlab.inputs import Inputs
from vlmlab.machine import device_info, engine_checks, has_cuda, versions
from vlmlab.sglang_worker import DEEPSTACK_ORDERS, RECORDED_FILE, REQUEST_FILE, TAKEN_FILE
from vlmlab.trace import RunInfo, Trace, load_trace, write_json, write_run, write_trace

STANDIN = Path(__file__).parent / "cpu_standin"
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0
SHUTDOWN_TIMEOUT_S = 20.0
WORKER = "vlmlab.sglang_worker"


def engine_arguments(checkpoint: Checkpoint, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Engine arguments for reproducible captures on this machine, without the model path and the hooks.

    Overlapping, caching and CUDA graphs are off, since each would skip or replay the Python modules that hooks observe.

    Args: checkpoint: gives the dtype. extra: further `sglang.Engine` arguments, such as {"tp_size": 2}; they win.
    Returns: keyword arguments of `sglang.Engine`.
    Source: sglang@0.5.23: srt/server_args.py (names and meaning).
    """
    arguments: dict[str, Any] = {
        "dtype": checkpoint.dtype,
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "chunked_prefill_size": -1,
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # an idle scheduler polls without pause and takes a core from everybody else
        "random_seed": 0,
        "enable_custom_logit_processor": True,  # how decode steps are given their tokens
        "log_level": "info",
    }
    if not has_cuda():
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "mm_attention_backend": "sdpa",
            "mem_fraction_static": 0.3,
            "max_total_tokens": 8192,
        }
    return arguments | dict(extra or {})


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Environment of SGLang's processes: the stand-in first on the path without CUDA, caches off, no network."""
    environment = dict(os.environ) | {"SGLANG_VLM_CACHE_SIZE_MB": "0", "HF_HUB_OFFLINE": "1"}
    if not has_cuda():
        paths = [str(STANDIN), os.environ.get("PYTHONPATH", "")]
        environment |= {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "SGLANG_USE_CPU_ENGINE": "1",
            # One decorator-level torch.compile would cost 20 s; tensors are bit-identical without it.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return environment | dict(extra)


def decisive_lines(log: str, count: int = 6) -> str:
    """The lines of an engine's log that say why it failed: the last error and what stands around it.

    Args: log: whole log. count: how many lines. Returns: lines, without absolute paths.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if re.match(r"^(\S*\.)?\w*(Error|Exception)\b", line)]
    end = errors[-1] + 1 if errors else len(lines)
    chosen = lines[max(0, end - (1 if errors else count)) : end]
    return "\n".join(re.sub(r"(/[\w.+-]+)+/([\w.+-]+)", r"\2", line) for line in chosen)


class SGLangEngine:
    """A started engine. Use open_sglang.

    Attributes: checkpoint, arguments: Engine arguments in force, deepstack_order: see open_sglang, log: path of the
    engine's log, seconds: start-up time.
    Raises: VlmlabError: see open_sglang; FP8 on a CPU is refused before anything starts.
    Source: sglang@0.5.23: srt/layers/quantization/fp8.py, Fp8LinearMethod.process_weights_after_loading ("requires
    that CPU has AMX support").
    """

    name = "sglang"

    def __init__(
        self,
        checkpoint: Checkpoint,
        extra: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = START_TIMEOUT_S,
        log: Path | None = None,
        deepstack_order: str = "sglang",
        wait: bool = True,
    ) -> None:
        check_deepstack_order(checkpoint, deepstack_order)
        failed = [check for check in engine_checks() if check.engine == "sglang" and not check.ok]
        if failed:
            raise VlmlabError(f"SGLang cannot run here: {failed[0].name}: {failed[0].detail}")
        self.checkpoint = checkpoint
        self.arguments, self.deepstack_order = engine_arguments(checkpoint, extra), deepstack_order
        if self.arguments.get("device") == "cpu" and (checkpoint.fp8 or self.arguments.get("quantization") == "fp8"):
            raise VlmlabError(
                f"expected a CUDA device for {checkpoint.name!r} in FP8, got a CPU: SGLang's FP8 linears need AMX "
                "there and kernels that the stand-in lacks; ask the hybrid forward instead"
            )
        self._environment = dict(environment or {})
        self._folder = tempfile.TemporaryDirectory(prefix="vlmlab-sglang-")
        self._control = Path(self._folder.name)
        self.log = log or self._control / "engine.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen | None = None
        self._timeout, self._begun, self.seconds = timeout, time.perf_counter(), dict[str, float]()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        if wait:
            self.ready()

    def _start(self) -> None:
        arguments = self.arguments | {"model_path": str(self.checkpoint.folder), "forward_hooks": self._hook_specs()}
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(self._environment),
                start_new_session=True,  # a group of its own: Ctrl-C reaches us, and we end the whole group by its id
            )
        self._send(arguments)

    def ready(self) -> None:
        """Wait until it has started. Raises: VlmlabError: it does not, see open_sglang; it is closed then."""
        if self.seconds:
            return
        try:
            reply = self._receive(max(0.0, self._begun + self._timeout - time.perf_counter()), "start")
            if "error" in reply:
                raise VlmlabError(f"the SGLang engine did not start: {reply['error']}\n{self._log_lines()}")
        except BaseException:
            self.close()
            raise
        self.seconds = {"start": time.perf_counter() - self._begun}

    def _hook_specs(self) -> list[dict[str, Any]]:
        control = str(self._control)
        tensor_parallel = self.arguments.get("tp_size", 1) > 1
        reads: dict[str, list[list[str]]] = {}
        for point in hook_points(self.checkpoint.config):
            partial = point.slot == "sum" or point.name.endswith(("attn_out", "mlp_out"))
            if point.slot == "logits" or (tensor_parallel and partial):
                continue  # under tensor parallelism a half-block's output is one rank's partial sum
            reads.setdefault(point.sglang, []).append([point.name, point.part, point.slot])
        specs = [_spec(module, "record", {"control": control, "reads": here}) for module, here in reads.items()]
        specs.append(_spec("model.layers.0", "first_layer", {"control": control}))
        specs.append(_spec("logits_processor", "finish", {"control": control}))
        if self.deepstack_order != "sglang":
            specs.append(_spec("model", "deepstack_order", {"order": self.deepstack_order}))
        return specs

    def _send(self, content: Mapping[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            raise VlmlabError("the SGLang engine is shut down; open a new one")
        try:
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, OSError, ValueError) as error:
            raise self._died("take a request") from error

    def _receive(self, timeout: float, doing: str) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        try:
            ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        except BaseException:
            self.close()  # interrupted: as below
            raise
        if not ready:
            lines = self._log_lines()
            self.close()  # an answer that comes later must not be taken for the next one's
            raise VlmlabError(f"the SGLang engine did not {doing} within {timeout:.0f} s; its log ends:\n{lines}")
        line = self._process.stdout.readline()
        if not line:
            raise self._died(doing)
        return json.loads(line)

    def _died(self, doing: str) -> VlmlabError:
        return VlmlabError(f"the SGLang engine did not {doing}: it died; its log says:\n{self._log_lines()}")

    def _log_lines(self) -> str:
        return decisive_lines(self.log.read_text(encoding="utf-8", errors="replace"))

    @property
    def alive(self) -> bool:
        """Whether the engine's process still runs."""
        return self._process is not None and self._process.poll() is None

    def generate(
        self,
        inputs: Inputs,
        max_new_tokens: int = 1,
        embeddings: Tensor | None = None,
        forced: Sequence[int] = (),
        copies: int = 1,
    ) -> list[int]:
        """Greedy tokens for one input, also beyond a token that ends the answer.

        Args: inputs: what to ask; SGLang tokenizes the text and processes the picture itself. max_new_tokens: how many.
        embeddings: [image tokens, D...] vision output to use instead of the picture. forced: tokens to generate before
        it may choose. copies: equal requests at once.
        Returns: token ids. Raises: VlmlabError: the engine refused or died.
        """
        self.ready()
        request: dict[str, Any] = {"max_new_tokens": max_new_tokens, "forced": list(forced), "copies": copies}
        if inputs.answer:
            request |= {"input_ids": inputs.input_ids.tolist()}
        if embeddings is not None:
            if inputs.image_grid_thw is None or len(embeddings) != inputs.image_tokens:
                raise VlmlabError(f"expected {inputs.image_tokens} rows of vision output, got {len(embeddings)}")
            file = self._control / "embeddings.safetensors"
            content = {
                "precomputed_embeddings": embeddings.contiguous(),
                "image_grid_thw": inputs.image_grid_thw,
                "input_ids": inputs.input_ids[None].contiguous(),
            }
            save_file(content, file)
            request |= {"input_ids": inputs.input_ids.tolist(), "image": {"file": str(file)}}
        elif not inputs.answer:
            request |= {"prompt": inputs.text, "image": _data_uri(inputs)}
        elif inputs.image is not None:
            raise VlmlabError("an answer after a picture needs the picture's vision output")
        self._send(request)
        reply = self._receive(REQUEST_TIMEOUT_S, "answer")
        if "error" in reply:
            raise VlmlabError(f"the SGLang engine refused the request: {reply['error']}")
        return reply["output_ids"]

    def capture(self, inputs: Inputs, folder: Path, embeddings: Tensor | None = None) -> Trace:
        """One prefill with every hook point copied to disk by the scheduler process.

        Args: inputs: what to ask. folder: trace folder to write. embeddings: vision output for the language model; with
        it, the vision part comes from the picture and the language part from a second request that is given this.
        Returns: Trace. Raises: VlmlabError: disk full, the engine died, or a hook point was never reached.
        """
        start = time.perf_counter()
        with write_trace(folder) as partial:
            if embeddings is None:
                [recorded], _ = self._record([partial], ["inputs", "vision", "language"], inputs)
            else:
                [recorded], _ = self._record([partial], ["inputs", "vision"], inputs)
                [second], _ = self._record([partial], ["language"], inputs, embeddings)
                recorded["shards"] |= second["shards"]
            self._check_reached(recorded["shards"], ["language"] if inputs.image is None else ["vision", "language"])
            seconds = {**self.seconds, "capture": time.perf_counter() - start}
            info = self._run_info(inputs, recorded, embeddings is not None, seconds)
            write_run(partial, info, recorded["shards"])
        return load_trace(folder)

    def capture_decode(
        self, inputs: Inputs, folder: Path, steps: int, embeddings: Tensor | None = None, forced: Sequence[int] = ()
    ) -> tuple[tuple[Trace, ...], list[int]]:
        """Decode steps after an unrecorded prefill, the language model's hook points copied to disk.

        Args: inputs: what to ask. folder: gets one trace folder a step, `step_0` and on. steps: how many.
        embeddings: vision output for the language model, as in capture. forced: tokens to follow; past them it is
        greedy.
        Returns: one Trace a step, and the steps + 1 generated token ids; token k is the input of step k.
        Raises: VlmlabError: disk full, the engine died, or a step or hook point was never reached.
        """
        return self._capture_passes(inputs, folder, steps, embeddings, 1, forced=forced, max_new_tokens=steps + 1)

    def capture_prefill(
        self, inputs: Inputs, folder: Path, embeddings: Tensor | None = None, passes: int = 1
    ) -> tuple[Trace, ...]:
        """The language part of a prefill, as one pass or in chunks.

        Args: inputs: what to ask. folder: gets one trace folder a pass. embeddings: as in capture. passes: how many the
        engine makes of it (see its argument chunked_prefill_size).
        Returns: one Trace a pass. Raises: VlmlabError: as capture_decode.
        """
        return self._capture_passes(inputs, folder, passes, embeddings, 0, max_new_tokens=1)[0]

    def capture_batch(
        self, inputs: Inputs, folder: Path, steps: int, copies: int, forced: Sequence[int], embeddings: Tensor | None
    ) -> tuple[Trace, ...]:
        """Decode steps of equal requests in one batch, forced on the same tokens.

        The first decode steps may run before all requests have joined; they are not recorded.

        Args: steps: how many passes over all copies. copies: requests. forced: tokens. Others: as in capture_decode.
        Returns: one Trace a pass, [copies, D] each; `inputs.positions` says which step every row is.
        Raises: VlmlabError: as capture_decode, also when the requests were not together for so many steps.
        """
        return self._capture_passes(
            inputs, folder, steps, embeddings, 0, rows=copies, forced=forced, copies=copies, max_new_tokens=len(forced)
        )[0]

    def _capture_passes(
        self,
        inputs: Inputs,
        folder: Path,
        passes: int,
        embeddings: Tensor | None,
        skipped: int,
        rows: int | None = None,
        **request: Any,
    ) -> tuple[tuple[Trace, ...], list[int]]:
        """The language part of forward passes, a trace folder each, after some that are not recorded."""
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            folders = [folder / f"step_{k}" for k in range(passes)]
            partials = [stack.enter_context(write_trace(step)) for step in folders]
            facts, tokens = self._record(
                [*[None] * skipped, *partials], ["inputs", "language"], inputs, embeddings, rows, **request
            )
            seconds = {**self.seconds, "capture": time.perf_counter() - start}
            for k, (partial, recorded) in enumerate(zip(partials, facts, strict=True)):
                self._check_reached(recorded["shards"], ["language"])
                info = self._run_info(inputs, recorded, embeddings is not None, seconds, decode_step=k)
                write_run(partial, info, recorded["shards"])
        return tuple(load_trace(step) for step in folders), tokens

    def _record(
        self,
        folders: Sequence[Path | None],
        parts: list[str],
        inputs: Inputs,
        embeddings: Tensor | None = None,
        rows: int | None = None,
        **request: Any,
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """One request, a forward pass for each folder; the facts of those with a folder, and the generated tokens."""
        recorded_file = self._control / RECORDED_FILE
        recorded_file.unlink(missing_ok=True)
        wanted = {"folders": [folder and str(folder) for folder in folders], "parts": parts, "rows": rows}
        write_json(self._control / REQUEST_FILE, wanted)
        try:
            tokens = self.generate(inputs, embeddings=embeddings, **request)
        finally:
            for name in (REQUEST_FILE, TAKEN_FILE):
                (self._control / name).unlink(missing_ok=True)
        if not recorded_file.is_file():
            raise VlmlabError("SGLang answered but its hooks recorded nothing; its log says:\n" + self._log_lines())
        recorded = json.loads(recorded_file.read_text(encoding="utf-8"))
        recorded = [facts for facts in recorded if facts is not None]
        errors = [facts["error"] for facts in recorded if facts["error"]]
        if errors:
            raise VlmlabError(errors[0])
        return recorded, tokens

    def _check_reached(self, shards: Mapping[str, str], parts: Sequence[str]) -> None:
        reads = [read for spec in self._hook_specs() for read in spec["config"].get("reads", [])]
        wanted = {name for name, part, _ in reads if part in parts} | {"logits"}
        unreached = sorted(wanted - set(shards))
        if unreached:
            raise VlmlabError(f"SGLang never reached hook point {unreached[0]} (and {len(unreached) - 1} more)")

    def _run_info(
        self, inputs: Inputs, recorded: Mapping[str, Any], given: bool, seconds: dict[str, float], **flags: Any
    ) -> RunInfo:
        settings = engine_settings(self.checkpoint, self.arguments, self.deepstack_order)
        language_input = "given vision output" if given else "own vision output"
        settings["flags"] = settings["flags"] | {"language_input": language_input} | flags
        return RunInfo(
            model=self.checkpoint.name,
            family=self.checkpoint.family,
            weights_hash=self.checkpoint.weights_hash,
            input_hash=inputs.hash,
            threads=recorded["threads"],
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=self.checkpoint.config,
            seconds=seconds,
            **settings,
        )

    def close(self) -> None:
        """Shut the engine down; end whatever is left of its process group."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SHUTDOWN_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the group we created; gone when shutdown was clean
            process.wait()
            process.stdout.close()
        self._folder.cleanup()


def check_deepstack_order(checkpoint: Checkpoint, order: str) -> None:
    """Raises: VlmlabError: SGLang has no such order, or the family no deepstack."""
    if order not in DEEPSTACK_ORDERS:
        raise VlmlabError(f"expected a deepstack order of {', '.join(DEEPSTACK_ORDERS)}, got {order!r}")
    if order != "sglang" and not checkpoint.config["vision_config"].get("deepstack_visual_indexes"):
        raise VlmlabError(f"{checkpoint.name} ({checkpoint.family}) has no deepstack whose order could be {order!r}")


def engine_settings(
    checkpoint: Checkpoint, arguments: Mapping[str, Any], deepstack_order: str = "sglang"
) -> dict[str, Any]:
    """Everything about an engine with these arguments that can change a bit, without starting it.

    Args: checkpoint, arguments: see engine_arguments. deepstack_order: see open_sglang. Returns: JSON-ready settings.
    """
    flags = {key: _portable(value) for key, value in arguments.items() if key != "log_level"}
    return {
        "engine": "sglang",
        "dtype": checkpoint.dtype,
        "attention": arguments.get("attention_backend") or "engine default",
        "device": device_info(arguments.get("device")),
        "versions": versions(),
        "flags": flags if deepstack_order == "sglang" else flags | {"deepstack_order": deepstack_order},
    }


def _portable(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _spec(module: str, factory: str, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": f"vlmlab {factory} {module}",
        "target_modules": [module],
        "hook_factory": f"{WORKER}:{factory}",
        "config": config,
    }


def _data_uri(inputs: Inputs) -> str | None:
    if inputs.image is None:
        return None
    stream = io.BytesIO()
    inputs.image.save(stream, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


@contextlib.contextmanager
def open_sglang(
    checkpoint: Checkpoint,
    extra: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = START_TIMEOUT_S,
    log: Path | None = None,
    deepstack_order: str = "sglang",
    wait: bool = True,
) -> Iterator[SGLangEngine]:
    """A started engine, shut down at the end of the block.

    Args: checkpoint: what to load. extra: further Engine arguments, such as {"tp_size": 2}. environment: further
    variables of its processes. timeout: seconds to wait for readiness. log: file that keeps the engine's log; without
    it the log goes with the block. deepstack_order: in which picture features join the stream, a way of
    arithmetic.deepstack_sum; the engine is otherwise the same. wait: for readiness; else the first use waits.
    Raises: VlmlabError: SGLang is missing, does not start in time, or fails; with the decisive lines of its log; or as
    check_deepstack_order.
    """
    engine = SGLangEngine(checkpoint, extra, environment, timeout, log, deepstack_order, wait)
    try:
        yield engine
    finally:
        engine.close()
