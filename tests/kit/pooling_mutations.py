"""Deliberate faults in pooling."""

from mutation import Mutation

MUTATIONS = [
    Mutation(
        "a vector is that of the token before the last",
        "heads/pooling/components.py",
        "batch.query_start + batch.query_len - 1",
        "batch.query_start + (batch.query_len - 1).clip(max=batch.query_len // 2)",
        "test_pooling and mixed_batches and qwen3",
    ),
    Mutation(
        "chunks from before a preemption are pooled again",
        "heads/pooling/head.py",
        "                    self._pieces[req_id] = []",
        "                    self._pieces.setdefault(req_id, [])",
        "test_pooling and preemption",
    ),
    Mutation(
        "vectors of tokens begin with a row of padding",
        "heads/pooling/head.py",
        "                start = int(batch.query_start[index])",
        "                start = int(batch.query_start[index]) - 1",
        "test_pooling and vectors_of_tokens",
    ),
    Mutation(
        "requests get each other's rows",
        "heads/pooling/head.py",
        "[_Piece(copies.pooled, index, index + 1)]",
        "[_Piece(copies.pooled, batch.num_reqs - 1 - index, batch.num_reqs - index)]",
        "test_pooling and mixed_batches and modernbert",
    ),
    Mutation(
        "a window to both sides is one token short",
        "models/patches/layers.py",
        "module.config.local_attention // 2 + 1",
        "module.config.local_attention // 2",
        "test_pooling and mixed_batches and modernbert",
    ),
    Mutation(
        "a second text begins one token late",
        "heads/pooling/components.py",
        "token_ids[first + starts[index] :",
        "token_ids[first + starts[index] + 1 :",
        "test_pooling and pairs",
    ),
    Mutation(
        "marks of steps are sought one token late",
        "heads/pooling/metadata.py",
        "[torch.tensor(prompt) for prompt in prompts]",
        "[torch.tensor(prompt).roll(1) for prompt in prompts]",
        "test_pooling and classes_of_tokens and process",
    ),
    Mutation(
        "classes of tokens lack the last one",
        "heads/pooling/head.py",
        "start + int(batch.query_len[index])))",
        "start + int(batch.query_len[index]) - (batch.query_len[index] > 1)))",
        "test_pooling and classes_of_tokens and bert",
    ),
    Mutation(
        "vectors are those of the model without adapters",
        "heads/pooling/head.py",
        "arrival.prompt_embeds, arrival.adapter, arrival.items",
        "arrival.prompt_embeds, None, arrival.items",
        "test_pooling and adapters",
    ),
]
