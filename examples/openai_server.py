"""An OpenAI-compatible server, and a client that asks it: what `vllm serve` in one shell and Python in another do.

python examples/openai_server.py [MODEL]     the bundled model if left out
"""

import socket
import subprocess
import sys
import time
from pathlib import Path

import openai

MODEL = Path(__file__).parent / "models" / "kjv-2m"
OPTIONS = ["--max-model-len", "128", "--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
# Few graphs, for a quick start; any option of neuron_config may be given like this.
OPTIONS += ["--additional-config.neuron_config.num_batched_tokens_buckets", "[64]"]
OPTIONS += ["--additional-config.neuron_config.num_seqs_buckets", "[2]"]
OPTIONS += ["--additional-config.neuron_config.context_length_buckets", "[128]"]


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = sys.argv[1] if len(sys.argv) > 1 else str(MODEL)
    vllm = Path(sys.executable).with_name("vllm")
    server = subprocess.Popen([vllm, "serve", model, "--host", "127.0.0.1", "--port", str(port), *OPTIONS])
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none needed", max_retries=0)
        while not is_ready(client):
            if server.poll() is not None:
                raise SystemExit("the server ended before it was ready: its messages say why")
            time.sleep(0.5)
        completion = client.completions.create(model=model, prompt="A wise man", max_tokens=24, temperature=0)
        print(f"Completion: {completion.choices[0].text!r}")
        question = [{"role": "user", "content": "Who is my shepherd?"}]
        stream = client.chat.completions.create(model=model, messages=question, max_tokens=24, seed=0, stream=True)
        print(f"Chat: {''.join(chunk.choices[0].delta.content or '' for chunk in stream)!r}")
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()


def is_ready(client: openai.OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except openai.APIConnectionError:
        return False


if __name__ == "__main__":
    main()
