"""``dev.py test --quick``: a test of each kind, with a bar that says how long the rest takes."""

from collections import Counter
from typing import Any

import pytest
from tqdm import tqdm

KINDS = {
    "the code's structure": ("project/test_structure.py::test_device_runner", 1),
    "the documentation's tables": ("project/test_docs.py", 2),
    "plain words": ("project/test_plain_words.py", 3),
    "the table of faults": ("kit/test_mutations.py::test_the_list_in_the_documentation", 1),
    "the arrays of a step": ("base/test_batch_builder.py", 10),
    "attention": ("base/test_attention.py", 15),
    "quantised weights": ("base/test_dequantise.py", 5),
    "an attention plan": ("base/test_attention_plan.py", 10),
    "what is drawn": ("base/test_sampling.py::test_draws_follow_the_distribution", 10),
    "requests that are refused": ("base/test_errors.py::test_bad_parameters_are_refused", 15),
    "an engine on openxla": ("neuron/test_compilation.py::test_every_bucket_serves", 25),
    "adapters": ("base/test_lora.py::test_synchronous_scheduling", 10),
    "drafts": ("base/test_speculation.py::test_states_of_three_layers", 10),
    "recurrent layers": ("base/test_recurrences.py", 5),
    "embeddings": ("base/test_pooling.py::test_equals_transformers[bert-classes]", 10),
    "images": ("base/test_whole_images.py::test_tokens_of_an_image_see_each_other", 15),
    "sessions": ("base/test_streaming_input.py::test_preempted_sessions", 10),
    "graphs of a GPU": ("gpu/test_cuda_graphs.py", 10),
    "a kernel in NKI": ("neuron/test_nki_attention.py::test_pairs_of_decode", 5),
    "a device that breaks a promise": ("kit/test_conformance.py::test_broken_device[ignores a penalty]", 25),
    "the kit on the base as it is": ("kit/test_mutations.py::test_the_base_as_it_is_passes", 20),
    "a deliberate fault": ("kit/test_mutations.py::test_the_kit_catches[a finished request keeps its row]", 5),
    "a device of one file": ("kit/test_plain_device.py::test_serves[by hand", 20),
}
"""Files with their tests, by the beginning of names, and about how many seconds they take on one core."""


def kind_of(name: str) -> str | None:
    """The kind of test that a node id is of."""
    inside = name.split("tests/", 1)[-1]
    return next((kind for kind, (beginning, _) in KINDS.items() if inside.startswith(beginning)), None)


class Bar:
    """Shows which share of the tests' time has passed, in place of pytest's dots."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._shares: dict[str, float] = {}

    def _begin(self, names: list[str]) -> None:
        if self._bar is not None:
            return
        kinds = {name: kind for name in names if (kind := kind_of(name))}
        counts = Counter(kinds.values())
        self._shares = {name: KINDS[kind][1] / counts[kind] for name, kind in kinds.items()}
        layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, about {remaining} left"
        self._bar = tqdm(total=sum(self._shares.values()), desc="Tests of each kind", bar_format=layout)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._begin(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # Of several processes, this one has none.
            self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.when == "call" and report.passed:
            return "passed", "", ""
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._bar is not None and report.when == "teardown":
            self._bar.update(self._shares.get(report.nodeid, 0))
            self._bar.set_description(kind_of(report.nodeid) or "")

    def pytest_sessionfinish(self) -> None:
        if self._bar is not None:
            self._bar.close()
