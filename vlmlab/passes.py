"""Forward passes of one checkpoint, each computed once: remembered here, and kept in the store for other processes.

Passes          the one owner of the passes behind an explanation, the explorer and the report
Pass            what is kept of one: its stream, and the digest of every tensor
counted         how often each was computed

A pass that agrees with an earlier one below some layer starts from that one's states there. Within passes, attention of
the vision tower, the slowest step, is computed once for equal inputs. Both give the same bits as computing all of it.
"""

import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vlmlab import arithmetic, store
from vlmlab.causes import Plan, causes_of, hf_plan
from vlmlab.checkpoint import Checkpoint
from vlmlab.hookpoints import is_stream
from vlmlab.hybrid import Cache, Hybrid
from vlmlab.machine import device_info, versions
from vlmlab.metrics import digest
from vlmlab.replay import Asked, Closure, closure, differing, run_plan
from vlmlab.trace import Trace, disk_errors, dtype_name

REMEMBERED_BYTES = 2**30  # of kept states
WHOLE_BYTES = 2**29  # of all states of the last passes, from which others can start
ATTENTION_BYTES = 2**29
CODE = ("arithmetic", "causes", "fp8", "fp8_weights", "hookpoints", "hybrid", "kernels", "passes", "replay", "trace")


@dataclass(frozen=True)
class Pass:
    """What is kept of one part of a forward pass.

    Attributes: states: hook points of the stream, router logits and logits to [T, D], on the CPU. bits: every hook
    point, in forward order, to its digest. cache: keys and values of the language model, to decode from. created: UTC
    time of computing. seconds: that took.
    """

    states: dict[str, Tensor]
    bits: dict[str, str]
    cache: Cache
    created: str
    seconds: float


class Passes:
    """Forward passes over one checkpoint.

    Args: hybrid: in the traces' dtype. exact: in float64, or what makes it; None where no truth is asked for. stored:
    whether passes are read from and kept in the store; only for weights that are as in the checkpoint's files.
    """

    def __init__(
        self, hybrid: Hybrid, exact: Hybrid | Callable[[], Hybrid] | None = None, stored: bool = False
    ) -> None:
        self.hybrid, self._make_exact, self.stored = hybrid, exact, stored
        self._kept, self._whole = (
            _Kept[Pass](REMEMBERED_BYTES),
            _Kept[tuple[Plan, dict[str, Tensor], Cache]](WHOLE_BYTES),
        )
        self._traces: list[tuple[Trace, dict[str, str]]] = []
        if hybrid.by is arithmetic:
            hybrid.by = _Steps()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Passes":
        """Over a checkpoint's own weights, kept in the store. Args: checkpoint: of a supported family."""
        return cls(Hybrid(checkpoint), lambda: Hybrid(checkpoint, torch.float64), stored=True)

    @cached_property
    def exact(self) -> Hybrid:
        """The same weights in float64, loaded when first asked for."""
        assert self._make_exact is not None, "these passes were made without a float64 forward"
        return self._make_exact if isinstance(self._make_exact, Hybrid) else self._make_exact()

    def get(self, asked: Asked, part: str, plan: Plan) -> Pass:
        """A part of a pass in the traces' dtype. Args: asked: input. part: "vision" or "language". plan: how."""
        return self._get(asked, part, plan, self.hybrid.dtype)

    def truth(self, asked: Asked, part: str) -> Pass:
        """A part of the pass in float64. Args: see get."""
        return self._get(asked, part, hf_plan(), torch.float64)

    def _get(self, asked: Asked, part: str, plan: Plan, dtype: torch.dtype) -> Pass:
        ways = plan.key(causes_of(self.hybrid.family, part))
        key = (asked.digest(part), part, ways, dtype_name(dtype))
        found = self._kept.get(key)
        if found is None:
            name = self.key("pass", key) if self.stored else None
            found = None if name is None else _read(name)
            if found is None:
                found = self._compute(asked, part, plan, dtype, key)
                if name is not None:
                    _write(name, found)
                    line = {"pass": {"part": part, "plan": dict(ways), "dtype": key[3], "asked": key[0]}}
                    store.note(line | {"created": found.created, "seconds": found.seconds})
            self._kept.put(
                key, found, [*found.states.values(), *found.cache.keys.values(), *found.cache.values.values()]
            )
        return found

    def key(self, kind: str, content: Any) -> str:
        """The name in the store of something that these weights and this machine's arithmetic give."""
        about = {
            "content": content,
            "weights": self.hybrid.checkpoint.weights_hash,
            "dtype": dtype_name(self.hybrid.dtype),
            "device": device_info(self.hybrid.device),
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }
        return store.key_of(kind, about, CODE)

    def _compute(self, asked: Asked, part: str, plan: Plan, dtype: torch.dtype, key: tuple) -> Pass:
        start, begun, cache = time.perf_counter(), None, Cache()
        hybrid = self.hybrid if dtype == self.hybrid.dtype else self.exact
        causes, depth = causes_of(hybrid.family, part), hybrid.depths[part]
        for other, (earlier, states, known) in self._whole.items():
            alike = plan.agrees(earlier, causes, depth) if (*other[:2], other[3]) == (*key[:2], key[3]) else 0
            if alike > (begun[0] if begun else 0):
                begun, cache = (alike, states), known.copy()
        for layer in range(begun[0] if begun else 0, depth):
            cache.forget(layer)
        states = run_plan(hybrid, asked, plan, part, begun, cache)
        self._whole.put(key, (plan, states, cache), states.values())
        kept = {name: state for name, state in states.items() if is_stream(name) or name.endswith("logits")}
        bits = {name: digest(state) for name, state in states.items()}
        return Pass(kept, bits, cache, datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter() - start)

    def missed(self, trace: Trace, found: Pass) -> list[str]:
        """Hook points of a trace, of those that a pass has, whose bits it does not give. The narrower dtype is widened,
        which is exact."""
        bits = self.bits_of(trace)
        return [name for name in trace.hook_points if name in found.bits and found.bits[name] != bits[name]]

    def closure(self, trace: Trace, asked: Asked, plan: Plan) -> tuple[Closure, dict[str, Tensor]]:
        """How much of a trace a plan reproduces bit for bit.

        Args: trace: captured. asked: its input. plan: how.
        Returns: Closure; where it is not whole, also all states of the pass, computed once more to be looked at.
        Raises: VlmlabError: no hook point in common.
        """
        found = [self.get(asked, part, plan) for part in asked.parts]
        compared = sum(name in one.bits for one in found for name in trace.hook_points)
        if compared and not any(self.missed(trace, one) for one in found):
            return Closure(compared, compared, 0, None), {}
        states = run_plan(self.hybrid, asked, plan)
        return closure(trace, states), states

    def bits_of(self, trace: Trace) -> dict[str, str]:
        """The digest of every hook point of a trace, as of the passes' dtype where that holds it exactly."""
        known = next((bits for other, bits in self._traces if other is trace), None)
        if known is None:
            known = {name: digest(_narrowed(trace[name], self.hybrid.dtype)) for name in trace.hook_points}
            self._traces.append((trace, known))
        return known


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype where that changes no bit, else as it is."""
    other = x.to(dtype)
    return other if x.dtype != dtype and not differing(other, x) else x


T = TypeVar("T")


def counted(since: str) -> dict[str, int]:
    """How often each pass was computed, by any process with this store.

    Args: since: UTC time in ISO form. Returns: part, plan, dtype and input to a count; 1 where nothing is done twice.
    """
    lines = (line for line in store.noted() if "pass" in line and line["created"] >= since)
    return dict(Counter(json.dumps(line["pass"], sort_keys=True) for line in lines))


class _Kept(Generic[T]):
    """What was asked for last, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._total = limit, 0
        self._values: OrderedDict[tuple, tuple[T, int]] = OrderedDict()

    def get(self, key: tuple) -> T | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: tuple, value: T, tensors: Iterable[Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors)
        _, before = self._values.pop(key, (None, 0))  # one that is computed again takes no room twice
        self._values[key] = value, size
        self._total += size - before
        while self._total > self._limit:
            _, (_, gone) = self._values.popitem(last=False)
            self._total -= gone

    def items(self) -> list[tuple[tuple, T]]:
        return [(key, value) for key, (value, _) in self._values.items()]


class _Steps:
    """arithmetic, with the vision tower's attention on a CPU computed once for equal inputs."""

    def __init__(self) -> None:
        self._kept = _Kept[Tensor](ATTENTION_BYTES)

    def __getattr__(self, name: str) -> Any:
        return getattr(arithmetic, name)

    def full_attention(self, q: Tensor, k: Tensor, v: Tensor, how: str) -> Tensor:
        """See arithmetic.full_attention."""
        compute = arithmetic.full_attention
        if q.is_cuda:
            return compute(q, k, v, how)
        key = (compute, how, digest(q), digest(k), digest(v))
        found = self._kept.get(key)
        if found is None:
            found = compute(q, k, v, how)
            self._kept.put(key, found, [found])
        return found


def _read(name: str) -> Pass | None:
    """A pass from the store, None where it is not, or is not whole."""
    path = store.use(name)
    if path is None:
        return None
    try:
        with safe_open(path, "pt") as tensors:
            about = json.loads(tensors.metadata()["pass"])
            states = {name: tensors.get_tensor(name) for name in about.pop("order")}
            keys, values = (
                {i: tensors.get_tensor(f"{what}.{i}") for i in range(about["layers"])} for what in ("keys", "values")
            )
            del about["layers"]
            return Pass(states, cache=Cache(keys, values), **about)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None


def _write(name: str, found: Pass) -> None:
    about = {"order": list(found.states), "layers": len(found.cache.keys), "bits": found.bits}
    about |= {"created": found.created, "seconds": found.seconds}
    cached = {f"keys.{i}": keys for i, keys in found.cache.keys.items()}
    cached |= {f"values.{i}": values for i, values in found.cache.values.items()}
    with disk_errors():
        written = store.partial(name)
        try:
            states = {key: state.cpu().contiguous() for key, state in (found.states | cached).items()}
            save_file(states, written, metadata={"pass": json.dumps(about)})
            store.finish(written, name)
        finally:
            written.unlink(missing_ok=True)
