"""The options of neuron_config: where they come from, what is refused and how it is said, and their documentation."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

import neuron_runner.worker
from model_runner_base.testing.models import TinyModel
from neuron_runner import environment
from neuron_runner.config import VARIABLES, NeuronConfig, OnDeviceSamplingConfig, read_neuron_config
from neuron_runner.config_help import options
from neuron_runner.worker import NeuronWorker

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("additional", "variables", "expected"),
    [
        ({}, {}, NeuronConfig()),
        ({"neuron_config": {"num_seqs_buckets": 8}}, {}, NeuronConfig(num_seqs_buckets=[8])),
        (
            {},
            {"NEURON_CONTEXT_LENGTH_BUCKETS": "128, 512,1024", "NEURON_TOKEN_GEN_BUCKETS": "256"},
            NeuronConfig(num_batched_tokens_buckets=[128, 512, 1024], context_length_buckets=[256]),
        ),
        ({}, {"NEURON_TOKEN_GEN_BUCKETS": "powers_of_two"}, NeuronConfig(context_length_buckets="powers_of_two")),
        ({}, {"NEURON_TOKEN_GEN_BUCKETS": ""}, NeuronConfig()),
        ({}, {"NEURON_QUANT_DTYPE": "s8"}, NeuronConfig(quant_dtype="s8")),
        # The same in both places, under a name of Neuron's plugin.
        (
            {"neuron_config": {"decode_context_length_buckets": [128, 256]}},
            {"NEURON_TOKEN_GEN_BUCKETS": "128,256"},
            NeuronConfig(context_length_buckets=[128, 256]),
        ),
        ({"neuron_config": {"quantization": "s8"}}, {}, NeuronConfig(quant_dtype="s8")),
        (
            {"neuron_config": {"context_encoding_buckets": [32], "token_generation_buckets": [64]}},
            {},
            NeuronConfig(num_batched_tokens_buckets=[32], context_length_buckets=[64]),
        ),
        # Overrides are laid over the rest option by option; a dictionary becomes an object, as a whole.
        (
            {
                "neuron_config": {"max_padding": 0.2, "on_device_sampling_config": {"global_topk": 64}},
                "override-neuron-config": {"on_device_sampling_config": {"dynamic": True}, "num_seqs_buckets": [2]},
            },
            {},
            NeuronConfig(
                max_padding=0.2, num_seqs_buckets=[2], on_device_sampling_config=OnDeviceSamplingConfig(global_topk=256)
            ),
        ),
        (
            {"neuron_config": {"quant_dtype": "s8"}, "override_neuron_config": {"quant_dtype": None}},
            {},
            NeuronConfig(),
        ),
        ("an object of the user's own", {"NEURON_QUANT_DTYPE": "s8"}, NeuronConfig(quant_dtype="s8")),
    ],
)
def test_options_come_from_config_overrides_and_environment(
    additional: Any, variables: dict[str, str], expected: NeuronConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    assert read_neuron_config(additional) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_seqs_buckets": [4, 2]}, r"^neuron_config.num_seqs_buckets: must rise strictly, got \[4, 2\]$"),
        ({"num_seqs_buckets": [2, 2, 4]}, "must rise strictly"),
        ({"num_seqs_buckets": []}, 'must be a list of whole numbers above 0, one such number, or "powers_of_two"'),
        ({"num_seqs_buckets": [0, 4]}, r"whole numbers above 0.*got \[0, 4\]"),
        ({"num_seqs_buckets": [1.5]}, "whole numbers above 0"),
        ({"num_seqs_buckets": True}, "whole numbers above 0"),
        ({"num_seqs_buckets": "1,2"}, "neuron_config.num_seqs_buckets: must be a list"),
        ({"bucket": [1]}, r"^neuron_config.bucket: unknown option \(options: num_batched_tokens_buckets, num_seqs_b"),
        ({"max_padding": 0}, "neuron_config.max_padding: Input should be greater than 0, got 0"),
        ({"max_padding": "0.2"}, "neuron_config.max_padding: Input should be a valid number, got '0.2'"),
        (
            {"compile_backend": "newron"},
            "neuron_config.compile_backend: must be openxla, torch.compile, or a registered Dynamo backend "
            r"\(aot_eager, .*inductor.*\), got 'newron'",
        ),
        ({"quant_dtype": "f8e4m3fn"}, "neuron_config.quant_dtype: Input should be 's8', got 'f8e4m3fn'"),
        ({"quantization": "bf16"}, "neuron_config.quantization: Input should be 's8', got 'bf16'"),
        (
            {"on_device_sampling_config": {"global_topk": 257}},
            "neuron_config.on_device_sampling_config.global_topk: Input should be less than or equal to 256, got 257",
        ),
        (
            {"on_device_sampling_config": {"all_greedy": True}},
            r"on_device_sampling_config.all_greedy: unknown option \(options: global_topk, dynamic\)",
        ),
        ({"on_device_sampling_config": 256}, "on_device_sampling_config: Input should be a valid dictionary"),
        (
            {"context_length_buckets": [9], "decode_context_length_buckets": [9]},
            "neuron_config gives context_length_buckets and decode_context_length_buckets, which are one option",
        ),
        ([1, 2], r"neuron_config must be a dictionary of options, got \[1, 2\]"),
    ],
)
def test_what_is_wrong_is_named(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_neuron_config({"neuron_config": options})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NEURON_TOKEN_GEN_BUCKETS": "512,128"}, "^NEURON_TOKEN_GEN_BUCKETS: must rise strictly"),
        ({"NEURON_TOKEN_GEN_BUCKETS": "128;512"}, "^NEURON_TOKEN_GEN_BUCKETS: must be a list .*got '128;512'"),
        ({"NEURON_QUANT_DTYPE": "f8e4m3fn"}, "^NEURON_QUANT_DTYPE: Input should be 's8'"),
        (
            {"NEURON_CONTEXT_LENGTH_BUCKETS": "64"},
            r"^NEURON_CONTEXT_LENGTH_BUCKETS gives \[64\], neuron_config.num_batched_tokens_buckets gives \[32, 64\]",
        ),
    ],
)
def test_variables_are_named(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=message):
        read_neuron_config({"neuron_config": {"num_batched_tokens_buckets": [32, 64]}})


def test_overrides_are_named() -> None:
    with pytest.raises(ValueError, match=r"^override-neuron-config.is_prefix_caching: unknown option"):
        read_neuron_config({"override-neuron-config": {"is_prefix_caching": True}})


@pytest.mark.parametrize("buckets", [[1, 4], [1, 16]])
def test_bucket_lists_must_end_at_the_limits(buckets: list[int]) -> None:
    config = NeuronConfig(num_seqs_buckets=buckets)
    with pytest.raises(ValueError, match=r"neuron_config.num_seqs_buckets must end at max_num_seqs=8, got \[1, "):
        config.check_limits(64, 8, 256)
    config.check_limits(64, buckets[-1], 256)


def test_engine_is_configured_by_the_environment(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is read once, where the engine is configured; its workers are handed the result."""
    monkeypatch.setenv("NEURON_TOKEN_GEN_BUCKETS", "64,256")
    arguments = EngineArgs(
        model=str(tiny_model("llama").path),
        skip_tokenizer_init=True,
        max_model_len=256,
        additional_config={"override_neuron_config": {"max_padding": 0.5}, "another": 1},
    )
    config = arguments.create_engine_config()
    expected = {"max_padding": 0.5, "context_length_buckets": [64, 256]}
    assert config.additional_config == {"neuron_config": expected, "another": 1}
    arguments.max_model_len = 128
    with pytest.raises(ValueError, match="NEURON_TOKEN_GEN_BUCKETS must end at max_model_len=128"):
        arguments.create_engine_config()


def test_what_holds_where_the_user_says_nothing(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits are the platform's default ones; vLLM's variable for the CPU gives the size of the cache."""
    arguments = EngineArgs(model=str(tiny_model("llama").path), skip_tokenizer_init=True)
    config = arguments.create_engine_config(UsageContext.LLM_CLASS)
    limits = config.scheduler_config
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, config.cache_config.block_size) == (64, 512, 32)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert arguments.create_engine_config().cache_config.kv_cache_memory_bytes == 2 << 30


@pytest.mark.parametrize("theirs", [{"max_padding": 0.2}, {"max_padding": 0.3}, {}])
def test_hosts_with_other_options_are_refused(theirs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"max_padding": 0.2}

    def gather(everyone: list[dict[str, Any]], own: dict[str, Any], group: None) -> None:
        everyone[:] = [theirs, own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(neuron_runner.worker, "get_world_group", lambda: SimpleNamespace(world_size=2, cpu_group=None))
    worker: Any = SimpleNamespace(
        rank=1,
        parallel_config=SimpleNamespace(world_size=2),
        vllm_config=SimpleNamespace(additional_config={"neuron_config": mine}),
    )
    expected = "rank 1 was given the options {'max_padding': 0.2}, rank 0 " + re.escape(str(theirs))
    with nullcontext() if theirs == mine else pytest.raises(ValueError, match=expected):
        NeuronWorker._check_options_of_ranks(worker)


@pytest.mark.parametrize(
    ("workers", "given", "expected"), [(2, None, "4"), (3, None, "2"), (9, None, "1"), (2, "7", "7")]
)
def test_workers_of_a_host_share_its_cores(
    workers: int, given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("NPROC", given or "")
    if given is None:
        monkeypatch.delenv("NPROC")
    environment.share_host_cores(workers)
    assert os.environ["NPROC"] == expected


def test_documented_options_are_those_that_exist() -> None:
    """Options are those in the table of docs/configuration.md, row for row."""
    rows = [
        f"| `{option.key}` | {option.type} | `{option.default}` | {option.description} |"
        + (f" `{option.variable}` |" if option.variable else " |")
        for option in options()
    ]
    assert "\n".join(rows) in (ROOT / "docs" / "configuration.md").read_text(), "\n".join(rows)


def test_help_names_flags_that_vllm_takes() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "neuron_runner.config_help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    flags = [word for word in out.stdout.split() if word.startswith("--additional-config.neuron_config.")]
    assert flags == [f"--additional-config.neuron_config.{option.key}" for option in options()]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for flag, option in zip(flags, options(), strict=True):
        if option.type != "dict":
            read_neuron_config(parser.parse_args([flag, option.default]).additional_config)
