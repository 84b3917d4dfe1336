"""The ``neuron_config`` of ``additional_config``: which sizes are compiled ahead."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Buckets = Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1)]
BUCKET_LISTS = ("num_batched_tokens_buckets", "num_seqs_buckets", "context_length_buckets")


class NeuronConfig(BaseModel):
    """Bucket lists, each sorted and without repeats. Without them, sizes are placed where traffic is expected."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    num_batched_tokens_buckets: Buckets | None = Field(
        default=None,
        description="Token counts of steps that mix prefill and decode; the last is max_num_batched_tokens.",
    )
    num_seqs_buckets: Buckets | None = Field(
        default=None, description="Request counts of pure decode steps; the last is max_num_seqs."
    )
    context_length_buckets: Buckets | None = Field(
        default=None, description="Mean context tokens a request that a step is sized for; the last is max_model_len."
    )
    max_padding: float = Field(
        default=0.14,
        gt=0,
        lt=1,
        description="Share of the expected work that may be padding; less of it takes more graphs.",
    )
    quant_dtype: Literal["s8"] | None = Field(default=None, description="s8 stores weights as int8.")

    @model_validator(mode="after")
    def _sorted(self) -> "NeuronConfig":
        for name in BUCKET_LISTS:
            buckets = getattr(self, name)
            if buckets is not None and buckets != sorted(set(buckets)):
                raise ValueError(f"{name} must rise strictly, got {buckets}")
        return self

    def check_limits(self, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> None:
        """Raises ValueError unless each given list ends at the engine's limit, which every step must fit."""
        limits = {
            "num_batched_tokens_buckets": ("max_num_batched_tokens", max_num_batched_tokens),
            "num_seqs_buckets": ("max_num_seqs", max_num_seqs),
            "context_length_buckets": ("max_model_len", max_model_len),
        }
        for name, (limit_name, limit) in limits.items():
            buckets = getattr(self, name)
            if buckets is not None and buckets[-1] != limit:
                raise ValueError(
                    f"neuron_config.{name} must end at {limit_name}={limit}, got {buckets}: "
                    f"change the list's last value or {limit_name}"
                )


def read_neuron_config(additional_config: Any) -> NeuronConfig:
    """Parses ``additional_config["neuron_config"]``; one line names the first thing that is wrong with it."""
    values = additional_config.get("neuron_config", {}) if isinstance(additional_config, dict) else {}
    try:
        return NeuronConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["neuron_config", *map(str, first["loc"])])
        allowed = ", ".join(NeuronConfig.model_fields)
        raise ValueError(f"{where}: {first['msg']} (keys: {allowed})") from None
