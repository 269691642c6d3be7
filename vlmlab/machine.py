"""What this machine has: versions, devices, which engine can run and why not. Nothing here imports an engine.

versions        installed versions of everything that can change a bit
device_info     what computes: CUDA device name and capability, or the CPU's instruction set
engine_checks   one finding per thing an engine needs
"""

import importlib.metadata
import platform
from dataclasses import asdict, dataclass
from typing import Any

from packaging.requirements import Requirement

PACKAGES = ("torch", "torchvision", "transformers", "tokenizers", "safetensors", "numpy", "pillow", "sglang")


@dataclass(frozen=True)
class Check:
    """One finding. ok is False when it keeps `engine` from running; detail says what was found and what to do."""

    engine: str
    name: str
    ok: bool
    detail: str


def versions() -> dict[str, str | None]:
    """Installed versions by package name, None where missing; "python" too."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def device_info(device: str | None = None) -> dict[str, Any]:
    """The computing device.

    Args: device: "cuda", "cpu", or None for what this machine offers.
    Returns: {"type", "name", "capability"}; for a CPU the capability is torch's instruction set, for example "AVX512".
    """
    import torch

    device = device or ("cuda" if has_cuda() else "cpu")
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability()
        name, capability = torch.cuda.get_device_name(), f"sm_{major}{minor}"
    else:
        name, capability = _cpu_name(), torch.backends.cpu.get_cpu_capability()
    return {"type": device.split(":")[0], "name": name, "capability": capability}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def has_sglang() -> bool:
    """Whether SGLang is installed."""
    return versions()["sglang"] is not None


def engine_checks() -> list[Check]:
    """What each engine needs and whether it is here.

    Returns: checks for "hf" and "sglang"; an engine can run when all its checks are ok.
    """
    found = versions()
    checks = [_installed("hf", "torch", found), _installed("hf", "transformers", found)]
    if found["sglang"] is None:
        checks.append(Check("sglang", "sglang", False, 'not installed; run pip install "vlmlab[sglang]"'))
        return checks
    checks.append(_installed("sglang", "sglang", found))
    for package in ("torch", "transformers"):
        wanted = _requirement_of("sglang", package)
        version = found[package]
        ok = version is not None and (wanted is None or wanted.specifier.contains(version, prereleases=True))
        rule = str(wanted.specifier) if wanted and wanted.specifier else "any version"
        advice = "" if ok else "; install the pinned set again (make clean, make report)"
        checks.append(
            Check("sglang", package, ok, f"sglang {found['sglang']} asks for {rule}, found {version}{advice}")
        )
    kernels = "real sgl_kernel (CUDA)" if has_cuda() else "CPU stand-in for sgl_kernel, SGLang's own torch path"
    checks.append(Check("sglang", "kernels", True, kernels))
    return checks


def _installed(engine: str, package: str, found: dict[str, str | None]) -> Check:
    version = found[package]
    return Check(engine, package, version is not None, version or "not installed; run pip install vlmlab")


def _requirement_of(package: str, needed: str) -> Requirement | None:
    for line in importlib.metadata.requires(package) or []:
        requirement = Requirement(line)
        if requirement.name == needed and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            return requirement
    return None


def inspect() -> dict[str, Any]:
    """Everything `vlmlab doctor` reports about the machine, as JSON-ready values.

    Returns: {"versions", "device", "cuda_devices", "threads", "checks", "engines": {"hf": bool, "sglang": bool}}.
    """
    import torch

    checks = engine_checks()
    runnable = {name: all(c.ok for c in checks if c.engine == name) for name in ("hf", "sglang")}
    count = torch.cuda.device_count() if has_cuda() else 0
    cuda = [
        {"name": torch.cuda.get_device_name(i), "memory_gib": torch.cuda.mem_get_info(i)[1] / 2**30}
        for i in range(count)
    ]
    return {
        "versions": versions(),
        "device": device_info(),
        "cuda_devices": cuda,
        "threads": torch.get_num_threads(),
        "checks": [asdict(check) for check in checks],
        "engines": runnable,
    }
