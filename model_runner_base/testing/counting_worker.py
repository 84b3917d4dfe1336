"""Methods that the workers of the kit's servers get, by ``worker_extension_cls``; workers import nothing else of it."""

import os
from pathlib import Path
from typing import Any


class CountingWorker:
    """Extension of a worker that counts compilations."""

    def note_compilations(self, directory: str) -> None:
        """Writes the number of compilations, once all sizes are made, to a file named by this worker's process id."""
        worker: Any = self
        runner = worker.model_runner
        runner.background_compiler.wait()
        Path(directory, str(os.getpid())).write_text(str(runner.graph_policy.num_compilations()))
