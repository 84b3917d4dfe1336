"""A loop of a trainer: sample, change the weights, send them to the running engine, and sample again.

    python examples/trainer_loop.py [MODEL]     the bundled model if left out

The trainer is a model of HF transformers, which learns one sentence. Its weights reach the engine over gloo, in chunks.
After each update, the engine's greedy tokens are those of the trainer. It runs on the example device (torch's CPU).
"""

import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SENTENCE = "And it came to pass, that the trainer sent new weights unto the engine."
PROMPT = "And it came to pass, that the"
NUM_TOKENS = 16
NUM_ROUNDS = 3
CHUNK_BYTES = 1 << 20


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def at_once(send: Callable[[], Any], receive: Callable[[], Any]) -> Any:
    """Runs the trainer's half of a transfer in a thread while the engine runs its own; returns the trainer's result."""
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        receive()
        return sending.result()


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    import vllm.platforms
    from plain_device import PlainPlatform
    from transformers import AutoModelForCausalLM, AutoTokenizer

    vllm.platforms.current_platform = PlainPlatform()
    from vllm import LLM, SamplingParams

    from model_runner_base.models.gloo_transfer import (
        GlooInitInfo,
        GlooSender,
        in_chunks,
        transfer_config,
        update_info,
    )

    path = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "models" / "kjv-2m")
    trainer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    ids = tokenizer(SENTENCE, return_tensors="pt").input_ids
    prompt = tokenizer(PROMPT).input_ids
    small = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 128, "kv_cache_memory_bytes": 8 << 20}
    llm = LLM(path, dtype="float32", enforce_eager=True, weight_transfer_config=transfer_config(), **small)

    def sample() -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        print(f"engine:  {PROMPT}\033[1m{output.outputs[0].text}\033[0m")
        return list(output.outputs[0].token_ids)

    def sample_of_trainer() -> list[int]:
        start = torch.tensor([prompt])
        options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
        out = trainer.generate(start, attention_mask=torch.ones_like(start), **options)
        return out[0, len(prompt) :].tolist()

    def send_weights() -> int:
        """Sends all weights, and returns the number of chunks."""
        num_chunks = 0
        llm.collective_rpc("start_weight_update")
        for chunk in in_chunks(trainer.named_parameters(), CHUNK_BYTES):
            info = {"update_info": update_info(chunk)}
            at_once(lambda: sender.send(chunk), lambda: llm.collective_rpc("update_weights", kwargs=info))  # noqa: B023
            num_chunks += 1
        llm.collective_rpc("finish_weight_update")
        llm.reset_prefix_cache()  # It holds keys and values of the old weights.
        return num_chunks

    connection = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    sender = at_once(
        lambda: GlooSender(GlooInitInfo(**connection)),
        lambda: llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": connection}),
    )
    assert sample() == sample_of_trainer()
    for _ in range(NUM_ROUNDS):
        for _ in range(3):
            optimizer.zero_grad()
            loss = trainer(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
        num_chunks = send_weights()
        print(f"trainer: loss {loss.item():.2f}; weights sent in {num_chunks} chunks")
        assert sample() == sample_of_trainer()
    print("after each update, the engine's greedy tokens were the trainer's")


if __name__ == "__main__":
    main()
