"""Support of features by device: the table of docs/support.md.

A cell says how a feature was shown to work on a device. "tests" is the test suite of this repository.
"""

DEVICES = ("Neuron runner on PJRT CPU", "Neuron hardware", "GPU runner", "example device (torch CPU)")

NOT_RUN = "not run on hardware"
NO_CUDA = "tests without a GPU"
H200 = "one H200"

NOT_TESTED = "not tested"

FEATURES = {
    "eager steps, chunked prefill, asynchronous scheduling, log probabilities": ("tests", NOT_RUN, H200, "tests"),
    "steps as graphs": ("tests", NOT_RUN, H200, "-"),
    "prefix caching, preemption": ("tests", NOT_RUN, NO_CUDA, "tests"),
    "sampling parameters": ("tests", NOT_RUN, NO_CUDA, "tests"),
    "structured output": ("tests", NOT_RUN, NOT_TESTED, "tests"),
    "speculative decoding": ("tests", NOT_RUN, NO_CUDA, "tests"),
    "LoRA adapters": ("tests", NOT_RUN, NO_CUDA, "tests"),
    "images": ("tests", NOT_RUN, NO_CUDA, "tests"),
    "video, sounds": ("tests", NOT_RUN, NOT_TESTED, "tests"),
    "embeddings, classes, scores": ("tests", NOT_RUN, NO_CUDA, "tests"),
    "tensor parallelism": ("tests", NOT_RUN, NOT_TESTED, "tests"),
    "expert parallelism": ("tests", NOT_RUN, NOT_TESTED, "tests"),
    "decode context parallelism": ("refused", "refused", "refused", "tests"),
    "pipeline stages": ("refused", "refused", "refused", "tests"),
    "replicas (data parallelism), with experts too": ("refused", "refused", "refused", "tests"),
    "contiguous KV cache": ("tests", NOT_RUN, "-", NOT_TESTED),
    "bfloat16": ("tests", NOT_RUN, H200, "tests"),
    "float16": ("refused", "refused", NOT_TESTED, "tests"),
    "quantised checkpoints, dequantised": ("tests", NOT_RUN, "-", "tests"),
    "latent attention (MLA)": ("tests", NOT_RUN, "refused", "tests"),
    "sparse attention (DSA) beyond `index_topk`": ("tests", NOT_RUN, "refused", "tests"),
    "compressed attention (DeepSeek V4, vLLM 0.33)": ("-", "-", "refused", "tests"),
    "8-bit KV cache": ("tests", NOT_RUN, NOT_TESTED, "tests"),
    "int8 weights": ("tests", NOT_RUN, "-", "-"),
    "attention kernel in NKI": ("tests on a stand-in for NKI", NOT_RUN, "-", "-"),
    "weights from trainers, in chunks": ("tests", NOT_RUN, NOT_TESTED, "tests"),
    "sleep and wake": ("tests", NOT_RUN, NO_CUDA, "tests"),
    "KV connectors, cache blocks on the host": ("tests", NOT_RUN, "refused", "tests"),
    "prefill and decode in two engines": (NOT_TESTED, NOT_RUN, "refused", "tests"),
    "events of cache blocks": (NOT_TESTED, NOT_RUN, NOT_TESTED, "tests"),
}
"""A row for each feature, a cell for each of ``DEVICES``."""
