"""Step time against the size of the KV cache: the same, since the caches are donated and written in place.

python -m benchmarks.cache_size
"""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import gc
from functools import partial

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

from benchmarks.models import BUNDLED_MODEL
from benchmarks.report import interleaved, parse, show

ROWS = (1, 16)
STEPS = 100


def measure(megabytes: int, repeats: int) -> dict[int, float]:
    """Milliseconds a decode step by rows, through the whole engine."""
    buckets = {"num_seqs_buckets": list(ROWS), "num_batched_tokens_buckets": [64]}
    llm = LLM(
        str(BUNDLED_MODEL),
        max_num_seqs=max(ROWS),
        max_num_batched_tokens=64,
        max_model_len=256,
        kv_cache_memory_bytes=megabytes << 20,
        enable_prefix_caching=False,
        additional_config={"neuron_config": buckets},
    )
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
    prompt = TokensPrompt(prompt_token_ids=[5, 6])
    cases = {str(rows): partial(llm.generate, [prompt] * rows, params, use_tqdm=False) for rows in ROWS}
    times = interleaved(cases, repeats)
    del llm, cases
    gc.collect()
    cleanup_dist_env_and_memory()
    return {rows: times[str(rows)] / STEPS for rows in ROWS}


def main() -> None:
    args = parse(__doc__)
    small, large = measure(64, args.repeats), measure(2048, args.repeats)
    rows = [
        {"rows": rows, "ms_at_64_MB": small[rows], "ms_at_2_GB": large[rows], "ratio": large[rows] / small[rows]}
        for rows in ROWS
    ]
    show(rows, args.json)


if __name__ == "__main__":
    main()
