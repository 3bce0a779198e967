import re
from dataclasses import fields
from pathlib import Path

import pytest

from lt_offload.errors import ConfigError
from lt_offload.profiling.hardware import (
    _cgroups,
    check_host_memory,
    hardware_names,
    load_hardware,
    measure_hardware,
    save_hardware,
)
from lt_offload.resources import shipped_files

NAMES = [
    "a100-80gb", "h200", "rtx-3060-12gb", "rtx-3070-8gb", "rtx-3090", "rtx-4060-8gb", "rtx-4060ti-16gb",
    "rtx-4070-12gb", "rtx-4090", "rtx-5060ti-16gb", "rtx-5070-12gb", "rtx-5080-16gb", "v100-16gb",
]  # fmt: skip


def test_shipped_names() -> None:
    assert hardware_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_shipped_descriptions_are_complete_and_sourced(name: str) -> None:
    found = load_hardware(name)
    assert found.name == name
    assert found.source
    numbers = (found.device_bytes, found.context_bytes, found.host_bytes, found.pinnable_bytes, found.h2d_bytes_per_s)
    assert found.process_bytes == 2 * 10**9
    rates = (found.d2h_bytes_per_s, found.device_memory_bytes_per_s, found.host_memory_bytes_per_s)
    assert all(number > 0 for number in (*numbers, *rates, *found.flops_per_s.values()))
    assert "float32" in found.flops_per_s
    assert found.device_memory_bytes_per_s > found.host_memory_bytes_per_s > found.h2d_bytes_per_s
    for line in shipped_files("configs/hardware", ".yaml")[name].read_text().splitlines():
        assert line.startswith("source:") or line.rstrip().endswith("flops_per_s:") or "# " in line, line


@pytest.mark.parametrize(
    ("alias", "name"),
    [("rtx-3060", "rtx-3060-12gb"), ("RTX 3090", "rtx-3090"), ("rtx_4060ti", "rtx-4060ti-16gb"), ("v100", "v100-16gb")],
)
def test_aliases(alias: str, name: str) -> None:
    assert load_hardware(alias) == load_hardware(name)


def test_own_description(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = shipped_files("configs/hardware", ".yaml")["rtx-3060-12gb"].read_text()
    path.write_text(text)
    assert load_hardware(path).name == "mine"
    path.write_text(text + "link: 5\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml.*: link: Unexpected"):
        load_hardware(path)
    path.write_text("device_bytes: 5\n")
    with pytest.raises(ConfigError, match="host_bytes: Field required"):
        load_hardware(path)
    path.write_text("- a\n")
    with pytest.raises(ConfigError, match="cannot read hardware description"):
        load_hardware(path)


def test_this_machine() -> None:
    said: list[str] = []
    found = measure_hardware("cpu", on_progress=said.append)
    assert said == ["measuring copies between host and device"]
    assert found.name == "emulated"
    assert found.context_bytes == 0
    assert 0 < found.device_bytes < found.host_bytes == found.pinnable_bytes  # what the process has is part of the RAM
    assert 0 < found.process_bytes < found.host_bytes
    assert found.h2d_bytes_per_s > 1e7
    assert found.d2h_bytes_per_s > 1e7
    assert found.staged_bytes_per_s == 0
    assert "one direction alone" in found.source


def test_control_groups(tmp_path: Path) -> None:
    assert [left for _, left in _cgroups(tmp_path)] == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert [left for _, left in _cgroups(tmp_path)] == []
    (tmp_path / "memory.max").write_text("1000\n")
    assert [left for _, left in _cgroups(tmp_path)] == [1000 - 700 + 150]
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("2000\n")
    (old / "memory.usage_in_bytes").write_text("100\n")
    (old / "memory.stat").write_text("cache 5\n")
    assert [left for _, left in _cgroups(tmp_path)] == [450, 1900]


def test_more_ram_than_the_machine_or_its_container_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_offload.profiling.hardware._CGROUP", tmp_path)
    monkeypatch.setattr("lt_offload.profiling.hardware.total_host_bytes", lambda: 64 * 10**9)
    check_host_memory(None)
    check_host_memory(64 * 10**9)
    with pytest.raises(ConfigError, match="host_memory=65 GB is more RAM than there is: this machine has 64 GB; lower"):
        check_host_memory(65 * 10**9)
    (tmp_path / "memory.max").write_text("max")
    check_host_memory(64 * 10**9)
    (tmp_path / "memory.max").write_text("32000000000")
    (tmp_path / "memory.current").write_text("5000000000")
    (tmp_path / "memory.stat").write_text("inactive_file 1000\n")
    check_host_memory(32 * 10**9)
    with pytest.raises(ConfigError, match="host_memory=64 GB is more RAM .*: its container may take 32 GB; lower"):
        check_host_memory(64 * 10**9)


@pytest.mark.parametrize("name", shipped_files("configs/hardware/hosts", ".yaml"))
def test_shipped_hosts_are_sourced_and_never_speed_a_link_up(name: str) -> None:
    card = load_hardware("rtx-3090")
    found = load_hardware(f"rtx-3090,host={name}")
    assert found.name == f"rtx-3090, {name}"
    assert found.source.startswith(f"{card.source}; {name}: ")
    assert (found.device_bytes, found.flops_per_s) == (card.device_bytes, card.flops_per_s)
    assert found.h2d_bytes_per_s <= card.h2d_bytes_per_s
    assert found.d2h_bytes_per_s <= card.d2h_bytes_per_s
    for line in shipped_files("configs/hardware/hosts", ".yaml")[name].read_text().splitlines():
        assert line.startswith("source: ") or "# " in line, line
    promised = re.fullmatch(r".*-(\d+)gb", name)
    if promised:
        assert found.host_bytes == found.pinnable_bytes == int(promised[1]) * 9 * 10**8  # the rest is the system's


def test_changes_to_a_machine() -> None:
    found = load_hardware("rtx-4060ti,host=ddr4-64,host=pcie3-x8")
    assert found.name == "rtx-4060ti-16gb, ddr4-64gb, pcie3-x8"
    assert found.host_bytes == 576 * 10**8
    assert found.h2d_bytes_per_s == found.d2h_bytes_per_s == 5.2e9
    assert load_hardware("rtx-4060ti,host=pcie4-x16").h2d_bytes_per_s == load_hardware("rtx-4060ti").h2d_bytes_per_s
    found = load_hardware("h200, ram=48GB, link=6GB")
    assert (found.host_bytes, found.pinnable_bytes) == (432 * 10**8, 432 * 10**8)
    assert load_hardware("h200,free=43GB").host_bytes == 43 * 10**9
    assert (found.h2d_bytes_per_s, found.d2h_bytes_per_s) == (6e9, 6e9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h200,host=ddr4", "host='ddr4' could be ddr4-128gb or ddr4-32gb or ddr4-64gb; give a YAML file"),
        ("h200,host=sdram", "host='sdram' is no file and not known; give"),
        ("h200,host=", "host='' is no file and not known; give"),
        ("h200,ram=lots", "hardware: ram='lots' is not a size"),
        ("h200,ram=64GB,free=50GB", "says RAM twice"),
        ("h200,link=4GB,link=5GB", "says link twice"),
        ("h200,pcie=3", r"unknown change 'pcie=3'; write host=NAME, ram=64GB, free=58GB"),
        ("rtx-3091", "did you mean rtx-3090"),
        ("rtx", "could be rtx-3060-12gb or"),
        ("tpu", f"is no file and not known.*{', '.join(NAMES)}"),
        ("3060", r"is no file and not known; did you mean rtx-3060-12gb\?"),
        ("rtx-30", "could be rtx-3060-12gb or rtx-3070-8gb or rtx-3090; give"),
    ],
)
def test_changes_and_names_that_are_wrong(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_hardware(name)


def test_a_host_describes_the_host_only(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text("host_bytes: 5000000000\n")
    assert load_hardware(f"h200,host={path}").host_bytes == 5 * 10**9
    path.write_text("device_bytes: 5\n")
    with pytest.raises(ConfigError, match="device_bytes is not one of host_bytes"):
        load_hardware(f"h200,host={path}")
    path.write_text("host_bytes: many\n")
    with pytest.raises(ConfigError, match=r"box\.yaml.*host_bytes: Input should be a valid integer"):
        load_hardware(f"h200,host={path}")


@pytest.mark.parametrize("name", [*NAMES, "rtx-3060,host=ddr4-32gb,link=2.5e9"])
def test_a_machine_survives_its_file(name: str, tmp_path: Path) -> None:
    machine = load_hardware(name)
    path = save_hardware(machine, tmp_path / "new" / "mine.yaml")
    assert load_hardware(path) == machine
    numbers = [line for line in path.read_text().splitlines() if re.fullmatch(r"\w+: [\d.e+]+.*", line)]
    sizes = [field.name for field in fields(machine) if field.name.endswith(("_bytes", "_bytes_per_s"))]
    assert [line.partition(":")[0] for line in numbers] == [*sizes, "network_s"]
    assert all(re.search(r"  # [\d.]+ ([kMGT]?B(/s)?|us)$", line) for line in numbers)
