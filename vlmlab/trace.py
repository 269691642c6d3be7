"""A trace is {hook point: tensor} plus RunInfo. Engines write it to disk while they run; analysis reads it lazily.

RunInfo         what produced the tensors: versions, device, dtype, flags, hashes; nothing that names a user or a path
Trace           tensors by hook point name, loaded when asked for
Recorder        collects one block's tensors at a time and streams them to disk
write_trace     a context that turns a finished recording into a trace folder, or leaves nothing behind
save_trace      write a trace elsewhere
load_trace      open a trace folder; every name and file in it is checked first

On disk: `run.json` (RunInfo and the file of every tensor) and one safetensors file per block. Nothing is ever
unpickled.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vlmlab.errors import VlmlabError
from vlmlab.hookpoints import block_of, resolve

RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunInfo:
    """Everything that can change a captured bit, and when it was captured.

    Attributes: engine: "hf" or "sglang". model: checkpoint name. family: model family. weights_hash, input_hash:
    sha256. dtype: storage dtype of weights and activations. attention: attention implementation. device: see
    machine.device_info. threads: CPU threads of the computing process. versions: by package. flags: engine settings.
    created: UTC time. seconds: wall time by phase. config: the checkpoint's config.json.
    """

    engine: str
    model: str
    family: str
    weights_hash: str
    input_hash: str
    dtype: str
    attention: str
    device: Mapping[str, Any]
    threads: int
    versions: Mapping[str, str | None]
    flags: Mapping[str, Any]
    created: str
    config: Mapping[str, Any]
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def release(self) -> str:
        """The engine's package and version, for example "sglang 0.5.23"."""
        package = {"hf": "transformers"}.get(self.engine, self.engine)
        return f"{package} {self.versions.get(package)}"


@dataclass(frozen=True)
class Trace:
    """Captured tensors of one run.

    Attributes: info: RunInfo. tensors: captured name to [T, D] tensor (`inputs.*` to whatever the engine was given).
    `trace[name]` also takes a block's `resid_pre`, see hookpoints.resolve.
    """

    info: RunInfo
    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[resolve(name)]

    def __contains__(self, name: str) -> bool:
        return resolve(name) in self.tensors

    @property
    def hook_points(self) -> tuple[str, ...]:
        """Names of the captured activations, in forward order, without `inputs.*`."""
        return tuple(name for name in self.tensors if not name.startswith("inputs."))

    @property
    def deepstack(self) -> tuple[Tensor, ...]:
        """The vision tower's deepstack features, [N, D] each, in order; empty where there are none."""
        return tuple(self[name] for name in self.hook_points if name.startswith("vision.deepstack."))


class ShardedTensors(Mapping[str, Tensor]):
    """Tensors of a trace folder, read from their file on access and never kept.

    Args: folder: trace folder. shards: tensor name to file name within it.
    """

    def __init__(self, folder: Path, shards: Mapping[str, str]) -> None:
        self._folder, self._shards = folder, dict(shards)

    def __getitem__(self, name: str) -> Tensor:
        try:
            with safe_open(self._folder / self._shards[name], "pt") as tensors:
                return tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise VlmlabError(
                f"trace file {self._shards[name]!r} is corrupt, truncated or gone ({error}); capture again with --fresh"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


class Recorder:
    """Copies tensors as they are produced and streams them to disk, one block in memory at a time.

    Args: folder: existing folder for the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards: dict[str, str] = {}
        self._pending: dict[str, Tensor] = {}
        self._stem = ""

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy `tensor` now, since the engine may overwrite it in place.

        Args: name: hook point. tensor: live tensor.
        Raises: VlmlabError: name or an earlier block seen again, disk full.
        """
        stem = _stem(name)
        file = f"{stem}.safetensors"
        if name in self.shards or (stem != self._stem and file in self.shards.values()):
            raise VlmlabError(f"{name} was produced twice in one capture; expected one forward pass per capture")
        copied = tensor.detach().to("cpu", copy=True).contiguous()
        self.shards[name] = file
        if stem == name:  # outside the blocks: a file of its own
            self._save(file, {name: copied})
            return
        if stem != self._stem:
            self.flush()
            self._stem = stem
        self._pending[name] = copied

    def flush(self) -> None:
        """Write what is pending. Raises: VlmlabError: the disk is full."""
        if self._pending:
            pending, self._pending = self._pending, {}
            self._save(f"{self._stem}.safetensors", pending)

    def _save(self, file: str, tensors: dict[str, Tensor]) -> None:
        with disk_errors():
            save_file(tensors, self.folder / file)


def _stem(name: str) -> str:
    """File name of a hook point: one file per block, `vision.03` or `layers.03`, and one for each tensor outside."""
    block = block_of(name)
    return f"{block[0]}.{block[1]:02d}" if block else name


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn a full disk into one clear sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        if full:
            raise VlmlabError(
                "the disk is full: a trace needs more room than is left; free some space or set VLMLAB_CACHE to a "
                "folder on a larger disk. Nothing half-written was kept"
            ) from error
        raise


@contextlib.contextmanager
def write_trace(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`; on success it takes that name at once, on any error it is removed.

    Args: folder: final trace folder; an older one of that name is replaced only on success.
    """
    with disk_errors():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = _beside(folder, "partial")
        partial.mkdir()
    try:
        yield partial
        if not (partial / RUN_FILE).is_file():
            raise VlmlabError("the capture ended without a run record; nothing was kept")
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _beside(folder: Path, what: str) -> Path:
    """A hidden name in the same folder that nobody else uses, with the permissions of an ordinary new folder."""
    return folder.parent / f".{folder.name}.{what}-{uuid.uuid4().hex[:12]}"


def replace_folder(source: Path, folder: Path) -> None:
    """Give `source` the name `folder`, removing an older folder of that name afterwards."""
    if folder.exists():
        old = _beside(folder, "old")
        os.replace(folder, old)
        os.replace(source, folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(source, folder)


def write_run(folder: Path, info: RunInfo, shards: Mapping[str, str]) -> None:
    """Write `run.json`, the last file of a trace.

    Args: folder: trace folder. info: RunInfo. shards: tensor name to file name.
    """
    with disk_errors():
        write_json(folder / RUN_FILE, {"run": asdict(info), "tensors": dict(shards)})


def save_trace(trace: Trace, folder: Path) -> None:
    """Write a trace to a folder of its own, one tensor in memory at a time.

    Args: trace: any trace. folder: to write. Raises: VlmlabError: disk full.
    """
    with write_trace(folder) as partial:
        recorder = Recorder(partial)
        for name, tensor in trace.tensors.items():
            recorder.add(name, tensor)
        recorder.flush()
        write_run(partial, trace.info, recorder.shards)


def write_json(file: Path, content: Any) -> None:
    """Write strict JSON under a temporary name, then rename. Raises: ValueError: a number is NaN or infinite."""
    temporary = file.with_name(f".{file.name}.partial")
    temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def load_trace(folder: str | os.PathLike) -> Trace:
    """Open a trace folder.

    Args: folder: written by write_trace.
    Returns: Trace; tensors are read when asked for.
    Raises: VlmlabError: not a trace, or a name in it is not what write_trace writes.
    """
    folder = Path(folder)
    try:
        content = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        info = RunInfo(**content["run"])
        shards = content["tensors"]
        usable = isinstance(shards, dict) and bool(shards)
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = ", ".join(f.name for f in fields(RunInfo))
        raise VlmlabError(
            f"expected a trace folder with a {RUN_FILE} holding {expected}; {folder.name!r} is not one "
            f"({type(error).__name__})"
        ) from error
    for name, file in shards.items() if usable else [("", "")]:
        named = isinstance(name, str) and re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)*", name)
        if not named or file != f"{_stem(name)}.safetensors":
            raise VlmlabError(f"trace {folder.name!r} names {file!r} for tensor {name!r}, which vlmlab never writes")
        if not (folder / file).is_file():
            raise VlmlabError(f"trace {folder.name!r} lacks its file {file!r}; capture again with --fresh")
    return Trace(info, ShardedTensors(folder, shards))


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
