"""Small tokenizers of the two families that models have, trained here; with real merges, and special tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>"]
_TEXT = """Yes, the answer to your question is no. The quick brown fox jumps over the lazy dog. What is it? Yes it is.
assistant user system question answer response instruction following hello there Hello world, say yes or say no
<tool_call> {"name": "add", "arguments": {"a": 1}} </tool_call> café naïve 1 2 3 12 23 123
### Instruction: ### Response:
"""


@cache
def _trained(kind: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    options: dict[str, Any] = {"special_tokens": ["<unk>", *SPECIAL], "show_progress": False}
    if kind == "bytes":  # as GPT-2, Llama 3, Qwen
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        options["initial_alphabet"] = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:  # as Llama 2, Mistral 7B, Phi-3: a space in front of the text, and ▁ for each space
        inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        options["special_tokens"] += [f"<0x{byte:02X}>" for byte in range(256)]
    inner.train_from_iterator([_TEXT] * 3, trainers.BpeTrainer(vocab_size=700, **options))
    return inner.to_str()


def tokenizer(kind: str, *, begins: bool = False, ends: bool = False, template: str | None = None) -> Any:
    """Return a tokenizer.

    Args:
        kind: ``bytes`` or ``metaspace``.
        begins: whether it begins every text with ``<s>``.
        ends: whether it ends every text with ``</s>``.
        template: its chat template.
    """
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.from_str(_trained(kind))
    around = ["<s>"] * begins + ["$A"] + ["</s>"] * ends
    if begins or ends:
        ids = [(token, inner.token_to_id(token)) for token in ("<s>", "</s>")]
        inner.post_processor = processors.TemplateProcessing(single=" ".join(around), special_tokens=ids)
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    made.chat_template = template
    return made
