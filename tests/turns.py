"""Tests that run in turns: a part of them at each commit, which is drawn by the commit's hash."""

import subprocess
import zlib
from collections.abc import Sequence
from functools import cache
from shutil import which

import pytest
from lane import HAS_OPENXLA, ROOT

IN_THIRDS = """
    acme_device architectures contiguous_cache drafted_prefixes drafts drafts_with_images dynamo engine_contracts
    examples expert_ranks gpu_lora gpu_recurrent gpu_runner host_offload image_ranks images latent_adapters orphans
    plain_device quantization recurrent_ranks reload_images served_stages serving_while_compiling smallest_limits
    suffix_decoding tensor_parallel trained_heads unequal_layers upstream xdrope
""".split()
"""Files whose cases take long. A third of their cases runs at a commit."""
IN_QUARTERS = """
    audio expert_adapters gemma4 gguf hunyuan image_families kimi_linear latent_attention later_architectures lora
    mistral_files mistral_large pooling pooling_images pooling_lora quantised_models recurrent_adapters
    recurrent_models recurrent_speculation replaced_experts right_drafts_beside_windows small_caches
    sparse_attention stages state_prefixes sweep text_alone transcription unequal_heads untried_families
    written_references
""".split()
"""Files of tests/base that compare models with HF transformers. At a commit a quarter of their cases runs with
torch_xla, and a half in the newest lane, whose engines start sooner."""
WHOLE_IN_THIRDS = """
    balanced_replicas embeddings_server engine_ends foreign_platform hostile_engine hostile_server image_embeddings
    image_server lora_server plugins pooling_ranks pooling_server prefill_and_decode_servers ray ray_stages
    runtime_control sleep transcription_server ways_to_run wheel
""".split()
"""Files that run whole: their tests share a server, or are few and long. A third of the files runs at a commit."""


def parts_of(item: pytest.Item) -> tuple[str, int]:
    """Name of what runs or waits together with a test, and of how many parts one runs at a commit."""
    file = item.path.stem.removeprefix("test_")
    if marker := item.get_closest_marker("in_turns"):
        return item.name, *(marker.args or (3,))
    # Cases with the same values share an engine.
    values = f"{file}[{getattr(getattr(item, 'callspec', None), 'id', item.name)}]"
    if file in IN_THIRDS:
        return values, 3
    if file in IN_QUARTERS:
        return values, 4 if HAS_OPENXLA else 2
    return file, 3 if file in WHOLE_IN_THIRDS else 1


@cache
def _commit() -> int | None:
    """Number of the commit; None where git tells none, so that all tests run."""
    if which("git") is None:
        return None
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout, 16) if done.returncode == 0 else None


def is_due(name: str, parts: int) -> bool:
    """Whether it is the turn of ``name``, which belongs to one of ``parts`` parts. The lanes differ in which it is."""
    commit = _commit()
    return commit is None or (zlib.crc32(f"{HAS_OPENXLA} {name}".encode()) - commit) % parts == 0


def due_of(cases: Sequence[str], parts: int) -> list[str]:
    """Cases whose turn it is, each ``parts``-th."""
    commit = _commit()
    return list(cases if commit is None else cases[commit % parts :: parts])
