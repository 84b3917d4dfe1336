"""A tiny Whisper with a processor of its own; HF transformers is the reference.

Its encoder hears 3 seconds, not 30: 150 rows of output, which end inside a KV tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.processed import Family, hf, make_processed_model, reference
from model_runner_base.testing.sounds import SAMPLING_RATE
from model_runner_base.testing.tokenizer import make_tokenizer

SECONDS = 3
LENGTH = 50 * SECONDS
"""Rows of encoder output."""
BLOCK_SIZE = 32
SCARCE_BYTES = (1 + 3 * -(-LENGTH // BLOCK_SIZE) + 4) * 3 * 2 * 64 * BLOCK_SIZE * PRECISION.dtype.itemsize
"""Bytes of KV cache: blocks for three encoder outputs, four more and the null block. Three layers of self-attention and
three of cross-attention share the memory."""
START = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
_SPECIAL = [
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|prev|>",
    "<|notimestamps|>",
    "<|0.00|>",
]


@dataclass(frozen=True)
class Transcriber:
    """A checkpoint on disk and its reference."""

    path: Path

    def prompt(self, sound: np.ndarray, text: str = START) -> Any:
        """Input of vLLM: a sound for the encoder, and a text that the decoder continues."""
        heard = {"prompt": "", "multi_modal_data": {"audio": (sound, SAMPLING_RATE)}}
        return {"encoder_prompt": heard, "decoder_prompt": text}

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = reference(self.path)[1].tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    @torch.no_grad()
    def greedy(self, sound: np.ndarray, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """The next ``count`` tokens after ``tokens``, and the log-probability of each."""
        model, processor = reference(self.path)
        features = processor(sound, sampling_rate=SAMPLING_RATE, return_tensors="pt").input_features
        encoded = model.model.encoder(features)
        known, logprobs = list(tokens), []
        for _ in range(count):
            logits = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([known])).logits[0, -1]
            best = logits.log_softmax(-1).max(-1)
            known.append(int(best.indices))
            logprobs.append(float(best.values))
        return known[len(tokens) :], logprobs

    def text(self, sound: np.ndarray, start: str, count: int) -> str:
        """The text of the next tokens, at most ``count``, up to the end-of-sequence token."""
        tokenizer = reference(self.path)[1].tokenizer
        tokens, _ = self.greedy(sound, self.tokens(start), count)
        end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else count
        text: str = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        return text


def _whisper() -> Family:
    plain = make_tokenizer()
    tokenizer = hf.WhisperTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        unk_token=plain.eos_token,
        bos_token=plain.bos_token,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    config = hf.WhisperConfig(
        vocab_size=VOCAB_SIZE + 16,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_layers=3,
        decoder_attention_heads=4,
        decoder_ffn_dim=96,
        max_source_positions=LENGTH,
        max_target_positions=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids(_SPECIAL[0]),
    )
    features = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    return config, hf.WhisperProcessor(features, tokenizer), _SPECIAL[0]


def make_transcriber(directory: Path) -> Transcriber:
    """Writes the checkpoint."""
    return Transcriber(make_processed_model("whisper", directory, _whisper)[0])
