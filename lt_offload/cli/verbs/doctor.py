"""``lt-finetune doctor``: measurements of this machine, on which plans depend."""

from __future__ import annotations

import platform

import torch

from lt_offload.cli.outputs import check_output, print_table
from lt_offload.finetune.terminal import clear, status
from lt_offload.machine.numa import memory_node_of
from lt_offload.machine.pinning import advice, is_wsl2, memlock_bytes
from lt_offload.profiling.hardware import measure_machine, save_hardware
from lt_offload.schema.profile import EMULATED, HardwareProfile
from lt_offload.units import format_bytes

_WIDTH = 80


def doctor(*, save: str | None = None) -> int:
    """Measure this machine and print a table: the numbers that plans depend on.

    Args:
        save: YAML file to write, which ``lt-finetune plan RECIPE --hardware FILE`` reads anywhere.
    """
    if save is not None:
        check_output(save, "--save")
    status("measuring this machine")
    machine = measure_machine(on_progress=status)
    clear()
    print(f"{machine.name} on {platform.machine()}, {torch.get_num_threads()} threads\n")
    measured = *rows(machine), *surroundings(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print_table(("what", "measured"), measured, width=_WIDTH)
    print(f"Source: {machine.source}.")
    if machine.name == EMULATED:
        print("No GPU here: the emulated device runs the same plans with the same numbers, under a hard budget in RAM.")
    elif machine.pinnable_bytes < machine.host_bytes:
        print(
            f"Only {format_bytes(machine.pinnable_bytes)} of RAM can be pinned; copies from and to the rest are slower "
            f"and keep the processor busy. To pin more: {advice()}."
        )
    if save is not None:
        print(f"{save_hardware(machine, save)}  (plan for this machine anywhere: --hardware {save})")
    return 0


def rows(machine: HardwareProfile) -> list[tuple[str, str]]:
    """Return (what, value) for people."""
    staged = machine.staged_bytes_per_s
    return [
        ("device memory", format_bytes(machine.device_bytes)),
        ("taken before the first tensor", format_bytes(machine.context_bytes)),
        ("RAM that training may take", format_bytes(machine.host_bytes)),
        *([] if machine.name == EMULATED else [("RAM that may be pinned", format_bytes(machine.pinnable_bytes))]),
        ("host to device, other direction busy", f"{format_bytes(machine.h2d_bytes_per_s)}/s"),
        ("device to host, other direction busy", f"{format_bytes(machine.d2h_bytes_per_s)}/s"),
        *([("RAM that is not pinned, either way", f"{format_bytes(staged)}/s")] if staged else []),
        *((f"matrix products, {dtype}", f"{rate / 1e12:.3g} TFLOP/s") for dtype, rate in machine.flops_per_s.items()),
        ("device memory, read and written", f"{format_bytes(machine.device_memory_bytes_per_s)}/s"),
        ("host memory, read and written", f"{format_bytes(machine.host_memory_bytes_per_s)}/s"),
    ]


def surroundings(device: torch.device) -> list[tuple[str, str]]:
    """Return (what, value) about the system around ``device``."""
    limit = memlock_bytes()
    return [
        ("limit on locked memory (ulimit -l)", "none" if limit is None else format_bytes(limit)),
        ("memory node (NUMA)", memory_node_of(device).about),
        ("system", f"{platform.system()}{' in WSL2' if is_wsl2() else ''} {platform.release()}"),
    ]
