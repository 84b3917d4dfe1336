"""Changes of the settings that vLLM's tests start engines with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import Any
from unittest import mock

from model_runner_base.testing.server import flags
from model_runner_base.testing.upstream.allow_list import TestFile
from model_runner_base.testing.upstream.servers import change_servers


class Overrides:
    """Options of engines; those of the file whose test runs, too."""

    def __init__(self, dtype: str, defaults: dict[str, Any], options: dict[str, Any]) -> None:
        self._dtype = dtype
        self._defaults = defaults
        self._options = options
        self._of_file: dict[str, Any] = {}

    def install(self) -> None:
        """Puts the options in place in this process, in which tests make the settings of their engines."""
        import vllm.model_executor.models.registry
        from vllm.config import ModelConfig
        from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

        config_class: Any = ModelConfig
        init = config_class.__init__

        @wraps(init)
        def with_dtype(config: ModelConfig, *args: Any, **named: Any) -> None:
            init(config, *args, **named | {"dtype": self._dtype})

        for engine_args in (EngineArgs, AsyncEngineArgs):
            self._change_options(engine_args)
        # vLLM looks at a model's class in a process of its own, which takes ten seconds for each architecture.
        registry: Any = vllm.model_executor.models.registry
        registry._run_in_subprocess = lambda function: function()
        config_class.__init__ = with_dtype

    def _change_options(self, engine_args: Any) -> None:
        init = engine_args.__init__
        initial = {field.name: field.default for field in fields(engine_args)}

        @wraps(init)
        def with_options(args: Any, *positional: Any, **named: Any) -> None:
            for name, value in self._defaults.items():
                if named.get(name, initial[name]) == initial[name]:
                    named[name] = value
            init(args, *positional, **named | self._options | self._of_file)

        engine_args.__init__ = with_options

    def change_reference(self, runner: Any) -> None:
        """Makes vLLM's ``HfRunner`` compute on the host, in the dtype of the engines."""
        init: Callable[..., None] = runner.__init__

        @wraps(init)
        def with_dtype(reference: Any, model_name: str, dtype: str = "auto", **named: Any) -> None:
            init(reference, model_name, dtype=self._dtype, **named)

        runner.__init__ = with_dtype
        runner.get_default_device = lambda reference: "cpu"

    def change_servers(self, server: Any) -> None:
        """Gives the options to vLLM's ``RemoteOpenAIServer``, too."""
        change_servers(server, self._of_server)

    def _of_server(self, given: list[str]) -> dict[str, Any]:
        names = {argument.partition("=")[0] for argument in given}
        left_open = {
            name: value
            for name, value in self._defaults.items()
            if names.isdisjoint([*flags({name: True}), *flags({name: False})])
        }
        return {"dtype": self._dtype} | left_open | self._options | self._of_file

    @contextmanager
    def of(self, file: TestFile) -> Iterator[None]:
        """Options of one file's tests."""
        with mock.patch.object(self, "_of_file", file.engine), mock.patch.dict("os.environ", file.environment):
            yield


@contextmanager
def tolerance_of(file: TestFile) -> Iterator[None]:
    """The tolerance of one file's tests."""
    import torch

    if file.tolerance is None:
        yield
        return
    close, limits = torch.testing.assert_close, file.tolerance.model_dump()
    with mock.patch.object(torch.testing, "assert_close", lambda *args, **named: close(*args, **named | limits)):
        yield
