"""Sweeps vLLM's registry: says for each architecture whether it is served with the tokens of HF transformers.

    python -m model_runner_base.testing.sweep                        the device that vLLM finds on this machine
    python -m model_runner_base.testing.sweep my_package.MyWorker    another one

Each architecture that the kit can write a tiny checkpoint of runs in an engine, with prompts in parts and longer than
windows, and with pictures if it takes some. The exit status is 1 if one ends with other tokens, or an error that is no
refusal, and 2 if nothing was chosen or the sweep was interrupted.
"""

import argparse
import os
import sys


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m model_runner_base.testing.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("worker", nargs="?", default="auto", help="the worker's class; left out: the platform's own")
    parser.add_argument("--platform", metavar="CLASS", help="its platform, where no installed plugin of vLLM names it")
    parser.add_argument("-k", metavar="TEXT", default="", help="only configurations whose name contains TEXT")
    known = parser.parse_args(arguments)
    # Before anything of vLLM is imported. One process, whose errors are then the engine's own.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if known.platform:
        from model_runner_base.testing.platform_choice import choose_platform

        choose_platform(known.platform)
    from model_runner_base.testing.registry import sweep

    return sweep(known.worker, known.k)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
