"""vLLM's own command on the platform that the environment names, where no installed plugin does.

    MODEL_RUNNER_BASE_PLATFORM=my_package.MyPlatform python -m model_runner_base.testing.server_process serve MODEL ...

Processes that the server spawns import this module, too, and get the platform before they ask for it.
"""

import os

from model_runner_base.testing.stacks import write_on_signal

write_on_signal()
if platform := os.environ.get("MODEL_RUNNER_BASE_PLATFORM"):
    from model_runner_base.testing.platform_choice import choose_platform

    choose_platform(platform)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
