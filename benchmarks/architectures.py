"""Tables of docs/architectures.md: which architectures of vLLM's registry run.

Each tiny configuration decodes a few prompts greedily, in chunks and mixed batches, and is compared with HF
transformers in float32. An architecture without a configuration is listed with the reason.

    python -m benchmarks.architectures [--openxla] [--output FILE] [NAME ...]
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

# One process, that reads its model classes itself: a process for each would cost most of the time.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import transformers
import vllm.model_executor.models.registry as registry
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model_runner_base.testing.architectures import CONFIGS, EXERCISES, REFUSED
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import Engines, generate, greedy, runner_of, tokens_of
from model_runner_base.testing.models import TinyModel, make_checkpoint

PROMPTS = random_prompts(0, [5, 33, 90, 150])
NEW_TOKENS = 12
FEW_BUCKETS = {
    "neuron_config": {
        "num_batched_tokens_buckets": [64],
        "num_seqs_buckets": [4],
        "context_length_buckets": [256],
    }
}
TRANSFORMERS = f"transformers {transformers.__version__}"

_MLA = "multi-head latent attention (MLA) is not supported yet"
_RECURRENT = "layers with a recurrent state are not supported yet"
REASONS = {
    "DeepseekV32ForCausalLM": _MLA,
    "Glm4MoeLiteForCausalLM": _MLA,
    "GlmMoeDsaForCausalLM": _MLA,
    "KimiLinearForCausalLM": f"{_MLA}; {_RECURRENT}",
    "MistralLarge3ForCausalLM": _MLA,
    "PanguUltraMoEForCausalLM": _MLA,
    "Lfm2ForCausalLM": f"{_RECURRENT} (a tiny config of {TRANSFORMERS} lacks `conv_dim`, which vLLM reads first)",
    "Lfm2MoeForCausalLM": _RECURRENT,
    "Mamba2ForCausalLM": f"{_RECURRENT} (vLLM reads `num_attention_heads` first, which the config lacks)",
    "MiniMaxForCausalLM": f"{_RECURRENT} (vLLM's own block-size check fails first, with a TypeError)",
    "MiniMaxText01ForCausalLM": _RECURRENT,
    "MiniMaxM1ForCausalLM": _RECURRENT,
    "NemotronHForCausalLM": _RECURRENT,
    "NemotronHPuzzleForCausalLM": _RECURRENT,
    "Plamo2ForCausalLM": _RECURRENT,
    "Zamba2ForCausalLM": f"{_RECURRENT} ({TRANSFORMERS} cannot build it this small)",
    "MPTForCausalLM": "another name of MptForCausalLM",
    "LLaMAForCausalLM": "another name of LlamaForCausalLM",
    "RWForCausalLM": "another name of FalconForCausalLM",
    "StableLMEpochForCausalLM": "another name of StableLmForCausalLM",
    "Fairseq2LlamaForCausalLM": "LlamaForCausalLM from fairseq2's checkpoints, which nothing here writes",
    "HCXVisionForCausalLM": "multimodal models are not supported yet",
}
"""Reasons, for architectures where there is more to say than "no class of its own in transformers"."""


def verdict(model: TinyModel, options: dict[str, Any]) -> tuple[str, str]:
    """Name of vLLM's class, and "equal" or what went wrong."""
    engines = Engines("auto", enforce_eager="additional_config" not in options)
    try:
        llm = engines.get(model.path, **options)
        name = type(runner_of(llm).get_model()).__name__
        got = tokens_of(generate(llm, PROMPTS, greedy(NEW_TOKENS)))
        want = [model.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]
        wrong = sum(a != b for a, b in zip(got, want, strict=True))
        return name, f"{wrong} of {len(PROMPTS)} differ" if wrong else "equal"
    except Exception as error:
        reason = re.sub(r".*Value error, |\[type=.*", "", " ".join(str(error).split()))
        return "", reason.replace(str(model.path.parent), "").strip()[:200]
    finally:
        engines.close()


def built_rows(names: list[str], with_openxla: bool) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            model = make_checkpoint(name, Path(directory))
            served_by, eager = verdict(model, {})
            openxla = verdict(model, {"additional_config": FEW_BUCKETS})[1] if with_openxla else "not run"
            config = type((CONFIGS | REFUSED)[name]()).__name__
            yield [f"`{name}`", served_by, config, EXERCISES.get(name, ""), eager, openxla]


def missing_rows() -> Iterator[list[str]]:
    """Entries of the registry that no tiny configuration covers, by reason."""
    native = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    built = {transformers_class(name) for name in CONFIGS | REFUSED}
    by_reason: dict[str, list[str]] = {}
    for architecture, (_, served_by) in registry._TEXT_GENERATION_MODELS.items():
        if architecture in built:
            continue
        reason = REASONS.get(architecture)
        if reason is None and architecture not in native:
            reason = f"no class in {TRANSFORMERS} (remote code, or a newer release): nothing to compare with"
            if served_by == "LlamaForCausalLM":
                reason += "; vLLM's class is the one that `llama` tests"
        by_reason.setdefault(reason or "not tried", []).append(architecture)
    for reason, architectures in by_reason.items():
        yield [reason, ", ".join(architectures)]


def transformers_class(name: str) -> str:
    from model_runner_base.testing.architectures import VLLM_NAMES

    model_type = (CONFIGS | REFUSED)[name]().model_type
    return VLLM_NAMES.get(name) or str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def show(header: list[str], rows: Iterator[list[str]], file: TextIO) -> None:
    print("|", " | ".join(header), "|", file=file)
    print("|" + "---|" * len(header), file=file)
    for row in rows:
        print("|", " | ".join(row), "|", file=file, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="configurations; all if left out")
    parser.add_argument("--openxla", action="store_true", help="compiled too, which takes minutes each")
    parser.add_argument("--output", type=argparse.FileType("w"), default=sys.stdout)
    arguments = parser.parse_args()
    registry._run_in_subprocess = lambda function: function()  # type: ignore[assignment]
    names = arguments.names or [*CONFIGS, *REFUSED]
    unknown = set(names) - set(CONFIGS) - set(REFUSED)
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}")
    header = ["config", "vLLM's class", "transformers' config", "exercises", "eager", "openxla"]
    show(header, built_rows(names, arguments.openxla), arguments.output)
    if not arguments.names:
        print(file=arguments.output)
        show(["why not", "architectures"], missing_rows(), arguments.output)


if __name__ == "__main__":
    main()
