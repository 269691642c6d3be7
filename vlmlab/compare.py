"""Two traces aligned: one row per hook point, one value per token, every row with a status.

compare_traces      Comparison of two traces; comparing nothing raises
compare_inputs      whether both engines saw the same input, item by item, before any numerics
public_figures      figures reported in public beside the ones measured here, never mixed

A row is `ok` only when every value is bit-equal. Where an engine returns a wider dtype (SGLang's logits are float32
copies of bfloat16 values) both are widened first, which is exact.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from vlmlab import metrics
from vlmlab.checkpoint import DATA
from vlmlab.errors import VlmlabError
from vlmlab.hookpoints import block_of
from vlmlab.routing import Flips, expert_flips
from vlmlab.trace import RunInfo, Trace

STATUSES = ("ok", "mismatch", "shape_mismatch", "missing", "non_finite")


@dataclass(frozen=True)
class Row:
    """One hook point of both traces.

    Attributes: hookpoint: canonical name. part: "vision" or "language". layer: block number or None. status: one of
    STATUSES. tokens: rows of the tensor (patches inside the ViT, tokens elsewhere). cosine_min, cosine_min_token: the
    worst token. cosine_mean: over tokens whose cosine is defined. cosine_whole, rel_l2_error: of the flattened tensors.
    norm_ratio_worst, norm_ratio_token: length of the target over that of the baseline, of the token where it is
    furthest from 1. norm_ratio: of the flattened tensors. max_abs_diff: elementwise. bitwise_equal: every value.
    undefined_tokens: zero vectors on either side. Numbers are None where undefined.
    """

    hookpoint: str
    part: str
    layer: int | None
    status: str
    tokens: int | None = None
    cosine_min: float | None = None
    cosine_min_token: int | None = None
    cosine_mean: float | None = None
    cosine_whole: float | None = None
    norm_ratio_worst: float | None = None
    norm_ratio_token: int | None = None
    norm_ratio: float | None = None
    rel_l2_error: float | None = None
    max_abs_diff: float | None = None
    bitwise_equal: bool = False
    undefined_tokens: int = 0


@dataclass(frozen=True)
class Comparison:
    """Baseline and target, hook point by hook point, in forward order.

    Attributes: baseline, target: RunInfo. rows: one per hook point. cosines: hook point to [T] cosine per token (NaN
    where undefined). errors: hook point to [T] relative L2 error per token. flips: one per layer with experts.
    """

    baseline: RunInfo
    target: RunInfo
    rows: tuple[Row, ...]
    cosines: Mapping[str, Tensor]
    errors: Mapping[str, Tensor]
    flips: tuple[Flips, ...] = ()

    def part(self, part: str) -> tuple[Row, ...]:
        """Rows of "vision" or "language"."""
        return tuple(row for row in self.rows if row.part == part)

    def row(self, hookpoint: str) -> Row:
        """The row of one hook point. Raises: KeyError: not compared."""
        for row in self.rows:
            if row.hookpoint == hookpoint:
                return row
        raise KeyError(hookpoint)

    def first_divergence(self, part: str | None = None) -> Row | None:
        """The first row in forward order that is not bit-equal, or None when all are."""
        rows = self.rows if part is None else self.part(part)
        return next((row for row in rows if row.status != "ok"), None)

    def floor(self, part: str) -> Row | None:
        """The row with the lowest cosine of any token in a part, or None when no cosine is defined."""
        rows = [row for row in self.part(part) if row.cosine_min is not None]
        return min(rows, key=lambda row: row.cosine_min or 0.0, default=None)

    def summary(self) -> str:
        """One computed sentence: hook points that are bit-equal, where the traces part first, lowest cosines."""
        equal = sum(row.status == "ok" for row in self.rows)
        parts = [f"{equal} of {len(self.rows)} hook points bit-equal"]
        for part, title in (("vision", "ViT"), ("language", "prefill")):
            first, floor = self.first_divergence(part), self.floor(part)
            if first is None or floor is None:
                parts.append(f"{title}: {'nothing compared' if not self.part(part) else 'no divergence'}")
            else:
                parts.append(
                    f"{title}: first at {first.hookpoint}, lowest cosine {floor.cosine_min:.6f} "
                    f"({floor.hookpoint}, token {floor.cosine_min_token})"
                )
        return "; ".join(parts)

    def to_frame(self, part: str | None = None) -> pd.DataFrame:
        """The rows as a DataFrame with the fields of Row as columns."""
        return pd.DataFrame([asdict(row) for row in (self.rows if part is None else self.part(part))])


def _part_of(name: str) -> str:
    return "vision" if name.startswith("vision.") else "language"


def _layer_of(name: str) -> int | None:
    block = block_of(name)
    return block[1] if block else None


def _number(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small operations: on a busy machine waiting for a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare_tensors(name: str, a: Tensor, b: Tensor) -> tuple[Row, Tensor | None, Tensor | None]:
    part, layer = _part_of(name), _layer_of(name)
    if a.shape != b.shape or a.numel() == 0:
        return Row(name, part, layer, "shape_mismatch"), None, None
    if a.dtype != b.dtype:
        wider = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(wider), b.to(wider)
    equal = metrics.bitwise_equal(a, b)
    a, b = a.double(), b.double()  # once for all measures
    if not (a.isfinite().all() and b.isfinite().all()):
        row = Row(name, part, layer, "non_finite", tokens=a.shape[0], bitwise_equal=equal)
        return row, None, None
    cosines, errors = metrics.cosine_similarity(a, b), metrics.rel_l2_error(a, b)
    defined = cosines.isfinite()
    worst = int(torch.where(defined, cosines, torch.inf).argmin()) if defined.any() else None
    ratios = metrics.norm_ratio(a, b)
    odd = int(ratios.log().abs().nan_to_num(-1.0).argmax()) if ratios.isfinite().any() else None
    flat_a, flat_b = a.reshape(1, -1), b.reshape(1, -1)
    row = Row(
        hookpoint=name,
        part=part,
        layer=layer,
        status="ok" if equal else "mismatch",
        tokens=a.shape[0],
        cosine_min=None if worst is None else cosines[worst].item(),
        cosine_min_token=worst,
        cosine_mean=cosines[defined].mean().item() if defined.any() else None,
        cosine_whole=_number(metrics.cosine_similarity(flat_a, flat_b).item()),
        norm_ratio_worst=None if odd is None else ratios[odd].item(),
        norm_ratio_token=odd,
        norm_ratio=_number(metrics.norm_ratio(flat_a, flat_b).item()),
        rel_l2_error=_number(metrics.rel_l2_error(flat_a, flat_b).item()),
        max_abs_diff=_number(metrics.max_abs_diff(a, b)),
        bitwise_equal=equal,
        undefined_tokens=int((~defined).sum()),
    )
    return row, cosines, errors


def check_comparable(baseline: Trace, target: Trace) -> None:
    """Raise VlmlabError ("no evidence") when two traces are not of the same weights and input."""
    for what in ("weights_hash", "input_hash"):
        a, b = getattr(baseline.info, what), getattr(target.info, what)
        if a != b:
            raise VlmlabError(
                f"no evidence: the traces differ in {what} ({a[:12]} and {b[:12]}); capture both with the same "
                f"{'checkpoint' if what == 'weights_hash' else 'picture and prompt'}"
            )


def compare_traces(baseline: Trace, target: Trace) -> Comparison:
    """Compare every hook point of either trace.

    Args: baseline, target: traces of the same weights and input.
    Returns: Comparison with one row for the union of hook points, in forward order; one side only gives `missing`.
    Raises: VlmlabError: different weights or input, or no hook point in common ("no evidence").
    """
    check_comparable(baseline, target)
    names = [*baseline.hook_points, *(name for name in target.hook_points if name not in baseline)]
    if not any(name in baseline and name in target for name in names):
        raise VlmlabError("no evidence: the two traces have no hook point in common")
    rows: list[Row] = []
    cosines: dict[str, Tensor] = {}
    errors: dict[str, Tensor] = {}
    with _one_thread():
        for name in names:
            if name not in baseline or name not in target:
                rows.append(Row(name, _part_of(name), _layer_of(name), "missing"))
                continue
            row, cosine, error = _compare_tensors(name, baseline[name], target[name])
            rows.append(row)
            if cosine is not None and error is not None:
                cosines[name], errors[name] = cosine, error
        flips = expert_flips(baseline, target)
    return Comparison(baseline.info, target.info, tuple(rows), cosines, errors, flips)


def compare_inputs(baseline: Trace, target: Trace) -> pd.DataFrame:
    """Whether both engines saw the same input, item by item.

    The grid is what the M-RoPE positions state.

    Args: baseline, target: traces with `inputs.*`.
    Returns: DataFrame with columns item, equal (bool), baseline, target: what each side had, in words.
    Raises: VlmlabError: a trace holds no inputs ("no evidence").
    """
    traces = (baseline, target)
    for trace in traces:
        if "inputs.input_ids" not in trace or "inputs.positions" not in trace:
            raise VlmlabError(f"no evidence: the {trace.info.engine} trace holds no inputs; capture it again")
    rows: list[dict[str, Any]] = []

    def add(item: str, equal: bool, a: Any, b: Any) -> None:
        rows.append({"item": item, "equal": bool(equal), "baseline": str(a), "target": str(b)})

    def add_tensor(item: str, a: Tensor | None, b: Tensor | None) -> None:
        differing = int(a.ne(b).sum()) if a is not None and b is not None and a.shape == b.shape else None
        note = f", {differing} elements differ" if differing else ""
        add(item, differing == 0, _shape(a), _shape(b) + note)

    ids = [_canonical_ids(trace) for trace in traces]
    add_tensor("token ids", *ids)
    if any("inputs.pixel_values" in trace for trace in traces):
        add_tensor("pixel values", *(_optional(trace, "inputs.pixel_values") for trace in traces))
        grids = [implied_grid(trace, own) for trace, own in zip(traces, ids, strict=True)]
        add("grid (frames, rows, columns of patches)", grids[0] == grids[1], *grids)
    add_tensor("M-RoPE positions", *(trace["inputs.positions"] for trace in traces))
    add_tensor("embeddings entering the language model", *(_optional(trace, "layers.0.resid_pre") for trace in traces))
    on_cpu = all(trace.info.device.get("type") == "cpu" for trace in traces)  # elsewhere threads change no bit
    for setting in ("weights_hash", "dtype", *(["threads"] if on_cpu else [])):
        a, b = (getattr(trace.info, setting) for trace in traces)
        add(setting.replace("_", " "), a == b, str(a)[:16], str(b)[:16])
    a, b = (trace.info.device for trace in traces)
    add("device", a == b, f"{a['type']} {a['capability']}", f"{b['type']} {b['capability']}")
    return pd.DataFrame(rows)


def _optional(trace: Trace, name: str) -> Tensor | None:
    return trace.tensors.get(name)


def _canonical_ids(trace: Trace) -> Tensor:
    """Token ids, with SGLang's picture placeholders read as the image token.

    SGLang replaces image ids by hash values above the vocabulary, so that its prefix cache tells pictures apart, and
    clamps them to the last id before the embedding. Source: sglang@0.5.23: srt/managers/mm_utils.py.
    """
    ids = trace["inputs.input_ids"].long()
    if trace.info.engine != "sglang":
        return ids
    config = trace.info.config
    last = (config.get("text_config") or config)["vocab_size"] - 1
    return torch.where(ids >= last, config["image_token_id"], ids)


def implied_grid(trace: Trace, ids: Tensor) -> tuple[int, int, int] | None:
    """The picture's grid in patches, as the trace's M-RoPE positions state it.

    Args: trace: with `inputs.positions` [3, T]. ids: [T] token ids.
    Returns: (frames, rows, columns) in patches, or None without a picture.
    """
    here = trace["inputs.positions"][:, ids == trace.info.config["image_token_id"]]
    if here.numel() == 0:
        return None
    merge = trace.info.config["vision_config"].get("spatial_merge_size", 2)
    frames, rows, columns = (int(axis.max() - axis.min()) + 1 for axis in here)
    return frames, rows * merge, columns * merge


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def next_token(trace: Trace) -> int:
    """The greedy next token after the prefill.

    Args: trace: with `logits`. Returns: token id.
    """
    return int(trace["logits"].float().argmax())


def public_figures(comparison: Comparison) -> pd.DataFrame:
    """Figures reported in public beside the ones measured here, each with model, device and versions of its own.

    Args: comparison: measured here.
    Returns: DataFrame with columns figure, where, lowest cosine, model, device, versions.
    """
    public = json.loads((DATA / "public_figures.json").read_text(encoding="utf-8"))
    floors = {"vit": _lowest(comparison, "vision.merger"), "prefill": _lowest_stream(comparison), "generation": None}
    device = comparison.target.device
    engines = {
        "sglang": comparison.target.versions["sglang"],
        "transformers": comparison.target.versions["transformers"],
    }
    rows = []
    for figure in public["figures"]:
        rows.append(
            {
                "figure": figure["name"],
                "where": "reported in public",
                "lowest cosine": figure["cosine"],
                "model": public["model"],
                "device": public["device"],
                "versions": _versions(public["versions"]),
            }
        )
        rows.append(
            {
                "figure": figure["name"],
                "where": "measured here",
                "lowest cosine": floors[figure["part"]],
                "model": comparison.target.model,
                "device": f"{device['type']} {device['name']} {device['capability']}",
                "versions": _versions(engines),
            }
        )
    return pd.DataFrame(rows)


def _lowest(comparison: Comparison, hookpoint: str) -> float | None:
    rows = [row for row in comparison.rows if row.hookpoint == hookpoint]
    return rows[0].cosine_min if rows else None


def _lowest_stream(comparison: Comparison) -> float | None:
    """Lowest cosine over the hidden states of all language blocks, which is what the public report lists."""
    values = [
        row.cosine_min
        for row in comparison.part("language")
        if row.hookpoint.endswith("resid_post") and row.cosine_min is not None
    ]
    return min(values, default=None)


def _versions(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def comparison_json(comparison: Comparison, inputs_equal: bool, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The comparison as the object that `vlmlab compare --json` prints; undefined numbers are None.

    Args: comparison: what was compared. inputs_equal: from compare_inputs. seconds: wall time by phase.
    Returns: {"engines", "inputs_equal", "parts": {"vit": ..., "prefill": ...}, "seconds"}; of a mixture of experts the
    prefill has "expert_flips", one object per layer.
    """
    infos = {comparison.target.engine: comparison.target, comparison.baseline.engine: comparison.baseline}
    if len(infos) == 1:  # two runs of one engine
        infos = {"baseline": comparison.baseline, "target": comparison.target}
    engines = {
        name: {**info.versions, "device": dict(info.device), "dtype": info.dtype, "captured": info.created}
        for name, info in infos.items()
    }
    tokens = {row.hookpoint: row.tokens for row in comparison.rows}
    vit = {"tokens": tokens.get("vision.merger"), "patches": tokens.get("vision.patch_embed")}
    flips = {"expert_flips": [asdict(layer) for layer in comparison.flips]} if comparison.flips else {}
    return {
        "engines": engines,
        "inputs_equal": inputs_equal,
        "parts": {
            "vit": vit | {"rows": _rows(comparison, "vision")},
            "prefill": {"tokens": tokens.get("layers.0.resid_pre"), "rows": _rows(comparison, "language")} | flips,
        },
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
    }


def _rows(comparison: Comparison, part: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(row).items() if k != "part"} for row in comparison.part(part)]
