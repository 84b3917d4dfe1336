"""Deliberate faults in what later releases of vLLM let a user ask for."""

from mutation import Mutation

MUTATIONS = [
    Mutation(
        "thinking ends one token after its budget",
        "heads/sampling/thinking_budget.py",
        "self.num_tokens - self._thinks_from < self._budget",
        "self.num_tokens - self._thinks_from <= self._budget",
        "test_thinking_budgets",
        is_later=True,
    ),
    Mutation(
        "chosen tokens get the values of the row before",
        "heads/sampling/logprobs.py",
        "            token_ids[row, : len(each)] = each\n",
        "            token_ids[row - 1, : len(each)] = each\n",
        "test_chosen_logprobs",
        is_later=True,
    ),
    Mutation(
        "a slot does not get the tokens that its request generates",
        "heads/sampling/slot_processors.py",
        "            kept[begin : begin + len(new)] = new\n",
        "",
        "test_slot_processors",
        is_later=True,
    ),
    Mutation(
        "a router's bias is left out",
        "models/patches/checkpoints.py",
        "                default_weight_loader(self.e_score_correction_bias, weight)\n",
        "",
        "test_later_experts and laguna",
        is_later=True,
    ),
    Mutation(
        "experts that vLLM's Transformers backend replaces compute SwiGLU",
        "models/layers/replaced_experts.py",
        "    layer.set_activation(activation_of(replaced))",
        "    activation_of(replaced)",
        "test_later_experts and minimax",
        is_later=True,
    ),
]
