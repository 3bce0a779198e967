"""Every causal architecture of transformers, of four tiny layers, trained plainly or within a budget."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lt_offload
from scripts.attack.compared import Ended, Found, attacked, no_failed_kernels
from scripts.hf.runs import quiet

VOCAB, ROWS, TOKENS, STEPS = 128, 2, 12, 3
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "dim", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("lru_width", "attention_hidden_size", "word_embed_proj_dim"), 32),
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
    **{"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"is_decoder": True, "use_cache": False, "first_k_dense_replace": 1, "index_topk": 8, "index_n_heads": 2},
    **{"num_kv_shared_layers": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
}
"""Values of settings that a configuration may have, whatever the model."""
OWN: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_head_dim": 16, "attention_hidden_size": 64},
    "zamba2": {"attention_head_dim": 16, "attention_hidden_size": 64, "mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}
"""What only these have, or cannot have otherwise."""
LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
"""Settings of as many entries as there are layers."""


def architectures() -> list[str]:
    """Return the kinds of models that transformers makes for ``AutoModelForCausalLM``."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny(kind: str) -> Any:
    """Return a configuration of ``kind`` that is its default one but for sizes; raises what transformers raises."""
    from transformers import CONFIG_MAPPING

    made: Any = CONFIG_MAPPING[kind]
    return made(**_joined(_smaller(made().to_dict()), OWN.get(kind, {})))


def _joined(settings: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    nested = {name: _joined(settings[name], value) for name, value in others.items() if isinstance(value, dict)}
    return settings | others | nested


def _smaller(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what is set otherwise; of nested configurations, too."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name.endswith("_config"):
            found[name] = _smaller(value)
        elif name in SIZES and (
            value is not None or name in ("head_dim", "num_key_value_heads", "num_experts_per_tok")
        ):
            found[name] = SIZES[name]
        elif name in LISTS and isinstance(value, list):
            found[name] = _thinned(value)
    if settings.get("kv_lora_rank") and "num_key_value_heads" in settings:  # latent attention has one for each head
        found["num_key_value_heads"] = SIZES["num_attention_heads"]
    return found


def _thinned(entries: list[Any]) -> list[Any]:
    """Return four entries, with each kind among them that there is room for."""
    kinds = list(dict.fromkeys(map(str, entries)))
    chosen = [next(entry for entry in entries if str(entry) == kind) for kind in kinds][:4]
    return (chosen * 4)[:4] if len(chosen) < 4 else chosen


def batches() -> list[dict[str, Tensor]]:
    """Return the batches of a training."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(3, VOCAB, (ROWS, TOKENS), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def build(kind: str) -> nn.Module:
    """Return a model of ``kind``, the same each time, in training mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(tiny(kind))
    return model.train()


def trained(kind: str, ours: dict[str, Any] | None = None) -> Ended:
    """Train in a loop; within ``offloaded`` if there are ``ours``, its settings."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with quiet(), no_failed_kernels():
        model = build(kind) if ours is not None else build(kind).to(device)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=1e-3, foreach=False)
        made = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches()]
        if ours is None:
            losses, plan = _loop(model, optimizer, made), None
        else:
            settings = {"time_limit": 2.0, **ours}
            with lt_offload.offloaded(model, optimizer, made[0], accelerator=device.type, **settings) as engine:
                losses, plan = _loop(model, optimizer, made), engine.plan
    return Ended.of(model, optimizer, {"losses": losses}, plan)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, made: list[dict[str, Tensor]]) -> list[Any]:
    losses = []
    torch.manual_seed(5)
    for batch in made:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def planned(kind: str) -> Found:
    """Plan from the configuration, without weights."""
    try:
        profile = lt_offload.profile_config(
            tiny(kind), batch_size=ROWS, sequence_length=TOKENS, hardware="rtx-3060-12gb"
        )
        lt_offload.solve(profile, memory="4GB", time_limit=2.0)
    except lt_offload.OffloadError as error:
        return Found("from configuration", "refused", f"{type(error).__name__}: {error}"[:600])
    except Exception as error:
        return Found("from configuration", "foreign", f"{type(error).__name__}: {error}"[:600])
    return Found("from configuration", "planned")


def compare(kind: str) -> Iterator[Found]:
    """Train ``kind`` plainly, in the smallest memory with and without recomputation, and plan it without weights."""
    trains = True
    for found in attacked(partial(trained, kind), ("smallest", "recomputing")):
        trains = trains and found.outcome != "not run"
        yield found
    if trains:
        yield planned(kind)
