"""Tiny audio models, with processors of their own, and sounds for them; HF transformers is the reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model_runner_base.testing.processed import TEXT, Family, continued, hf, make_processed_model, special_tokenizer

SAMPLING_RATE = 16000


@dataclass(frozen=True)
class HearingModel:
    """A checkpoint on disk and its reference; ``placeholder`` is the text in place of a sound in a prompt."""

    path: Path
    placeholder: str

    def greedy(self, text: str, sounds: Sequence[np.ndarray], count: int) -> tuple[list[int], list[int]]:
        """The prompt's tokens as the reference's processor makes them, and the next ``count``."""
        heard = {"audio": list(sounds), "sampling_rate": SAMPLING_RATE} if sounds else {}
        return continued(self.path, count, text=[text], **heard)


def sound(seed: int, seconds: float) -> np.ndarray:
    """[samples] float32, mono: three tones that fade, so that no two parts of a sound are the same."""
    random = np.random.default_rng(seed)
    time = np.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    pitches, fading = random.uniform(100, 4000, (3, 1)), random.uniform(0.5, 4, (3, 1))
    tones = np.sin(2 * np.pi * pitches * time) * np.exp(-fading * time)
    return tones.mean(0).astype(np.float32)


def _qwen2_audio() -> Family:
    names = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    tokenizer = special_tokenizer(*names)
    config = hf.Qwen2AudioConfig(
        audio_config={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 16,
            "max_source_positions": 1500,  # vLLM takes sounds that are padded to 30 seconds, no others.
        },
        text_config=TEXT | {"model_type": "qwen2"},
        audio_token_index=tokenizer.convert_tokens_to_ids(names[0]),
    )
    processor = hf.Qwen2AudioProcessor(hf.WhisperFeatureExtractor(feature_size=16), tokenizer)
    return config, processor, names[0]


HEARING_FAMILIES = {"qwen2-audio": _qwen2_audio}


def make_hearing_model(name: str, directory: Path) -> HearingModel:
    """Writes a tiny checkpoint of a family with its processor."""
    return HearingModel(*make_processed_model(name, directory, HEARING_FAMILIES[name]))
