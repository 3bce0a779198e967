"""Private names of Lightning's Trainer and loops, in both of its packages: the use of each, the failure without it.

All of them are in Lightning 2.6, the only minor version that pyproject.toml allows. Nothing here imports Lightning: the
objects are given. Trainers are typed ``Any``, as they are of one of two namespaces.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

WRAPPERS_OF_FABRIC = {"_FabricModule", "_FabricOptimizer"}
"""Classes of the results of ``fabric.setup``: wrappers, not the models that the loop holds, refused by name."""
BATCH_NORM = "_BatchNorm"
"""Torch's class below every batch norm, which limits know by name, as they load no torch."""
OWNERS = ("_trainer", "_fabric")
"""Attributes in which a module keeps the object that trains it, which no step changes."""
CLIP_GRADIENTS, AFTER_CLOSURE = "_clip_gradients", "_after_closure"
"""Methods of the precision plugin that clip, and that call the hooks before the optimizer's step."""
SCRIPT_LAUNCHER = "_SubprocessScriptLauncher"
"""The class that starts one process for each device, among the launchers of a namespace."""
ALL_GATHER = "_all_gather_ddp_if_available"
"""The function of Fabric's that gathers tensors of all processes, with gradients if these are asked for."""
BEFORE_BATCH = "_broadcast_sigterm_tensor"
"""Method of the loop of batches, in which all processes wait for the first one, and cannot be interrupted."""
BEFORE_ZERO_GRAD = "_on_before_zero_grad"
"""Method of the loop of optimization, in which hooks see the gradients that are about to go."""


# -- where training is ------------------------------------------------------------------------------------------------


def adds_up(trainer: Any) -> bool:
    """Return whether no update follows the present batch: windows of several batches are cut by it."""
    return bool(trainer.fit_loop._should_accumulate())


skips_backward: Callable[[Any], bool] = attrgetter("fit_loop._skip_backward")
"""True if the present step is repeated for its loss alone, after manual interventions."""


def is_validation_due(fit_loop: Any) -> bool:
    """Return whether a validation follows the present batch: a checkpoint made before it has to go on with it."""
    return bool(fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher))


def is_last_batch(epoch_loop: Any) -> bool:
    """Return whether no batch of the epoch comes after the present one."""
    return bool(epoch_loop._num_ready_batches_reached())


is_training_done: Callable[[Any], bool] = attrgetter("fit_loop.epoch_loop._is_training_done")
"""True if the epoch ends here: then the signal to leave is obeyed behind its validation."""


# -- going on from a checkpoint ---------------------------------------------------------------------------------------

BATCHES_THAT_STEPPED = "_batches_that_stepped"
"""Key of a saved state of the loop of batches: the number of updates that loggers were told of."""


def has_validated(epoch_loop: Any) -> None:
    """Let ``epoch_loop`` take the validation of its epoch for done."""
    epoch_loop.val_loop._has_run = True


def goes_on(fit_loop: Any) -> None:
    """Let ``fit_loop`` not take itself for one that has just been loaded."""
    fit_loop._restarting = False


loaded_checkpoint: Callable[[Any], Any] = attrgetter("_checkpoint_connector._loaded_checkpoint")
"""The contents of the checkpoint that is resumed; Lightning forgets them before training begins."""


def flush_metrics(trainer: Any) -> None:
    """Hand the metrics of a step that is done to the loggers, where nobody will come to do so."""
    trainer._logger_connector.update_train_step_metrics()


# -- data -------------------------------------------------------------------------------------------------------------


data_source: Callable[[Any], Any] = attrgetter("fit_loop._data_source")
"""The source of training batches: the object that makes the loader, which nothing else may ask for."""
data_fetcher: Callable[[Any], Any] = attrgetter("_data_fetcher")
"""The object that fetches batches: it is told where to begin when a run goes on."""
COMBINED_LOADER = "_combined_loader"
combined_loader: Callable[[Any], Any] = attrgetter(COMBINED_LOADER)
"""The loaders of training batches; None before they are made. Schedules ask it for their number."""


def in_turn(fit_loop: Any) -> bool:
    """Return whether a batch is of one loader, and the next loader begins where one ends."""
    return bool(fit_loop._combined_loader._mode == "sequential")


def take_up_states(fit_loop: Any) -> bool:
    """Load the states that are kept for loaders which were made before; return whether there were any."""
    states = fit_loop._combined_loader_states_to_load
    if not states:
        return False
    fit_loop._combined_loader._load_state_dicts(states)
    fit_loop._combined_loader_states_to_load = []
    return True


def before_transfer(module: Any, batch: Any) -> Any:
    """Return ``batch`` behind the hooks that see it before it goes to the device."""
    return module._on_before_batch_transfer(batch)


def training_modes(trainer: Any) -> dict[str, bool]:
    """Return the modes of modules, by name, that come back when the check of validation before training ends."""
    return trainer.fit_loop.epoch_loop.val_loop._module_mode.mode if trainer.sanity_checking else {}


# -- modules and callbacks --------------------------------------------------------------------------------------------


def trainer_of(module: Any) -> Any:
    """Return the Trainer of a module, None without one: the public name raises an error then."""
    return getattr(module, "_trainer", None)


def detects_anomaly(trainer: Any) -> bool:
    """Return whether ``detect_anomaly`` was set: it does not see into blocks, and is refused."""
    return bool(getattr(trainer, "_detect_anomaly", False))


averages_on: Callable[[Any], Any] = attrgetter("_device")
"""The device of a callback's average of weights; None: the module's."""


def own_average(callback: Any) -> bool:
    """Return whether a callback averages by another formula than the mean."""
    return bool({"avg_fn", "multi_avg_fn"} & {*getattr(callback, "_kwargs", ())})


def compiler_context(module: Any) -> Any:
    """Return Lightning's notes about ``torch.compile`` of a module; None if it was not compiled."""
    return getattr(module, "_compiler_ctx", None)
