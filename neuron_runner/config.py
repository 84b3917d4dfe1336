"""The options of ``neuron_config``: which sizes are compiled, how tokens are drawn, how weights are kept.

They come from ``additional_config["neuron_config"]``. ``override_neuron_config`` next to it replaces single options.
Three options may come from the environment instead; what is given in both places must be the same.
``python -m neuron_runner.config_help`` prints them all.
"""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from neuron_runner import environment

POWERS_OF_TWO = "powers_of_two"

MAX_CANDIDATES = 256
"""The most of a row's largest numbers that Neuron's compiler finds."""

SECTIONS = ("neuron_config", "neuron-config", "override_neuron_config", "override-neuron-config")
"""Keys of ``additional_config``; an option in a later one replaces that of an earlier one."""

VARIABLES = {
    "NEURON_CONTEXT_LENGTH_BUCKETS": "num_batched_tokens_buckets",
    "NEURON_TOKEN_GEN_BUCKETS": "context_length_buckets",
    "NEURON_QUANT_DTYPE": "quant_dtype",
}
"""Environment variables, and the option that each of them gives."""

ALIASES = {
    "decode_context_length_buckets": "context_length_buckets",
    "context_encoding_buckets": "num_batched_tokens_buckets",
    "token_generation_buckets": "context_length_buckets",
    "quantization": "quant_dtype",
}
"""Names that Neuron's own plugins have for some of the options, and our names."""


def _check_buckets(value: Any) -> list[int] | str:
    if value == POWERS_OF_TWO:
        return POWERS_OF_TWO
    buckets = value if isinstance(value, list) else [value]
    if not buckets or any(type(bucket) is not int or bucket < 1 for bucket in buckets):
        raise ValueError(f'must be a list of whole numbers above 0, one such number, or "{POWERS_OF_TWO}"')
    if buckets != sorted(set(buckets)):
        raise ValueError("must rise strictly")
    return buckets


Buckets = Annotated[list[int] | Literal["powers_of_two"], PlainValidator(_check_buckets)]
"""Sizes that rise strictly; a number is a list of one; "powers_of_two" doubles up to the limit, and ends with it."""


XLA_BACKENDS = ("openxla", "torch.compile")
"""Values of ``compile_backend`` that need torch_xla; any other names a backend of Dynamo."""


def _check_backend(value: Any) -> str | None:
    if value is None or value in XLA_BACKENDS:
        return value
    from torch._dynamo import list_backends

    # Left out: torch_xla's own backends, and those of torch's tests, neither of which is a way to run.
    others = ("openxla", "relu_")
    registered = [name for name in list_backends(exclude_tags=()) if not name.startswith(others)]
    if value not in registered:
        raise ValueError(f"must be {', '.join(XLA_BACKENDS)}, or a registered Dynamo backend ({', '.join(registered)})")
    return value


Backend = Annotated[str | None, PlainValidator(_check_backend)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OnDeviceSamplingConfig(_Options):
    """Drawing among the likeliest tokens only, in a graph that never sorts the vocabulary."""

    global_topk: int = Field(
        default=MAX_CANDIDATES,
        ge=1,
        le=MAX_CANDIDATES,
        description="Tokens are drawn from this many likeliest ones: it caps each request's top_k, and top_p and min_p "
        "choose among the rest. Greedy requests do not change.",
    )
    dynamic: Literal[True] = Field(
        default=True,
        description="Each request has its own temperature, top_k and top_p. Only true is accepted.",
    )


class NeuronConfig(_Options):
    """Options of ``neuron_config``. Without bucket lists, sizes are placed where traffic is expected."""

    num_batched_tokens_buckets: Buckets | None = Field(
        default=None,
        description="Prompt tokens of a step with prompts (transformers-neuronx: context encoding). The last is "
        "max_num_batched_tokens; longer prompts run in chunks. Placed if left out. Powers of two start at 128.",
    )
    num_seqs_buckets: Buckets | None = Field(
        default=None,
        description="Requests of a decode step. The last is max_num_seqs. Placed if left out, or powers of two if "
        "context_length_buckets is given. Powers of two start at 1.",
    )
    context_length_buckets: Buckets | None = Field(
        default=None,
        description="Mean context of the requests of a decode step (transformers-neuronx: token generation). The last "
        "is max_model_len. Placed if left out, or 64, 256, 512, ... if num_seqs_buckets is given. Powers of two start "
        "at 128.",
    )
    max_padding: float = Field(
        default=0.21,
        gt=0,
        le=1,
        description="Share of the expected work that may be padding, where sizes are placed. 0.28 needs about two "
        "thirds of the graphs and of the start-up time of 0.21. 1 makes the largest sizes only.",
    )
    compile_backend: Backend = Field(
        default=None,
        description="openxla, torch.compile, or the name of a backend of Dynamo, which needs no torch_xla. Left out: "
        "openxla if torch_xla is installed, else neuron.",
    )
    warm_up: Literal["background", "full"] | None = Field(
        default=None,
        description="background serves as soon as the largest sizes are compiled, and compiles the others meanwhile; "
        "full serves when all are compiled. Left out: background with one worker, full with several, and with a "
        "backend of Dynamo on a Neuron device.",
    )
    on_device_sampling_config: OnDeviceSamplingConfig | None = Field(
        default=None,
        description="Limits of sampling on the device. Left out: none on PJRT CPU; the defaults below on Neuron "
        "devices, whose compiler cannot sort a vocabulary.",
    )
    quant_dtype: Literal["s8"] | None = Field(
        default=None,
        description="s8 keeps the weights of linear layers, experts and embeddings as int8, with a scale for each "
        "output channel.",
    )

    @property
    def backend(self) -> str:
        """``compile_backend``, or its default if it is left out; ValueError if that default is not registered."""
        if self.compile_backend is not None:
            return self.compile_backend
        return "openxla" if environment.has_torch_xla() else _default_backend()

    @property
    def runs_on_xla(self) -> bool:
        """Whether torch_xla compiles and runs the steps."""
        return self.backend in XLA_BACKENDS

    def warms_up_in_background(self, num_workers: int) -> bool:
        """Whether steps are served while sizes are still compiled.

        Raises ValueError for options that do not go together, or not with this number of workers.
        """
        one = f"needs one worker, there are {num_workers}:"
        if self.backend != "openxla" and num_workers > 1:
            advice = "set tensor_parallel_size=1, or give openxla"
            raise ValueError(f"neuron_config.compile_backend={self.backend} {one} {advice}")
        if self.backend == "torch.compile":
            if self.warm_up == "background":
                raise ValueError("neuron_config.warm_up=background is not for torch.compile: leave one out")
            return False
        if self.warm_up == "background" and num_workers > 1:
            raise ValueError(f"neuron_config.warm_up=background {one} leave it out, or give full")
        if self.warm_up is None and not self.runs_on_xla:  # A device's own compiler takes minutes, and steps wait.
            return not environment.neuron_device_visible()
        return self.warm_up != "full" and num_workers == 1

    def check_limits(self, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> None:
        """Raises ValueError unless each given list ends at the engine's limit, which every step must fit."""
        limits = {
            "num_batched_tokens_buckets": ("max_num_batched_tokens", max_num_batched_tokens),
            "num_seqs_buckets": ("max_num_seqs", max_num_seqs),
            "context_length_buckets": ("max_model_len", max_model_len),
        }
        variables = {key: variable for variable, key in VARIABLES.items() if os.environ.get(variable)}
        for key, (limit_name, limit) in limits.items():
            buckets = getattr(self, key)
            if isinstance(buckets, list) and buckets[-1] != limit:
                raise ValueError(
                    f"{variables.get(key, f'neuron_config.{key}')} must end at {limit_name}={limit}, got {buckets}: "
                    f"change the list's last value or {limit_name}"
                )

    def written_into(self, additional_config: dict[str, Any]) -> dict[str, Any]:
        """``additional_config`` with these options in place of its sections, so that workers need not decide again."""
        others = {key: value for key, value in additional_config.items() if key not in SECTIONS}
        return others | {"neuron_config": self.model_dump(exclude_unset=True)}


def read_neuron_config(additional_config: Any) -> NeuronConfig:
    """The options as given; ValueError with one line that names the first thing that is wrong with them."""
    values: dict[str, Any] = {}
    if isinstance(additional_config, dict):
        for section in SECTIONS:
            given = additional_config.get(section)
            values |= _read_section(section, {} if given is None else given)
    for variable, key in VARIABLES.items():
        text = os.environ.get(variable, "").strip()
        if not text:
            continue
        value = _checked({key: _numbers(text) if key.endswith("buckets") else text}, {key: variable})[key]
        if values.setdefault(key, value) != value:
            raise ValueError(
                f"{variable} gives {value!r}, neuron_config.{key} gives {values[key]!r}: leave one of them out"
            )
    return NeuronConfig.model_validate(values)


def _default_backend() -> str:
    """The default of ``compile_backend`` without torch_xla. Raises ValueError if it is not registered."""
    try:
        return str(_check_backend("neuron"))
    except ValueError as error:
        raise ValueError(
            "neither torch_xla nor TorchNeuron, which brings the backend of Dynamo neuron, is installed: install one "
            f"of them, or have another backend stand in; neuron_config.compile_backend {error}"
        ) from None


def _read_section(section: str, values: Any) -> dict[str, Any]:
    """The options of a section by the names of the fields of NeuronConfig."""
    if not isinstance(values, dict):
        raise ValueError(f"{section} must be a dictionary of options, got {values!r}")
    written: dict[str, str] = {}
    name: str
    for name in values:
        key = str(name).replace("-", "_")
        key = ALIASES.get(key, key)
        if key in written:
            raise ValueError(f"{section} gives {written[key]} and {name}, which are one option: leave one of them out")
        written[key] = name
    labels = {key: f"{section}.{name}" for key, name in written.items()}
    return _checked({key: values[name] for key, name in written.items()}, labels)


def _checked(values: dict[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """``values`` as the fields of a NeuronConfig take them; ``labels`` name the options in errors."""
    try:
        return NeuronConfig.model_validate(values).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
    key, *rest = [str(part) for part in first["loc"]]
    where = ".".join([labels[key], *rest])
    if first["type"] == "extra_forbidden":
        options = OnDeviceSamplingConfig.model_fields if rest else NeuronConfig.model_fields
        raise ValueError(f"{where}: unknown option (options: {', '.join(options)})")
    raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}, got {first['input']!r}")


def _numbers(text: str) -> list[int] | str:
    """ "128,512" as numbers; other text is returned as it is, to be refused later."""
    return [int(part) for part in text.split(",")] if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text) else text
