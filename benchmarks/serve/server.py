"""``vllm serve`` on the device that takes no time; the arguments are those of the command.

    python -m benchmarks.serve.server MODEL --worker-cls benchmarks.serve.workers.OurWorker [ARGUMENT ...]

Processes that are spawned import this module again as their main one, so each of them has the platform.
"""

import sys

import benchmarks.host  # noqa: F401  # Puts the example device's platform in place, above what asks for it.

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[1:1] = ["serve"]
    main()
