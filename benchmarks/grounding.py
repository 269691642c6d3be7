"""What 200 grounding answers of one condition cost through the hybrid forward, with versions.

    python benchmarks/grounding.py [--n 200] [--size 392x392] [--json]

Aim on 2 CPU cores with the embedded checkpoint, pictures of 392 x 392 px but for the first: at most 120 s. Cases are
asked one by one; most of the time goes into the vision tower, whose attention is quadratic in the picture's area.
"""

import argparse
import json
import time

import torch

from vlmlab.ask import Forward, Way, ask_hybrid
from vlmlab.causes import hf_plan, sglang_plan
from vlmlab.checkpoint import load_checkpoint
from vlmlab.grounding import cases, summarise
from vlmlab.machine import device_info, versions


def measure(n: int, size: tuple[int, int]) -> dict[str, object]:
    """Args: n: cases. size: of all but the first, px. Returns: figures, JSON-ready."""
    checkpoint = load_checkpoint()
    posed = cases(n, size)
    figures: dict[str, object] = {"cases": n, "size": f"{size[0]}x{size[1]}"}
    ways = {"hf": Way(hf_plan()), "sglang": Way(sglang_plan()), "float64": Way(hf_plan(), torch.float64)}
    for name, way in ways.items():
        start = time.perf_counter()
        outcomes = ask_hybrid(Forward(checkpoint), posed, {name: way})[name]
        seconds = time.perf_counter() - start
        condition = summarise(outcomes, name, "")
        figures[f"hybrid {name}, s"] = seconds
        figures[f"hybrid {name}, hit rate"] = condition.hit_rate
        figures[f"hybrid {name}, median drift, px"] = condition.drift_px.median
    return figures | {"threads": torch.get_num_threads(), "device": device_info("cpu"), "versions": versions()}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--size", default="392x392")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    result = measure(options.n, (width, height))
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {f'{value:.4g}' if isinstance(value, float) else value}")


if __name__ == "__main__":
    main()
