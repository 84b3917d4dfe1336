"""Deliberate faults in the reading of quantised checkpoints."""

from mutation import Mutation

MUTATIONS = [
    Mutation(
        "a zero point is off by one",
        "models/quantized/formats/packed_integers.py",
        "zeros = zeros + 1",
        "zeros = zeros + 0",
        "test_quantised_checkpoints and GPTQ",
    ),
    Mutation(
        "the order of a quantised weight's inputs is ignored",
        "models/quantized/formats/packed_integers.py",
        'groups = fields.get("groups")',
        "groups = None",
        "test_quantised_checkpoints and GPTQ",
    ),
    Mutation(
        "a block has the scale of the one next to it",
        "models/quantized/formats/small_floats.py",
        'scale_(values, scale_values(fields["scale"])',
        'scale_(values, scale_values(fields["scale"]).roll(1, 0)',
        "test_quantised_checkpoints and FP8",
    ),
    Mutation(
        "scales of experts are transposed",
        "models/quantized/formats/small_floats.py",
        "scale.unsqueeze(-1)",
        "scale.T.reshape(scale.shape).unsqueeze(-1)",
        "test_quantised_checkpoints and MXFP4",
    ),
    Mutation(
        "what no name fits takes the first group",
        "models/quantized/formats/compressed_tensors.py",
        "target = self._targets.by_name(layer) or self._targets.by_class(layer)",
        "target = self._targets.by_name(layer) or next(iter(self._weights))",
        "test_quantised_checkpoints and permuted",
    ),
    Mutation(
        "a group's zero points are left out",
        "models/quantized/formats/compressed_tensors.py",
        "if zero is not None:\n            shift_",
        "if False:\n            shift_",
        "test_quantised_checkpoints and permuted",
    ),
    Mutation(
        "rotary rows stay in llama.cpp's order",
        "models/quantized/gguf/weights.py",
        "values = processor.process(weights=self._file.read(own), name=own).weights",
        "values = self._file.read(own)",
        "test_gguf_files and llama",
    ),
    Mutation(
        "a block of a GGUF file has the scale of the one next to it",
        "models/quantized/gguf/file.py",
        "rows = data.reshape(-1, data.shape[-1])",
        "rows = data.reshape(-1, data.shape[-1])\n        if rows.dtype == np.uint8:\n            "
        "rows = np.where(np.arange(rows.shape[-1]) % 34 < 2, np.roll(rows, 34, -1), rows)",
        "test_gguf_files and llama",
    ),
    Mutation(
        "experts of a GGUF file change places",
        "models/quantized/gguf/weights.py",
        "self._file.read(own, index)",
        "self._file.read(own, index ^ 1)",
        "test_gguf_files and qwen3-moe",
    ),
]
