"""vLLM's own tests on a device.

    python -m model_runner_base.testing.upstream my_package.MyWorker [--platform my_package.MyPlatform] [-k logprobs]

The tests are those of the installed release, from its source distribution. ``lists`` has a file for each release that
names the tests, and what is changed or expected of them. Models that the tests name are replaced by tiny ones. The
options that are not named below are pytest's.
"""
