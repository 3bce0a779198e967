from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ConfigDict

from lt_offload.errors import PlanError
from lt_offload.schema.files import from_json, load_json, save_json, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    spokes: int
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cart:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    wheels: tuple[Wheel, ...]
    load: float | None = None
    schema: int = 3


CART = Cart(wheels=(Wheel(spokes=8, tags=("oak", "ä")), Wheel(spokes=12)), load=0.1)


def test_round_trip(tmp_path: Path) -> None:
    path = save_json(CART, tmp_path / "deep" / "cart.json")
    assert load_json(Cart, path, schema=3) == CART
    assert from_json(Cart, to_json(CART), source="cart", schema=3) == CART


def changed(**changes: Any) -> str:
    return json.dumps(json.loads(to_json(CART)) | changes)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "cart.json is not a valid Cart file"),
        ("[]", "cart.json has schema None, this release of lt_offload reads schema 3 of Cart"),
        (changed(schema=2), "cart.json has schema 2, .* reads schema 3"),
        (changed(colour="red"), "cart.json is not a valid Cart file: colour"),
        (changed(wheels=[{"spokes": "many"}]), r"cart.json is not a valid Cart file: wheels\.0\.spokes"),
        (changed(wheels=[{}]), r"wheels\.0\.spokes: Field required"),
        ('{"schema": 3}', "cart.json is not a valid Cart file: wheels"),
    ],
)
def test_bad_files_are_named_with_the_path_of_the_error(text: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        from_json(Cart, text, source="cart.json", schema=3)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read Cart file .*nowhere.json.*No such file"):
        load_json(Cart, tmp_path / "nowhere.json", schema=3)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "cart.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="is not a valid Cart file"):
        load_json(Cart, tmp_path / "cart.json", schema=3)
