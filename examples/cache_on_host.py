"""Cache blocks on the host: a prompt that comes back after the device's cache is emptied is copied, not computed.

python examples/cache_on_host.py [MODEL]     the bundled model if left out
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams

MODEL = Path(__file__).parent / "models" / "kjv-2m"
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; " * 3


def main() -> None:
    llm = LLM(
        sys.argv[1] if len(sys.argv) > 1 else str(MODEL),
        enforce_eager=True,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 26,
        kv_offloading_size=0.1,  # GiB
    )

    def show(what: str) -> None:
        (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        print(f"{what}, {output.num_cached_tokens} tokens of the prompt copied: {output.outputs[0].text!r}")

    show("at first")
    llm.generate("And", use_tqdm=False)  # Blocks of a step go to the host with the next one.
    llm.reset_prefix_cache()
    show("again")


if __name__ == "__main__":
    main()
