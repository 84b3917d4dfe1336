"""Requests to servers whose engine has several processes, and sentences that say which of them is at fault."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError

import psutil
import pytest

from model_runner_base.testing.fixtures import Serve
from model_runner_base.testing.orphans import running
from model_runner_base.testing.server import RUNNING, first_error, post, posted
from model_runner_base.testing.stacks import places_of

ANSWER_S = 60
"""Seconds that an answer may take."""
ERROR_S = 5
"""Seconds until clients have an error after one of the server's processes was killed."""
END_S = 15
"""Seconds until all others have ended then; vLLM gives an engine core five."""
COUNT = 12
"""Tokens of an answer."""
EXTENSION = "model_runner_base.testing.counting_worker.CountingWorker"


@contextmanager
def serving(serve: Serve, option: str, config: pytest.Config, **options: Any) -> Iterator[str]:
    """A server with two of what an option of the kit, such as "stages", says that the machine has devices for.

    Raises NotImplementedError if the option is not given.
    """
    if config.getoption(option) < 2:
        raise NotImplementedError(f"{option} are not checked on one device: --{option} 2 says that there are two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # For calls of the workers' methods.
        with serve(worker_extension_cls=EXTENSION, **options) as url:
            yield url


def ask(
    url: str, prompt: Sequence[int], what: str, count: int = COUNT, replica: int | None = None, **options: Any
) -> list[int]:
    """Tokens of an answer, from one of the replicas if it is given.

    Raises:
        AssertionError: there is no answer, or none in time. It says why, and begins with ``what``.
    """
    body = {"model": "kit", "prompt": list(prompt), "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
    headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
    with explained(url, f"{what}, prompt of {len(prompt)} tokens"):
        (choice,) = post(f"{url}/v1/completions", body | options, timeout_s=ANSWER_S, headers=headers)["choices"]
    tokens: list[int] = choice["token_ids"]
    assert len(tokens) == count, f"{what}: {choice['finish_reason']} after {len(tokens)} tokens"
    return tokens


def ask_all(url: str, prompts: Sequence[Sequence[int]], what: str, **options: Any) -> list[list[int]]:
    """Tokens of answers to requests that come at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [*pool.map(lambda prompt: ask(url, prompt, what, **options), prompts)]


@contextmanager
def explained(url: str, what: str) -> Iterator[None]:
    """Turns an error of a request into an AssertionError that names the process at fault as well as can be known."""
    try:
        yield
    except HTTPError as error:
        words = error.read().decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            words = json.loads(words)["error"]["message"]
        if error.code == 400:
            raise AssertionError(f"{what}: refused: {words}") from error
        raise AssertionError(f"{what}: {first_error(url)}") from error
    except OSError as error:
        if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
            server = RUNNING[url]
            places = places_of(psutil.Process(server.pid), server.log.parent)
            raise AssertionError(f"{what}: no answer within {ANSWER_S} s; {places}") from error
        raise AssertionError(f"{what}: {first_error(url)}") from error


def call_workers(url: str, method: str, *arguments: str) -> None:
    """Calls a method of all workers."""
    with explained(url, method), suppress(json.JSONDecodeError):  # Where nothing is returned, the answer is empty.
        post(f"{url}/collective_rpc", {"method": method, "args": [*arguments]}, timeout_s=ANSWER_S)


def count_compilations(url: str, directory: Path) -> dict[str, int]:
    """Compilations so far by process id of a worker; ``directory`` is for this alone."""
    call_workers(url, "note_compilations", str(directory))
    return {file.name: int(file.read_text()) for file in directory.iterdir()}


class KilledPart(NamedTuple):
    """Times after which a killed process shows to clients and on the machine."""

    errors_s: float
    """Seconds after which the last of the clients had an error."""
    end_s: float
    """Seconds after which the last process of the server had ended."""


def kill(url: str, title: str, prompts: Sequence[Sequence[int]]) -> KilledPart:
    """Kills the process of a server whose title ends with ``title`` while clients ask for ``prompts`` without a pause.

    Of each prompt, clients send 100 tokens at most.

    Raises:
        AssertionError: a client waits for longer than ``ERROR_S``, or a process is left after ``END_S`` more.
    """
    server = psutil.Process(RUNNING[url].pid)
    parts = [server, *server.children(recursive=True)]
    titles = [" ".join(each.cmdline()).strip() for each in parts]
    victims = [each for each, name in zip(parts, titles, strict=True) if name.endswith(f"VLLM::{title}")]
    assert len(victims) == 1, f"there are {len(victims)} processes named {title} of {titles}"
    began = threading.Barrier(len(prompts) + 1)

    def ask_until_error(prompt: Sequence[int]) -> float:
        # Older servers refuse prompts that leave no place for all of the tokens.
        body = {"model": "kit", "prompt": list(prompt)[:100], "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        with suppress(OSError, HTTPException):
            with posted(f"{url}/v1/completions", body | {"stream": True}, timeout_s=ANSWER_S) as answer:
                answer.readline()
                began.wait(ANSWER_S)
                is_failed = b'"error"' in answer.read()
            while not is_failed:
                post(f"{url}/v1/completions", body, timeout_s=ANSWER_S)
        return time.monotonic()

    with ThreadPoolExecutor(len(prompts)) as pool:
        ends = [pool.submit(ask_until_error, prompt) for prompt in prompts]
        try:
            began.wait(ANSWER_S)
        except threading.BrokenBarrierError:
            raise AssertionError(f"before {title} was killed: {first_error(url)}") from None
        victims[0].kill()
        killed = time.monotonic()
        errors_s = max(end.result() for end in ends) - killed
    assert errors_s < ERROR_S, f"a client waited for {errors_s:.1f} s after {title} was killed"
    left, deadline = parts, killed + errors_s + END_S
    while (left := running(left)) and time.monotonic() < deadline:
        time.sleep(0.02)
    names = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            names.append(" ".join(process.cmdline())[:80])
    assert not names, f"processes are left {END_S} s after the clients' errors: {', '.join(names)}"
    end_s = time.monotonic() - killed
    return KilledPart(errors_s, end_s)
