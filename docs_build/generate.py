"""Tables of the docs that the code knows, written between markers.

    python -m docs_build.generate [--check]     write them; with --check only say which files differ

A page has ``<!-- generated: NAME -->`` before such a table and ``<!-- end of NAME -->`` after it. What lies between is
written by the function of that name in ``TABLES``. ``tests/project/test_docs.py`` checks that it is up to date.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from docs_build import kit_results, public_names, travel, upstream_results
from docs_build.refusals import refusals
from docs_build.support import DEVICES, FEATURES

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{name}.md" for name in ("architectures", "configuration", "conformance"))]
PAGES += [
    f"docs/{name}.md" for name in ("public_api", "refusals", "support", "upstream", "tables/faults", "tables/travel")
]
REGION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = ["| " + " | ".join(row) + " |\n" for row in (columns, *rows)]
    return "".join([lines[0], "|---" * len(columns), "|\n", *lines[1:]]).replace("|  |", "| |")


def settings() -> str:
    """Options of ``neuron_config``."""
    from neuron_runner.config_help import options

    rows = []
    for option in options():
        variable = f"`{option.variable}`" if option.variable else ""
        rows.append((f"`{option.key}`", option.type, f"`{option.default}`", option.description, variable))
    return table(("option", "type", "default", "meaning", "environment"), rows)


def faults() -> str:
    """Deliberate faults of the kit's own tests."""
    sys.path.insert(0, str(ROOT / "tests" / "kit"))
    try:
        from mutations import MUTATIONS
    finally:
        sys.path.pop(0)
    rows = [(fault.name, f"`{fault.file}`", f"`{fault.selection}`") for fault in MUTATIONS]
    return table(("fault", "file under `model_runner_base`", "checks that catch it (`-k`)"), rows)


def device_faults() -> str:
    """Deliberate faults of foreign devices."""
    sys.path.insert(0, str(ROOT / "tests" / "kit"))
    try:
        from device_fault import KINDS
        from device_faults import FAULTS
    finally:
        sys.path.pop(0)
    rows = [(KINDS[fault.kind], fault.name, f"`{fault.selection}`") for fault in FAULTS]
    return table(("kind of bug", "fault", "checks that catch it (`-k`)"), rows)


def architectures() -> str:
    """Text architectures whose greedy tokens tests compare with HF transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    from model_runner_base.testing import recurrent_architectures
    from model_runner_base.testing.architecture_features import EXERCISES
    from model_runner_base.testing.architectures import CONFIGS, LATENT, VLLM_NAMES
    from model_runner_base.testing.recurrent_architectures import RECURRENT

    exercises = EXERCISES | recurrent_architectures.EXERCISES
    rows = []
    for name, make in (CONFIGS | LATENT | RECURRENT).items():
        config = make()
        architecture = VLLM_NAMES.get(name) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
        _, served_by = _TEXT_GENERATION_MODELS.get(architecture, ("", "TransformersForCausalLM"))
        # Of these models, tests compile four.
        is_compiled = name in (*CONFIGS, "deepseek-v2", "deepseek-v3", "lfm2", "qwen3-next")
        compiled = "equal" if is_compiled else "not run"
        rows.append((f"`{name}`", str(served_by), type(config).__name__, exercises.get(name, ""), "equal", compiled))
    return table(("config", "vLLM's class", "transformers' config", "exercises", "eager", "openxla"), rows)


def refused() -> str:
    """Messages of refused settings and models."""
    rows = [(f"`{message.replace('|', '/')}`", f"`{file}`") for message, file in refusals()]
    return table(("message", "raised in"), rows)


def support() -> str:
    return table(("", *DEVICES), [(feature, *cells) for feature, cells in FEATURES.items()])


def kit() -> str:
    """Promises that each device keeps, by group of the conformance kit."""
    results = kit_results.load()
    groups = sorted({group for of_device in results.values() for group in of_device})
    rows = [
        (group, *(kit_results.cell(of_device.get(group, {})) for of_device in results.values())) for group in groups
    ]
    return table(("group", *results), rows)


def signatures() -> str:
    """Parameters of the functions and methods that docs/public_api.md calls stable."""
    rows = ((f"`{name}`", f"`{signature}`") for name, signature in public_names.signatures().items())
    return table(("name", "parameters"), rows)


def upstream() -> str:
    """Results of vLLM's own tests, by file."""
    results = upstream_results.load()
    files = sorted({file for of_device in results.values() for file in of_device})
    rows = [
        (f"`{file}`", *(upstream_results.cell(of_device.get(file)) for of_device in results.values())) for file in files
    ]
    return table(("file", *results), rows)


def travelling() -> str:
    """Bytes that a step sends between devices."""
    return table(("model", "step", "sent by", "bytes", *travel.LINKS), travel.rows())


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "faults": faults,
    "device_faults": device_faults,
    "architectures": architectures,
    "refusals": refused,
    "support": support,
    "kit": kit,
    "signatures": signatures,
    "upstream": upstream,
    "travelling": travelling,
}


def written(text: str) -> str:
    """The page's text with its tables written anew."""
    return REGION.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main(arguments: list[str]) -> None:
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text()
        if (new := written(text)) != text:
            stale.append(page)
            if "--check" not in arguments:
                path.write_text(new)
    print("\n".join(stale) or "All tables are up to date.")
    if stale and "--check" in arguments:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
