"""Promises about the code itself: the base names no device, a device overrides four methods."""

import ast
import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from model_runner_base import ModelRunnerBase
from model_runner_base.inputs.multimodal.inputs import gather_encoder_outputs
from model_runner_base.inputs.multimodal.positions import calc_mrope_positions

ROOT = Path(__file__).parents[2]
HOOKS = {"_cache_device_properties", "load_model", "profile_run", "capture_model"}
DEVICE_NAMES = re.compile(r"cuda|xla|neuron|trainium|inferentia|hpu|gaudi|npu|ascend|tpu|rocm|xpu", re.IGNORECASE)

STEP_TYPES = {
    "SchedulerOutput",
    "NewRequestData",
    "CachedRequestData",
    "ModelRunnerOutput",
    "AsyncModelRunnerOutput",
    "GrammarOutput",
    "KVCacheConfig",
    "CommonAttentionMetadata",
}
"""vLLM's step types, which change from release to release; so do the specs of ``SPECS``."""
SPECS = "vllm.v1.kv_cache_interface"
BASE = ROOT / "model_runner_base"
PORTS = [
    *(BASE / "vllm_compat" / "types").glob("*.py"),
    BASE / "step" / "schedule.py",
    BASE / "heads" / "outputs.py",
]
"""Modules that read vLLM's step types: into types of the base, and results of a head into vLLM's output."""
INSIDE = [
    path
    for package in ("model_runner_base", "gpu_runner", "neuron_runner", "examples")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path not in PORTS
    and path != BASE / "testing" / "scheduler_outputs.py"
    and BASE / "scheduling" not in path.parents
]


def of_vllm(tree: ast.AST) -> set[str]:
    """The full names of vLLM's that a module imports, or reads off a module of vLLM's that it imported."""
    names: set[str] = set()
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names.add(f"{node.module}.{alias.name}")
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                modules[alias.asname or top] = alias.name if alias.asname else top
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path, attributes = node.value, [node.attr]
            while isinstance(path, ast.Attribute):
                path, attributes = path.value, [path.attr, *attributes]
            if isinstance(path, ast.Name) and path.id in modules:
                names.add(".".join([modules[path.id], *attributes]))
    return {name for name in names if name.split(".")[0] == "vllm"}


def is_step_type(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return last in STEP_TYPES or (module == SPECS and (last.endswith(("Spec", "Specs")) or last == "*"))


@pytest.mark.parametrize("path", INSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_module_alone_reads_vllms_step_types(path: Path) -> None:
    """No module but those of ``PORTS`` reads step types, so a release that changes them changes nothing else.

    model_runner_base/scheduling is a piece of vLLM's own scheduler, which makes them.
    """
    assert sorted(filter(is_step_type, of_vllm(ast.parse(path.read_text())))) == []


def test_readers_of_step_types_are_found() -> None:
    """A module that reads a step type is found, however it names the type; the port itself is full of them."""
    for line in (
        "from vllm.v1.core.sched.output import SchedulerOutput",
        "from vllm.v1.outputs import ModelRunnerOutput as Output",
        "def lazy():\n    from vllm.v1.kv_cache_interface import FullAttentionSpec",
        "from vllm.v1 import kv_cache_interface as specs\nspecs.MambaSpec",
        "import vllm.v1.kv_cache_interface\nx: vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs",
        "import vllm.v1.attention.backend as backend\nbackend.CommonAttentionMetadata",
    ):
        assert any(map(is_step_type, of_vllm(ast.parse(line)))), line
    for line in (
        "from model_runner_base.step.schedule import SchedulerOutput",
        "from vllm import SamplingParams",
    ):
        assert not any(map(is_step_type, of_vllm(ast.parse(line)))), line
    found = {name for path in PORTS for name in of_vllm(ast.parse(path.read_text())) if is_step_type(name)}
    assert {name.rpartition(".")[2] for name in found} >= STEP_TYPES


def test_the_scheduler_stands_apart() -> None:
    """The scheduler serves vLLM without our runner, too: it imports no other folder. Three modules and the kit know of
    it."""
    folder = BASE / "scheduling"
    for path in folder.rglob("*.py"):
        of_ours = re.findall(r"^\s*from (model_runner_base\S*) import", path.read_text(), re.MULTILINE)
        assert all(module.startswith("model_runner_base.scheduling") for module in of_ours), path.name
    others = [path for path in BASE.rglob("*.py") if folder not in path.parents]
    named_in = {path.name for path in others if "model_runner_base.scheduling" in path.read_text()}
    assert named_in == {"our_engines.py", "platform.py", "schedulers.py", "worker.py"}


@pytest.mark.parametrize(("part", "other"), [("corrections", "rows"), ("rows", "corrections")])
def test_rows_and_corrections_of_the_scheduler_import_neither_the_other(part: str, other: str) -> None:
    folder = BASE / "scheduling"
    paths = [folder / "step_hooks.py", *(folder / part).glob("*.py")]
    assert len(paths) > 5
    assert [path.name for path in paths if f"model_runner_base.scheduling.{other}" in path.read_text()] == []


def test_one_module_repeats_steps() -> None:
    """One module, step/repeat.py, repeats steps; no other module knows of a step that is like the last one."""
    files = BASE.rglob("*.py")
    assert [path.name for path in files if "_steady" in path.read_text()] == []


def test_files_have_at_most_600_lines() -> None:
    """A file has at most 600 lines, so that it stays one idea."""
    out = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [path for path in out.stdout.splitlines() if (ROOT / path).is_file()]
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in files}
    assert len(lines) > 500 and {path: count for path, count in lines.items() if count > 600} == {}


@pytest.mark.parametrize("path", sorted(BASE.rglob("*.py")), ids=lambda path: path.name)
def test_base_names_no_device(path: Path) -> None:
    # "input" and "output" hold the letters of an accelerator's name; no word of ours should.
    text = re.sub(r"(in|out)puts?", "", path.read_text(), flags=re.IGNORECASE)
    # A method that every metadata builder of vLLM's has, a part of every step's statistics, what starts engines.
    for name in ("build_for_cudagraph_capture", "cudagraph_stats", "CoreEngineProcManager"):
        text = text.replace(name, "")
    assert DEVICE_NAMES.findall(text) == []


@pytest.mark.openxla
def test_device_runner_overrides_exactly_the_hooks() -> None:
    from neuron_runner.model_runner import NeuronModelRunner

    own = {name for name, value in vars(NeuronModelRunner).items() if callable(value)}
    assert own == HOOKS


def test_base_leaves_the_hooks_to_the_device() -> None:
    for name in HOOKS:
        with pytest.raises(NotImplementedError):
            getattr(ModelRunnerBase, name)(object())


def test_base_has_the_names_that_the_rfc_fixes() -> None:
    names = [
        "_update_states",
        "_prepare_sampling",
        "_execute_encoder",
        "get_model",
        "_dummy_run",
        "initialize_kv_cache",
        "get_kv_cache_spec",
        "_prepare_inputs",
        "execute_model",
        "sample_tokens",
    ]
    assert [name for name in names if not callable(getattr(ModelRunnerBase, name, None))] == []
    assert {"use_piecewise_graph", "tokenwise_graph_batch_sizes"} <= vars(ModelRunnerBase).keys()
    # Parts do the work of these two: at a request's arrival, and inside the graph.
    assert callable(calc_mrope_positions) and callable(gather_encoder_outputs)


def modules_of_the_base() -> dict[str, set[str]]:
    """Modules of the base by name, each with those that it imports, also inside of functions; without the kit."""
    modules = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in BASE.rglob("*.py")}
    imported: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found.update({f"{node.module}.{alias.name}" for alias in node.names} | {node.module})
        imported[name] = found & modules.keys()
    return {name: found for name, found in imported.items() if not name.startswith("model_runner_base.testing.")}


def test_folders_of_the_base_have_an_order() -> None:
    """No two modules or folders of one folder import each other, not even by others in between."""
    imported = modules_of_the_base()
    folders = {name.rpartition(".")[0] for name in imported}
    for folder in folders | {folder.rpartition(".")[0] for folder in folders} - {""}:
        depth = folder.count(".") + 2
        within = dict[str, set[str]]()
        for name, found in imported.items():
            if name.startswith(f"{folder}."):
                part = ".".join(name.split(".")[:depth])
                others = {".".join(other.split(".")[:depth]) for other in found if other.startswith(f"{folder}.")}
                within.setdefault(part, set()).update(others - {part})
        assert list(TopologicalSorter(within).static_order()), folder  # It raises CycleError for parts in a circle.


def test_top_of_the_base_is_what_a_vendor_needs() -> None:
    """Modules that a vendor subclasses, calls or catches are at the top; everything else is in a folder."""
    top = {"__init__.py", "device_ops.py", "errors.py", "model_runner.py", "platform.py", "worker.py"}
    assert {path.name for path in BASE.glob("*.py")} == top


def test_ground_floor_imports_nothing_of_the_base() -> None:
    """Folders with types and releases of vLLM serve every folder, and the kit serves none."""
    for name, found in modules_of_the_base().items():
        folders = {other.split(".")[1] for other in found if other.count(".")}
        assert "testing" not in folders, name
        if name.startswith("model_runner_base.vllm_compat."):
            assert folders <= {"vllm_compat"}, name
        if name.startswith("model_runner_base.admission."):
            assert folders <= {"admission", "errors", "vllm_compat"}, name


def test_imports_point_one_way() -> None:
    """The base imports no device package, and nothing but vLLM, torch and small libraries; its kit, those of tests."""
    own = {"filelock", "numba", "numpy", "psutil", "pydantic", "tqdm"}
    base = {"model_runner_base", "vllm", "torch", "transformers", "safetensors"} | own
    kit = {"PIL", "hypothesis", "pytest", "regex", "rich", "scipy", "tokenizers"}
    for path in BASE.rglob("*.py"):
        allowed = base | kit if "testing" in path.parts else base
        if path.name == "refusals.py":  # An error of the server's, which vLLM makes of it.
            allowed = allowed | {"fastapi"}
        if path == BASE / "draft" / "host.py":  # Where vLLM's own suffix decoding has it from.
            allowed = allowed | {"arctic_inference"}
        if path.parent.name == "gguf" or path.name == "gguf_files.py":  # An extra; its files may be the hub's.
            allowed = allowed | {"gguf", "huggingface_hub"}
        if path.name == "fetch.py":  # In a process of its own.
            allowed = allowed | {"pip"}
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                top = (module or "").split(".")[0]
                assert top in allowed or top in __import__("sys").stdlib_module_names, f"{path.name} imports {module}"
