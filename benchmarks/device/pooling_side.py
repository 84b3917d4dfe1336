"""One side of the pooling benchmark, in a process of its own: embeds the same texts whenever it reads a line.

    python pooling_side.py MODEL TEXTS OPTIONS

TEXTS is a JSON file with lists of token ids, OPTIONS the options of ``vllm.LLM`` as JSON, or "transformers". It imports
nothing of this project, so that another environment's interpreter can run it. The first line that it writes on the
standard output is its platform; each further line the milliseconds of a run.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Texts = list[list[int]]
PADDED_BATCH = 8


def with_vllm(path: str, texts: Texts, options: dict[str, Any]) -> tuple[str, Callable[[], object]]:
    """Returns the platform's name and a function that embeds the texts."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform

    llm = LLM(path, runner="pooling", dtype="float32", **options)
    prompts = [TokensPrompt(prompt_token_ids=each) for each in texts]
    return type(current_platform).__name__, lambda: llm.embed(prompts, use_tqdm=False)


def with_transformers(path: str, texts: Texts) -> tuple[str, Callable[[], object]]:
    """Returns the same for HF transformers, with padded batches of texts that are about equally long."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    by_length = sorted(texts, key=len)
    batches = []
    for start in range(0, len(texts), PADDED_BATCH):
        rows = [torch.tensor(each) for each in by_length[start : start + PADDED_BATCH]]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        batches.append((ids, (torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])).long()))

    @torch.no_grad()
    def run() -> None:
        for ids, mask in batches:
            model(input_ids=ids, attention_mask=mask)

    return "transformers", run


def main() -> None:
    path, texts, options = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3]
    # What libraries print goes to the error stream.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    is_vllm = options != "transformers"
    name, run = with_vllm(path, texts, json.loads(options)) if is_vllm else with_transformers(path, texts)
    print(name, file=answers, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print((time.perf_counter() - start) * 1e3, file=answers, flush=True)


if __name__ == "__main__":
    main()
