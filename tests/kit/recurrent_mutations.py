"""Deliberate faults in states of recurrent layers."""

from mutation import Mutation

MUTATIONS = [
    Mutation(
        "a request begins with the state of the one before",
        "models/recurrent/step.py",
        "    return torch.where(has_state.view(-1, *[1] * (found.dim() - 1)), found, 0)",
        "    return found",
        "test_recurrent and one_request",
    ),
    Mutation(
        "a convolution leaves out its oldest input",
        "models/recurrent/operations.py",
        "    for back in range(1, taps):",
        "    for back in range(1, taps - 1):",
        "test_recurrent and mixed_batches",
    ),
    Mutation(
        "a token decays as the tile's first one",
        "models/recurrent/mamba.py",
        "(x * torch.exp(whole - log).unsqueeze(3))",
        "(x * torch.exp(whole - log[..., :1]).unsqueeze(3))",
        "test_recurrent and mixed_batches",
    ),
    Mutation(
        "a tile writes its request's state though another tile follows",
        "models/recurrent/step.py",
        "            written=torch.where(is_last, states, 0),",
        "            written=torch.where(is_last, 0, states),",
        "test_recurrent and mixed_batches",
    ),
    Mutation(
        "a state passes from a request to the next one",
        "models/recurrent/operations.py",
        "    after = scan(torch.where(is_first, 0, factors), terms, multiply)",
        "    after = scan(factors, terms, multiply)",
        "test_recurrent and mixed_batches",
    ),
    Mutation(
        "a repeated step takes the states of the rows before",
        "caches/states.py",
        "stop, batch.rows[:num_rows], table.table",
        "stop, np.arange(num_rows), table.table",
        "test_recurrent and arrivals",
    ),
    Mutation(
        "padding writes a request's state",
        "caches/states.py",
        "batch.num_computed[:rows], batch, views[BLOCKS])",
        "batch.num_computed[:rows], batch, views[BLOCKS]); views[BLOCKS][rows:] = 1",
        "test_state_schedules",
    ),
    Mutation(
        "a request that hits a prefix begins with the state of another block",
        "caches/states.py",
        "                self._fill_tiles(views[SOURCES], batch.num_computed[rows:], batch)",
        "                self._fill_tiles(views[SOURCES], batch.num_computed[rows:] + 1, batch)",
        "test_recurrent and prefix_hits",
    ),
    Mutation(
        "a rejected draft stays in the state",
        "caches/states.py",
        "blocks * num_places + counts % num_places",
        "blocks * num_places + 0 * counts",
        "test_recurrent and wrong_drafts and alone",
    ),
    Mutation(
        "a draft's state goes to the block of the next token",
        "caches/states.py",
        "blocks.gather(1, (positions.clamp(min=0) // ",
        "blocks.gather(1, ((positions + 1).clamp(min=0) // ",
        "test_recurrent and wrong_drafts and prefixes",
    ),
]
