"""``lt-finetune ls`` and ``lt-finetune cp``: the recipes that come with the package."""

from __future__ import annotations

import json as json_format

import psutil  # type: ignore[import-untyped]

from lt_offload.cli import recipes
from lt_offload.cli.outputs import check_output
from lt_offload.replacing import save_text
from lt_offload.resources import is_dir, user_path


def ls(*, json: bool = False) -> int:
    """List the recipes that come with the package by the GPU memory they are for, each with its first line.

    Those that this machine has the RAM for come first; the others are marked.

    Args:
        json: as a list of objects with name, gpu_gb and ram_gb (0: any machine), about and file, for programs.
    """
    known = recipes.shipped()
    if json:
        listed = [
            {"name": name, "gpu_gb": recipes.gigabytes(path), "ram_gb": recipes.ram_gigabytes(path)}
            | {"about": recipes.describe(path), "file": str(path)}
            for name, path in known.items()
        ]
        print(json_format.dumps(listed, indent=1))
        return 0
    width = max(map(len, known))
    ram = psutil.virtual_memory().total
    too_large = {name for name, path in known.items() if recipes.ram_gigabytes(path) * 1e9 > ram}
    sizes = {name: recipes.gigabytes(path) for name, path in known.items()}
    for size in sorted(set(sizes.values())):
        print(f"GPU with {size} GB" if size else "Any machine")
        names = [name for name in known if sizes[name] == size]
        for name in sorted(names, key=too_large.__contains__):
            print(f"{'*' if name in too_large else ' '} {name:{width}}  {recipes.describe(known[name])}")
    if too_large:
        print(f"* more RAM than the {ram / 1e9:.0f} GB of this machine")
    print("Another model: lt-finetune new MODEL --memory 12GB")
    return 0


def cp(recipe: str, file: str) -> int:
    """Copy a recipe, to change it.

    The copy still builds on the shipped files that it names; everything in it can be changed.

    Args:
        recipe: name of a shipped recipe, or a file.
        file: where to; a folder keeps the name. Nothing is overwritten.
    """
    source, target = recipes.find(recipe), user_path(file)
    if is_dir(target):
        target = target / source.name
    check_output(target, "cp", new=True)
    save_text(target, source.read_text(encoding="utf-8"), new=True)
    print(f"{target}  (run it: lt-finetune {target})")
    return 0
