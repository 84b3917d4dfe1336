"""Fetches vLLM's source distribution as pip would: from its index, through its proxy, with its certificates.

    python -m model_runner_base.testing.upstream.fetch 0.16.0 FOLDER

This uses private names of pip, as no public command does it: ``pip download`` and ``pip install --report`` also build
the metadata of what they fetched, for which they first install torch, and another client would not know pip's index,
proxy, certificates and passwords. A process of its own, since pip changes which modules are imported.
"""

import hashlib
import logging
import sys
from pathlib import Path
from typing import Any


def fetch(release: str, folder: Path) -> None:
    """Writes the source distribution of a release into ``folder``.

    Raises:
        LookupError: pip finds none.
        ValueError: its hash is not the one that the index names.
    """
    from pip._internal.commands import create_command

    logging.getLogger("pip").setLevel(logging.CRITICAL)
    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--no-binary", "vllm", "--retries", "1", "vllm"])
    with command.main_context():
        session = command.get_default_session(options)
        candidates = command._build_package_finder(options=options, session=session).find_all_candidates("vllm")
        link = next((candidate.link for candidate in candidates if str(candidate.version) == release), None)
        if link is None:
            raise LookupError("none found")
        path = folder / Path(link.filename).name  # The index's name may have slashes in it.
        if link.is_file:
            path.write_bytes(Path(link.file_path).read_bytes())
        else:
            headers = {"Accept-Encoding": "identity"}
            with session.get(link.url_without_fragment, headers=headers, stream=True) as response:
                response.raise_for_status()
                with path.open("wb") as file:
                    file.writelines(response.iter_content(1 << 20))
        if link.hash_name is not None and hashlib.new(link.hash_name, path.read_bytes()).hexdigest() != link.hash:
            raise ValueError(f"{path.name} does not have the {link.hash_name} that the index names")


if __name__ == "__main__":
    try:
        fetch(sys.argv[1], Path(sys.argv[2]))
    except Exception as error:  # Of pip, of its index, or of the network.
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
