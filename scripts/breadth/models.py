"""Every architecture of transformers and diffusers for a task, tiny, trained plainly or within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lt_offload
from scripts.attack.compared import Ended, Found, attacked, no_failed_kernels
from scripts.breadth import diffusion, optimizers, sentences
from scripts.hf.runs import quiet
from tests.support.engines import make_optimizer
from tests.support.trainers import Stepping, stepped

ADAMW = partial(make_optimizer, name="adamw")
VOCAB, ROWS, TOKENS, STEPS, IMAGE = 128, 2, 12, 3, 64
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "dim", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("lru_width", "attention_hidden_size", "audio_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "n_inner", "d_inner"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size", "hidden_dim"), 64),
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size", "intermediate_size_mlp"),
        32,
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_head_dim", "mamba_d_head"), 8
    ),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **{"image_size": IMAGE, "patch_size": 8, "hidden_size_per_layer_input": 8},
    **dict.fromkeys(("vocab_size", "entity_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "blank_token_id": 0},
    **{"is_decoder": True, "use_cache": False, "first_k_dense_replace": 1, "index_topk": 8, "index_n_heads": 2},
    **{"num_kv_shared_layers": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
}
"""Values of settings that a configuration may have, whatever the model."""
OWN: dict[str, dict[str, Any]] = {
    "bit": {"num_groups": 4},
    "cvt": {"depth": [1, 2, 3], "embed_dim": [16, 48, 96]},
    "donut-swin": {"embed_dim": 24, "patch_size": 4, "window_size": 2},
    "efficientnet": {"width_coefficient": 0.1, "hidden_dim": 128},
    "encoder-decoder": {"encoder": {"is_decoder": False}, "decoder": {"add_cross_attention": True}},
    "esm": {"vocab_size": VOCAB, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    "focalnet": {"embed_dim": 24},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hgnet_v2": {
        "hidden_sizes": [32, 128, 256, 512],
        "stage_in_channels": [48, 32, 128, 256],
        "stage_mid_channels": [12, 24, 48, 96],
        "stage_out_channels": [32, 128, 256, 512],
    },
    "hiera": {"embed_dim": 16, "image_size": [IMAGE, IMAGE]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "levit": {"patch_size": 16},
    "mamba2": {"num_heads": 8},
    "mobilevitv2": {"patch_size": 2},
    "neomme": {"head_dim": 16},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 4},
    "reformer": {"axial_pos_embds": False},
    "swin": {"embed_dim": 24, "patch_size": 4, "window_size": 2},
    "swinv2": {"embed_dim": 24, "patch_size": 4, "window_size": 2},
    "textnet": {"stem_out_channels": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_head_dim": 16, "attention_hidden_size": 64},
    "zamba2": {"attention_head_dim": 16, "attention_hidden_size": 64, "mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}
"""What only these have, or cannot have otherwise."""
COMPUTED = ("head_dim", "num_key_value_heads", "num_experts_per_tok")
"""Sizes that are set where the default is None, which not every model makes a number of."""
LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
"""Settings of as many entries as there are layers."""
STAGES: dict[str, Callable[[int], int]] = {"depths": partial(min, 2), "hidden_sizes": lambda width: width // 4}
"""Settings of as many entries as there are stages of other images."""


@dataclass(frozen=True)
class Family:
    """The models of one task."""

    kinds: Callable[[], list[str]]
    """Returns the kinds of models that there are."""
    train: Callable[[str, dict[str, Any] | None], Ended]
    """Trains one, the same each time; with the settings of a budget if they are given."""
    library: str = "transformers"
    """The package that they are of."""


def _of_transformers(mapping: str, auto: str, batch: Callable[[Tensor], dict[str, Tensor]]) -> Family:
    """Return the family of a table of transformers.

    Args:
        mapping: what transformers calls its table.
        auto: the class that makes a model from a configuration.
        batch: returns a batch of some tokens.
    """

    def train(kind: str, ours: dict[str, Any] | None) -> Ended:
        return _fitted(Stepping(_build(auto, kind), ADAMW), list(map(batch, _ids())), ours)

    return Family(partial(_kinds, mapping), train)


def _fitted(module: Stepping, batches: list[Any], ours: dict[str, Any] | None) -> Ended:
    """Train under Lightning."""
    strategy: Any = "auto" if ours is None else lt_offload.OffmateStrategy(solver_time_limit=2.0, **ours)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ended = stepped(strategy, module, batches, accelerator=device, devices=1)
    return Ended.of(ended.model, ended.optimizer, {"losses": ended.losses}, getattr(strategy, "plan", None))


def _denoise(kind: str, ours: dict[str, Any] | None) -> Ended:
    return _fitted(diffusion.Denoising(kind, ADAMW), diffusion.batches(kind), ours)


def _contrast(kind: str, ours: dict[str, Any] | None) -> Ended:
    encoder, _, way = kind.partition(" by ")
    config = tiny(encoder)
    config.is_decoder = False
    if way:
        return sentences.trained(config, ADAMW, ours)
    return _fitted(sentences.Contrasting(config, ADAMW), sentences.batches(), ours)


def _kinds(mapping: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    return sorted(getattr(modeling_auto, mapping))


def _tokens(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": ids}


def _images(ids: Tensor) -> dict[str, Tensor]:
    pixels = torch.randn((ROWS, 3, IMAGE, IMAGE), generator=torch.Generator().manual_seed(int(ids.sum())))
    return {"pixel_values": pixels, "labels": ids[:, 0] % 2}


CAUSAL = "AutoModelForCausalLM"
FAMILIES: dict[str, Family] = {
    "causal": _of_transformers("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", CAUSAL, _tokens),
    "masked": _of_transformers("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM", _tokens),
    "seq2seq": _of_transformers("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM", _tokens),
    "images": _of_transformers(
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification", _images
    ),
    "diffusion": Family(lambda: sorted(diffusion.CASES), _denoise, "diffusers"),
    "sentences": Family(sentences.kinds, _contrast, "sentence-transformers"),
    "optimizers": Family(optimizers.kinds, optimizers.trained, optimizers.PACKAGE),
}


def tiny(kind: str) -> Any:
    """Return a configuration of ``kind`` that is its default one but for sizes; raises what transformers raises."""
    from transformers import CONFIG_MAPPING

    made: Any = CONFIG_MAPPING[kind]
    config = made(**_joined(_smaller(made().to_dict()), OWN.get(kind, {})))
    for name in ("decoder_start_token_id", "pad_token_id"):
        if config.is_encoder_decoder and getattr(config, name, None) is None:
            setattr(config, name, SIZES[name])  # some leave it to whoever trains them
    return config


def _joined(settings: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    nested = {name: _joined(settings[name], value) for name, value in others.items() if isinstance(value, dict)}
    return settings | others | nested


def _smaller(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what is set otherwise; of nested configurations, too."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and (name.endswith("_config") or "model_type" in value):
            found[name] = {key: value[key] for key in ("model_type",) if key in value} | _smaller(value)
        elif name in SIZES and not isinstance(value, (list, tuple)) and (value is not None or name in COMPUTED):
            found[name] = SIZES[name]
        elif name in LISTS and isinstance(value, list):
            found[name] = _thinned(value)
        elif name in STAGES and isinstance(value, list):
            found[name] = list(map(STAGES[name], value))
    if settings.get("kv_lora_rank") and "num_key_value_heads" in settings:  # latent attention has one for each head
        found["num_key_value_heads"] = SIZES["num_attention_heads"]
    return found


def _thinned(entries: list[Any]) -> list[Any]:
    """Return four entries, with each kind among them that there is room for."""
    kinds = list(dict.fromkeys(map(str, entries)))
    chosen = [next(entry for entry in entries if str(entry) == kind) for kind in kinds][:4]
    return (chosen * 4)[:4] if len(chosen) < 4 else chosen


def _ids() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (ROWS, TOKENS), generator=generator) for _ in range(STEPS)]


def _build(auto: str, kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = tiny(kind)
    config.architectures = []  # or those of several classes are not found
    if auto != CAUSAL:
        config.is_decoder = False
    model: nn.Module = getattr(transformers, auto).from_config(config)
    return model.train()


def trained(family: str, kind: str, ours: dict[str, Any] | None = None) -> Ended:
    """Train; with our strategy if there are ``ours``, its settings."""
    with quiet(), no_failed_kernels():
        return FAMILIES[family].train(kind, ours)


def planned(kind: str) -> Found:
    """Plan from the configuration, without weights."""
    try:
        profile = lt_offload.profile_config(
            tiny(kind), batch_size=ROWS, sequence_length=TOKENS, hardware="rtx-3060-12gb"
        )
        lt_offload.solve(profile, memory="4GB", solver_time_limit=2.0)
    except lt_offload.OffloadError as error:
        return Found("from configuration", "refused", f"{type(error).__name__}: {error}"[:600])
    except Exception as error:
        return Found("from configuration", "foreign", f"{type(error).__name__}: {error}"[:600])
    return Found("from configuration", "planned")


def compare(family: str, kind: str) -> Iterator[Found]:
    """Train ``kind`` plainly, in the smallest memory with and without recomputation; plan without weights."""
    trains = True
    for found in attacked(partial(trained, family, kind), ("smallest", "recomputing")):
        trains = trains and found.outcome != "not run"
        yield found
    if trains and family == "causal":
        yield planned(kind)
