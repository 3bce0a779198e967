"""Profiles and machines from files: what planners take for granted is checked when they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lt_offload.errors import ConfigError, PlanError
from lt_offload.profiling.hardware import load_hardware, save_hardware
from lt_offload.schema.files import to_json
from lt_offload.schema.profile import Profile, problems
from tests.support.samples import make_profile

SOUND = make_profile(layers=2)


def written(tmp_path: Path, path: str, value: Any) -> Path:
    """Write the sound profile with one value changed; ``path`` is like ``"tensors.0.blocks"``."""
    whole = inner = json.loads(to_json(SOUND))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        inner = inner[part]
    inner[last] = value
    (tmp_path / "profile.json").write_text(json.dumps(whole))
    return tmp_path / "profile.json"


def test_a_sound_profile_has_no_problems() -> None:
    assert list(problems(SOUND)) == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("batch_size", 0, "batch_size: Input should be greater than 0, not 0"),
        ("hardware.h2d_bytes_per_s", 0, "hardware.h2d_bytes_per_s: Input should be greater than 0"),
        ("hardware.context_bytes", -1, "hardware.context_bytes: Input should be greater than or equal to 0, not -1"),
        ("hardware.device_bytes", 10**30, "hardware.device_bytes: 1000000000000000000.* is out of bounds"),
        ("optimizer.host_bytes_per_s", float("nan"), "optimizer.host_bytes_per_s: nan is out of bounds"),
        ("optimizer.scratch_ratio", -1, "optimizer.scratch_ratio: Input should be greater than or equal to 0, not -1"),
        ("slack_bytes", -1, "slack_bytes: Input .*, not -1"),
        ("blocks", [], "it has 0 blocks"),
        ("blocks.0.options", [], r"blocks\.0: its options are none"),
        ("blocks.1.input_bytes", -1, r"blocks\.1\.input_bytes: Input should be .*, not -1"),
        ("blocks.1.options.0.saved_bytes", -1, r"blocks\.1\.options\.0\.saved_bytes: Input should be .*, not -1"),
        ("blocks.1.has_backward", False, "one without a backward comes after one with a backward"),
        ("tensors.0.blocks", [], r"tensors\.0: its blocks \(\) are not one or more"),
        ("tensors.0.blocks", [99], r"tensors\.0: its blocks \(99,\) do not exist"),
        ("tensors.0.bytes", -1, r"tensors\.0\.bytes: Input should be .*, not -1"),
    ],
)
def test_a_value_that_cannot_be(tmp_path: Path, path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"profile.json' is not a valid Profile file: .*{message}"):
        Profile.load(written(tmp_path, path, value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host_bytes: 2001-99-99", "cannot read hardware description .*month must be in 1..12"),
        ("host_bytes: " + "[" * 3000, "it is nested too deeply"),
        ("2001-01-01: 3", "it is no mapping of names to numbers"),
        ("host_bytes: .inf", "host_bytes: Input should be a finite number"),
        ("h2d_bytes_per_s: .inf", "h2d_bytes_per_s: Input should be less than or equal to .*, not inf"),
        ("h2d_bytes_per_s: .nan", "h2d_bytes_per_s: Input should be .*, not nan"),
        ("d2h_bytes_per_s: 0", "d2h_bytes_per_s: Input should be greater than 0, not 0"),
        ("flops_per_s: {float32: -1}", "flops_per_s.float32: Input should be greater than or equal to 0, not -1"),
        (
            "peak_flops_per_s: {float32: -1}",
            "peak_flops_per_s.float32: Input should be greater than or equal to 0, not -1",
        ),
    ],
)
def test_a_machine_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    path = save_hardware(load_hardware("v100"), tmp_path / "machine.yaml")
    key = text.partition(":")[0]
    lines = [line for line in path.read_text().splitlines() if not line.startswith((f"{key}:", "  "))]
    path.write_text(
        "\n".join([line for line in lines if line not in ("flops_per_s:", "peak_flops_per_s:")] + [text]) + "\n"
    )
    with pytest.raises(ConfigError, match=message):
        load_hardware(path)
