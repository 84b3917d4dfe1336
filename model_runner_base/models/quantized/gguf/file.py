"""Reading of a GGUF file: its metadata, and its tensors by name, each dequantised when it is asked for."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from model_runner_base.errors import CheckpointError, UnsupportedConfigError

_NUMBERS_AT_ONCE = 1 << 20
"""Numbers dequantised in one call: arithmetic on them makes several arrays of their size."""


def is_gguf(model: Any) -> bool:
    return str(model).endswith(".gguf")


class GgufFile:
    """Open GGUF file. Its tensors are mapped into memory, so that only those that are asked for are read.

    Raises CheckpointError for a file that is cut off, and UnsupportedConfigError for a type of numbers that cannot be
    dequantised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _checked_reader()(path)
        if int(self._value(reader, "split.count") or 1) > 1:
            raise UnsupportedConfigError(
                f"{path} is one of several files: merge them by llama-gguf-split --merge, and name the result"
            )
        self.metadata: dict[str, Any] = {name: self._value(reader, name) for name in reader.fields}
        self.architecture = str(self.metadata.get("general.architecture"))
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        for tensor in reader.tensors:
            _check_type(path, tensor)

    @staticmethod
    def _value(reader: Any, name: str) -> Any:
        """A field's value; lists of texts, the vocabulary, are left out."""
        field = reader.fields.get(name)
        if field is None or (len(field.types) > 1 and field.types[-1].name == "STRING"):
            return None
        return field.contents()

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the tensors by name, the number of outputs first."""
        return {name: [int(size) for size in reversed(tensor.shape)] for name, tensor in self._tensors.items()}

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """A tensor in float32, or only one part of it along its first dimension."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        data, shape = (tensor.data, self.shapes[name]) if index is None else (tensor.data[index], self.shapes[name][1:])
        rows = data.reshape(-1, data.shape[-1])
        values = np.empty((len(rows), shape[-1]), np.float32)
        step = max(1, _NUMBERS_AT_ONCE // shape[-1])
        for start in range(0, len(rows), step):
            values[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)
        return values.reshape(shape)


@cache
def _checked_reader() -> Any:
    """The reader of the package gguf, which names a tensor that it cannot read."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
    except ImportError:
        raise UnsupportedConfigError(
            "GGUF files are read by the package gguf, which is not installed: pip install gguf"
        ) from None

    class CheckedReader(GGUFReader):
        def __init__(self, path: Path) -> None:
            try:
                super().__init__(path)
            except (IndexError, OSError, UnicodeDecodeError, ValueError, OverflowError) as error:
                if isinstance(error, CheckpointError | UnsupportedConfigError):
                    raise
                reason = str(error).partition("\n")[0]
                raise CheckpointError(
                    f"{path} is no GGUF file, or cut off in its header ({reason}): copy the file again"
                ) from None

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            for field in fields:
                _, name, _, dims, number, offset = field.parts
                text, code = bytes(name).decode(), int(number[0])
                if code not in set(GGMLQuantizationType):
                    raise UnsupportedConfigError(
                        f"{text} is of type {code}, which the installed package gguf does not know: install a newer one"
                    )
                block, size = GGML_QUANT_SIZES[GGMLQuantizationType(code)]
                num_bytes = int(np.prod(dims, dtype=np.int64)) // block * size
                if start_offs + int(offset[0]) + num_bytes > len(self.data):
                    raise CheckpointError(f"{self.data.filename} is cut off in or before {text}: copy the file again")
            super()._build_tensors(start_offs, fields)

    return CheckedReader


def _check_type(path: Path, tensor: Any) -> None:
    if not _is_known(tensor.tensor_type):
        raise UnsupportedConfigError(
            f"{tensor.name} of {path} has numbers of type {tensor.tensor_type.name}, which gguf does not dequantise: "
            "use another file"
        )


@cache
def _is_known(kind: Any) -> bool:
    """Whether numbers of a type can be dequantised: a block of zeros shows it."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
