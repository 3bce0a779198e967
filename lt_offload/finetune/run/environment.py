"""Versions and machine of a run, as a bug report needs them: no names of people, hosts or folders."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lt_offload import __version__
from lt_offload.profiling.hardware import total_host_bytes
from lt_offload.report.runs import ENVIRONMENT

_PACKAGES = (
    "torch", "lightning", "transformers", "datasets", "tokenizers", "safetensors", "peft", "bitsandbytes", "numpy",
)  # fmt: skip


def environment() -> dict[str, object]:
    """Return the versions of the libraries, and the properties of the machine."""
    facts: dict[str, object] = {"lt_offload": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {"cuda": torch.version.cuda, "gpu": card.name, "gpu_bytes": card.total_memory}
        facts["gpu_capability"] = f"{card.major}.{card.minor}"
    facts["system"] = f"{platform.system()} {platform.release()}"
    facts["processor"] = _processor()
    facts["cores"] = os.cpu_count()
    facts["threads"] = torch.get_num_threads()
    facts["ram_bytes"] = total_host_bytes()
    return facts


def write_environment(folder: Path) -> None:
    """Write :func:`environment` into a run folder."""
    (folder / ENVIRONMENT).write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
