"""The sweep of vLLM's registry tells an architecture that is equal from one that is refused or different."""

from dataclasses import replace
from pathlib import Path

from model_runner_base.testing.engine import Engines
from model_runner_base.testing.registry import Checkpoint, of_text, result_of, untried


def test_rows(tmp_path: Path) -> None:
    """A user would take a wrong architecture for one that is served if a changed token were called equal."""
    engines = Engines("auto", enforce_eager=True)
    checkpoint = of_text("qwen2", tmp_path)
    wrong = [[*tokens] for tokens in checkpoint.reference()]
    wrong[2][5] += 1

    def fail() -> Checkpoint:
        raise OSError("no such class")

    rows = [
        result_of("qwen2", lambda: checkpoint, engines),
        result_of("wrong", lambda: replace(checkpoint, reference=lambda: wrong), engines),
        result_of("refused", lambda: replace(checkpoint, options={"kv_sharing_fast_prefill": True}), engines),
        result_of("broken", lambda: replace(checkpoint, options={"block_size": "x"}), engines),
        result_of("none", fail, engines),
    ]
    assert [row.result for row in rows] == ["equal", "different", "refused", "error", "not compared"]
    assert rows[1].reason == "prompt 2, from token 5 on"
    assert rows[2].reason.startswith("KV-sharing fast prefill is not supported yet")
    assert {"Qwen2ForCausalLM", "LlamaForCausalLM"} & {*untried(rows)} == {"LlamaForCausalLM"}
