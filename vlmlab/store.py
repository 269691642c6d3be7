"""What was captured or computed once, kept on disk for the next process: one file or folder an entry, named by its key.

store_folder        where: $VLMLAB_CACHE, else a folder in the user's cache
key_of              the name of an entry: a hash of everything that can change a bit of it
read_json, write_json   an entry that is JSON
use                 an entry that exists, marked as used now
finish              a written entry takes its name at once; the longest unused entries make room
entries, clear      what is kept, and nothing any more
note, noted         one line for everything that was computed, not read

An entry has its name only when it is whole, and loses its name before anything in it goes, so that no process reads
half of one. Entries that a process used in the last hour stay whatever the limit says: it may still read them.
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmlab.errors import VlmlabError

LIMIT_GIB = 20.0
IN_USE_S = 3600.0
ABANDONED_S = 24 * 3600.0  # a hidden half-written entry, whose process has died
LOG = "computed.jsonl"
# What of the environment can change bits. How threads wait cannot.
VARIABLES = ("OMP_", "MKL_", "SGLANG_", "TORCH_", "ATEN_", "ONEDNN_", "DNNL_", "NVIDIA_TF32", "CUBLAS_")
HARMLESS = ("OMP_WAIT_POLICY",)


@dataclass(frozen=True)
class Entry:
    """One entry. name: its key. bytes: on disk. used: seconds since the epoch, last written or read."""

    name: str
    bytes: int
    used: float


def store_folder() -> Path:
    """Where entries are kept.

    Returns: $VLMLAB_CACHE when set, else vlmlab in the user's cache folder.
    """
    chosen = os.environ.get("VLMLAB_CACHE")
    return Path(chosen) if chosen else Path("~/.cache/vlmlab").expanduser()


def limit_bytes() -> int:
    """How much the store may hold: $VLMLAB_CACHE_GIB, else LIMIT_GIB. Raises: VlmlabError: it is no size."""
    told = os.environ.get("VLMLAB_CACHE_GIB", LIMIT_GIB)
    try:
        size = float(told)
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise VlmlabError(f"expected VLMLAB_CACHE_GIB to be a size in GiB such as 20, got {told!r}")
    return int(size * 2**30)


def key_of(kind: str, content: Mapping[str, Any], modules: tuple[str, ...]) -> str:
    """The name of an entry.

    Args: kind: what it is, in a word. content: everything that can change it. modules: of this package, whose code can.
    Returns: the kind and 20 hex digits, from the content, the code, the processors and the environment.
    """
    whole = {
        "content": content,
        "code": _code_hash(modules),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(VARIABLES) and k not in HARMLESS},
    }
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()
    return f"{kind}-{digest[:20]}"


def _code_hash(modules: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for module in modules:
        digest.update((Path(__file__).parent / f"{module}.py").read_bytes())
    return digest.hexdigest()


def use(name: str) -> Path | None:
    """An entry, marked as used now. Args: name: of key_of. Returns: its path, None where there is none."""
    path = store_folder() / name
    try:
        os.utime(path)
    except OSError:
        return None
    return path


def partial(name: str) -> Path:
    """A hidden path in the store to write an entry under, for `finish`. Nobody else uses it."""
    folder = store_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f".{name}.partial-{uuid.uuid4().hex[:12]}"


def finish(written: Path, name: str) -> Path:
    """Give a whole entry its name, and let the longest unused ones make room.

    Args: written: file of `partial`. name: of key_of. Returns: its path.
    """
    path = store_folder() / name
    os.replace(written, path)
    prune()
    return path


def read_json(name: str) -> Any:
    """A JSON entry, marked as used. Args: name: of key_of. Returns: its content, None where it is not or is broken."""
    path = use(name)
    try:
        return None if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(name: str, content: Any) -> None:
    """Keep JSON. Args: name: of key_of. content: JSON-ready; infinite numbers are."""
    written = partial(name)
    try:
        written.write_text(json.dumps(content), encoding="utf-8")
        finish(written, name)
    finally:
        written.unlink(missing_ok=True)


def entries() -> list[Entry]:
    """Every entry, the longest unused first."""
    found = []
    for path in store_folder().glob("[!.]*-*"):
        try:
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            size = sum(file.stat().st_size for file in files)
            found.append(Entry(path.name, size, path.stat().st_mtime))
        except FileNotFoundError:  # another process has just removed it
            continue
    return sorted(found, key=lambda entry: entry.used)


def prune(limit: int | None = None) -> list[Entry]:
    """Remove the longest unused entries until the rest fits, except those in use, and what died half-written.

    Args: limit: bytes; None for limit_bytes. Returns: what was removed.
    """
    kept, now = entries(), time.time()
    limit, total, removed = limit_bytes() if limit is None else limit, sum(entry.bytes for entry in kept), []
    for entry in kept:
        if total <= limit or now - entry.used < IN_USE_S:
            break
        _remove(store_folder() / entry.name)
        removed.append(entry)
        total -= entry.bytes
    for path in store_folder().glob(".*.*-*"):
        if now - path.lstat().st_mtime > ABANDONED_S:
            _remove(path)
    return removed


def clear() -> list[Entry]:
    """Remove every entry and the log. Returns: what was removed."""
    removed = entries()
    for entry in removed:
        _remove(store_folder() / entry.name)
    (store_folder() / LOG).unlink(missing_ok=True)
    return removed


def _remove(path: Path) -> None:
    gone = path.with_name(f".{path.name.lstrip('.')}.old-{uuid.uuid4().hex[:12]}")
    try:
        os.replace(path, gone)
    except FileNotFoundError:
        return
    if gone.is_dir():
        shutil.rmtree(gone, ignore_errors=True)
    else:
        gone.unlink(missing_ok=True)


def note(line: Mapping[str, Any]) -> None:
    """Add a line to the log of what was computed. Args: line: JSON-ready; a line is written at once or not at all."""
    folder = store_folder()
    folder.mkdir(parents=True, exist_ok=True)
    content = (json.dumps(line) + "\n").encode()
    descriptor = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


def noted() -> list[dict[str, Any]]:
    """The log's lines, oldest first."""
    try:
        lines = (store_folder() / LOG).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]
