"""Deliberate faults in the reading of quantised checkpoints."""

from mutation import Mutation

MUTATIONS = [
    Mutation(
        "a zero point is off by one",
        "quantized/formats/gptq.py",
        "zeros = zeros + 1",
        "zeros = zeros + 0",
        "test_quantised_checkpoints and GPTQ",
    ),
    Mutation(
        "the order of a quantised weight's inputs is ignored",
        "quantized/formats/gptq.py",
        'groups = parts.get("groups")',
        "groups = None",
        "test_quantised_checkpoints and GPTQ",
    ),
    Mutation(
        "a block has the scale of the one next to it",
        "quantized/formats/fp8.py",
        'scale_values(parts["scale"])',
        'scale_values(parts["scale"]).roll(1, 0)',
        "test_quantised_checkpoints and FP8",
    ),
    Mutation(
        "scales of experts are transposed",
        "quantized/formats/mxfp4.py",
        "scale.unsqueeze(-1)",
        "scale.T.reshape(scale.shape).unsqueeze(-1)",
        "test_quantised_checkpoints and MXFP4",
    ),
]
