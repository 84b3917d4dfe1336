"""Proxy of a prefill engine and a decode engine: the first computes a prompt's blocks, the second one answers.

python examples/prefill_and_decode/proxy.py PORT PREFILL_URL DECODE_URL
"""

import sys
from collections.abc import AsyncIterator

from aiohttp import ClientSession, ClientTimeout, web

SESSION = web.AppKey("session", ClientSession)
ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0, "n": 1, "stream": False}


def make_proxy(prefill: str, decode: str) -> web.Application:
    async def connect(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(timeout=ClientTimeout(None)) as session:
            app[SESSION] = session
            yield

    async def answer(request: web.Request) -> web.StreamResponse:
        body, session = await request.json(), request.app[SESSION]
        short = {name: value for name, value in body.items() if name != "stream_options"} | ONE_TOKEN
        async with session.post(prefill + request.path, json=short) as prefilled:
            if prefilled.status != 200:
                text = await prefilled.read()
                return web.Response(body=text, status=prefilled.status, content_type=prefilled.content_type)
        async with session.post(decode + request.path, json=body) as decoded:
            response = web.StreamResponse(status=decoded.status)
            response.content_type = decoded.content_type
            await response.prepare(request)
            async for piece in decoded.content.iter_any():
                await response.write(piece)
            return response

    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(connect)
    app.router.add_post("/v1/{route:completions|chat/completions}", answer)
    return app


if __name__ == "__main__":
    web.run_app(make_proxy(*sys.argv[2:4]), host="127.0.0.1", port=int(sys.argv[1]))
