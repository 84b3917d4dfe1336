"""Promises about the code itself: the base names no device, a device overrides four methods."""

import ast
import re
from pathlib import Path

import pytest

from model_runner_base import ModelRunnerBase
from neuron_runner.model_runner import NeuronModelRunner

ROOT = Path(__file__).parents[1]
HOOKS = {"_cache_device_properties", "load_model", "profile_run", "capture_model"}
DEVICE_NAMES = re.compile(r"cuda|xla|neuron|trainium|inferentia|hpu|gaudi|npu|ascend|tpu|rocm|xpu", re.IGNORECASE)


@pytest.mark.parametrize("path", sorted((ROOT / "model_runner_base").rglob("*.py")), ids=lambda path: path.name)
def test_base_names_no_device(path: Path) -> None:
    # "input" and "output" hold the letters of an accelerator's name; no word of ours should.
    text = re.sub(r"(in|out)puts?", "", path.read_text(), flags=re.IGNORECASE)
    text = text.replace("build_for_cudagraph_capture", "")  # A method that every metadata builder of vLLM's has.
    assert DEVICE_NAMES.findall(text) == []


def test_device_runner_overrides_exactly_the_hooks() -> None:
    own = {name for name, value in vars(NeuronModelRunner).items() if callable(value)}
    assert own == HOOKS


def test_base_leaves_the_hooks_to_the_device() -> None:
    for name in HOOKS:
        with pytest.raises(NotImplementedError):
            getattr(ModelRunnerBase, name)(object())


def test_base_has_the_names_that_the_rfc_fixes() -> None:
    names = [
        "_update_states",
        "_calc_mrope_positions",
        "_prepare_sampling",
        "_execute_encoder",
        "_gather_encoder_outputs",
        "get_model",
        "_dummy_run",
        "initialize_kv_cache",
        "get_kv_cache_spec",
        "_prepare_inputs",
        "execute_model",
        "sample_tokens",
    ]
    assert [name for name in names if not callable(getattr(ModelRunnerBase, name, None))] == []
    assert ModelRunnerBase.use_piecewise_graph is False


def test_imports_point_one_way() -> None:
    """The base imports no device package, and nothing but vLLM, torch and small libraries; its kit, those of tests."""
    base = {"model_runner_base", "vllm", "torch", "transformers", "safetensors", "numba", "numpy", "psutil", "tqdm"}
    kit = {"hypothesis", "pytest", "regex", "rich", "scipy", "tokenizers"}
    for path in (ROOT / "model_runner_base").rglob("*.py"):
        allowed = base | kit if "testing" in path.parts else base
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                top = (module or "").split(".")[0]
                assert top in allowed or top in __import__("sys").stdlib_module_names, f"{path.name} imports {module}"
