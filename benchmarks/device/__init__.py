"""Benchmarks of graphs and engines on PJRT CPU, and of how step sizes fit traffic. Importing this package keeps engines
in one process, where they can be looked into."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NEURON_RUNNER", "1")
