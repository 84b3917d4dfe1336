"""Weights of a GGUF file under the names, and in the layout, that transformers' checkpoints have."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from model_runner_base.errors import CheckpointError, UnsupportedConfigError
from model_runner_base.models.quantized.gguf.architectures import architecture_of
from model_runner_base.models.quantized.gguf.file import GgufFile
from model_runner_base.models.quantized.stored import Entry

_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Projections of stacked experts by the names of their tensors."""
_UNUSED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the config stands for."""


class GgufWeights:
    """Weights of a file for the model of ``hf_config``; raises CheckpointError for the first misfit of the two."""

    def __init__(self, path: Path, hf_config: Any) -> None:
        self._file = GgufFile(path)
        architecture = architecture_of(self._file)
        if hf_config.model_type not in (architecture.model_type, *architecture.other_types):
            raise UnsupportedConfigError(
                f"{path} has a model of type {architecture.model_type}, the config one of type {hf_config.model_type}: "
                "name the config of the model that the file was made from"
            )
        self._config = hf_config
        self._shapes = _shapes_of_model(hf_config)
        self._names = self._match()
        self.entries = {name: Entry(path, torch.float32, shape) for name, shape in self._plain_shapes().items()}

    def _match(self) -> dict[str, str]:
        """Stored names by the model's; those of experts have ``{}`` where the expert's number is."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == self._file.architecture)
        known = get_tensor_name_map(arch, self._config.num_hidden_layers)
        stored, names = self._file.shapes, {}
        for name in self._shapes:
            plain, dot, ending = name.rpartition(".")
            if ".mlp.experts." in name:
                # Stacked in newer releases of transformers and in the file, but one by one in checkpoints.
                layer = name.partition(".mlp.")[0]
                number = layer.rpartition(".")[2]
                for stack, projection in _EXPERTS.items():
                    names[f"{layer}.mlp.experts.{{}}.{projection}.weight"] = f"blk.{number}.{stack}.weight"
            elif own := known.get_name(plain):
                names[name] = own + dot + ending
            elif not (self._config.tie_word_embeddings and name == "lm_head.weight"):
                raise self._misfit(f"files of {self._file.architecture} have no name for {name}")
        if self._config.tie_word_embeddings and names.get("lm_head.weight") not in stored:
            names.pop("lm_head.weight", None)
        for name, own in names.items():
            if own not in stored:
                raise self._misfit(f"{own} is missing, which is {name}")
        if others := stored.keys() - names.values() - set(_UNUSED):
            raise self._misfit(f"{min(others)} has no place in a model of type {self._config.model_type}")
        return names

    def _plain_shapes(self) -> dict[str, list[int]]:
        """Shapes of the weights by name; raises CheckpointError for one that is not the model's."""
        shapes: dict[str, list[int]] = {}
        for name, own in self._names.items():
            shape = self._file.shapes[own]
            if "{}" in name:
                sizes = [self._config.moe_intermediate_size, self._config.hidden_size]
                wanted = [self._config.num_experts, *(sizes[::-1] if "down_proj" in name else sizes)]
                shapes |= {name.format(index): shape[1:] for index in range(shape[0])}
            else:
                wanted = shapes[name] = self._shapes[name]
            # A projection to one number is stored as a vector.
            if shape != wanted and [1, *shape] != wanted:
                raise self._misfit(f"{own} has shape {shape}, and the config asks for {wanted}")
        return shapes

    def _misfit(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file.path} does not fit its config: {reason}; use another file, or the checkpoint that it was "
            "made from"
        )

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and weights, dequantised one at a time."""
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        # It takes back what llama.cpp's converter does, such as another order of rotary rows.
        processor = TENSOR_PROCESSORS.get(self._file.architecture, TensorProcessor)(self._config.to_dict())
        for name, own in self._names.items():
            if "{}" in name:
                for index in range(self._file.shapes[own][0]):
                    yield name.format(index), torch.from_numpy(self._file.read(own, index)).to(dtype)
            else:
                values = processor.process(weights=self._file.read(own), name=own).weights
                yield name, torch.from_numpy(values).to(dtype).reshape(self.entries[name].shape)


def _shapes_of_model(hf_config: Any) -> dict[str, list[int]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
