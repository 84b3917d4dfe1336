"""Faults in a device's kernels and weights, for what few models have."""

from device_fault import DeviceFault, variant

OWN_MEMORY = """
@classmethod
def shares_host_memory(cls, vllm_config):
    return False
"""
"""Body of a platform whose device has memory of its own."""

OWN_FORMAT = """
def make_format(self):
    return Format(self.num_kv_heads, self.head_size, self.numbers)
"""

# A kernel for decode rows that does not leave out what no token sees.
UNMASKED = """
def attend_decode(self, query, kv_cache, plan):
    keys, values = kv_cache[plan.pair_blocks].flatten(1, 2).split(self.num_kv_heads, dim=2)
    group = self.num_heads // self.num_kv_heads
    keys, values = (x.repeat_interleave(group, dim=2) for x in (keys, values))
    queries = query.view(-1, plan.last.shape[1], self.num_heads, self.head_size)
    out, place = torch.zeros_like(queries), torch.arange(plan.kv_tile)
    for row in range(len(queries)):
        pairs = (plan.pair_tile == row).nonzero().flatten()
        seen = place <= plan.last[pairs].unsqueeze(2)
        scores = self.scale * torch.einsum("qhd,pshd->hqps", queries[row], keys[pairs])
        scores = scores.masked_fill(~seen.transpose(0, 1), -6e4).flatten(2)
        out[row] = torch.einsum("hqn,nhd->qhd", scores.softmax(dim=-1), values[pairs].flatten(0, 1))
    return out.flatten(0, 1).flatten(1)
"""

# Heads are shared out by a shift, which is right for groups of 1, 2, 4, ... heads.
SHIFTED_HEADS = UNMASKED.replace(
    "keys, values = (x.repeat_interleave(group, dim=2) for x in (keys, values))",
    "heads = [head >> (group - 1).bit_length() for head in range(self.num_heads)]\n"
    "    keys, values = (x[:, :, heads] for x in (keys, values))",
)

WITHOUT_MAXIMUM = UNMASKED.replace("scores.softmax(dim=-1)", "scores.exp() / scores.exp().sum(dim=-1, keepdim=True)")

# Of a context that fills all of its KV tiles the last keys are lost.
LOST_KEYS = UNMASKED.replace(
    "        scores = self.scale",
    "        if len(pairs) and seen.sum() % 512 == 0:\n"
    "            seen[-1] &= place <= plan.last[pairs[-1]].unsqueeze(1) - 16\n"
    "        scores = self.scale",
)

# Products of weights and values are added to a sum in the model's dtype, which loses what is small.
ROUNDED_SUMS = UNMASKED.replace(
    'out[row] = torch.einsum("hqn,nhd->qhd", scores.softmax(dim=-1), values[pairs].flatten(0, 1))',
    "weights = scores.softmax(dim=-1).permute(2, 1, 0).unsqueeze(3)\n"
    "        out[row] = sum(weights * values[pairs].flatten(0, 1).unsqueeze(1))",
)

WITHOUT_WINDOWS = """
def attend_decode(self, query, kv_cache, plan):
    return super().attend_decode(query, kv_cache, replace(plan, first=None))
"""

FIXED_EPS = """
from vllm.model_executor.layers.layernorm import RMSNorm
@RMSNorm.register_oot
class Norm(RMSNorm):
    def forward_oot(self, x, residual=None):
        self.variance_epsilon = 1e-6
        return self.forward_native(x, residual)
"""

OWN_SCALE = """
def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.scale = self.head_size ** -0.5
"""

WITHOUT_LOGIT_SCALE = """
from vllm.model_executor.layers.logits_processor import LogitsProcessor
def unscaled(self, *args, make=LogitsProcessor.__init__, **kwargs):
    make(self, *args, **kwargs)
    self.scale = 1.0
LogitsProcessor.__init__ = unscaled
"""

ONE_ROTARY_STYLE = """
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
@RotaryEmbedding.register_oot
class Rotary(RotaryEmbedding):
    def forward_oot(self, positions, query, key=None):
        rows, parts = self.cos_sin_cache[positions.flatten()], []
        cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
        for part in (query, key):
            heads = part.view(len(rows), -1, self.head_size)
            turned, rest = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
            one, other = turned.chunk(2, dim=-1)
            turned = torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)
            parts.append(torch.cat((turned, rest), dim=-1).view(part.shape))
        return parts[0], parts[1]
"""

TRANSPOSED = """
class Format(CacheFormat):
    def shape(self, num_blocks, block_size):
        return (num_blocks, 2, self.num_kv_heads, self.head_size, block_size)
    def write(self, kv_cache, blocks, offsets, key, value):
        heads = -1, self.num_kv_heads, self.head_size
        for part, rows in enumerate((key, value)):
            kv_cache[blocks.long(), part, :, :, offsets.long()] = rows.view(heads)
    def read(self, kv_cache, plan):
        entries, size = plan.entries.long(), kv_cache.shape[-1]
        shape = -1, plan.kv_tile, self.num_kv_heads, self.head_size
        places = entries // size, entries % size
        return tuple(kv_cache[places[0], part, :, :, places[1]].view(shape) for part in (0, 1))
"""
"""Format of a device whose slots are the last dimension, and of the size of a head."""
FUSED = (
    TRANSPOSED.replace("self.head_size, block_size)", "self.head_size * block_size)")
    .replace("        entries, size", "        kv_cache = self.apart(kv_cache)\n        entries, size")
    .replace("        heads = -1", "        kv_cache = self.apart(kv_cache)\n        heads = -1")
)
FUSED += """
    def apart(self, kv_cache):
        return kv_cache.view(*kv_cache.shape[:3], self.head_size, -1)
"""
"""The same with the last two dimensions as one."""
LOSES_KEYS = TRANSPOSED.replace(
    "key, value)):", "torch.where(offsets[:, None, None] == 4, 0, key.view(heads)), value)):"
)
"""The same, without the keys of each block's slot 4."""

SHORT_IDS = """
def attend_decode(self, query, kv_cache, plan):
    ids = plan.pair_blocks
    return super().attend_decode(query, kv_cache, replace(plan, pair_blocks=ids.short().to(ids.dtype) & 0x7FFF))
"""

COUNTS_CACHES = """
taken = 0
def memory_info(self):
    return MemoryInfo(free=(1 << 30) - Ops.taken, total=1 << 30)
def zeros(self, shape, dtype):
    return self.counted(super().zeros(shape, dtype))
@staticmethod
def counted(tensor):
    Ops.taken += tensor.nbytes
    weakref.finalize(tensor.untyped_storage(), Ops.free, tensor.nbytes)
    return tensor
@staticmethod
def free(count):
    Ops.taken -= count
"""
"""Body of operations that count what ``zeros`` takes."""
COUNTS = "import weakref\nfrom model_runner_base.device_ops import MemoryInfo"
"""Imports of those operations."""
COUNTS_WEIGHTS = """
def load_model(self):
    super().load_model()
    for weight in self.model.parameters():
        Ops.counted(weight)
"""
"""Body of a runner that counts weights, too."""


def without(attribute: str) -> str:
    """Body of an implementation of attention that ignores what a layer asks for by an attribute."""
    return f"def __init__(self, *args, **kwargs):\n    super().__init__(*args, **kwargs)\n    self.{attribute} = None"


FAULTS = [
    DeviceFault(
        "a kernel shares out heads by a shift, which is wrong for three heads a group",
        0,
        variant(attention=SHIFTED_HEADS),
        "test_attention and three",
        r"groups of three heads, with a head size of 80, prompt of .*; step \d+, .*layer 1",
    ),
    DeviceFault(
        "a kernel does not subtract the largest score",
        0,
        variant(attention=WITHOUT_MAXIMUM),
        "test_attention and large",
        r"scores whose exponential is infinite, prompt of .*; step \d+, .*layer 1",
    ),
    DeviceFault(
        "a kernel ignores soft caps",
        0,
        variant(attention=without("logits_soft_cap")),
        "test_attention and gemma2",
        r"\[gemma2\] soft caps, prompt of .*; step \d+, .*layer 1",
    ),
    DeviceFault(
        "a kernel ignores sinks",
        0,
        variant(attention=without("sinks")),
        "test_attention and gpt-oss",
        r"\[gpt-oss\] sinks, prompt of .*; step \d+, .*layer 1",
    ),
    DeviceFault(
        "a kernel ignores ALiBi",
        0,
        variant(attention=without("alibi_slopes")),
        "test_attention and bloom",
        r"\[bloom\] ALiBi, prompt of .*; step \d+, .*layer 1",
    ),
    DeviceFault(
        "a kernel for decode ignores windows",
        0,
        variant(attention=WITHOUT_WINDOWS, top="from dataclasses import replace"),
        "test_attention and not test_features",
        r"a window of 20 tokens, prompt of .*; step \d+, .*layer 1",
        ("--profile", "smoke"),
    ),
    DeviceFault(
        "RMSNorm has a fixed eps",
        0,
        variant(top=FIXED_EPS),
        "test_attention and not test_features",
        r"RMSNorm with an eps of 1e-3, a rotary theta of 500, prompt of \d+ tokens",
        ("--profile", "smoke"),
    ),
    DeviceFault(
        "a kernel takes the scale from the size of a head",
        0,
        variant(attention=OWN_SCALE),
        "test_attention and scales",
        r"scales of embeddings, residuals, scores and logits, prompt of .*; step \d+, .*layer 1",
        ("--profile", "smoke"),
        on_both_releases=True,
    ),
    DeviceFault(
        "logits are not scaled",
        0,
        variant(top=WITHOUT_LOGIT_SCALE),
        "test_attention and scales",
        r"scales of embeddings, residuals, scores and logits, prompt of .*log probability of token",
        ("--profile", "smoke"),
    ),
    DeviceFault(
        "a rotary kernel knows one style alone",
        0,
        variant(top=ONE_ROTARY_STYLE),
        "test_attention and not test_features",
        r"interleaved rotary positions in half of a head, prompt of .*; step \d+, .*keys of layer 0",
        ("--profile", "smoke"),
    ),
    DeviceFault(
        "a rotary kernel knows one style alone, in bfloat16",
        0,
        variant(top=ONE_ROTARY_STYLE, platform="import torch\ndtypes = (torch.bfloat16,)"),
        "test_rotary_style",
        r"interleaved rotary positions in half of a head, prompt of .*bfloat16 moves logits .*keys of layer 0",
        ("--profile", "smoke"),
        on_both_releases=True,
    ),
    DeviceFault(
        "a cache of a layout of its own loses keys",
        0,
        variant(attention=OWN_FORMAT, top=LOSES_KEYS),
        "test_one_request and llama",
        r"llama, prompt of .*; step \d+, .*keys of layer 0 at position \d+ \(block \d+, slot 4\)",
    ),
    DeviceFault(
        "a kernel keeps ids of blocks in 16 bits",
        0,
        variant(attention=SHORT_IDS, top="from dataclasses import replace"),
        "test_high_block_ids",
        r"blocks with ids above 32,767, prompt of .*; step \d+, .*layer 1",
    ),
    DeviceFault(
        "a kernel loses keys of a context whose KV tiles are all full",
        0,
        variant(attention=LOST_KEYS),
        "test_decodes_past_powers_of_two",
        r"\(50[67] tokens\).* (output|logprobs of token) \d+",
    ),
    DeviceFault(
        "a kernel adds up in the model's dtype",
        0,
        variant(attention=ROUNDED_SUMS),
        "test_half_precision",
        r"bfloat16: log probabilities of outputs are 0\.\d+ from float32, and transformers' 0\.\d+ are at most",
    ),
    DeviceFault(
        "the head is a copy of the embedding, which a reload leaves as it was",
        20,
        variant(
            top="import copy",
            runner="def load_model(self):\n"
            "    super().load_model()\n"
            "    self.model.lm_head = copy.deepcopy(self.model.lm_head)\n",
        ),
        "test_tied_weights",
        r"other, prompt of \d+ tokens",
    ),
    DeviceFault(
        "weights are not counted as taken",
        0,
        variant(platform=OWN_MEMORY, ops=COUNTS_CACHES, top=COUNTS),
        "figures",
        r"weights of \d+ bytes lower the free memory of memory_info by 0",
    ),
]
