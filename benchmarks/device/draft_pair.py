"""A target of any size, and a drafter that is right as often as wanted.

After each token the target's likeliest is the next one of the vocabulary, whatever came before: the layers have random
weights, scaled down so far that they cost what they cost and change nothing. The drafter has the same table of
embeddings, except at the tokens that it gets wrong: a fixed share of every 100 in a row, at random places.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

IN_A_ROW = 100
QUIET = 0.05
"""Factor of the weights through which the layers add to the hidden states."""


def save_target(path: Path, **config: Any) -> None:
    """Saves a checkpoint; ``config`` is LlamaConfig's."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=False))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(QUIET)
        embeddings = torch.nn.init.normal_(model.model.embed_tokens.weight)
        model.lm_head.weight.copy_(embeddings.roll(1, dims=0) / embeddings.shape[1] ** 0.5)
    model.save_pretrained(path)


def save_drafter(target: Path, path: Path, acceptance: float) -> dict[str, Any]:
    """Saves an EAGLE head of one layer for a target; returns its ``speculative_config``."""
    config = json.loads((target / "config.json").read_text())
    weights = load_file(target / "model.safetensors")
    own = {name.removeprefix("model."): weight for name, weight in weights.items() if "model.layers.0." in name}
    del own["layers.0.input_layernorm.weight"]
    # fc gets the token's embedding and the hidden state, and hands on the embedding.
    size, embeddings = config["hidden_size"], _wrong_at(weights["model.embed_tokens.weight"], 1 - acceptance)
    own |= {"fc.weight": torch.eye(size, 2 * size), "embed_tokens.weight": embeddings}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file(own, path / "model.safetensors", {"format": "pt"})
    return {"method": "eagle", "model": str(path)}


def _wrong_at(embeddings: torch.Tensor, share: float) -> torch.Tensor:
    """Embeddings in which a share of the rows is replaced by those of other tokens."""
    generator = torch.Generator().manual_seed(0)
    embeddings, others = embeddings.clone(), embeddings.roll(IN_A_ROW, dims=0)
    for start in range(0, len(embeddings), IN_A_ROW):
        places = torch.randperm(min(IN_A_ROW, len(embeddings) - start), generator=generator)
        places = start + places[: round(share * len(places))]
        embeddings[places] = others[places]
    return embeddings
