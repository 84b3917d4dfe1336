"""Text from a tiny model on the device; to be run in a checkout of model-runner-base."""

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM("examples/models/kjv-2m", max_num_seqs=4)
    (output,) = llm.generate(["In the beginning"], SamplingParams(temperature=0, max_tokens=20))
    print(output.outputs[0].text)
