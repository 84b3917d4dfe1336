"""Recognises drafts whose ``config.json`` has ``"is_eagle": true`` as EAGLE heads, without ``method`` being given.

Some toolchains mark the heads that they write in this way. vLLM itself goes by the checkpoint's name.
"""

import json
from functools import wraps
from pathlib import Path
from typing import Any


def marked_method(model: Any) -> str | None:
    """Method of a local checkpoint that has the mark; None for any other."""
    file = Path(str(model)) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    if not config.get("is_eagle"):
        return None
    return "eagle3" if "eagle3" in "".join(config.get("architectures", ())).lower() else "eagle"


def recognise_marked_heads(engine_args_cls: Any) -> None:
    """Makes vLLM's ``EngineArgs`` fill in ``method`` if ``speculative_config`` names a marked head but no method."""
    create = engine_args_cls.create_speculative_config
    if hasattr(create, "__wrapped__"):
        return

    @wraps(create)
    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.speculative_config
        if isinstance(config, dict) and not config.get("method") and (method := marked_method(config.get("model"))):
            self.speculative_config = {**config, "method": method}
        return create(self, *args, **kwargs)

    engine_args_cls.create_speculative_config = create_speculative_config
