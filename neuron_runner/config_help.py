"""Help for the options of ``neuron_config``, from their fields: ``python -m neuron_runner.config_help`` prints it.

docs/configuration.md holds the same as a table; a test compares the two.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from neuron_runner.config import VARIABLES, NeuronConfig


@dataclass(frozen=True)
class Option:
    key: str
    """Name under ``neuron_config``, with dots between its parts."""
    type: str
    default: str
    variable: str | None
    description: str


def options(model: type[BaseModel] = NeuronConfig, prefix: str = "") -> Iterator[Option]:
    """Yields the options in the order of their fields; an option that holds others is followed by them."""
    variables = {key: variable for variable, key in VARIABLES.items()}
    for name, field in model.model_fields.items():
        key = prefix + name
        default = json.dumps(field.default)
        yield Option(key, _type_name(field.annotation), default, variables.get(key), field.description or "")
        for part in get_args(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from options(part, f"{key}.")


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type_name(part) for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " or ".join(map(json.dumps, get_args(annotation)))
    if get_origin(annotation) is list:
        return "list"
    return "dict" if issubclass(annotation, BaseModel) else str(annotation.__name__)


def print_help() -> None:
    """Prints the options as ``vllm serve --help`` would show them: each is a flag of it."""
    parser = argparse.ArgumentParser(
        prog="vllm serve",
        usage="vllm serve MODEL [--additional-config.neuron_config.OPTION VALUE ...]",
        description="Options of neuron_config. Each is a flag of `vllm serve`, and a key of LLM(additional_config="
        '{"neuron_config": {...}}) or --additional-config \'{"neuron_config": {...}}\'. Lists are JSON: "[128, 512]".',
        formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100),
        add_help=False,
    )
    group = parser.add_argument_group("neuron_config")
    for option in options():
        variable = f" Environment: {option.variable}." if option.variable else ""
        text = f"{option.description}{variable} (default: {option.default})".replace("%", "%%")
        group.add_argument(f"--additional-config.neuron_config.{option.key}", metavar=f"({option.type})", help=text)
    parser.print_help()


if __name__ == "__main__":
    print_help()
