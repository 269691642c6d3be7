"""The hybrid forward on what an engine was given: the whole pass, or every operation from the engine's own input.

Asked, asked_of, asked_of_step  what a trace's forward pass was given
run_answer          the decode steps after a prefill
run_plan, walk_plan the whole forward pass under a plan: all its states, or one after the other
local_states        every operation run again from the trace's own captured input
closure             how much of a trace is reproduced bit for bit

The parts stand on their own: the vision part starts from the pixels, the language part from the vision output that the
engine was given, so that an error of one is not charged to the other.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vlmlab.causes import Plan
from vlmlab.errors import VlmlabError
from vlmlab.hookpoints import block_of
from vlmlab.hybrid import Begun, Cache, Hybrid, Read, Record, Seen
from vlmlab.metrics import bit_patterns, digest
from vlmlab.trace import Trace, disk_errors


@dataclass(frozen=True)
class Asked:
    """What a forward pass was given.

    Attributes: input_ids: [T]. positions: [3, T]. pixels: [P, C * t * p * p] or None. grid_thw: [1, 3] or None. seen:
    vision output that the language model was given, or None without a picture.
    """

    input_ids: Tensor
    positions: Tensor
    pixels: Tensor | None
    grid_thw: Tensor | None
    seen: Seen | None

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that a forward pass has: "vision" where there is a picture, and "language"."""
        return ("vision", "language") if self.pixels is not None else ("language",)

    def digest(self, part: str) -> str:
        """128 bits that stand for all that a part is given. Args: part: "vision" or "language"."""
        seen = () if self.seen is None else (self.seen.features, *self.seen.deepstack)
        given = (self.pixels, self.grid_thw) if part == "vision" else (self.input_ids, self.positions, *seen)
        return hashlib.sha256(" ".join("none" if x is None else digest(x) for x in given).encode()).hexdigest()[:32]


def asked_of(hybrid: Hybrid, trace: Trace, baseline: Trace) -> Asked:
    """What the trace's forward pass should have been given; the positions are computed anew, by definition.

    Args: hybrid: of the checkpoint. trace: to explain. baseline: Transformers' trace of the same input, which holds the
    grid, and whose vision output SGLang's language model was given.
    Returns: Asked. Raises: VlmlabError: the baseline holds no inputs.
    """
    if "inputs.input_ids" not in baseline:
        raise VlmlabError("no evidence: the baseline trace holds no inputs; capture it again")
    giver = baseline if trace.info.flags.get("language_input") == "given vision output" else trace
    seen = None
    if "vision.merger" in giver:
        seen = Seen(giver["vision.merger"], giver.deepstack)
    ids, grid = baseline["inputs.input_ids"], baseline.tensors.get("inputs.image_grid_thw")
    return Asked(ids, hybrid.positions(ids, grid), trace.tensors.get("inputs.pixel_values"), grid, seen)


def asked_of_step(prefill: Asked, step: int, token: int) -> Asked:
    """What a decode step should have been given. Args: prefill: input before it. step: from 0. token: its id."""
    place = int(prefill.positions.max()) + 1 + step
    return Asked(torch.tensor([token]), torch.full((3, 1), place), None, None, None)


@torch.no_grad()
def walk_plan(
    hybrid: Hybrid,
    asked: Asked,
    plan: Plan,
    part: str | None,
    record: Record,
    begun: Begun | None = None,
    cache: Cache | None = None,
) -> None:
    """The forward pass, hook point by hook point.

    Args: hybrid: weights. asked: input. plan: how. part: "vision", "language" or None for both. record: gets every hook
    point's live tensor; what it raises ends the pass. begun: layers of the part that are computed already. cache: gets
    the keys and values of the layers that are computed.
    """
    if part != "language" and asked.pixels is not None and asked.grid_thw is not None:
        hybrid.vision(asked.pixels, asked.grid_thw, plan, record, begun)
    if part != "vision":
        seen = _cast(asked.seen, hybrid.dtype)
        hybrid.language(asked.input_ids, asked.positions, plan, seen, cache, record, begun)


def run_plan(
    hybrid: Hybrid,
    asked: Asked,
    plan: Plan,
    part: str | None = None,
    begun: Begun | None = None,
    cache: Cache | None = None,
) -> dict[str, Tensor]:
    """The forward pass.

    Args: as of walk_plan. Returns: hook point to [T, D] tensor on the CPU.
    """
    states: dict[str, Tensor] = {}
    walk_plan(hybrid, asked, plan, part, states.__setitem__, begun, cache)
    before = {} if begun is None else {n: state for n, state in begun[1].items() if hybrid.below(n, begun[0])}
    return before | {name: state.cpu() for name, state in states.items()}


@torch.no_grad()
def run_answer(
    hybrid: Hybrid, asked: Asked, tokens: Sequence[int], plan: Plan, cache: Cache, first: Tensor
) -> dict[str, Tensor]:
    """A decode step for every token.

    Args: hybrid: weights and dtype. asked: the prefill. tokens: [S] input of every step. plan: how. cache: of the
    prefill under the plan; extended. first: [1, V] its logits.
    Returns: hook point of the language model to [S, D], one row a step, on the CPU; "logits" to [S + 1, V], the
    prefill's first.
    """
    rows = dict[str, list[Tensor]]()

    def record(name: str, state: Tensor) -> None:
        rows.setdefault(name, []).append(state)

    for k, token in enumerate(tokens):
        step = asked_of_step(asked, k, token)
        hybrid.language(step.input_ids, step.positions, plan, cache=cache, record=record)
    rows["logits"] = [first, *rows.get("logits", [])]
    return {name: torch.cat(states).cpu() for name, states in rows.items()}


def _cast(seen: Seen | None, dtype: torch.dtype) -> Seen | None:
    if seen is None:
        return None
    return Seen(seen.features.to(dtype), tuple(features.to(dtype) for features in seen.deepstack))


# ---------------------------------------------------------------------------------------------------- closure


@dataclass(frozen=True)
class Closure:
    """How much of a trace is explained bit for bit.

    Attributes: equal, total: tensors. elements: elements that differ. first: first hook point that differs, or None.
    """

    equal: int
    total: int
    elements: int
    first: str | None


def closure(trace: Trace, states: Mapping[str, Tensor]) -> Closure:
    """Compare a trace with a plan's states, every hook point of the trace.

    Args: trace: captured. states: of run_plan or local_states. Returns: Closure.
    Raises: VlmlabError: no hook point in common.
    """
    names = [name for name in trace.hook_points if name in states]
    if not names:
        raise VlmlabError("no evidence: the plan computed none of the trace's hook points")
    counts = {name: differing(states[name], trace[name]) for name in names}
    first = next((name for name in names if counts[name]), None)
    return Closure(sum(n == 0 for n in counts.values()), len(names), sum(counts.values()), first)


def inputs_of(hybrid: Hybrid, name: str) -> tuple[str, ...]:
    """The hook points that an operation reads. Args: name: of its output. Returns: names; empty for the first ones."""
    block = block_of(name)
    if name == "vision.0.resid_pre":
        return ("vision.patch_embed",)
    if block:
        stem, half = f"{block[0]}.{block[1]}", name.rsplit(".", 1)[1]
        before = {"attn_out": ("resid_pre",), "resid_mid": ("resid_pre", "attn_out"), "mlp_out": ("resid_mid",)}
        before |= dict.fromkeys(("before_deepstack", "resid_post"), ("resid_mid", "mlp_out"))
        if hybrid.sparse and block[0] == "layers":
            before |= {"router_logits": ("resid_mid",), "mlp_out": ("resid_mid", "router_logits")}
        return tuple(f"{stem}.{other}" for other in before.get(half, ()))
    if name.startswith("vision.deepstack."):
        return (f"vision.{hybrid.deepstack_layers[int(name.rsplit('.', 1)[1])]}.resid_post",)
    last = {"vision.merger": f"vision.{hybrid.vision_depth - 1}.resid_post", "logits": "final_norm"}
    last |= {"final_norm": f"layers.{hybrid.depth - 1}.resid_post"}
    return (last[name],) if name in last else ()


def save_difference(file: Path, hybrid: Hybrid, trace: Trace, states: Mapping[str, Tensor], name: str) -> None:
    """Write what a maintainer needs to look at one hook point that a plan does not reproduce.

    Args: file: safetensors file to write. hybrid: that computed. trace: captured. states: computed. name: hook point.
    Tensors: `captured`, `computed`, and `input.*`, what the operation read, as captured.
    """
    tensors = {"captured": trace[name], "computed": states[name]}
    tensors |= {f"input.{other}": trace[other] for other in inputs_of(hybrid, name) if other in trace}
    with disk_errors():
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {key: tensor.clone().contiguous() for key, tensor in tensors.items()}, file, metadata={"hook_point": name}
        )


def differing(a: Tensor, b: Tensor) -> int:
    """Elements without equal bits (0.0 is not -0.0); the narrower dtype is widened, which is exact."""
    if a.shape != b.shape:
        return b.numel()
    wider = torch.promote_types(a.dtype, b.dtype)
    return int(bit_patterns(a.to(wider)).ne(bit_patterns(b.to(wider))).sum())


# ---------------------------------------------------------------------------------------------------- local


@torch.no_grad()
def local_states(
    hybrid: Hybrid, trace: Trace, asked: Asked, plan: Plan, cache: Cache | None = None, part: str | None = None
) -> dict[str, Tensor]:
    """Every operation once more, each from the trace's own captured input, so that no error adds to another.

    A layer's experts are chosen by the router logits it captured. Its `resid_post` comes from the two halves, with the
    deepstack addition where there is one: only Transformers' order reads the stream that stands between.

    Args: hybrid: weights and dtype. trace: captured. asked: its input. plan: how. cache: keys and values of earlier
    tokens, for a decode step; extended. part: "vision", "language" or None for both.
    Returns: hook point to [T, D] on the CPU; operations whose input was not captured are left out.
    """
    states = {} if part == "language" else _local_vision(hybrid, trace, asked, plan)
    if part != "vision":
        states |= _local_language(hybrid, trace, asked, plan, Cache() if cache is None else cache)
    return {name: state.cpu() for name, state in states.items() if name in trace}


class _Captured:
    """A trace's tensors as a forward pass reads them."""

    def __init__(self, hybrid: Hybrid, trace: Trace) -> None:
        self._hybrid, self._trace = hybrid, trace

    def has(self, *names: str) -> bool:
        return all(name in self._trace for name in names)

    def __getitem__(self, name: str) -> Tensor:
        return self._trace[name].to(self._hybrid.device, self._hybrid.dtype)


def _local_vision(hybrid: Hybrid, trace: Trace, asked: Asked, plan: Plan) -> dict[str, Tensor]:
    states, got = dict[str, Tensor](), _Captured(hybrid, trace)
    if asked.pixels is None or asked.grid_thw is None:
        return states
    grid = int(asked.grid_thw[0, 1]), int(asked.grid_thw[0, 2])
    rotary = hybrid.vision_rotary(grid)
    states["vision.patch_embed"] = hybrid.patch_embed(asked.pixels, plan)
    if got.has("vision.patch_embed"):
        states["vision.0.resid_pre"] = hybrid.add_positions(got["vision.patch_embed"], grid, plan)
    for i in range(hybrid.vision_depth):
        before, attn_out, middle, mlp_out, after = (
            f"vision.{i}.{half}" for half in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        )
        if got.has(before):
            states[attn_out] = hybrid.vision_attention(i, got[before], rotary, plan)
        if got.has(before, attn_out):
            states[middle] = got[before] + got[attn_out]
        if got.has(middle):
            states[mlp_out] = hybrid.vision_mlp(i, got[middle], plan)
        if got.has(middle, mlp_out):
            states[after] = got[middle] + got[mlp_out]
        if i in hybrid.deepstack_layers and got.has(after):
            k = hybrid.deepstack_layers.index(i)
            states[f"vision.deepstack.{k}"] = hybrid.deepstack_merger(k, got[after], plan)
    if got.has(f"vision.{hybrid.vision_depth - 1}.resid_post"):
        states["vision.merger"] = hybrid.merger(got[f"vision.{hybrid.vision_depth - 1}.resid_post"], plan)
    return states


def _local_language(hybrid: Hybrid, trace: Trace, asked: Asked, plan: Plan, cache: Cache) -> dict[str, Tensor]:
    states, got = dict[str, Tensor](), _Captured(hybrid, trace)
    seen = _cast(asked.seen, hybrid.dtype)
    deepstack = () if seen is None else seen.deepstack
    rows, text_rotary = hybrid.image_rows(asked.input_ids), hybrid.text_rotary(asked.positions)
    states["layers.0.resid_pre"] = hybrid.embed(asked.input_ids, seen)
    read: Read | None = got["layers.0.resid_pre"] if got.has("layers.0.resid_pre") else None  # by the next norm
    for i in range(hybrid.depth):
        before, attn_out, middle, mlp_out, after = (
            f"layers.{i}.{half}" for half in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        )
        router = f"layers.{i}.router_logits"
        if read is not None:
            states[attn_out] = hybrid.attention(i, read, text_rotary, plan, cache)
        read = got[middle] if got.has(middle) else None
        if got.has(before, attn_out):  # the norm may read more than the stream keeps
            states[middle], read = hybrid.add(got[before], got[attn_out], i, plan)
        if read is not None and hybrid.sparse:
            states[router] = hybrid.router_logits(i, read, plan)
        if read is not None and (got.has(router) or not hybrid.sparse):
            states[mlp_out] = hybrid.mlp(i, read, plan, got[router] if hybrid.sparse else None)
        read = got[after] if got.has(after) else None
        if got.has(middle, mlp_out):
            residual: Tensor = got[middle]
            pending: Tensor | None = got[mlp_out]
            states[f"layers.{i}.before_deepstack"] = got[middle] + got[mlp_out]
            if i < len(deepstack):
                residual, pending = hybrid.add_deepstack(i, residual, got[mlp_out], deepstack[i], rows, plan)
            states[after], read = hybrid.add(residual, pending, i + 1, plan)
    if read is not None:
        states["final_norm"] = hybrid.final_norm(read, plan)
    if got.has("final_norm"):
        states["logits"] = hybrid.logits(got["final_norm"], plan)
    return states
