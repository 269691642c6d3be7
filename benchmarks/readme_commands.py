"""What the two commands of the README cost, phase by phase, on this machine; writes the table that the README shows.

    python benchmarks/readme_commands.py [--commands report test] [--set NAME=VALUE] [--write]

Both run in a fresh clone of this repository's last commit, with an environment of their own, which is removed
afterwards. A cache of downloads that is there already is used, and said. `--set ATEN_CPU_CAPABILITY=avx2 --set
ONEDNN_MAX_CPU_ISA=AVX2` comes close to a processor without AVX-512.
"""

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from vlmlab.machine import device_info, versions

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured by benchmarks/readme_commands.py -->", "<!-- end -->"


def run(folder: Path, target: str, environment: Mapping[str, str]) -> tuple[float, str]:
    """Wall time of `make target`, s, and what it printed. Raises: CalledProcessError: it failed."""
    start = time.perf_counter()
    done = subprocess.run(
        ["make", target], cwd=folder, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return time.perf_counter() - start, done.stdout


def measure(commands: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Phase to time in words. Args: commands: "report", "test" or both. environment: variables to set."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="vlmlab-readme-") as name:
        folder = Path(name) / "vlmlab"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        seconds, _ = run(folder, ".venv/.ready", environment)
        found["environment, with what this machine had downloaded before"] = f"{seconds:.0f} s"
        if "report" in commands:
            seconds, said = run(folder, "report", environment)
            first = re.search(r"\((\d+) s\)", said)
            assert first is not None, "make report printed no result line"
            found["`make report`: reports/report.html"] = f"{first[1]} s"
            found["`make report`: all notebooks, too"] = f"{seconds:.0f} s"
            found["`make report` again"] = f"{run(folder, 'report', environment)[0]:.0f} s"
        if "test" in commands:
            seconds, said = run(folder, "test", environment)
            passed = re.search(r"\d+ passed.*? in ", said)
            assert passed is not None, "make test ran no test"
            found[f"`make test` ({passed[0].removesuffix(' in ')})"] = f"{seconds:.0f} s"
    return found


def table(found: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The README's lines."""
    device, cores = device_info("cpu"), len(os.sched_getaffinity(0))
    packages = ", ".join(f"{name} {versions()[name]}" for name in ("torch", "transformers", "sglang"))
    set_ = "".join(f", {name}={value}" for name, value in environment.items())
    where = f"{device['name']}, {cores} cores, {device['capability']}{set_}; {packages}; {datetime.now(UTC):%Y-%m-%d}"
    rows = [f"| {what} | {time_} |" for what, time_ in found.items()]
    return "\n".join([BEGIN, f"| on {where} | |", "|---|---|", *rows, END])


def main() -> None:
    """Print the table; with --write put it into README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", nargs="+", default=["report", "test"], choices=("report", "test"))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    environment = dict(pair.split("=", 1) for pair in options.set)
    lines = table(measure(options.commands, environment), environment)
    print(lines)
    if options.write:
        readme = ROOT / "README.md"
        before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
        readme.write_text(before + lines + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
