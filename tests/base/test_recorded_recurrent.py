"""Hybrid models that this lane's transformers has no class of, against answers that the newest lane recorded."""

from pathlib import Path
from typing import Any

import pytest
from conftest import engine
from recorded_recurrent import NEW_TOKENS, older_config, recorded, write_checkpoint
from transformers import AutoConfig
from vllm.transformers_utils.configs.nemotron_h import NemotronHConfig

from model_runner_base.testing.engine import generate, greedy, tokens_of

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "enforce_eager": True}

# Published checkpoints of Nemotron-H bring the class of their config along.
AutoConfig.register("nemotron_h", NemotronHConfig)


def checkpoint(name: str, path: Path) -> tuple[Path, list[Any]]:
    facts = recorded()[name]
    write_checkpoint(path, older_config(name, facts["config"]), facts["shapes"])
    return path, facts["answers"]


@pytest.mark.parametrize("name", ["lfm2-moe", "nemotron-h"])
def test_equals_what_was_recorded(name: str, tmp_path: Path) -> None:
    """Requests alone and in batches, prompts cut into chunks."""
    path, answers = checkpoint(name, tmp_path)
    prompts, want = [tuple(prompt) for prompt, _ in answers], [tokens for _, tokens in answers]
    with engine(path, **OPTIONS, max_num_batched_tokens=32) as llm:
        assert [tokens_of(generate(llm, [prompt], greedy(NEW_TOKENS)))[0] for prompt in prompts[:5]] == want[:5]
        assert tokens_of(generate(llm, prompts, greedy(NEW_TOKENS))) == want


def test_experts_without_a_gate_are_refused(tmp_path: Path) -> None:
    path, _ = checkpoint("nemotron-h-moe", tmp_path)
    with pytest.raises(ValueError, match="or a Nemotron-H without experts"), engine(path, **OPTIONS):
        pass
