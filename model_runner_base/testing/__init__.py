"""The conformance kit: what vLLM promises, checked on a device's own worker, with nothing but local files.

    python -m model_runner_base.testing my_package.MyWorker [--platform my_package.MyPlatform] [pytest's options]
    pytest --worker my_package.MyWorker --pyargs model_runner_base.testing.checks     the same, as a pytest plugin

The checks start real ``vllm.LLM`` engines in this process, on tiny checkpoints with random weights that are made on the
spot, and compare what a user sees with HF transformers in float32 and an independent NumPy model of the documented
rules. At the end comes a table, one row a promise: it passes, it fails (with the smallest case that does), or the
device does not support it (in the device's own words). The exit status is 0 where something passes and nothing fails.

``--platform`` is for a device that is not installed as one of vLLM's platform plugins. ``-k sampling`` runs one group.
"""
