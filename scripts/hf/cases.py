"""The runs that are compared: what people set in a Trainer, with models of a few layers and rows of a few words."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

Make = Callable[[Path], Any]
"""Makes a Trainer whose ``output_dir`` is below a folder."""

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "cats"]
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 7,
}


def llama(**settings: Any) -> LlamaForCausalLM:
    """Return a model of three layers, always the same."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "pad_token_id": 0, **settings}))


def rows(count: int = 11, seed: int = 3) -> list[dict[str, list[int]]]:
    """Return rows of 6 to 14 tokens."""
    numbers = random.Random(seed)
    made = [[numbers.randint(3, 63) for _ in range(numbers.randint(6, 14))] for _ in range(count)]
    return [{"input_ids": ids, "labels": list(ids), "attention_mask": [1] * len(ids)} for ids in made]


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Fill rows up to the longest."""
    longest = max(len(row["input_ids"]) for row in batch)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in batch])
        for name, value in fill.items()
    }


def accuracy(found: Any) -> dict[str, float]:
    """Return what a user computes of predictions."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


class OwnLoss(Trainer):
    """Computes the loss itself, from two parts."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return cross entropy and a penalty of large logits."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()) + 1e-3 * logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class Scaled(Trainer):
    """Scales the loss so that every second step is left out, beginning with the first."""

    def create_accelerator_and_postprocess(self) -> None:
        """Give the accelerator that scaler."""
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cuda", 2.0**30, 2.0**14, 2.0**-14, growth_interval=1)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch, and log the scale."""
        loss = super().training_step(*args, **kwargs)
        self.log({"scale": self.accelerator.scaler.get_scale()})
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what can be compared."""
        logs = {name: str(value) if value != value else value for name, value in logs.items()}  # NaN equals nothing
        super().log(logs, *args, **kwargs)


class OwnStep(Trainer):
    """Reads and edits gradients at the end of its training step."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch, and halve the sums of gradients that are large."""
        loss = super().training_step(*args, **kwargs)
        for parameter in self.model.parameters():
            if parameter.grad is not None and float(parameter.grad.double().norm()) > 0.5:
                parameter.grad.mul_(0.5)
        return loss


class OwnBackward(Trainer):
    """Calls the backward of its losses itself, one for each row, and reads a gradient after it."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train on a micro-batch, whose loss is a mean of its own."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        total = torch.tensor(0.0, device=self.args.device)
        count = len(inputs["input_ids"])
        for row in range(count):
            loss = model(**{name: tensor[row : row + 1] for name, tensor in inputs.items()}).loss / count
            (loss / self.args.gradient_accumulation_steps).backward()
            total += loss.detach()
        self.log({"head": float(model.lm_head.weight.grad.norm())})
        return total


class TwoForwards(Trainer):
    """R-Drop: what two forwards with dropout say is to be alike."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean of both losses, and how far they are apart."""
        first, second = model(**inputs), model(**inputs)
        logs = [torch.nn.functional.log_softmax(outputs.logits, -1) for outputs in (first, second)]
        apart = torch.nn.functional.kl_div(*logs, reduction="batchmean", log_target=True)
        loss = (first.loss + second.loss) / 2 + 0.1 * apart
        return (loss, first) if return_outputs else loss


class GroupPerLayer(Trainer):
    """Learns slower the deeper a layer is."""

    def create_optimizer(self, *_: Any) -> Any:
        """Make an optimizer with a group for every layer."""
        layers = list(self.model.model.layers)
        rest = [self.model.lm_head.weight, self.model.model.norm.weight]
        groups: list[dict[str, Any]] = [{"params": rest}]
        groups.append({"params": [self.model.model.embed_tokens.weight], "lr": 1e-3})
        for depth, layer in enumerate(reversed(layers), 1):
            groups.append({"params": list(layer.parameters()), "lr": 1e-2 * 0.8**depth, "weight_decay": 0.1})
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return self.optimizer


class InOrder(Trainer):
    """Takes rows in their order, the shortest first, from data whose lengths nobody knows."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Growing(torch.utils.data.Dataset[Any]):
    """Rows of growing length."""

    def __init__(self) -> None:
        self.rows = sorted(rows(12), key=lambda row: len(row["input_ids"]))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]


class Busy(TrainerCallback):
    """Unfreezes a layer in the second epoch, and writes to the head after every update."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Freeze and unfreeze."""
        model.model.layers[0].requires_grad_(bool(state.epoch and state.epoch >= 1))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Read one weight and write to another."""
        with torch.no_grad():
            model.lm_head.weight.mul_(1 - float(model.model.norm.weight.mean()) / 100)


class OfGradients(TrainerCallback):
    """Logs norms of gradients before and after an update, and edits them before it."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Read, scale, replace and drop gradients."""
        _log_norms(state, model, "before")
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.grad.mul_(0.5)
            elif "lm_head" in name:
                parameter.grad = parameter.grad.clamp(-0.01, 0.01)
            elif "layers.1.mlp" in name:
                parameter.grad = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Read what the update has used."""
        _log_norms(state, model, "after")


def _norm(gradient: torch.Tensor) -> float:
    return float(gradient.norm().nan_to_num())  # NaN, where a step is left out, equals nothing


def _log_norms(state: Any, model: Any, when: str) -> None:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    state.log_history.append({f"{when} {name}": _norm(g) for name, g in gradients.items() if g is not None})


class Sentences(torch.utils.data.IterableDataset[Any]):
    """Rows that come one after another, nobody knows how many."""

    def __iter__(self) -> Any:
        return iter(rows(9))


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **settings: Any) -> Any:
    """Return the arguments of a Trainer; without a GPU that of transformers is the CPU."""
    return kind(**{**DEFAULTS, "use_cpu": not torch.cuda.is_available(), "output_dir": str(folder / "out"), **settings})


def plain(model: Callable[[], Any] = llama, kind: Callable[..., Trainer] = Trainer, **settings: Any) -> Make:
    """Return what makes a Trainer of transformers; arguments of the Trainer itself begin with an underscore."""
    own = {name[1:]: value for name, value in settings.items() if name.startswith("_")}
    rest = {name: value for name, value in settings.items() if not name.startswith("_")}

    def make(folder: Path) -> Any:
        data = {"train_dataset": rows(), "data_collator": collate, **own}
        return kind(model=model(), args=arguments(folder, **rest), **data)

    return make


def images() -> Any:
    """Return a model of images."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3))


def pictures() -> list[dict[str, Any]]:
    """Return rows for it."""
    torch.manual_seed(4)
    return [{"pixel_values": torch.randn(3, 16, 16), "labels": row % 3} for row in range(11)]


def encoder_and_decoder() -> Any:
    """Return such a model; a plain Trainer would leave its cache on, which has other last bits."""
    torch.manual_seed(1)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **tokens, use_cache=False))


def generating(model: Callable[[], Any]) -> Make:
    """Return what makes a Seq2SeqTrainer that generates where it evaluates."""

    def make(folder: Path) -> Any:
        settings = {**_STEPS, "predict_with_generate": True, "generation_max_length": 20}
        args = arguments(folder, Seq2SeqTrainingArguments, **settings)
        data = {"train_dataset": rows(), "eval_dataset": rows(5), "data_collator": collate}
        return Seq2SeqTrainer(model=model(), args=args, **data)

    return make


def eight_bits(folder: Path) -> Any:
    """Make a Trainer with an 8-bit optimizer."""
    from bitsandbytes.optim import AdamW8bit

    return plain(_optimizer_cls_and_kwargs=(AdamW8bit, {"lr": 1e-2, "min_8bit_size": 1024}))(folder)


def _of_bitsandbytes(name: str) -> Make:
    """Return what makes a Trainer for which transformers chooses one, those of 8 bits with 32 for the embedding."""

    def make(folder: Path) -> Any:
        from bitsandbytes.optim import GlobalOptimManager

        # It outlives trainings, and would take a tensor for one that has had the same place in memory.
        GlobalOptimManager.get_instance().initialize()
        return plain(lambda: llama(hidden_size=64, intermediate_size=128), optim=name, learning_rate=1e-3)(folder)

    return make


_BY_NAME = ("adamw_bnb_8bit", "lion_32bit", "lion_8bit", "ademamix", "ademamix_8bit", "rmsprop_bnb_8bit")
_NAMED = {f"optim={name}": _of_bitsandbytes(name) for name in _BY_NAME}
OF_BITSANDBYTES = (eight_bits, *_NAMED.values())
"""Those with its optimizers."""


def with_schedule(folder: Path) -> Any:
    """Make a Trainer that is given its optimizer and its schedule."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)
    return plain(lambda: model, _optimizers=(optimizer, schedule))(folder)


def lora(**settings: Any) -> Any:
    """Return a model with adapters."""
    from peft import LoraConfig, get_peft_model

    model = llama()
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], **settings))


def lora_and_head() -> Any:
    """Return a model with adapters and a head of its own, whose activations its owner has recomputed."""
    model = lora(modules_to_save=["lm_head"])
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    return model


_STEPS = {"eval_strategy": "steps", "eval_steps": 2}
EVALUATED: Mapping[str, Any] = {
    **_STEPS,
    # The smallest budget is that of the training.
    "per_device_eval_batch_size": 1,
    "eval_accumulation_steps": 1,
    "_eval_dataset": rows(9, seed=5),
    "_compute_metrics": accuracy,
}

HF: dict[str, Make] = {
    "defaults": plain(),
    "max_grad_norm=0": plain(max_grad_norm=0.0),
    "gradient_accumulation_steps=4, uneven end": plain(gradient_accumulation_steps=4, num_train_epochs=2, max_steps=-1),
    "bf16": plain(bf16=True),
    "gradient_checkpointing": plain(gradient_checkpointing=True),
    "eval_strategy, compute_metrics": plain(**EVALUATED),
    "load_best_model_at_end": plain(
        **EVALUATED,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
    ),
    "own compute_loss": plain(kind=OwnLoss),
    "cosine schedule, warmup": plain(lr_scheduler_type="cosine", warmup_steps=2),
    "optim=adamw_torch": plain(optim="adamw_torch"),
    "optim=adafactor": plain(optim="adafactor"),
    "optim=sgd": plain(optim="sgd"),
    "optim=adagrad": plain(optim="adagrad"),
    "optim=rmsprop": plain(optim="rmsprop"),
    "optimizer_cls_and_kwargs, AdamW8bit of bitsandbytes": eight_bits,
    **_NAMED,
    "PEFT": plain(lora),
    "PEFT, load_best_model_at_end": plain(
        lora, **EVALUATED, save_strategy="steps", save_steps=2, load_best_model_at_end=True
    ),
    "NEFTune, label smoothing": plain(neftune_noise_alpha=5.0, label_smoothing_factor=0.1),
    "group_by_length": plain(train_sampling_strategy="group_by_length"),
    "dropout": plain(lambda: llama(attention_dropout=0.2)),
    "own training_step that edits gradients": plain(kind=OwnStep, gradient_accumulation_steps=2),
    "own training_step that calls loss.backward() per row": plain(kind=OwnBackward, gradient_accumulation_steps=2),
    "callback that reads and edits gradients": plain(_callbacks=[OfGradients()], max_grad_norm=0.1),
    "own compute_loss with two forwards": plain(lambda: llama(attention_dropout=0.2), kind=TwoForwards, **EVALUATED),
    "own create_optimizer, a group per layer": plain(kind=GroupPerLayer),
    "optimizers=(AdamW, OneCycleLR)": with_schedule,
    "IterableDataset, gradient_accumulation_steps=2": plain(_train_dataset=Sentences(), gradient_accumulation_steps=2),
    "reduce_lr_on_plateau": plain(
        **{**EVALUATED, "eval_steps": 1},
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"factor": 0.5, "patience": 0},
    ),
    "PEFT, modules_to_save, gradient_checkpointing": plain(lora_and_head, gradient_checkpointing=True),
    "rows that grow": plain(kind=InOrder, _train_dataset=Growing()),
    "callback that unfreezes and writes weights": plain(_callbacks=[Busy()], num_train_epochs=2, max_steps=-1),
    "images (ViT)": plain(images, _train_dataset=pictures(), _data_collator=None),
    "Seq2SeqTrainer, predict_with_generate": generating(llama),
    "Seq2SeqTrainer, encoder and decoder (T5)": generating(encoder_and_decoder),
    "tied weights": plain(lambda: llama(tie_word_embeddings=True)),
}
"""What is set, and what makes a Trainer with it."""


# -- TRL --------------------------------------------------------------------------------------------------------------


def _words(numbers: random.Random, most: int) -> str:
    return " ".join(numbers.choice(WORDS) for _ in range(numbers.randint(1, most)))


def _dataset(columns: Mapping[str, int], count: int = 14) -> Any:
    from datasets import Dataset

    numbers = random.Random(1)
    return Dataset.from_list([{name: _words(numbers, most) for name, most in columns.items()} for _ in range(count)])


def text() -> Any:
    """Return a dataset of sentences."""
    return _dataset({"text": 8})


def preferences() -> Any:
    """Return a dataset of prompts with two answers each."""
    return _dataset({"prompt": 3, "chosen": 4, "rejected": 4})


def _trl(
    name: str,
    data: Callable[[], Any],
    *,
    base: Any = AutoModelForCausalLM,
    load: Mapping[str, Any] | None = None,
    adapters: bool = False,
    evaluated: bool = False,
    **settings: Any,
) -> Make:
    """Return what makes the Trainer ``name`` of TRL, with the tiny model that is in the folder."""

    def make(folder: Path) -> Any:
        trainer, config = _classes(name)
        own: dict[str, Any] = {}
        if adapters:
            from peft import LoraConfig

            own["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        chosen = {"bf16": False, "gradient_checkpointing": False, "max_length": 48, **settings}
        if evaluated:
            # The smallest budget is that of the training then, and not that of evaluations, in which nothing travels.
            chosen["per_device_eval_batch_size"] = 1
            own["eval_dataset"] = data().select(range(9))
        torch.manual_seed(0)
        model = base.from_pretrained(folder / "model", dtype=torch.float32, **(load or {}))
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        made = arguments(folder, config, **chosen)
        return trainer(model=model, args=made, train_dataset=data(), processing_class=tokenizer, **own)

    return make


def _classes(name: str) -> tuple[Any, Any]:
    if name == "ORPO":
        from trl.experimental import orpo

        return orpo.ORPOTrainer, orpo.ORPOConfig
    import trl

    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")


def _labelled() -> Any:
    data = preferences().remove_columns("rejected").rename_column("chosen", "completion")
    return data.add_column("label", [bool(row % 2) for row in range(len(data))])


def _explicit() -> Any:
    return preferences().remove_columns("prompt")


TRL: dict[str, Make] = {
    "SFT": _trl("SFT", text),
    "SFT, prompt and completion": _trl("SFT", lambda: _dataset({"prompt": 3, "completion": 5})),
    "SFT, packing": _trl("SFT", text, packing=True, packing_strategy="wrapped"),
    "SFT, padding_free": _trl("SFT", text, padding_free=True, max_length=None),
    "SFT, LoRA": _trl("SFT", text, adapters=True),
    "SFT, bf16, accumulation": _trl("SFT", text, bf16=True, gradient_accumulation_steps=2),
    "SFT, gradient_checkpointing": _trl("SFT", text, gradient_checkpointing=True),
    "SFT, evaluated": _trl("SFT", text, evaluated=True, **_STEPS),
    "SFT, loss_type=dft": _trl("SFT", text, loss_type="dft"),
    "DPO": _trl("DPO", preferences),
    "DPO, sync_ref_model": _trl("DPO", preferences, sync_ref_model=True, ref_model_sync_steps=2),
    "DPO, precompute_ref_log_probs": _trl("DPO", preferences, precompute_ref_log_probs=True),
    "DPO, LoRA": _trl("DPO", preferences, adapters=True),
    "DPO, evaluated": _trl("DPO", preferences, evaluated=True, **_STEPS),
    "Reward": _trl("Reward", _explicit, base=AutoModelForSequenceClassification, load={"num_labels": 1}),
    "Reward, evaluated": _trl(
        "Reward", _explicit, base=AutoModelForSequenceClassification, load={"num_labels": 1}, evaluated=True, **_STEPS
    ),
    "KTO": _trl("KTO", _labelled),
    "KTO, evaluated": _trl("KTO", _labelled, evaluated=True, **_STEPS),
    "ORPO": _trl("ORPO", preferences),
}
"""The same for TRL."""
