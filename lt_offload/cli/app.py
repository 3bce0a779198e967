"""Lightning's command line for fine-tuning: from files and flags to settings, and errors that name the wrong one.

:func:`run` carries out a verb of ``verbs/`` with the settings.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lt_offload.cli import messages, recipes
from lt_offload.cli.outputs import new_run
from lt_offload.cli.recipes import compose
from lt_offload.cli.static.settings import joined, unknown
from lt_offload.cli.table import Verb
from lt_offload.cli.verbs.check import check_early
from lt_offload.errors import ConfigError, first_line
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.processes import end_others, is_first, let_the_first_speak
from lt_offload.finetune.run.summary import RunSummary
from lt_offload.finetune.terminal import quiet, say
from lt_offload.machine.replaced import own_attribute
from lt_offload.replacing import replacing
from lt_offload.strategy.checkpoint import files as checkpoint
from lt_offload.strategy.namespaces import STRATEGY_NAME
from lt_offload.strategy.several.processes import Processes

_UNLIMITED = {"max_steps": "-1", "max_epochs": "null"}


class Parser(LightningArgumentParser):
    """A parser that raises instead of exiting, and writes configs that are recipes for every verb."""

    transient: Sequence[str] = ()
    """Keys that belong to one call and not to the settings."""

    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        """Return the settings as YAML."""
        settings = namespace.clone()
        for key in self.transient:
            settings.pop(key, None)
        text: str = super().dump(settings, *args, **kwargs)
        return text

    def save(self, cfg: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Write the settings to ``path`` as a whole: a run that was killed meanwhile can go on."""
        local = checkpoint.local(path)
        with nullcontext(path) if local is None else replacing(local) as new:
            super().save(cfg, new, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ``message``, shortened."""
        raise ConfigError(explain(message, list(self._option_string_actions))) from ex


class App(LightningCLI):
    """The module, data module and trainer of a chain of recipe files and flags; nothing runs yet.

    Parameters of ``verb``, which will be called, are flags of their own. Of ``files``, which make ``recipe`` up, each
    one overrides the ones before, and ``args`` override all.
    """

    def __init__(self, verb: Callable[..., int], recipe: Path, files: Sequence[Path], args: Sequence[str]) -> None:
        self.verb = verb
        self.recipe = recipe
        self.files, self.args = files, args
        # Read before parsing: after it, nothing tells a flag from a setting of the recipe.
        self._names_data = any(arg.startswith("--data.path") for arg in args)
        self._names_root = any(arg.startswith("--trainer.default_root_dir") for arg in args)
        self.options: dict[str, Any] = {}
        self.summary = RunSummary()
        super().__init__(
            FineTune,
            FineTuneData,
            trainer_class=Trainer,
            parser_class=Parser,
            parser_kwargs={"prog": "lt-finetune RECIPE", "description": verb.__doc__, "allow_abbrev": False},
            save_config_callback=SaveConfigCallback if verb.__name__ == "fit" else None,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=1,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            # Everything comes as arguments, files too, so that jsonargparse has one order of what overrides what.
            # run=False: Lightning's subcommands do not exist here, verbs/ calls the Trainer.
            args=compose(files, joined(args)),
            run=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the verb's own flags, and the keys with which a recipe names other files."""
        parser.add_argument("--base", type=str | list[str] | None, default=None, help="files a recipe builds on")
        parser.add_argument("--gpu", type=str | list[str] | None, default=None, help="files that override it on a GPU")
        # What both sides need is set once; jsonargparse hands it to the other before classes are made.
        parser.link_arguments("model.name", "data.model")
        parser.link_arguments("model.new_tokens", "data.new_tokens")
        parser.link_arguments("data.tokenizer", "model.tokenizer")
        self._option_names = parser.add_function_arguments(
            self.verb, skip={"app"}, as_group=self.verb.__name__ != "data"
        )
        assert isinstance(parser, Parser)
        # These are of one call: in the config.yaml of a run they would be wrong for every other verb that reads it.
        parser.transient = ("base", "gpu", "config", *self._option_names)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and take out the verb's own flags."""
        # Lightning warns if there are arguments in sys.argv too; these are the ones we were given, rearranged.
        with own_attribute(sys, "argv", sys.argv[:1]):
            super().parse_arguments(parser, args)
        self.options = {name: self.config.pop(name) for name in self._option_names}
        # Lightning refuses such a seed, too, but in words that name no setting.
        seed = self.config.get("seed_everything")
        if not 0 <= (seed or 0) < 2**32:
            raise ConfigError(f"seed_everything={seed} is out of bounds; choose a number from 0 to {2**32 - 1}")

    def instantiate_classes(self) -> None:
        """Make the module, the data module and the trainer; ``ConfigError`` if one does not take its settings."""
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, OverflowError, ModuleNotFoundError) as error:  # jsonargparse words ours anew
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(explain(str(error), [])) from error
        except MisconfigurationException as error:
            settings, first = self.config_init["trainer"], first_line(error)
            if "backend found" not in first and "accelerator" not in first.lower():
                raise ConfigError(f"trainer: {first}") from error
            raise ConfigError(
                f"trainer.accelerator={settings.get('accelerator')!r} with trainer.devices={settings.get('devices')!r} "
                f"does not work here: {first} Use trainer.accelerator=cpu (the emulated device) or auto, and "
                "trainer.devices=1"
            ) from error

    def choose_weights(self, *, of_run: bool) -> None:
        """Let a verb that loads a checkpoint, and has none named, take the newest complete one of a run folder.

        With a recipe in place of a run folder the pretrained weights are used; a line says so if the recipe has been
        trained. Raises ``ConfigError`` if a run folder has none.
        """
        if "resume" in self.options or self.options.get("ckpt_path", "") is not None:
            return
        if not of_run:
            with suppress(ConfigError):
                run, _ = last_run(self.recipe, None)
                verb = f"lt-finetune {self.verb.__name__} {run}"
                say(f"taking the pretrained weights; '{verb}' takes those of the last run")
            return
        folder = self.recipe.parent / "checkpoints"
        newest = checkpoint.newest(folder)
        if newest is None:
            raise ConfigError(
                f"there is no complete checkpoint in {folder}; give one with --ckpt_path, or {self.recipe} as the "
                "recipe for the pretrained model"
            )
        self.options["ckpt_path"] = str(newest)

    def _resume(self, root: str | None) -> None:
        """Go on in the folder of the last run, from its newest checkpoint; ``ConfigError`` if it had other data."""
        self.run_dir, newest = last_run(self.recipe, Path(root) if root else None, by_flag=self._names_root)
        self.options["ckpt_path"] = str(newest)
        path, saved = self.config["data"]["path"], self.run_dir / "config.yaml"
        before = recipes.read(saved).get("data", {}).get("path", path) if saved.exists() else path
        # Data that a flag names are meant as they are; a recipe may have been edited since the run.
        if before != path and not self._names_data:
            raise ConfigError(
                f"--resume: data.path={str(path)!r} of {self.recipe} is not that of the run in {self.run_dir}, "
                f"{str(before)!r}; 'lt-finetune {self.run_dir} --resume' has all settings of the run, or name the data "
                "with --data.path"
            )

    def keep_metrics(self) -> Path | None:
        """Let ``metrics.csv`` of an earlier part of the run have a number, as the logger would delete it; return it."""
        written = self.run_dir / "metrics.csv"
        if not written.exists():
            return None
        # Numbers count up, so that a run that was resumed many times keeps all of its curves.
        names = (self.run_dir / f"metrics-{number}.csv" for number in itertools.count(1))
        return written.rename(next(name for name in names if not name.exists()))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the trainer, with a run folder that holds everything the run leaves behind."""
        config = self.config_init["trainer"]
        strategy, precision, root = config.get("strategy"), str(config.get("precision")), config.get("default_root_dir")
        for name, unlimited in _UNLIMITED.items() if self.verb.__name__ in ("fit", "check") else ():
            if config.get(name) == 0:
                raise ConfigError(f"trainer.{name}=0 trains nothing; raise it, or set it to {unlimited} for no limit")
        on_gpu = torch.cuda.is_available() and config.get("accelerator") != "cpu"
        offloads = isinstance(strategy, Processes) or strategy == STRATEGY_NAME
        if precision in ("16", "16-mixed") and offloads and not on_gpu:
            raise ConfigError(
                f"trainer.precision={precision} needs a GPU, without which Lightning computes in bfloat16; set it to "
                "bf16-mixed, or to 32-true"
            )
        trains = self.verb.__name__ == "fit"  # else it is no run, and leaves no folder behind
        if self.options.get("resume"):
            if self.options["ckpt_path"] is not None:
                raise ConfigError(
                    f"--resume and --ckpt_path {self.options['ckpt_path']} both name a checkpoint; give one"
                )
            self._resume(root)
        elif root or not (trains and is_first()):
            self.run_dir = Path(root or "runs")
        else:
            self.run_dir = new_run(recipes.run_name(self.recipe))
        kwargs["default_root_dir"] = str(self.run_dir)
        if self.verb.__name__ in ("generate", "chat"):  # one process answers, where several have trained
            devices = config.get("devices")
            kwargs |= {"devices": devices[:1] if isinstance(devices, list) else 1, "num_nodes": 1}
        # Decided here: left to Lightning, what is logged would depend on which packages are installed.
        kwargs["logger"] = trains and loggers(config.get("logger"), self.run_dir, self.options.get("wandb"))
        self.summary = RunSummary(self.run_dir)
        # Other strategies have no such setting, and a folder that the user has named stays.
        if getattr(strategy, "report_dir", "none") is None:
            strategy.report_dir = self.run_dir
        callbacks = config.get("callbacks") or []
        wanted = _without_doubles(callbacks if isinstance(callbacks, list) else [callbacks])
        shown = not quiet() and config.get("enable_progress_bar") is not False
        bars = [callback for callback in wanted if shown and isinstance(callback, ProgressBar)]
        wanted = [callback for callback in wanted if not isinstance(callback, ProgressBar)]
        # A Trainer that is given no bar makes one of Lightning's, unless it is told not to.
        if not bars:
            kwargs["enable_progress_bar"] = False
        if config.get("enable_model_summary") is None:
            kwargs["enable_model_summary"] = False
        kwargs["callbacks"] = [*self.summary.callbacks, *wanted, *bars]  # a bar shows what the others have measured
        return super().instantiate_trainer(**kwargs)


def run(verb: Verb, files: Sequence[Path], args: Sequence[str], *, of_run: bool = False) -> int:
    """Carry out ``verb`` with the settings of ``files``, later ones first in rank, and flags; return the exit code.

    ``of_run``: the recipe was named by the folder of a run, which then has the checkpoint, too.
    """
    messages.install()
    # A plan for a card that is named is one on a GPU, whatever this machine has.
    on_gpu = torch.cuda.is_available() or any(arg.startswith("--hardware") for arg in args)
    function = verb.load()
    app = App(function, files[-1], [*files, *(recipes.for_gpu(files) if on_gpu else [])], args)
    app.choose_weights(of_run=of_run)
    if verb.name != "plan":  # which needs neither data nor weights
        reads_data = verb.name not in ("generate", "chat", "export")
        check_early(app, app.options.get("ckpt_path"), resume=verb.name == "fit", reads_data=reads_data)
    code = 1
    try:
        code = function(app, **app.options)
    finally:
        # Also after an exception: the others would wait for this one with their next exchange.
        if code != 0:
            end_others(app.trainer)
    if code != 0 and not is_first():
        let_the_first_speak()
    return code


def last_run(recipe: Path, root: Path | None, *, by_flag: bool = False) -> tuple[Path, Path]:
    """Return the folder ``root``, or that of the last run of ``recipe`` with a checkpoint, and its newest complete one.

    ``by_flag``: ``root`` is that of a flag, and not of the recipe's file. Raises ``ConfigError`` if there is no such
    checkpoint.
    """
    # The settings of a run stand in its folder, which may have moved since, and they mean that one.
    if not by_flag and recipe.name == "config.yaml" and (recipe.parent / "checkpoints").is_dir():
        root = recipe.parent
    # Digits only: a recipe whose name begins with this one's and a dash has runs of its own.
    stamp = "[0-9]" * 8 + "-" + "[0-9]" * 6
    runs = [root] if root else sorted(Path("runs").glob(f"{recipes.run_name(recipe)}-{stamp}"), reverse=True)
    for folder in runs:
        if (newest := checkpoint.newest(folder / "checkpoints")) is not None:
            return folder, newest
    where = f"{root / 'checkpoints'}" if root else f"{Path('runs').resolve()}/{recipes.run_name(recipe)}-*/checkpoints"
    raise ConfigError(f"--resume: there is no complete checkpoint in {where}; start without --resume")


def _without_doubles(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return ``callbacks`` with only the last of those that a Trainer takes once: the user's replace the recipe's."""
    last: dict[object, Callback] = {}
    for callback in callbacks:
        once = {ProgressBar: "progress bar", Checkpoint: callback.state_key}
        # A dict keeps the place of the first mention and takes the value of the last one.
        last[next((key for kind, key in once.items() if isinstance(callback, kind)), id(callback))] = callback
    return list(last.values())


def explain(message: str, flags: Sequence[str]) -> str:
    """Return jsonargparse's ``message`` as one line that names the setting; ``flags`` are the known ones."""
    nested = re.search(r"Group '([^']+)' does not accept option '([^']+)'", message)
    if nested:
        return _unknown(f"{nested[1]}.{nested[2]}", flags)
    stray = re.search(r"(?:unrecognized arguments: |Option ')([^\s']+)", message)
    if stray:
        return _unknown(stray[1].lstrip("-").split("=")[0], flags)
    missing = re.search(r'^Key "([^"]+)" not found in namespace', message)
    if missing:
        return f"{missing[1]} is missing; set it, and leave {missing[1].partition('.')[0]} a group of settings"
    key = re.search(r'[Kk]ey "([^"]+)"', message)
    where = f"{key[1]}: " if key else ""
    message = re.sub(r"\n +Subclass types expect one of:(?:\n +- a .*)+", "", message)
    reasons = re.findall(r"^\s*- (.*(?:\n(?!\s*- |\s*Given value).*)*)", message, flags=re.MULTILINE)
    # Of a union's errors, those about the type say only what else it could have been.
    telling = [reason for reason in reasons if not reason.startswith("Expected a")]
    telling = [reason for reason in telling if not reason.startswith("Not a valid subclass")] or telling
    if telling:
        return where + "; ".join(" ".join(reason.split()) for reason in telling)
    union = re.search(r"Subtypes: \[(.*)\]\n(?:.*\n)*\s*Given value: (.*)", message)
    if union:
        types = re.sub(r"<class '([\w.]+)'>", r"\1", union[1]).replace("typing.", "").replace("NoneType", "null")
        return f"{where}expected one of {types}; got {union[2]}"
    line = " ".join(part.strip() for part in message.splitlines())
    line = re.sub(r'^.*?[Kk]ey "[^"]+":\s*', where, line)
    line = re.sub(r"<class '([\w.]+)'>", r"\1", line).replace("typing.", "")
    return re.sub(r"Expected an? (.+?)\. Got value: (.*)", r"expected \1, got \2", line)


def _unknown(key: str, flags: Sequence[str]) -> str:
    known = [flag.lstrip("-") for flag in flags if flag.startswith("--")]
    return unknown(key, [name for name in known if not name.endswith(("help", "+"))])


def loggers(chosen: Any, folder: Path, wandb: str | None) -> list[Logger] | bool:
    """Return the loggers of a run: those that ``trainer.logger`` has ``chosen``, and the project ``wandb``, if any.

    Raises ``ConfigError`` if its package is not installed, or all logging is switched off.
    """
    if chosen in (None, True):
        wanted: list[Logger] = [
            # Empty names: else each logger puts folders of its own between. Flushed at every
            # record, which comes seldom, so that a run that is killed has its curve.
            CSVLogger(str(folder), name="", version="", flush_logs_every_n_steps=1),
            TensorBoardLogger(str(folder / "tensorboard"), name="", version=""),
        ]
    elif chosen is False:
        wanted = []
    else:
        wanted = list(chosen) if isinstance(chosen, list) else [chosen]
    if wandb is None:
        return wanted or False
    if not wanted:
        raise ConfigError(f"--wandb {wandb} logs, and trainer.logger=false does not; leave one of them out")
    if not wandb.strip():
        raise ConfigError("--wandb: the name of the project is empty; give one, or --wandb alone")
    if find_spec("wandb") is None:
        raise ConfigError(f"--wandb {wandb} needs the package wandb: pip install wandb")
    from lightning.pytorch.loggers import WandbLogger

    # With WANDB_MODE=offline it needs no network, and its files can be sent later.
    offline = os.environ.get("WANDB_MODE") == "offline"
    return [*wanted, WandbLogger(project=wandb, name=folder.resolve().name, save_dir=str(folder), offline=offline)]
