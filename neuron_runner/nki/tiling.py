"""Layout of a (query tile, KV tile) pair on a NeuronCore, and whether it fits.

A pass works on some query heads of a tile at once: its rows are (head, query) with the query innermost, one a
partition. Where a pass spans several KV heads, products run over all its rows, and what belongs to another KV head is
zero or thrown away.
"""

from dataclasses import dataclass

PARTITIONS = 128
SBUF_PARTITION_BYTES = 192 * 1024
MAX_MOVING = 512
KERNEL_QUERY_TILE = 128
KERNEL_KV_TILE = 512
"""Tiles that the runner plans where the kernels run: as many queries as partitions, as many keys as a product takes."""
MAX_OUTPUT = 1024
"""Columns of a pass's output over all its KV heads, two PSUM banks of float32."""


def heads_of_pass(num_heads: int, num_kv_heads: int, head_size: int, query_tile: int) -> tuple[int, int]:
    """(query heads, KV heads) of a pass: the most that fit and divide the heads evenly."""
    group = num_heads // num_kv_heads
    if query_tile * group > PARTITIONS:
        heads = max(h for h in range(1, group + 1) if group % h == 0 and h * query_tile <= PARTITIONS)
        return heads, 1
    most = max(1, min(PARTITIONS // (query_tile * group), MAX_OUTPUT // head_size))
    kv_heads = max(h for h in range(1, num_kv_heads + 1) if num_kv_heads % h == 0 and h <= most)
    return kv_heads * group, kv_heads


@dataclass(frozen=True)
class Tiling:
    """The sizes of one kernel. Raises ValueError, saying what to change, where they do not fit a NeuronCore."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    query_tile: int
    kv_tile: int
    itemsize: int
    """Bytes of an element of query and cache."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads are no multiple of {self.num_kv_heads} KV heads")
        if not 1 <= self.head_size <= PARTITIONS:
            raise ValueError(
                f"the kernel takes heads of up to {PARTITIONS}, not {self.head_size}: set VLLM_NEURON_NKI=0 to run "
                f"attention as plain torch"
            )
        if not 1 <= self.query_tile <= PARTITIONS:
            raise ValueError(f"query tiles hold up to {PARTITIONS} tokens, not {self.query_tile}: lower query_tile")
        if self.kv_tile > PARTITIONS and self.kv_tile % PARTITIONS:
            raise ValueError(
                f"a KV tile of {self.kv_tile} is neither up to {PARTITIONS} nor a multiple of it: choose a block size "
                f"that divides {PARTITIONS} or is a multiple of it"
            )
        if self.itemsize not in (2, 4):
            raise ValueError(f"query and cache must be bfloat16, float16 or float32, not of {self.itemsize} bytes")
        if self.sbuf_bytes > SBUF_PARTITION_BYTES:
            raise ValueError(
                f"a pair takes {self.sbuf_bytes} bytes of each SBUF partition, which has {SBUF_PARTITION_BYTES}: "
                f"choose a smaller KV tile (or block) than {self.kv_tile}, or spread the KV heads by tensor parallelism"
            )

    @property
    def heads_per_pass(self) -> int:
        return heads_of_pass(self.num_heads, self.num_kv_heads, self.head_size, self.query_tile)[0]

    @property
    def kv_heads_per_pass(self) -> int:
        return heads_of_pass(self.num_heads, self.num_kv_heads, self.head_size, self.query_tile)[1]

    @property
    def passes(self) -> int:
        return self.num_heads // self.heads_per_pass

    @property
    def rows(self) -> int:
        """Partitions that a pass uses."""
        return self.heads_per_pass * self.query_tile

    @property
    def sbuf_bytes(self) -> int:
        """Upper bound of the bytes that are in use at once in a partition."""
        d, s, b = self.head_size, self.kv_tile, self.itemsize
        chunks = -(-s // PARTITIONS)
        cache = chunks * 2 * self.num_kv_heads * d * b + self.num_kv_heads * s * b
        queries = self.passes * self.kv_heads_per_pass * self.rows * b + 2 * d * b
        state = self.passes * (d + 2) * 4 + self.kv_heads_per_pass * d * 4 * 4
        scores = s * (5 * 4 + b) + self.rows * b
        small = 4 * (chunks + 32 + d)
        return cache + queries + state + scores + small
