"""One training of a program, plain or within a budget, by Lightning or in a loop."""

# ruff: noqa: D102 - hooks of Lightning
from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import lt_offload
from scripts.attack.compared import Ended, no_failed_kernels
from scripts.attack.programs import Model, Program, loss_of
from scripts.hf.runs import quiet
from tests.support.user_nets import VOCAB

STEPS, EPOCHS = 6, 2
_COUNTED = 2
"""The step after which a habit acts that acts once."""

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True, foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2, foreach=False),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=1e-2, foreach=False),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}
SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=2e-2, total_steps=EPOCHS * STEPS + 1),
}
PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-true", "autocast": "bf16-mixed"}


class Training:
    """What a program trains, what it does beside, and what it has seen."""

    def __init__(self, program: Program) -> None:
        self.program, self.model = program, Model(program)
        self.seen: dict[str, list[Any]] = {"losses": []}
        self._averages: dict[str, Tensor] = {}
        self._hook(self.model, program.hook)

    def note(self, name: str, value: Any) -> None:
        """Keep ``value`` without a tensor: on the emulated device a copy would take memory of the device."""
        self.seen.setdefault(name, []).append(value.tolist() if isinstance(value, Tensor) else value)

    def _hook(self, model: Model, kind: str) -> None:
        block, calls = model.layers[1], [0]
        matrix = next(p for p in block.parameters() if p.ndim > 1)

        def counting(grad: Tensor) -> Tensor:
            calls[0] += 1
            return grad * (1 + 0.1 * calls[0])

        def scaled(_module: nn.Module, _args: Any, output: Any) -> Any:
            return output * 0.9 if isinstance(output, Tensor) else None

        def noting(_module: nn.Module, _inputs: Any, grads: Any) -> None:
            self.note("backward", grads[0].float().sum())

        hooked: Any = matrix
        if kind == "forward":
            block.register_forward_hook(scaled)
        elif kind == "pre":
            block.register_forward_pre_hook(lambda _m, args: (args[0] * 1.1, *args[1:]) if args else None)
        elif kind == "backward":
            block.register_full_backward_hook(noting)
        elif kind in ("parameter", "counter") and matrix.requires_grad:
            hooked.register_hook(counting if kind == "counter" else lambda grad: grad * 0.5)
        elif kind == "accumulated" and matrix.requires_grad:
            hooked.register_post_accumulate_grad_hook(lambda p: self.note("accumulated", p.grad.float().norm()))

    def optimizer(self) -> Optimizer:
        """Make the optimizer; frozen tensors that a habit trains later are in it from the start."""
        if self.program.habit == "unfreeze":
            self.model.layers[0].requires_grad_(False)
        later = set(self.model.layers[0].parameters()) if self.program.habit == "unfreeze" else set()
        trained = [p for p in self.model.parameters() if p.requires_grad or p in later]
        groups: Any = trained
        if self.program.groups:
            parts = [[p for p in trained if (p.ndim > 1) == matrices] for matrices in (True, False)]
            groups = [{"params": part, "weight_decay": 0.01 * i} for i, part in enumerate(parts) if part]
        return OPTIMIZERS[self.program.optimizer](groups)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch, which the model computes or its user."""
        made = self.model(**batch)
        loss: Tensor = loss_of(made["logits"], made["aux"], batch["labels"]) if self.program.outside else made["loss"]
        return loss

    def before_update(self) -> None:
        """Read or edit gradients."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.program.habit == "norms":
            self.note("norms", [float(grad.float().norm()) for grad in gradients])
        elif self.program.habit == "edit":
            for grad in gradients:
                grad.mul_(0.5)

    @torch.no_grad()
    def after_step(self, updates: int, optimizer: Optimizer, batch: dict[str, Tensor]) -> None:
        """Read or write weights, states and settings."""
        habit, model = self.program.habit, self.model
        if habit == "average":
            for name, parameter in model.named_parameters():
                now = parameter.detach().cpu()
                before = self._averages.get(name)
                self._averages[name] = now.clone() if before is None else before.lerp_(now, 0.1)
        elif habit == "unfreeze" and updates == _COUNTED:
            model.layers[0].requires_grad_(True)
        elif habit == "clamp":
            for parameter in model.layers[0].parameters():
                parameter.clamp_(-0.2, 0.2)
        elif habit == "decay":
            for parameter in model.parameters():
                parameter.data.mul_(0.999)
        elif habit == "states":
            tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
            self.note("states", [float(tensor.float().sum()) for tensor in tensors])
        elif habit == "generate":
            self.note("generated", self.loss(batch))
        elif habit == "rate":
            for group in optimizer.param_groups:
                group["lr"] *= 0.8
        elif habit == "copy" and updates == _COUNTED:
            for name, tensor in model.state_dict().items():
                self.note(name, tensor)

    @torch.no_grad()
    def validate(self, batch: dict[str, Tensor]) -> None:
        """Note the loss of a batch without dropout."""
        self.note("validation", self.loss(batch))

    def after_training(self) -> None:
        """Read what is left."""
        for average in self._averages.values():
            self.note("averages", average)
        if self.program.habit == "gradients":
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    self.note(name, parameter.grad)


def batches(program: Program) -> list[dict[str, Tensor]]:
    """Return the batches of an epoch."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(VOCAB, (2, 6), generator=generator) for _ in range(STEPS)]
    if program.shorter:
        made[-1] = made[-1][:1]
    return [{"ids": ids, "labels": ids.roll(1, 1)} for ids in made]


# -- with Lightning ----------------------------------------------------------------------------------------------------


class Module(L.LightningModule):
    """The program as a module; its hooks are those of a callback as well."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_, self.model = training, training.model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        if self.training_.program.habit == "skip" and batch_idx == 1:
            return None
        loss = self.training_.loss(batch)
        self.log("loss", loss)
        self.training_.note("losses", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.training_.validate(batch)

    def configure_optimizers(self) -> Any:
        optimizer, name = self.training_.optimizer(), self.training_.program.schedule
        if not name:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": SCHEDULES[name](optimizer), "interval": "step"}}

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(batches(self.training_.program), batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self.train_dataloader() if self.training_.program.habit == "validate" else []


class Habits(L.Callback):
    """What a user's callback does."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._training.before_update()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._training.after_step(trainer.global_step, trainer.optimizers[0], batch)


def by_lightning(program: Program, ours: dict[str, Any] | None) -> tuple[Training, Optimizer, Any]:
    """Train with a Trainer; with our strategy if there are ``ours``, its settings."""
    random.seed(7)
    training = Training(program)
    strategy: Any = "auto" if ours is None else lt_offload.OffmateStrategy(solver_time_limit=2.0, **ours)
    quietly = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=1,
        strategy=strategy,
        precision=PRECISIONS[program.dtype],  # type: ignore[arg-type]
        max_epochs=EPOCHS,
        accumulate_grad_batches=program.accumulate,
        gradient_clip_val=0.5 if program.clip else None,
        gradient_clip_algorithm=program.clip or None,
        num_sanity_val_steps=0,
        callbacks=[Habits(training)],
        **dict.fromkeys(quietly, False),  # type: ignore[arg-type]
    )
    torch.manual_seed(5)
    trainer.fit(Module(training))
    training.after_training()
    return training, trainer.optimizers[0], getattr(strategy, "plan", None)


# -- in a loop of one's own --------------------------------------------------------------------------------------------


def by_loop(program: Program, ours: dict[str, Any] | None) -> tuple[Training, Optimizer, Any]:
    """Train in a loop; within ``offloaded`` if there are ``ours``, its settings."""
    random.seed(7)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = Training(program)
    model = training.model if ours is not None else training.model.to(device)
    optimizer = training.optimizer()
    made = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches(program)]
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=program.dtype == "autocast")

    def loss_in_context(batch: dict[str, Tensor]) -> Tensor:
        with autocast():
            return training.loss(batch)

    with ExitStack() as context:
        engine = None
        if ours is not None:
            settings = {"accumulate": program.accumulate, "solver_time_limit": 2.0, "run": loss_in_context, **ours}
            # Gradients that are read or edited between the backward and the step are there in this case only.
            settings["delayed"] = bool(program.clip) or program.habit in ("gradients", "edit", "norms")
            engine = context.enter_context(
                lt_offload.offloaded(model, optimizer, made[0], accelerator=device.type, **settings)
            )
        _loop(training, optimizer, made, loss_in_context, engine)
        training.after_training()
        plan = getattr(engine, "plan", None)
    return training, optimizer, plan


def _loop(
    training: Training,
    optimizer: Optimizer,
    made: list[dict[str, Tensor]],
    loss_in_context: Callable[[dict[str, Tensor]], Tensor],
    engine: Any,
) -> None:
    program, model, updates = training.program, training.model, 0
    schedule = SCHEDULES[program.schedule](optimizer) if program.schedule else None
    torch.manual_seed(5)
    for _ in range(EPOCHS):
        model.train()
        for number, batch in enumerate(made):
            if program.habit == "skip" and number == 1 and program.accumulate == 1:
                continue
            loss = loss_in_context(batch)
            (loss / program.accumulate).backward()  # type: ignore[no-untyped-call]
            training.note("losses", loss)
            if (number + 1) % program.accumulate:
                continue
            training.before_update()
            if program.clip:
                clip = getattr(nn.utils if engine is None else engine, f"clip_grad_{program.clip}_")
                clip(*(() if engine is not None else (model.parameters(),)), 0.5)
            optimizer.step()
            if not (program.habit == "gradients" and updates == EPOCHS * STEPS // program.accumulate - 1):
                optimizer.zero_grad()
            updates += 1
            if schedule is not None:
                schedule.step()
            training.after_step(updates, optimizer, batch)
        if program.habit == "validate":
            model.eval()
            training.validate(made[0])


def trained(program: Program, ours: dict[str, Any] | None = None) -> Ended:
    """Train, and return what is left on the host; raises ``RuntimeError`` if a kernel of the fake GPU has failed."""
    train = by_loop if program.loop == "own" else by_lightning
    with quiet(), no_failed_kernels():
        training, optimizer, plan = train(program, ours)
    return Ended.of(training.model, optimizer, training.seen, plan)
