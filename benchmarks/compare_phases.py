"""Phases of `vlmlab compare` and what capture costs, as figures with versions and ratios from one run.

    python benchmarks/compare_phases.py [--json]

Aims on 2 CPU cores: cold comparison at most 90 s, a further comparison on started engines at most 5 s, capture at most
1.10 times the plain forward, and at most one block more in memory than the plain forward.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 9


def cold() -> float:
    """Seconds of `vlmlab compare` in a fresh process with an empty store."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "-m", "vlmlab.cli", "compare", "--fresh", "--json", "--out", f"{folder}/out"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"VLMLAB_CACHE": folder})
        return time.perf_counter() - start


def warm(folder: Path) -> tuple[list[float], list[float], list[float]]:
    """Seconds of a comparison on started engines, of a plain HF forward and of an HF forward being recorded."""
    from vlmlab.checkpoint import load_checkpoint
    from vlmlab.compare import compare_inputs, compare_traces
    from vlmlab.engine_hf import open_hf, recording, vision_output
    from vlmlab.engine_sglang import open_sglang
    from vlmlab.hookpoints import hook_points
    from vlmlab.inputs import reference_inputs
    from vlmlab.trace import Recorder

    checkpoint = load_checkpoint()
    inputs = reference_inputs(checkpoint)
    points = hook_points(checkpoint.config)
    further, plain, recorded = [], [], []
    with open_hf(checkpoint) as hf:
        hf.forward(inputs)
        for _ in range(REPEATS):
            start = time.perf_counter()
            hf.forward(inputs)
            plain.append(time.perf_counter() - start)
            with tempfile.TemporaryDirectory(dir=folder) as shards:
                start = time.perf_counter()
                recorder = Recorder(Path(shards))
                with recording(hf.model, points, recorder.add):
                    hf.forward(inputs)
                recorder.flush()
                recorded.append(time.perf_counter() - start)
        with open_sglang(checkpoint) as sglang:
            for _ in range(3):
                start = time.perf_counter()
                baseline = hf.capture(inputs, folder / "hf")
                target = sglang.capture(inputs, folder / "sglang", vision_output(baseline))
                compare_traces(baseline, target)
                compare_inputs(baseline, target)
                further.append(time.perf_counter() - start)
    return further, plain, recorded


def peak_mib(with_capture: bool) -> float:
    """Peak resident memory of a fresh process that runs one HF prefill, with or without recording it, in MiB."""
    code = f"""
import tempfile
from pathlib import Path
from vlmlab.checkpoint import load_checkpoint
from vlmlab.engine_hf import open_hf, recording
from vlmlab.hookpoints import hook_points
from vlmlab.inputs import reference_inputs
from vlmlab.trace import Recorder
import resource
checkpoint = load_checkpoint()
inputs = reference_inputs(checkpoint)
with open_hf(checkpoint) as hf, tempfile.TemporaryDirectory() as folder:
    recorder = Recorder(Path(folder))
    points = hook_points(checkpoint.config) if {with_capture} else ()
    with recording(hf.model, points, recorder.add):
        hf.forward(inputs)
    recorder.flush()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    from vlmlab.machine import device_info, versions

    with tempfile.TemporaryDirectory() as folder:
        further, plain, recorded = warm(Path(folder))
    figures = {
        "cold comparison, s": cold(),
        "further comparison on started engines, s": statistics.median(further),
        "plain HF forward, s": statistics.median(plain),
        "recorded over plain forward": statistics.median(r / p for r, p in zip(recorded, plain, strict=True)),
        "peak memory recorded minus plain, MiB": statistics.median(peak_mib(True) - peak_mib(False) for _ in range(3)),
    }
    if options.json:
        print(json.dumps({"figures": figures, "device": device_info(), "versions": versions()}, allow_nan=False))
        return
    print(device_info())
    print({name: version for name, version in versions().items() if version})
    for name, value in figures.items():
        print(f"{name:45s} {value:9.3f}")


if __name__ == "__main__":
    main()
