"""Tensors of a checkpoint are followed to the parameters that a model's loading writes them to."""

import torch
from torch import nn

from model_runner_base.models.weight_places import WeightPlaces


def test_tensors_that_a_buffer_is_assembled_of() -> None:
    """Queries, keys and values reach a parameter by a buffer, a view and an assignment; a tensor left out does not."""
    layer = nn.ParameterDict({name: nn.Parameter(torch.zeros(4, 2)) for name in ("qk", "v", "other")})
    tensors = {name: torch.randn(2, 2) for name in ("q", "k", "v", "norm")}
    places = WeightPlaces()
    places.expect({layer["qk"]: "attention", layer["v"]: "attention", layer["other"]: "other"})
    with places:
        for name, tensor in tensors.items():
            places.follow(name, tensor)
        buffer = torch.empty(4, 2)
        buffer[:2] = tensors["q"]
        buffer[2:].copy_(tensors["k"] * 2)
        layer["qk"].data.copy_(buffer)
        layer["v"].data = torch.cat((tensors["v"], tensors["v"]))
    assert places.found == {"q": {"attention"}, "k": {"attention"}, "v": {"attention"}, "norm": set()}
