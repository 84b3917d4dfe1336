"""Images, videos and sounds: what vLLM leaves out of them, scales, cuts, or asks a device for."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import psutil
import torch
from vllm.v1.core.sched import output

from model_runner_base.vllm_compat.probes.config import setting


def keep_item_data() -> None:
    """Patches vLLM's scheduler output. Call it in the process that schedules.

    Later releases of vLLM leave out the data of items that lie in a cached prefix, and never send it to requests that
    resume. Then a request that is preempted could not encode its items again, once its blocks and its encoder outputs
    have been given up.
    """
    if hasattr(output, "strip_covered_mm_data"):
        output.strip_covered_mm_data = _as_they_are


def _as_they_are(mm_features: list[Any], *_: Any, **__: Any) -> list[Any]:
    return mm_features


SCALES = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


def scale_in_processor(model_config: Any) -> None:
    """Turns ``mm_device_do_normalize`` off for a model whose videos are scaled otherwise than its images.

    Later releases send some models raw pixels, and the tower scales them by the image processor's mean and deviation,
    those of videos, too. If a checkpoint has other numbers for videos, the processor scales the pixels of both here.
    """
    config = model_config.multimodal_config
    if not setting(config, "mm_device_do_normalize") or not config.get_limit_per_prompt("video"):
        return
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    def read(name: str) -> dict[str, Any]:
        return get_hf_file_to_dict(name, model_config.model, model_config.revision) or {}

    both = read("processor_config.json")
    images = both.get("image_processor") or read("preprocessor_config.json")
    videos = both.get("video_processor") or read("video_preprocessor_config.json")
    if any(name in images and name in videos and images[name] != videos[name] for name in SCALES):
        config.mm_device_do_normalize = False


OF_TEXT = ("truncation", "max_length")


def keep_sounds_whole(architecture: str) -> None:
    """Patches the model's processor. Sounds are still cut to the feature extractor's length, as transformers does.

    vLLM 0.16 passes the limit of a prompt's tokens to transformers' processor, which also applies it to a sound's
    samples. vLLM's class for Whisper leaves the limit out if there are sounds. Here its class for Qwen2-Audio does the
    same.
    """
    if architecture != "Qwen2AudioForConditionalGeneration":
        return
    from vllm.model_executor.models.qwen2_audio import Qwen2AudioMultiModalProcessor as Processor

    call: Any = vars(Processor).get("_call_hf_processor")
    if call is None or hasattr(call, "__wrapped__"):  # Later releases pass no limit of tokens.
        return

    @wraps(call)
    def call_hf_processor(self: Any, prompt: str, mm_data: Any, mm_kwargs: Any, tok_kwargs: Any) -> Any:
        of_audio = {name: value for name, value in tok_kwargs.items() if name not in OF_TEXT}
        return call(self, prompt, mm_data, mm_kwargs, of_audio)

    Processor._call_hf_processor = call_hf_processor  # type: ignore[method-assign]


@contextmanager
def memory_of_host() -> Iterator[None]:
    """Context in which the accelerator's free and total memory is the host's, if torch has no accelerator.

    Gemma 4's tower encodes as many images at a time as fit into free memory. On the host, torch has no accelerator to
    ask.
    """
    accelerator: Any = torch.accelerator
    if accelerator.is_available() or not hasattr(accelerator, "get_memory_info"):
        yield
        return
    own = accelerator.get_memory_info
    accelerator.get_memory_info = lambda device=None: _memory()
    try:
        yield
    finally:
        accelerator.get_memory_info = own


def _memory() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total
