"""Ranks sentences by how close they are to a query, with vectors by vllm.LLM on NeuronModelRunner.

python3.11 dev.py rank --query "a soft reply calms an angry man"

A line is the cosine of a sentence's vector and the query's, and the sentence; the closest comes first. Sentences come
from ``--file``, one a line, or are some verses. The bundled model knows only the King James Bible, and little of it:
it finds verses by some of their words, in the words of today.
"""

import argparse
import os
from pathlib import Path

MODEL = Path(__file__).parent / "models" / "kjv-embed"
QUERY = "god made the sky and the earth"
SENTENCES = [
    "And God said, Let there be light: and there was light.",
    "In the beginning God created the heaven and the earth.",
    "The LORD is my shepherd; I shall not want.",
    "A soft answer turneth away wrath: but grievous words stir up anger.",
    "Jesus wept.",
    "And the sons of Noah, that went forth of the ark, were Shem, and Ham, and Japheth:",
    "Go to the ant, thou sluggard; consider her ways, and be wise:",
    "Pride goeth before destruction, and an haughty spirit before a fall.",
    "So David prevailed over the Philistine with a sling and with a stone, and smote the Philistine, and slew him; but "
    "there was no sword in the hand of David.",
    "And the waters returned, and covered the chariots, and the horsemen, and all the host of Pharaoh that came into "
    "the sea after them; there remained not so much as one of them.",
    "Ask, and it shall be given you; seek, and ye shall find; knock, and it shall be opened unto you:",
    "For where your treasure is, there will your heart be also.",
    "Blessed are the peacemakers: for they shall be called the children of God.",
    "And we know that all things work together for good to them that love God, to them who are the called according to "
    "his purpose.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="a local embedding model; the bundled one if left out")
    parser.add_argument("--query", action="append", help="may be given several times")
    parser.add_argument("--file", type=Path, help="sentences to rank, one a line")
    parser.add_argument("--top", type=int, default=5, help="sentences to print for each query")
    parser.add_argument("--enforce-eager", action="store_true", help="no compilation, for debugging")
    args = parser.parse_args()

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import torch
    from vllm import LLM

    queries = args.query or [QUERY]
    sentences = args.file.read_text().splitlines() if args.file else SENTENCES
    llm = LLM(
        args.model,
        runner="pooling",
        dtype="float32",
        enforce_eager=args.enforce_eager,
        # A few sentences: a quick start is worth more than steps without padding.
        additional_config={"neuron_config": {"max_padding": 0.5}},
        use_tqdm_on_load=False,
    )
    vectors = torch.tensor(
        [output.outputs.embedding for output in llm.embed([*queries, *sentences], use_tqdm=False)],
        dtype=torch.float32,
    )
    for query, cosines in zip(queries, vectors[: len(queries)] @ vectors[len(queries) :].T, strict=True):
        print(f"\n{query}")
        for index in cosines.argsort(descending=True)[: args.top].tolist():
            print(f"{cosines[index]:7.4f}  {sentences[index]}")


if __name__ == "__main__":
    main()
