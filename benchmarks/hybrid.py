"""What the hybrid forward and the dashboard cost, as ratios and times from one run, with versions.

    python benchmarks/hybrid.py [--json]

Aims on 2 CPU cores with the embedded checkpoint: hybrid at most 1.15 times the Transformers forward; a language-model
toggle at most 0.5 s, a ViT toggle at most 2.5 s, a combination seen before at most 50 ms.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from vlmlab.capture import capture_both
from vlmlab.causes import hf_plan
from vlmlab.checkpoint import load_checkpoint
from vlmlab.dashboard import Dashboard
from vlmlab.engine_hf import open_hf
from vlmlab.explorer import Explorer
from vlmlab.hybrid import Hybrid
from vlmlab.inputs import reference_inputs
from vlmlab.machine import device_info, versions
from vlmlab.passes import Passes

REPEATS = 9


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure() -> dict[str, object]:
    """Returns: figures, JSON-ready."""
    checkpoint = load_checkpoint()
    inputs = reference_inputs(checkpoint)
    hf, sglang = capture_both(checkpoint, inputs)
    hybrid, exact = Hybrid(checkpoint), Hybrid(checkpoint, torch.float64)
    positions = hybrid.positions(inputs.input_ids, inputs.image_grid_thw)

    def forward() -> None:
        with torch.no_grad():
            seen = hybrid.vision(inputs.pixel_values, inputs.image_grid_thw, hf_plan())
            hybrid.language(inputs.input_ids, positions, hf_plan(), seen)

    with open_hf(checkpoint) as engine:
        engine.forward(inputs)
        forward()
        pairs = [(seconds(lambda: engine.forward(inputs)), seconds(forward)) for _ in range(REPEATS)]
    plain, ours = (statistics.median(times) for times in zip(*pairs, strict=True))

    grid = tuple(int(n) // inputs.merge_size for n in inputs.image_grid_thw[0, 1:])
    opening = time.perf_counter()
    dashboard = Dashboard(Explorer(Passes(hybrid, exact), hf, sglang), inputs.image, grid)
    opening = time.perf_counter() - opening

    def toggle(cause: str) -> float:
        button = dashboard.toggles[cause]
        return seconds(lambda: setattr(button, "value", not button.value))

    language = [toggle(name) for name in ("rms_norm", "qkv_linear", "rotary", "head")]
    vision = [toggle(name) for name in ("patch_embed", "vit_attention", "vit_rotary")]
    again = [toggle(name) for name in ("vit_rotary", "vit_rotary", "head", "head")]
    return {
        "hybrid over Transformers forward": ours / plain,
        "language-model toggle, median of 4, s": statistics.median(language),
        "language-model toggle, slowest of 4, s": max(language),
        "ViT toggle, median of 3, s": statistics.median(vision),
        "ViT toggle, slowest of 3, s": max(vision),
        "seen before, slowest of 4, s": max(again),
        "dashboard opens, s": opening,
        "threads": torch.get_num_threads(),
        "device": device_info("cpu"),
        "versions": versions(),
    }


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    figures = measure()
    if options.json:
        print(json.dumps(figures))
        return
    for name, figure in figures.items():
        print(f"{name}: {figure:.3f}" if isinstance(figure, float) else f"{name}: {figure}")


if __name__ == "__main__":
    main()
