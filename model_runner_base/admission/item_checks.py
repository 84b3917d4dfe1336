"""Checks of images, videos and sounds that a user gives as embeddings, before the request is queued.

vLLM checks their width if they are plain tensors, and never their number of rows. Embeddings that do not fit would fail
within a step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.multimodal.inputs import MultiModalFieldConfig

from model_runner_base.errors import RequestError
from model_runner_base.vllm_compat.probes.multimodal import BY_TRANSFORMERS

SUFFIX = "_embeds"
WITHOUT_EMBEDS = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "WhisperForConditionalGeneration",
)
"""Architectures whose vLLM classes take no embeddings of items, and fail on them in a step."""


def item_width(model_config: ModelConfig) -> int | None:
    """Width of a row of an encoder's output, deepstack levels included; None if the model takes no embeddings."""
    if model_config.architecture in (*WITHOUT_EMBEDS, *BY_TRANSFORMERS) or not model_config.is_multimodal_model:
        return None
    vision = getattr(model_config.hf_config, "vision_config", None)
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    return model_config.get_inputs_embeds_size() * (1 + len(levels))


def check_fields(data: Mapping[str, Any], modality: str) -> None:
    """Raises RequestError for a grid that no item can have; vLLM makes a prompt of as many tokens as the grid says."""
    name = f"{modality}_grid_thw"
    if name not in data:
        return
    grid = torch.as_tensor(data[name])
    if grid.ndim != 2 or grid.shape[1] != 3 or grid.is_floating_point() or grid.is_complex():
        raise RequestError(f"{name} must be integers of shape [items, 3], got {grid.dtype} of shape {[*grid.shape]}")
    embeds = data.get(modality + SUFFIX, ())
    if isinstance(embeds, torch.Tensor) and embeds.ndim != 2:
        raise RequestError(f"{modality}{SUFFIX} must have shape [rows, width] with {name}, got {[*embeds.shape]}")
    num_rows = len(embeds)
    for sizes in grid.tolist():
        if min(sizes) < 1:
            raise RequestError(f"{name} must be positive, got {sizes}")
        # No model merges more than 64 patches into a row; check_shares compares the exact number.
        if sizes[0] * sizes[1] * sizes[2] > 64 * max(num_rows, 1):
            raise RequestError(
                f"{name} {sizes} has more patches than {num_rows} rows of {modality}{SUFFIX} can be made of"
            )


def check_shares(data: Mapping[str, Any], modality: str, fields: Mapping[str, MultiModalFieldConfig]) -> None:
    """Raises RequestError unless the items of a modality use all rows that are given for them together.

    ``fields`` says how vLLM divides the rows among items.
    """
    name = modality + SUFFIX
    rows, slices = data.get(name), getattr(getattr(fields.get(name), "field", None), "slices", None)
    if rows is None or slices is None:
        return
    # vLLM has one slice for each item, or a tuple of slices, one for each dimension.
    expected = max(((each if isinstance(each, slice) else each[0]).stop for each in slices), default=0)
    if len(rows) != expected:
        raise RequestError(f"{name} must have {expected} rows, as {modality}_grid_thw says, got {len(rows)}")


def check_items(items: Mapping[str, Sequence[Any]], places: Mapping[str, Sequence[Any]], width: int | None) -> None:
    """Raises RequestError for the first item of a request whose embeddings do not fit.

    ``items`` and ``places`` are vLLM's ``mm_kwargs`` and ``mm_placeholders``. An item without data was checked when the
    engine first received it.
    """
    for modality, each in items.items():
        for index, item in enumerate(each):
            data = {} if item is None else item.get_data()
            if modality + SUFFIX in data:
                name = f"{modality}{SUFFIX}[{index}]"
                check_item_embeds(name, data[modality + SUFFIX], places[modality][index].get_num_embeds(), width)


def check_item_embeds(name: str, embeds: Any, num_rows: int, width: int | None) -> None:
    """Raises RequestError unless an item's embeddings are ``num_rows`` finite rows of ``width`` numbers."""
    if width is None:
        raise RequestError(f"{name}: this model takes no embeddings in place of images, videos and sounds")
    if not isinstance(embeds, torch.Tensor) or embeds.ndim != 2:
        shape = [*embeds.shape] if isinstance(embeds, torch.Tensor) else type(embeds).__name__
        raise RequestError(f"{name} must have shape [{num_rows}, {width}], got {shape}")
    if not embeds.is_floating_point():
        raise RequestError(f"{name} must be floating point, got {embeds.dtype}")
    if embeds.shape[1] != width:
        raise RequestError(f"{name} must have rows of {width} numbers, got {embeds.shape[1]}")
    if not num_rows or len(embeds) != num_rows:
        raise RequestError(f"{name} must have {num_rows or 'some'} rows, got {len(embeds)}")
    if not torch.isfinite(embeds.to(torch.float32)).all():
        raise RequestError(f"{name} must be finite numbers: there is NaN or infinity")
