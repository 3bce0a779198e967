"""The bench of launches: its plans are made, and carried out beside a plain loop in the same process."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import launch
from tests.gpu.target import Target


@pytest.mark.usefixtures("short")
def test_every_plan_is_measured_beside_a_plain_loop(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "WARM_UP", 1)
    kind = target.torch_device.type
    made = launch.make_plans(2, kind, str(tmp_path))
    assert list(made["files"]) == list(launch.PLANS)
    submitted = {}
    for name, file in made["files"].items():
        compared = launch.difference(2, kind, file, steps=1, rounds=1)
        assert compared["engine_step_s"] > 0
        counted = launch.calls(2, kind, file, steps=1)
        assert sum(calls for calls, _ in counted["files"].values()) > 0
        submitted[name] = set(counted["submitted"])
    assert submitted["streamed"] == {"h2d", "d2h", "host"}
    assert submitted["offload"] >= {"h2d", "d2h"}
