"""Any plan on one input, computed when first asked for and remembered: what the dashboard shows.

Explorer        a pair of traces, a plan at a time
Curve           one part under one plan against one baseline
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from vlmlab.causes import Plan, causes_of, hf_plan, sglang_plan
from vlmlab.errors import VlmlabError
from vlmlab.hybrid import Hybrid
from vlmlab.kernels import available
from vlmlab.metrics import cosine_similarity, rel_l2_error
from vlmlab.replay import asked_of, closure, run_plan
from vlmlab.trace import Trace
from vlmlab.verdict import legal_plans

BASELINES = {"hf": "Transformers", "sglang": "SGLang", "truth": "float64"}
METRICS = {"1 - cosine": lambda a, b: 1 - cosine_similarity(a, b), "relative L2 error": rel_l2_error}
REMEMBERED = 256  # curves; one holds a few numbers per hook point and token


@dataclass(frozen=True)
class Curve:
    """One part under one plan against one baseline.

    Attributes: table: one row per hook point of the stream, in forward order: hookpoint, worst, token (of the worst),
    mean, envelope (worst token of any legal plan). tokens: [N] metric per token at the last hook point. remainder:
    tensors of the part in SGLang's trace that the plan does not reproduce bit for bit. total: tensors compared.
    """

    table: pd.DataFrame
    tokens: Tensor
    remainder: int
    total: int


def is_stream(name: str) -> bool:
    """Whether a hook point belongs to the decay curve of its part."""
    return name.endswith((".resid_pre", ".resid_post")) or name in ("vision.merger", "final_norm")


class Explorer:
    """A pair of traces of one input, and the checkpoint to compute any plan between them.

    Args: hybrid: the checkpoint in the traces' dtype. exact: in float64. hf, sglang: traces.
    Attributes: parts: those the input has. depths: layers per part.
    """

    def __init__(self, hybrid: Hybrid, exact: Hybrid, hf: Trace, sglang: Trace) -> None:
        self.hybrid, self._exact = hybrid, exact
        self._asked = asked_of(hybrid, sglang, hf)
        self.parts = ("vision", "language") if self._asked.pixels is not None else ("language",)
        self.depths = {"vision": hybrid.vision_depth, "language": hybrid.depth}
        self._kernels = available(hybrid.device, sglang.info.flags)
        self._start, self._goal = hf_plan(hf.info.attention), sglang_plan(self._kernels)
        self._sglang = Trace(sglang.info, dict(sglang.tensors))  # in memory
        self._baselines: dict[tuple[str, str], dict[str, Tensor]] = {}
        self._envelopes: dict[tuple[str, str, str], pd.Series] = {}
        self._runs: OrderedDict[tuple, tuple[dict[str, Tensor], int, int]] = OrderedDict()
        self._curves: OrderedDict[tuple, Curve] = OrderedDict()

    def plan(self, switched: Mapping[str, Iterable[int] | None]) -> Plan:
        """Transformers' plan with causes switched to SGLang's way.

        Args: switched: cause to the layers where, or None for everywhere.
        """
        plan = self._start
        for cause in causes_of(self.hybrid.family):
            if cause.name in switched:
                layers = switched[cause.name] if cause.layered else None
                plan = plan.switched(cause.name, self._goal.how(cause.name), layers, self.depths[cause.part])
        return plan

    def curve(self, part: str, plan: Plan, baseline: str, metric: str) -> Curve:
        """The part's decay under a plan.

        Args: part: of `parts`. plan: how. baseline: of BASELINES. metric: of METRICS. Returns: Curve.
        Raises: VlmlabError: no such part, baseline or metric.
        """
        if part not in self.parts or baseline not in BASELINES or metric not in METRICS:
            raise VlmlabError(f"expected one of {self.parts}, {tuple(BASELINES)} and {tuple(METRICS)}")
        key = (part, plan.key(causes_of(self.hybrid.family, part)), baseline, metric)
        if key not in self._curves:
            self._curves[key] = self._compute(part, plan, baseline, metric)
            while len(self._curves) > REMEMBERED:
                self._curves.popitem(last=False)
        self._curves.move_to_end(key)
        return self._curves[key]

    def _compute(self, part: str, plan: Plan, baseline: str, metric: str) -> Curve:
        states, remainder, total = self._run(part, plan)
        against, measure = self._baseline(part, baseline), METRICS[metric]
        rows, values = [], torch.zeros(0)
        for name, state in states.items():
            values = measure(against[name], state)
            token = int(values.argmax())
            rows.append(
                {"hookpoint": name, "worst": values[token].item(), "token": token, "mean": values.mean().item()}
            )
        table = pd.DataFrame(rows)
        table["envelope"] = table["hookpoint"].map(self._envelope(part, baseline, metric))
        return Curve(table, values, remainder, total)

    def _run(self, part: str, plan: Plan) -> tuple[dict[str, Tensor], int, int]:
        """Stream states of a plan, and how many of SGLang's tensors it misses. The last few plans are remembered."""
        key = (part, plan.key(causes_of(self.hybrid.family, part)))
        if key not in self._runs:
            states = run_plan(self.hybrid, self._asked, plan, part)
            closed = closure(self._sglang, states)
            kept = {name: state for name, state in states.items() if is_stream(name)}
            self._runs[key] = kept, closed.total - closed.equal, closed.total
            while len(self._runs) > 16:
                self._runs.popitem(last=False)
        self._runs.move_to_end(key)
        return self._runs[key]

    def _baseline(self, part: str, baseline: str) -> dict[str, Tensor]:
        if (part, baseline) not in self._baselines:
            if baseline == "truth":
                states = run_plan(self._exact, self._asked, self._start, part)
                states = {name: state for name, state in states.items() if is_stream(name)}
            else:
                states, _, _ = self._run(part, self._start if baseline == "hf" else self._goal)
            self._baselines[part, baseline] = states
        return self._baselines[part, baseline]

    def _envelope(self, part: str, baseline: str, metric: str) -> pd.Series:
        """Worst token of any legal plan against the baseline, by hook point."""
        key = (part, baseline, metric)
        if key not in self._envelopes:
            against = self._baseline(part, baseline)
            worst: dict[str, float] = {}
            for plan in legal_plans(self._kernels):
                for name, state in self._run(part, plan)[0].items():
                    value = METRICS[metric](against[name], state).max().item()
                    worst[name] = max(value, worst.get(name, 0.0))
            self._envelopes[key] = pd.Series(worst)
        return self._envelopes[key]
