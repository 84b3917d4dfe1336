"""Cost of one request's feature in a decode step of 16 requests, against none: unused features should cost nothing.

python -m benchmarks.features
"""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from functools import partial
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.models import BUNDLED_MODEL
from benchmarks.report import interleaved, parse, show

ROWS = 16
STEPS = 100

FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "none, again": {},
    "temperature": {"temperature": 1.0, "seed": 0},
    "top_p": {"temperature": 1.0, "top_p": 0.9, "seed": 0},
    "presence_penalty": {"presence_penalty": 1.0},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "bad_words": {"bad_words": ["LORD", "the king"]},
    "allowed_token_ids": {"allowed_token_ids": list(range(3, 500))},
    "logprobs=5": {"logprobs": 5},
    "logprobs=-1": {"logprobs": -1},
    "structured output": {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{1000}")},
}


def main() -> None:
    args = parse(__doc__)
    llm = LLM(
        str(BUNDLED_MODEL),
        max_num_seqs=ROWS,
        max_num_batched_tokens=64,
        max_model_len=256,
        max_logprobs=-1,
        enable_prefix_caching=False,
        additional_config={
            "neuron_config": {"num_seqs_buckets": [ROWS], "num_batched_tokens_buckets": [64], "warm_up": "full"}
        },
    )

    def params(feature: dict[str, Any]) -> SamplingParams:
        return SamplingParams(**{"temperature": 0, "max_tokens": STEPS, "ignore_eos": True, **feature})

    cases = {
        name: partial(llm.generate, ["And it"] * ROWS, [params({})] * (ROWS - 1) + [params(feature)], use_tqdm=False)
        for name, feature in FEATURES.items()
    }
    times = interleaved(cases, args.repeats)
    rows = [
        {"feature of one request": name, "ms_a_step": time / STEPS, "ratio": time / times["none"]}
        for name, time in times.items()
    ]
    show(rows, args.json)


if __name__ == "__main__":
    main()
