"""Deliberate faults in kinds of prompts, and in priorities among them."""

from mutation import Mutation

MUTATIONS = [
    Mutation(
        "embeddings of a prompt begin with the last one of another prompt",
        "inputs/embeddings.py",
        "            row += len(embeds)\n",
        "            row += len(embeds) - 1\n",
        "test_prompt_embeddings",
    ),
    Mutation(
        "blocks of a request that is taken out of its step are found as a prefix",
        "scheduling/corrections/preempted_steps.py",
        "{block.block_id for block in unwritten}",
        "{block.block_id for block in ()}",
        "test_priorities and text",
    ),
    Mutation(
        "an image of a request that is taken out of its step counts as encoded",
        "scheduling/corrections/preempted_steps.py",
        "in self._promised - encoded:",
        "in ():",
        "test_priorities and images",
    ),
    Mutation(
        "embeddings between tokens are put at the beginning of their chunk",
        "inputs/embeddings.py",
        "yield batch.query_start[index] + given, chunk[given].float()",
        "yield batch.query_start[index] + np.arange(len(given)), chunk[given].float()",
        "test_mixed_prompts",
        is_later=True,
    ),
]
