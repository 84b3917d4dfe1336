"""Faults in what a device itself does: memory, copies, waits, kernels, graphs."""

from device_fault import DeviceFault, variant
from kernel_faults import OWN_FORMAT, OWN_MEMORY, UNMASKED

# The host's array is read again at the next wait, as by a copy that is late.
LATE = """
reads = []
def to_device(self, array, out=None):
    tensor = torch.from_numpy(array.copy())
    self.reads.append((tensor, array))
    return tensor
def to_host(self, tensor):
    self.synchronize()
    return super().to_host(tensor)
def synchronize(self):
    while self.reads:
        tensor, array = self.reads.pop()
        tensor.copy_(torch.from_numpy(array))
"""

OLD_SLOTS = """
HELD = {}
class Format(CacheFormat):
    def write(self, kv_cache, blocks, offsets, key, value):
        super().write(kv_cache, blocks, offsets, key, value)
        count, held = len(blocks), HELD.setdefault(kv_cache.data_ptr(), torch.zeros(2, 4096, dtype=torch.long))
        kv_cache[held[0, count:], held[1, count:]] = self.rows(key, value)[-1]
        held[0, :count], held[1, :count] = blocks, offsets
"""

# Copies and addresses are of whole words.
DROPS_BYTES = """
def to_device(self, array, out=None):
    if out is None:
        return super().to_device(array)
    count = array.nbytes // 4 * 4
    written, sent = (x.reshape(-1).view(torch.uint8)[:count] for x in (out, torch.from_numpy(array.copy())))
    written.copy_(sent)
    return out
"""

ARENA = """
memory, used = torch.zeros(1 << 22, dtype=torch.uint8), 0
def zeros(self, shape, dtype):
    if dtype != torch.uint8:
        return super().zeros(shape, dtype)
    start, count = Ops.used, int(np.prod(shape))
    Ops.used += count // 8 * 8
    return Ops.memory[start : start + count].view(shape).zero_()
"""

LAST_SLOT = """
class Format(CacheFormat):
    def write(self, kv_cache, blocks, offsets, key, value):
        slots = torch.where(blocks > 0, blocks * kv_cache.shape[1] + offsets, -1)
        kv_cache.flatten(0, 1)[slots] = self.rows(key, value)
"""

LARGEST_SIZES = """
def configure(self, limits):
    super().configure(limits)
    self.set_sizes(limits.largest_sizes)
def wrap(self, function, state):
    return function
def num_compilations(self):
    return len(self.sizes)
"""

SMALLER_SIZES = "[*limits.largest_sizes, limits.decode_size(1, 2), limits.decode_size(2, 4)]"
"""Sizes of a policy; the example device warms up the largest alone."""

# A graph's results lie where the graph has them; its first run is of the largest step.
RESULTS_IN_PLACE = """
def wrap(self, function, state):
    places = {}
    def call(*args):
        result = function(*args)
        if not isinstance(result, torch.Tensor):
            return result
        place = places.setdefault(tuple(result.shape), result)
        return place.copy_(result)
    return call
"""

CLONES = """
def begin_to_host(self, tensor):
    return super().begin_to_host(tensor.clone())
"""

# The same of the steps' graphs alone; what samples and draws is none.
STEPS_IN_PLACE = """
def wrap(self, function, state):
    places = {}
    def call(*args):
        results = function(*args)
        if not isinstance(args[0], StepSize):
            return results
        *results, packed = results
        held = places.setdefault(args[0], results)
        return [*(place.copy_(result) for place, result in zip(held, results)), packed]
    return call
"""

USED_AGAIN = """
unread = None
def begin_to_host(self, tensor):
    self.unread = tensor
    return lambda: self.to_host(tensor)
def to_device(self, array, out=None):
    if self.unread is not None and not self.unread.is_floating_point():
        self.unread.fill_(1 << 20)
    self.unread = None
    return super().to_device(array, out)
"""

COARSE_NOISE = """
from model_runner_base.heads.sampling import sampler
def noise(seed_low, seed_high, position, count, start=0):
    exact = -torch.exp(-sampler_noise(seed_low, seed_high, position, count, start))
    return -torch.log(-torch.log((torch.exp(exact) * 1023).round() / 1023))
sampler_noise, sampler.gumbel_noise = sampler.gumbel_noise, noise
"""

SCALED_BY_ALL = """
from vllm.model_executor.layers.activation import SiluAndMul
@SiluAndMul.register_oot
class Activation(SiluAndMul):
    def forward_oot(self, x):
        scale = x.abs().amax()
        gate, up = (x / scale * scale).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
"""

COMPILED_KERNEL = """
from vllm.model_executor.layers.activation import SiluAndMul
@torch.compile(backend="eager", dynamic=False)
def fused_activation(x):
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
@SiluAndMul.register_oot
class Activation(SiluAndMul):
    def forward_oot(self, x):
        return fused_activation(x)
"""

FAULTS = [
    DeviceFault(
        "integers that are sent keep 24 bits",
        16,
        variant(
            ops="def to_device(self, array, out=None):\n"
            "    if array.ndim == 2 and array.shape[1] == 3 and array.dtype == np.int32:\n"
            "        array = array & 0xFFFFFF\n"
            "    return super().to_device(array, out)\n"
        ),
        "test_each_bit",
        r"seed 16777216 has the tokens of seed 0: its bits are not all read",
        on_both_releases=True,
    ),
    DeviceFault(
        "a library is not found, so that no engine starts",
        0,
        variant(runner="def load_model(self):\n    raise RuntimeError('kernel library not found')"),
        "test_start or test_equality",
        "RuntimeError: kernel library not found",
        ("--maxfail=0",),  # Here the check itself ends the kit.
    ),
    DeviceFault(
        "copies to a tensor that exists are of whole words",
        0,
        variant(ops=DROPS_BYTES),
        "test_device_operations",
        r"to_device with out, uint8 \(\d+,\), \d+ bytes: the tensor has \d wrong numbers",
    ),
    DeviceFault(
        "an arena rounds sizes down, so that tensors overlap",
        0,
        variant(ops=ARENA),
        "test_tensors_do_not_overlap",
        r"the tensor of \d+ bytes from zeros shares its bytes from \d+ on with another, where tensor \d+, from zeros",
    ),
    DeviceFault(
        "more memory is reported free than there is",
        0,
        variant(
            ops="""
def memory_info(self):
    memory = super().memory_info()
    return type(memory)(free=16 << 40, total=memory.total)
"""
        ),
        "test_figures",
        "memory_info: 17592186044416 bytes are free of",
    ),
    DeviceFault(
        "memory that is taken stays free",
        0,
        variant(
            platform=OWN_MEMORY,
            ops="""
def memory_info(self):
    memory = super().memory_info()
    return type(memory)(free=memory.total * 9 // 10, total=memory.total)
""",
        ),
        "test_figures",
        r"zeros takes 67108864 bytes each time, and free memory of memory_info falls by \[0, 0, 0, 0",
    ),
    DeviceFault(
        "a step is said to need more memory than there is",
        0,
        variant(platform=OWN_MEMORY, runner="def profile_run(self):\n    return 1 << 60"),
        "test_start_by_figures",
        "memory",
    ),
    DeviceFault(
        "attention is not deterministic",
        0,
        variant(
            attention="""
def attend(self, *args):
    out = super().attend(*args)
    return out * (1 + 3e-4 * torch.randn_like(out))
"""
        ),
        "test_repeated_numbers",
        "not the same bit for bit .* log probabilities differ",
    ),
    DeviceFault(
        "a kernel multiplies what no token sees by zero",
        8,
        variant(attention=UNMASKED),
        "test_scheduled_writes",
        "NaN, which reached a result",
    ),
    DeviceFault(
        "an activation is scaled by the largest number of all tokens, padding included",
        8,
        variant(top=SCALED_BY_ALL, policy=LARGEST_SIZES),
        "test_padding_of_nan",
        r"llama, prompt of .*: output .* \(padding has NaN, which reaches a request .*\); step \d+, ",
    ),
    DeviceFault(
        "captures leave NaN in the null block",
        9,
        variant(
            runner="""
def capture_model(self):
    super().capture_model()
    for cache in self.parts.kv_caches:
        cache[0] = float("nan")
"""
        ),
        "test_scheduled_writes",
        "the null block, block 0, has NaN after warm-up",
    ),
    DeviceFault(
        "memory is not cleared",
        9,
        variant(
            ops="""
def zeros(self, shape, dtype):
    return torch.full(shape, 7, dtype=dtype)
"""
        ),
        "test_device_operations and test_zeros",
        r"zeros\(\(1,\), torch.int32\): 1 numbers are not 0",
    ),
    DeviceFault(
        "slots of a larger step stay in a kernel's buffer",
        10,
        variant(attention=OWN_FORMAT, top=OLD_SLOTS),
        "test_scheduled_writes",
        "it writes slot .* of block .*, which is of none of its tokens",
    ),
    DeviceFault(
        "padding writes slot -1",
        11,
        variant(attention=OWN_FORMAT, top=LAST_SLOT, policy=LARGEST_SIZES),
        "test_scheduled_writes",
        "the last slot of the last block: does padding write slot -1",
    ),
    DeviceFault(
        "a copy to the device shares the host's memory",
        12,
        variant(ops="def to_device(self, array, out=None):\n    return torch.from_numpy(array)"),
        "test_device_operations",
        "overwritten after the call",
    ),
    DeviceFault(
        "a copy to the device reads the host late",
        12,
        variant(ops=LATE),
        "test_device_operations",
        "overwritten after the call, .* reads the array later",
    ),
    DeviceFault(
        "copies to the host share a buffer",
        13,
        variant(
            ops="""
buffer = torch.zeros(1 << 24, dtype=torch.uint8)
def begin_to_host(self, tensor):
    host = self.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    host.copy_(tensor)
    return lambda: host.numpy()
"""
        ),
        "test_device_operations",
        "begin_to_host .* of 4 that are under way",
    ),
    DeviceFault(
        "memory of sampled ids is used again before they are read",
        13,
        variant(ops=USED_AGAIN),
        "test_ids_under_load",
        "ids .* are not in the vocabulary",
    ),
    DeviceFault(
        "results of every graph lie where the graph has them; copies to the host are made of a clone",
        13,
        variant(ops=CLONES, policy=LARGEST_SIZES + RESULTS_IN_PLACE),
        "test_device_operations",
        "graph_policy.wrap, run 1 of 3 of a function without a StepSize",
    ),
    DeviceFault(
        "a step's graph, the only one, runs again before its result is read",
        13,
        variant(top="from model_runner_base import StepSize", policy=LARGEST_SIZES + STEPS_IN_PLACE),
        "test_results_are_kept or test_pooling and vectors_of_tokens",
        r"prompt of \d+ tokens: off by .*; step \d+, ",
    ),
    DeviceFault(
        "noise has so few bits that it is infinite",
        16,
        variant(top=COARSE_NOISE),
        "test_noise",
        r"top_k.*, seed=\d+: output 0 is .* \(random numbers of 0 or 1 .*\); step \d+, ",
    ),
    DeviceFault(
        "sizes that are not warmed up are compiled by requests, and not counted",
        17,
        variant(top=COMPILED_KERNEL, policy=LARGEST_SIZES.replace("limits.largest_sizes", SMALLER_SIZES)),
        "test_no_compilation",
        "not counted by num_compilations.*torch.compile.*fused_activation",
    ),
]
