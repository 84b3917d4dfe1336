"""Proxy of a prefill engine and a decode engine: the first computes a prompt's blocks, the second one answers.

python examples/prefill_and_decode/proxy.py PORT PREFILL_URL DECODE_URL

If the prefill engine has ended or fails, the decode engine computes the prompt. If the decode engine has ended or
fails, the client gets status 503. If it ends while it answers, the client's connection breaks, so that no answer looks
whole; a server whose engine alone ends writes an error into the answer.
"""

import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

SESSION = web.AppKey("session", ClientSession)
ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0, "n": 1, "stream": False}
NO_ANSWER = {"error": {"message": "the decode engine does not answer", "type": "ServiceUnavailable", "code": 503}}
OF_SERVER = (408, 429)
"""Statuses below 500 that say nothing about the request."""


def make_proxy(prefill: str, decode: str) -> web.Application:
    async def connect(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(timeout=ClientTimeout(None)) as session:
            app[SESSION] = session
            yield

    async def refusal(session: ClientSession, path: str, body: dict[str, Any]) -> web.Response | None:
        """The prefill engine's answer if the request is at fault; else None, with or without blocks of the prompt."""
        short = {name: value for name, value in body.items() if name != "stream_options"} | ONE_TOKEN
        with contextlib.suppress(ClientError):
            async with session.post(prefill + path, json=short) as prefilled:
                text = await prefilled.read()
                if 400 <= prefilled.status < 500 and prefilled.status not in OF_SERVER:
                    return web.Response(body=text, status=prefilled.status, content_type=prefilled.content_type)
        return None

    async def answer(request: web.Request) -> web.StreamResponse:
        body, session, response = await request.json(), request.app[SESSION], web.StreamResponse()
        if refused := await refusal(session, request.path, body):
            return refused
        try:
            async with session.post(decode + request.path, json=body) as decoded:
                if decoded.status >= 500:
                    return web.json_response(NO_ANSWER, status=503)
                response.set_status(decoded.status)
                response.content_type = decoded.content_type
                async for piece in decoded.content.iter_any():
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(piece)
        except ClientError:
            if not response.prepared:
                return web.json_response(NO_ANSWER, status=503)
            if request.transport is not None:
                request.transport.abort()
        return response

    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(connect)
    app.router.add_post("/v1/{route:completions|chat/completions}", answer)
    return app


if __name__ == "__main__":
    web.run_app(make_proxy(*sys.argv[2:4]), host="127.0.0.1", port=int(sys.argv[1]), handler_cancellation=True)
