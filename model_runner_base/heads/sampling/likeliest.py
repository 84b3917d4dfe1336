"""The largest numbers of long rows, found piece by piece on devices that cannot search a whole row."""

import torch
from torch.nn import functional


def likeliest(values: torch.Tensor, count: int, max_width: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the ``count`` largest numbers of each row, largest first, and their places: [S, count], int32.

    Args:
        values: [S, V] float, V >= count.
        max_width: the longest row that may be searched at a time, at least twice ``count``; None: any length. Longer
            rows are cut into pieces of one length, and the largest numbers of all pieces are searched again. Places are
            integers throughout, so they are exact in vocabularies of any size.
    """
    if max_width is None or values.shape[1] <= max_width:
        top, places = values.topk(count, dim=-1)
        return top, places.to(torch.int32)
    # Forbidden tokens are raised from -inf to the lowest finite number, so that padding, which is -inf, comes last.
    lowest = torch.finfo(values.dtype).min
    top, places = _by_pieces(values.clamp(min=lowest), count, max_width)
    return torch.where(top == lowest, float("-inf"), top), places


def _by_pieces(values: torch.Tensor, count: int, max_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what ``likeliest`` does, for rows without -inf; only the padding that it adds is -inf."""
    num_rows, width = values.shape
    if width <= max_width:
        top, places = values.topk(count, dim=-1)
        return top, places.to(torch.int32)
    num_pieces = -(-width // max_width)
    piece = -(-width // num_pieces)
    padded = functional.pad(values, (0, num_pieces * piece - width), value=float("-inf"))
    top, places = padded.reshape(num_rows * num_pieces, piece).topk(count, dim=-1)
    starts = torch.arange(num_pieces, dtype=torch.int32, device=values.device) * piece
    places = (places.to(torch.int32).view(num_rows, num_pieces, count) + starts.view(1, -1, 1)).view(num_rows, -1)
    top, among = _by_pieces(top.view(num_rows, -1), count, max_width)
    return top, places.gather(-1, among.long())
