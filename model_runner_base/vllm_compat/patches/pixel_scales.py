"""Has vLLM scale a video's pixels by the video processor's numbers.

Later releases send some models raw pixels, and the tower scales them by the image processor's mean and deviation, those
of videos, too. If a checkpoint has other numbers for videos, the processor scales the pixels of both here.
"""

from typing import Any

from model_runner_base.vllm_compat.probes.config import setting

SCALES = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


def scale_in_processor(model_config: Any) -> None:
    """Turns ``mm_device_do_normalize`` off for a model whose videos are scaled otherwise than its images."""
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
