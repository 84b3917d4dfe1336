"""Sleep at both levels: device memory that is freed and taken back, and the same text before and after.

python examples/sleep_and_wake.py [MODEL]     the bundled model if left out
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams

MODEL = Path(__file__).parent / "models" / "kjv-2m"
PROMPT = "In the beginning God created"


def main() -> None:
    llm = LLM(
        sys.argv[1] if len(sys.argv) > 1 else str(MODEL),
        enable_sleep_mode=True,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_model_len=128,
        kv_cache_memory_bytes=1 << 28,
    )
    params = SamplingParams(temperature=0, max_tokens=16)

    def show(what: str) -> None:
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        print(f"{what}: {output.outputs[0].text!r}")

    show("before")
    llm.sleep(level=1)
    try:
        show("asleep")
    except ValueError as error:
        print(f"asleep: {error}")
    llm.wake_up()
    show("after level 1")
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    show("after level 2")


if __name__ == "__main__":
    main()
