"""A tokenizer for the tiny models, made on the spot: ASCII characters, pairs of common ones, a few longer tokens."""

import shutil
from itertools import product

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.models import TinyModel

EOS = 1
_SPECIAL = ["<s>", "</s>", "<pad>"]
_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "\t"]
_COMMON = " etaoinshrdlucmfwygp"
_LONGER = ["th|e", "an|d", "in|g", " t|he", "tr|u", "tru|e", '{|"', '"|:', '":| ', '"|,', '",| ', "1|0"]
# Byte-level tokenizers write blanks as visible characters.
_VISIBLE = str.maketrans({" ": "Ġ", "\n": "Ċ", "\t": "ĉ"})


def add_tokenizer(model: TinyModel) -> TinyModel:
    """A copy of the checkpoint, next to it, with a tokenizer of ``VOCAB_SIZE`` tokens."""
    path = model.path.with_name(f"{model.path.name}-with-tokenizer")
    if not path.exists():
        shutil.copytree(model.path, path)
        make_tokenizer().save_pretrained(path)
    return TinyModel(path)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE; token ids 0 to 2 are special, 3 to 99 single characters."""
    merges = [*product(_COMMON, _COMMON), *(tuple(merge.split("|")) for merge in _LONGER)]
    tokens = [*_CHARACTERS, *("".join(pair) for pair in merges)]
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *(token.translate(_VISIBLE) for token in tokens)])}
    assert len(vocabulary) == VOCAB_SIZE
    visible = [(left.translate(_VISIBLE), right.translate(_VISIBLE)) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=visible))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    bos, eos, pad = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )


def token_texts() -> list[str]:
    """The text of each token id; empty for special ones."""
    tokenizer = make_tokenizer()
    return ["" if i < len(_SPECIAL) else tokenizer.decode([i]) for i in range(VOCAB_SIZE)]
