"""Layers of image towers that can be in graphs: no operator of vLLM's own, no view that the lazy device lacks."""

import torch
from torch.nn import functional as F
from vllm.model_executor.layers.attention import MMEncoderAttention
from vllm.model_executor.layers.conv import Conv2dLayer, Conv3dLayer

from model_runner_base.inputs.multimodal.towers.encoder_graphs import QUERIES
from model_runner_base.step.rounds import State, run_rounds


@torch.library.custom_op("neuron_runner::segment_attention", mutates_args=())
def segment_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: torch.Tensor, scale: float, reach: int
) -> torch.Tensor:
    """Attention in which patches with the same number in ``segments`` [P] see each other.

    ``query``, ``key``, ``value`` and the result are [1, P, heads, head size]. Patches of one segment are adjacent, and
    at most ``reach``.

    An operator of its own, so that a capture with symbolic sizes leaves the loop over parts of the queries to each
    size's compilation. Each part sees as many patches as another one: those that any of its segments may have.
    """
    count = len(segments)
    size = min(QUERIES, count)
    num_seen = min(count, size + 2 * reach)

    def body(number: torch.Tensor, state: State, reads: State) -> State:
        q, k, v, segments = reads
        begin = (number * size).clamp(max=count - size)
        own = begin + torch.arange(size, dtype=torch.int32, device=number.device)
        first = (begin - reach).clamp(0, count - num_seen)
        seen = first + torch.arange(num_seen, dtype=torch.int32, device=number.device)
        sees = segments[own].unsqueeze(1) == segments[seen].unsqueeze(0)
        scores = torch.matmul(q[own].transpose(0, 1).float() * scale, k[seen].permute(1, 2, 0).float())
        weights = torch.where(sees, scores, float("-inf")).softmax(-1).to(v.dtype)
        out = torch.matmul(weights, v[seen].transpose(0, 1)).transpose(0, 1)
        return (state[0].index_put((own,), out),)

    most = -(-count // size)
    rounds = torch.full((), most, dtype=torch.int32, device=query.device)
    state, reads = (torch.zeros_like(query[0]),), (query[0], key[0], value[0], segments)
    return run_rounds(rounds, most, body, state, reads)[0].unsqueeze(0)


@segment_attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: torch.Tensor, scale: float, reach: int
) -> torch.Tensor:
    return torch.empty_like(query)


class NeuronTowerAttention(MMEncoderAttention):
    """Attention of a tower; on the host it is vLLM's own.

    On the device ``cu_seqlens`` holds the segment of each patch (``PatchTower.encode``), and patches of a segment see
    each other. Without it all patches of a tile do.
    """

    reach = 1 << 30
    """The most patches of a segment."""

    def forward_oot(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        **further: torch.Tensor | None,
    ) -> torch.Tensor:
        """``further``: further arguments about segments, of later releases of vLLM."""
        if query.device.type != "xla":
            return self.forward_native(query, key, value, cu_seqlens, max_seqlen, **further)
        if cu_seqlens is not None:
            scale = self.head_size**-0.5 if self.scale is None else self.scale
            return segment_attention(query, key, value, cu_seqlens, scale, self.reach)
        q, k, v = (x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2) for x in (query, key, value))
        is_grouped = self.num_heads > self.num_kv_heads
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=is_grouped).transpose(1, 2)
        return out.reshape(query.shape)


class NeuronConv2d(Conv2dLayer):
    """Convolution as one product a patch, on the device and if patches do not overlap; otherwise vLLM's own."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        if not self.enable_linear or x.device.type != "xla":
            return self.forward_native(x)
        down, across = self.kernel_size
        count, channels, height, width = x.shape
        rows, columns = height // down, width // across
        x = x[:, :, : rows * down, : columns * across].reshape(count, channels, rows, down, columns, across)
        patches = x.permute(0, 2, 4, 1, 3, 5).reshape(count, rows * columns, -1)
        out = F.linear(patches, self.weight.flatten(1), self.bias)
        return out.transpose(1, 2).reshape(count, -1, rows, columns)


class NeuronConv3d(Conv3dLayer):
    """Convolution of single patches [P, ...] as one product, on the device; otherwise vLLM's own."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        if not self.enable_linear or x.device.type != "xla":
            return self.forward_native(x)
        return F.linear(x.flatten(1), self.weight.flatten(1), self.bias).view(len(x), -1, 1, 1, 1)
