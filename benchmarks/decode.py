"""Decode steps of both engines on the same tokens, every hook point captured, engines already started.

    python benchmarks/decode.py

The embedded checkpoint, whose weights are tiny. Also the float64 truth and every cause alone over the same steps.
"""

import tempfile
import time
from pathlib import Path

import torch

from vlmlab.attribution import explain_steps
from vlmlab.checkpoint import load_checkpoint
from vlmlab.engine_hf import open_hf, vision_output
from vlmlab.engine_sglang import open_sglang
from vlmlab.hybrid import Hybrid
from vlmlab.inputs import reference_inputs
from vlmlab.passes import Passes

STEPS = 128


def main():
    """Print the seconds of every phase."""
    checkpoint = load_checkpoint()
    inputs = reference_inputs(checkpoint, "List every shape with its color, center and bounding box.")
    with tempfile.TemporaryDirectory() as name, open_hf(checkpoint) as hf, open_sglang(checkpoint) as sglang:
        folder = Path(name)
        prefill = hf.capture(inputs, folder / "prefill")
        sglang.generate(inputs, 1)  # warm
        start = time.perf_counter()
        _, tokens = hf.capture_decode(inputs, folder / "hf", STEPS)
        middle = time.perf_counter()
        _, same = sglang.capture_decode(inputs, folder / "sglang", STEPS, vision_output(prefill), tokens)
        end = time.perf_counter()
        assert same == tokens
        print(
            f"{STEPS} steps: Transformers {middle - start:.1f} s, SGLang {end - middle:.1f} s, both {end - start:.1f} s"
        )
        target = sglang.capture(inputs, folder / "target", vision_output(prefill))
        start = time.perf_counter()
        explain_steps(Passes(Hybrid(checkpoint), Hybrid(checkpoint, torch.float64)), prefill, target, tokens[:STEPS])
        print(f"float64, both arithmetics and every cause alone {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
