"""A checkpoint folder, checked and hashed before any engine sees it.

load_checkpoint     from a local folder or a hub id; a clear error for everything that is not a usable checkpoint
checkpoint_of       the checkpoint that a trace was captured from
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vlmlab.errors import VlmlabError
from vlmlab.fp8 import is_fp8, read_quantization
from vlmlab.hookpoints import family_of

DATA = Path(__file__).resolve().parent.parent / "data"
DEFAULT_CHECKPOINT = DATA / "checkpoints" / "qwen2-vl-tiny"


@dataclass(frozen=True)
class Checkpoint:
    """A usable checkpoint.

    Attributes: folder: where it lies (never recorded). name: folder name or hub id. family: see hookpoints.FAMILIES.
    config: parsed config.json. weights_hash: sha256 over config.json, generation_config.json and every weight file.
    """

    folder: Path
    name: str
    family: str
    config: Mapping[str, Any]
    weights_hash: str

    @property
    def dtype(self) -> str:
        """Storage dtype the checkpoint declares, for example "bfloat16"; of an FP8 one, of what is not quantised."""
        text = self.config.get("text_config") or {}
        return self.config.get("dtype") or self.config.get("torch_dtype") or text.get("dtype") or "bfloat16"

    @property
    def fp8(self) -> bool:
        """Whether linears are stored in FP8."""
        return is_fp8(self.config)

    @property
    def weight_bytes(self) -> int:
        """Size of the weight files in bytes."""
        return sum(file.stat().st_size for file in _weight_files(self.folder))


def load_checkpoint(model: str | os.PathLike | None = None) -> Checkpoint:
    """Find, check and hash a checkpoint.

    Args: model: a local folder, a hub id such as "Qwen/Qwen2-VL-7B-Instruct" (downloaded when the hub is reachable), or
    None for the embedded checkpoint.
    Returns: Checkpoint.
    Raises: VlmlabError: unknown model, missing or broken file, unsupported architecture or quantization.
    """
    folder, name = _find(str(DEFAULT_CHECKPOINT if model is None else model))
    config = _read_json(folder / "config.json")
    family = family_of(config)
    files = _weight_files(folder)
    if not files:
        raise VlmlabError(f"expected *.safetensors in checkpoint {name!r}, found none; unpickled formats are not read")
    for file in files:
        _check_weight_file(file, name)
    checkpoint = Checkpoint(folder, name, family, config, _weights_hash(folder, files))
    if config.get("quantization_config") is not None:
        read_quantization(config)
        if checkpoint.dtype not in ("bfloat16", "float16", "float32"):
            raise VlmlabError(f"expected dtype bfloat16 in config.json beside its FP8 weights, got {checkpoint.dtype}")
    return checkpoint


def checkpoint_of(weights_hash: str, name: str, model: str | os.PathLike | None = None) -> Checkpoint:
    """The checkpoint that a trace was captured from.

    Args: weights_hash, name: of the trace. model: where to look; None for the embedded checkpoints.
    Returns: Checkpoint. Raises: VlmlabError: none with these weights.
    """
    folders = [model] if model else sorted((DATA / "checkpoints").glob("*/config.json"))
    for folder in folders:
        checkpoint = load_checkpoint(folder if model else Path(folder).parent)
        if checkpoint.weights_hash == weights_hash:
            return checkpoint
    where = repr(checkpoint.name) if model else "any embedded checkpoint"
    raise VlmlabError(f"the run was captured with the weights of {name!r}, not of {where}; pass --model")


def _find(model: str) -> tuple[Path, str]:
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise VlmlabError(f"expected a checkpoint folder with config.json, got folder {folder.name!r} without one")
        return folder.resolve(), folder.resolve().name
    if folder.exists() or model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise VlmlabError(f"unknown model {model!r}: expected a checkpoint folder or a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
        return Path(snapshot_download(model, allow_patterns=patterns)), model
    except Exception as error:  # the hub client raises many unrelated types
        raise VlmlabError(
            f"unknown model {model!r}: no such folder here, and the hub did not serve it ({type(error).__name__}); "
            "check the name, or download it elsewhere and pass its folder"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VlmlabError(f"expected readable JSON in {file.name}, got {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise VlmlabError(f"expected a JSON object in {file.name}, got {type(content).__name__}")
    return content


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _check_weight_file(file: Path, name: str) -> None:
    try:
        with safe_open(file, "pt") as tensors:
            tensors.keys()
    except (SafetensorError, OSError) as error:
        raise VlmlabError(
            f"weight file {file.name!r} of {name!r} is corrupt or truncated ({error}); copy or download it again"
        ) from error


def _weights_hash(folder: Path, files: list[Path]) -> str:
    """Every byte counts; large files are hashed once and remembered by size and modification time."""
    whole = hashlib.sha256()
    for file in [folder / "config.json", folder / "generation_config.json", *files]:
        if file.is_file():
            whole.update(f"{file.name}:{_file_hash(file)}\n".encode())
    return whole.hexdigest()


def _file_hash(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
