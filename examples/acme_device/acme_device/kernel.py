"""The attention kernel: it reads cache blocks by a list of pairs."""

import torch


@torch.library.custom_op("acme::attend", mutates_args=())
def attend(
    query: torch.Tensor,  # [tiles, Q, H, D]
    cache: torch.Tensor,  # [blocks, block size, 2 * KV heads, D]: keys, then values
    pair_tile: torch.Tensor,
    pair_blocks: torch.Tensor,
    first: torch.Tensor | None,
    last: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Outputs of all query tiles; any finite numbers where a query sees no key."""
    out = torch.zeros_like(query)
    place = torch.arange(pair_blocks.shape[1] * cache.shape[1], device=cache.device)  # in the KV tile
    seen = place <= last.unsqueeze(2)  # [pairs, Q, KV tile]
    if first is not None:
        seen &= place >= first.unsqueeze(2)
    for tile in range(len(query)):  # in parallel, in a real kernel
        own = pair_tile == tile
        read = seen[own].any(dim=1)  # Other entries are old, or of other requests, and may be NaN.
        keys, values = cache[pair_blocks[own]].flatten(1, 2)[read].chunk(2, dim=1)  # [n, KV heads, D]
        group = query.shape[2] // keys.shape[1]
        scores = torch.einsum("qhd,nhd->hqn", query[tile], keys.repeat_interleave(group, dim=1)) * scale
        mask = seen[own].transpose(1, 2)[read].T
        weights = scores.masked_fill(~mask, -1e30).softmax(dim=2)
        out[tile] = torch.einsum("hqn,nhd->qhd", weights, values.repeat_interleave(group, dim=1))
    return out


@attend.register_fake
def _(query: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(query)
