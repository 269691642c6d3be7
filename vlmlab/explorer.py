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
from vlmlab.hookpoints import is_stream
from vlmlab.kernels import available
from vlmlab.metrics import cosine_similarity, rel_l2_error
from vlmlab.passes import Pass, Passes
from vlmlab.replay import asked_of
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


class Explorer:
    """A pair of traces of one input, and the checkpoint to compute any plan between them.

    Args: passes: over the checkpoint, in the traces' dtype and in float64. hf, sglang: traces.
    Attributes: hybrid: of the passes. parts: those the input has. depths: layers per part.
    """

    def __init__(self, passes: Passes, hf: Trace, sglang: Trace) -> None:
        self.hybrid, self._passes = passes.hybrid, passes
        self._asked = asked_of(self.hybrid, sglang, hf)
        self.parts, self.depths = self._asked.parts, self.hybrid.depths
        self._kernels = available(self.hybrid.device, sglang.info.flags)
        self._start, self._goal = hf_plan(hf.info.attention), sglang_plan(self._kernels)
        self._sglang = sglang
        self._envelopes: dict[tuple[str, str, str], pd.Series] = {}
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
        found = self._passes.get(self._asked, part, plan)
        against, measure = self._baseline(part, baseline), METRICS[metric]
        rows, values = [], torch.zeros(0)
        for name, state in _stream(found).items():
            values = measure(against[name], state)
            token = int(values.argmax())
            rows.append(
                {"hookpoint": name, "worst": values[token].item(), "token": token, "mean": values.mean().item()}
            )
        table = pd.DataFrame(rows)
        table["envelope"] = table["hookpoint"].map(self._envelope(part, baseline, metric))
        total = sum(name in found.bits for name in self._sglang.hook_points)
        return Curve(table, values, len(self._passes.missed(self._sglang, found)), total)

    def _baseline(self, part: str, baseline: str) -> dict[str, Tensor]:
        if baseline == "truth":
            return _stream(self._passes.truth(self._asked, part))
        return _stream(self._passes.get(self._asked, part, self._start if baseline == "hf" else self._goal))

    def _envelope(self, part: str, baseline: str, metric: str) -> pd.Series:
        """Worst token of any legal plan against the baseline, by hook point."""
        key = (part, baseline, metric)
        if key not in self._envelopes:
            against = self._baseline(part, baseline)
            worst: dict[str, float] = {}
            for plan in legal_plans(self._kernels):
                for name, state in _stream(self._passes.get(self._asked, part, plan)).items():
                    value = METRICS[metric](against[name], state).max().item()
                    worst[name] = max(value, worst.get(name, 0.0))
            self._envelopes[key] = pd.Series(worst)
        return self._envelopes[key]


def _stream(found: Pass) -> dict[str, Tensor]:
    return {name: state for name, state in found.states.items() if is_stream(name)}
