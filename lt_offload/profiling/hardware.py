"""Memory and speeds of a machine: measured here, or read from a description.

Descriptions are ``configs/hardware/*.yaml``, and ``configs/hardware/hosts/*.yaml`` for what surrounds a card; reading
them needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.replacing import save_text
from lt_offload.resources import is_file, shipped_files
from lt_offload.schema.files import first_fault
from lt_offload.schema.profile import EMULATED, HardwareProfile
from lt_offload.suggest import nearest
from lt_offload.units import format_bytes, format_seconds, parse_bytes
from lt_offload.yaml_files import read_yaml

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")
_MACHINES = "configs/hardware"
_HOSTS = "configs/hardware/hosts"
_LEFT_OVER = 256
"""One part in so many of a GPU's free memory is not taken for a budget that nobody has named: 30 MB of 8 GB."""
SYSTEM_SHARE = 0.1
"""Part of the RAM of a machine that is named, not measured, that the system and other programs keep; an assumption."""
_HOST_FIELDS = (
    "host_bytes", "pinnable_bytes", "host_memory_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s",
    "staged_bytes_per_s", "root_bytes_per_s", "network_bytes_per_s", "network_s", "source",
)  # fmt: skip
"""The fields that a description of a host may have."""


def hardware_names() -> list[str]:
    """Return the names of the shipped descriptions."""
    return list(shipped_files(_MACHINES, ".yaml"))


def load_hardware(name: str | Path) -> HardwareProfile:
    """Return the machine called ``name``, or described in the YAML file ``name``.

    A shipped name may be cut short where that is unambiguous: ``rtx-3060`` is ``rtx-3060-12gb``. Changes may follow:
    ``rtx-3060,host=ddr4-64gb,host=pcie3-x8`` or ``rtx-3060,ram=48GB,link=6GB,net=12GB``. A host is a shipped
    description or a YAML file; it replaces what it says about RAM, and copies are as fast as the slower of card and
    slot. Of ``ram=48GB`` the system keeps a tenth; ``free=43GB`` is what training may take. Raises ``ConfigError`` if
    there is no such description, or it is not a valid one.
    """
    text = str(name)
    # The path of a file may have commas, which would be taken for changes.
    base, *changes = [text] if is_file(text) else text.split(",")
    path = _description(base, "hardware", _MACHINES)
    machine = _validated(path, {"name": path.stem} | _read(path))
    keys = [change.partition("=")[0].strip() for change in changes]
    sizes = ["RAM" if key in ("ram", "free") else key for key in keys if key != "host"]
    if twice := [what for what in sizes if sizes.count(what) > 1]:
        raise ConfigError(f"hardware={text!r} says {twice[0]} twice; name it once")
    for change in changes:
        machine = _changed(machine, change.strip())
    return machine


def save_hardware(machine: HardwareProfile, path: str | Path) -> Path:
    """Write ``machine`` as a description that :func:`load_hardware` reads, with a comment per number."""
    import yaml
    from pydantic import TypeAdapter

    lines = [f"# {machine.name}: {machine.source or 'no source given'}", "# Sizes in bytes, speeds per second."]
    for key, value in TypeAdapter(HardwareProfile).dump_python(machine).items():
        written = yaml.safe_dump({key: value}, sort_keys=False, width=1000).rstrip()
        if isinstance(value, int | float):
            size = f"{format_bytes(value)}{'/s' if 'per_s' in key else ''}"
            written += f"  # {size if 'bytes' in key else format_seconds(value)}"
        lines.append(written)
    return save_text(path, "\n".join(lines) + "\n")


def _changed(machine: HardwareProfile, change: str) -> HardwareProfile:
    """Return ``machine`` with one change: ``host=NAME``, or ``ram=``, ``free=``, ``link=`` or ``net=`` and a size."""
    key, _, value = change.partition("=")
    if key == "host":
        path = _description(value, "host", _HOSTS)
        values = _read(path)
        if alien := values.keys() - set(_HOST_FIELDS):
            raise ConfigError(f"host description {str(path)!r}: {min(alien)} is not one of {', '.join(_HOST_FIELDS)}")
        source = f"{machine.source}; {path.stem}: {values.pop('source', 'no source given')}"
        before = {field.name: getattr(machine, field.name) for field in fields(machine)}
        other = _validated(path, before | values | {"name": f"{machine.name}, {path.stem}", "source": source})
        return replace(
            other,
            h2d_bytes_per_s=min(machine.h2d_bytes_per_s, other.h2d_bytes_per_s),
            d2h_bytes_per_s=min(machine.d2h_bytes_per_s, other.d2h_bytes_per_s),
        )
    if key not in ("ram", "free", "link", "net"):
        raise ConfigError(
            f"hardware: unknown change {change!r}; write host=NAME, ram=64GB, free=58GB (of the RAM, for training), "
            "link=12GB or net=12GB (per second)"
        )
    size = parse_bytes(value, setting=f"hardware: {key}")
    name = f"{machine.name}, {change}"
    if key in ("ram", "free"):
        size = size - int(SYSTEM_SHARE * size) if key == "ram" else size
        return replace(machine, name=name, host_bytes=size, pinnable_bytes=size)
    if key == "net":
        return replace(machine, name=name, network_bytes_per_s=float(size))
    return replace(machine, name=name, h2d_bytes_per_s=float(size), d2h_bytes_per_s=float(size))


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read hardware description {str(path)!r}: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"cannot read hardware description {str(path)!r}: it is no mapping of names to numbers")
    return values


def _validated(path: Path, values: dict[str, Any]) -> HardwareProfile:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(HardwareProfile).validate_python(values)
    except ValidationError as error:
        raise ConfigError(f"hardware description {str(path)!r}: {first_fault(error)}") from None


def _description(name: str, setting: str, folder: str) -> Path:
    shipped = shipped_files(folder, ".yaml")
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in shipped:
        return shipped[wanted]
    if is_file(name):
        return Path(name)
    # rtx-3060 is rtx-3060-12gb and not rtx-3060ti, should there be one
    for stem in (f"{wanted}-", wanted):
        matches = [known for known in shipped if wanted and known.startswith(stem)]
        if len(matches) == 1:
            return shipped[matches[0]]
    near = [known for known in shipped if wanted and wanted in known]
    near = near or nearest(wanted, shipped, cutoff=0.6, most=2)
    why = f"could be {' or '.join(matches)}" if matches else "is no file and not known"
    hint = f"; did you mean {' or '.join(near)}?" if near and not matches else ""
    raise ConfigError(f"{setting}={name!r} {why}{hint}; give a YAML file or one of {', '.join(shipped)}")


def measure_hardware(
    device: torch.device | str | None = None, *, on_progress: Callable[[str], None] | None = None
) -> HardwareProfile:
    """Measure this machine with ``device`` (None: CUDA if there is any, otherwise the CPU, for the emulated device)."""
    import torch

    from lt_offload.machine.driver import context_bytes, current, find_device
    from lt_offload.machine.numa import memory_node_of
    from lt_offload.machine.pinning import PinLimit, find_pin_limit
    from lt_offload.machine.zero_copy import register, unregister
    from lt_offload.profiling.rates import LOCKED_BYTES, measure_links

    target = find_device(device)
    cuda = target.type == "cuda"
    if on_progress is not None:
        on_progress("measuring copies between host and device")
    # Plans count the RAM that the process has taken already (`process_bytes`): left out here, it would count twice.
    taken = taken_host_bytes().private
    free = available_host_bytes()
    host = free + taken
    with current(target):
        limit = find_pin_limit(register, unregister, host_bytes=free) if cuda else PinLimit(nbytes=free, how="")
        node = memory_node_of(target)
        try:
            links = measure_links(target, pinned=limit.nbytes >= LOCKED_BYTES, node=node)
        except UnsupportedError:  # a limit between what was tried and what is measured with
            limit = PinLimit(nbytes=0, how=f"{format_bytes(LOCKED_BYTES)} could not be locked")
            links = measure_links(target, pinned=False, node=node)
    source = [
        f"measured; one direction alone: {format_bytes(links['h2d_alone_bytes_per_s'])}/s to the device, "
        f"{format_bytes(links['d2h_alone_bytes_per_s'])}/s to the host"
    ]
    return HardwareProfile(
        name=torch.cuda.get_device_name(target) if cuda else EMULATED,
        device_bytes=torch.cuda.mem_get_info(target)[1] if cuda else free,
        host_bytes=host,
        # Where no limit was found, what this process has taken already could be locked as well.
        pinnable_bytes=host if limit.nbytes == free else limit.nbytes,
        **links,
        context_bytes=context_bytes(target) if cuda else 0,
        process_bytes=taken_host_bytes().all,
        source="; ".join([*source, f"page-locked memory: {limit.how}"] if limit.how else source),
    )


def measured_before(machine: HardwareProfile, device: torch.device) -> HardwareProfile | None:
    """Return ``machine`` with no more RAM than there is now; None if ``device`` is not the one it was measured with."""
    import torch

    if machine.name != (torch.cuda.get_device_name(device) if device.type == "cuda" else EMULATED):
        return None
    host = min(machine.host_bytes, taken_host_bytes().private + available_host_bytes())
    return replace(machine, host_bytes=host, pinnable_bytes=min(machine.pinnable_bytes, host))


def measure_machine(
    device: torch.device | str | None = None, *, on_progress: Callable[[str], None] | None = None
) -> HardwareProfile:
    """Return ``measure_hardware`` together with the rates of matrix products and of memory, which estimates need."""
    from lt_offload.machine.driver import context_bytes, find_device
    from lt_offload.profiling.rates import measure_rates

    target = find_device(device)
    machine = measure_hardware(target, on_progress=on_progress)
    rates = measure_rates(target, on_progress=on_progress or (lambda _message: None))
    # Products have loaded kernels that training loads, too.
    return replace(machine, context_bytes=context_bytes(target) if target.type == "cuda" else 0, **rates)


def check_memory(memory: int | None, device: torch.device) -> None:
    """Raise ``ConfigError`` if ``device`` can never have ``memory`` bytes; the emulated one is in RAM."""
    if memory is None:
        return
    if device.type == "cuda":
        import torch

        has, where = torch.cuda.get_device_properties(device).total_memory, "the GPU"
    else:
        has, where = total_host_bytes(), "RAM, where the emulated device is,"
    if memory > has:
        raise ConfigError(
            f"memory={format_bytes(memory)} is more than there is: {where} has {format_bytes(has)}; lower memory, or "
            "leave it out for all that is free"
        )


def check_host_memory(host_memory: int | None) -> None:
    """Raise ``ConfigError`` if this machine, or the container of this process, can never have so many bytes of RAM."""
    has = [("this machine has", total_host_bytes()), *(("its container may take", n) for n, _ in _cgroups(_CGROUP))]
    where, most = min(has, key=lambda one: one[1])
    if host_memory is not None and host_memory > most:
        raise ConfigError(
            f"host_memory={format_bytes(host_memory)} is more RAM than there is: {where} {format_bytes(most)}; lower "
            "host_memory, or leave it out for all that is free"
        )


def free_memory(device: torch.device) -> int:
    """Return the device memory that this process could occupy, its context included; the emulated device is in RAM.

    Of a GPU a little is left: what a desktop takes varies while a plan is made, and all of a budget has to be there.
    """
    from lt_offload.machine.driver import occupiable_bytes

    if device.type != "cuda":
        return available_host_bytes()
    free = occupiable_bytes(device)
    return free - free // _LEFT_OVER


def available_host_bytes() -> int:
    """Return the RAM that this process may still take, by the system's free RAM and the limits of its control group."""
    import psutil  # type: ignore[import-untyped]

    return max(0, min([int(psutil.virtual_memory().available), *(left for _, left in _cgroups(_CGROUP))]))


class TakenHostBytes(NamedTuple):
    """RAM that this process takes."""

    all: int
    """As system monitors show it."""
    private: int
    """The part that no file backs, and that therefore does not count as free."""


def taken_host_bytes() -> TakenHostBytes:
    """Return the RAM that this process takes, without what its heap has kept as free: that goes back to the system."""
    import psutil

    from lt_offload.machine.heap import give_back

    give_back()
    memory = psutil.Process().memory_info()
    return TakenHostBytes(all=memory.rss, private=max(0, memory.rss - getattr(memory, "shared", 0)))


def total_host_bytes() -> int:
    """Return the RAM of this machine."""
    import psutil

    return int(psutil.virtual_memory().total)


_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of control groups, versions 2 and 1: the limit, the use, and the name of the page cache's part of the use."""


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of the control group and the bytes that it leaves, per mounted version with a limit."""
    for limit_name, used_name, cache_key in _MEMORY_FILES:
        try:
            limit, used_file = int((root / limit_name).read_text(encoding="utf-8")), root / used_name
            used = int(used_file.read_text(encoding="utf-8"))
            statistics = dict(
                line.split() for line in (used_file.parent / "memory.stat").read_text(encoding="utf-8").splitlines()
            )
        except (OSError, ValueError):  # there is none: "max"
            continue
        yield limit, limit - used + int(statistics.get(cache_key, 0))  # the page cache gives way
