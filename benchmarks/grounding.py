"""What grounding answers cost through the hybrid forward, cases batched and alone, with versions.

    python benchmarks/grounding.py [--n 200] [--sample 24] [--size 392x392] [--json]

Aims on 2 CPU cores, pictures of 392 x 392 px but for the first: 200 boxes under one condition in at most 120 s with
each embedded checkpoint; 200 boxes under 20 conditions in at most 1200 s with one, projected from a sample. Measured
besides on the sample, in the same run: cases alone, and how many answers and steps differ when batched. On a machine
shared with others, set OMP_NUM_THREADS=1 and look at processor time.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import TypeVar

import vlmlab  # noqa: F401  before torch, which reads once how long its threads spin

import torch  # isort: skip

from vlmlab.ask import Forward, Way, ask_hybrid
from vlmlab.batching import effect_of
from vlmlab.causes import hf_plan, sglang_plan
from vlmlab.checkpoint import DATA, load_checkpoint
from vlmlab.grounding import BOX_QUESTION, cases, summarise
from vlmlab.hypotheses import of_family, orders_of
from vlmlab.machine import device_info, versions

CHECKPOINTS = ("qwen2-vl-tiny", "qwen3-vl-tiny", "qwen3-vl-moe-tiny")
CONDITIONS = 20
HF = Way(hf_plan())
COMPARED = {
    "hf": HF,
    "sglang": Way(sglang_plan()),
    "FP8 channel/token": Way(hf_plan().switched("fp8", "channel/token")),
    "float64": Way(hf_plan(), torch.float64),
}


def every_way(family: str) -> dict[str, Way]:
    """What `vlmlab ground` asks with all hypotheses and FP8. Args: family: of FAMILIES. Returns: name to Way."""
    orders = {name: Way(hf_plan().switched("deepstack_order", how)) for name, how in orders_of(family).items()}
    ways = COMPARED | orders
    in_fp8 = {f"{name}, FP8": Way(way.plan.switched("fp8", "channel/token")) for name, way in orders.items()}
    return ways | in_fp8 | {name: Way(hf_plan(), hypothesis=change) for name, change in of_family(family).items()}


Work = TypeVar("Work")


def timed(work: Callable[[], Work]) -> tuple[Work, float, float]:
    """Result, wall-clock and processor time, s; neighbours lengthen the first. Args: work: to do once."""
    start, cpu = time.perf_counter(), time.process_time()
    return work(), time.perf_counter() - start, time.process_time() - cpu


def measure(name: str, n: int, sample: int, size: tuple[int, int]) -> dict[str, object]:
    """Figures of one checkpoint, JSON-ready. Args: n: cases. sample: of them. size: of all but the first, px."""
    checkpoint, posed = load_checkpoint(DATA / "checkpoints" / name), cases(n, size, question=BOX_QUESTION)
    forward, few = Forward(checkpoint), posed[1 : sample + 1]
    figures: dict[str, object] = {}
    for way_name, way in COMPARED.items():
        forward.ask_at_once(few[:2], way)  # loads, quantises or widens weights
        alone, _, each = timed(lambda way=way: [forward.ask(case, way) for case in few])
        together, _, all_of_them = timed(lambda way=way: forward.ask_at_once(few, way))
        figures[f"{way_name}: alone, processor s a box"] = each / len(few)
        figures[f"{way_name}: batched / alone, processor"] = all_of_them / each
        effect = effect_of(alone, together)
        figures[f"{way_name}: answers changed"] = f"{effect.answers} of {effect.cases}"
        other_bits = f"{effect.prefills} of {effect.cases}, {effect.steps} of {effect.decode_steps}"
        figures[f"{way_name}: prefills, decode steps with other bits"] = other_bits
    found, took, busy = timed(lambda: ask_hybrid(Forward(checkpoint), posed, {"": HF}))
    condition, ways = summarise(found[""], "", ""), every_way(checkpoint.family)
    figures[f"{n} boxes, one condition, s"], figures[f"{n} boxes, one condition, processor s"] = took, busy
    figures["hit rate"], figures["median drift, px"] = condition.hit_rate, condition.drift_px.median
    _, took, busy = timed(lambda: ask_hybrid(forward, few, ways))
    for unit, time_of_all in {"s": took, "processor s": busy}.items():
        each = time_of_all / len(few) / len(ways)
        figures[f"{len(ways)} conditions, {unit} a box and condition"] = each
        figures[f"{n} boxes, {CONDITIONS} conditions, projected, {unit}"] = each * n * CONDITIONS
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--sample", type=int, default=24)
    parser.add_argument("--size", default="392x392")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    machine: dict[str, object] = {"size, px": options.size, "threads": torch.get_num_threads()}
    result = {"machine": machine | {"device": device_info("cpu"), "versions": versions()}}
    for checkpoint in CHECKPOINTS:
        result[checkpoint] = measure(checkpoint, options.n, min(options.sample, options.n - 1), (width, height))
        for name, value in () if options.json else result[checkpoint].items():
            print(f"{checkpoint}, {name}: {f'{value:.4g}' if isinstance(value, float) else value}", flush=True)
    print(json.dumps(result if options.json else result["machine"]))


if __name__ == "__main__":
    main()
