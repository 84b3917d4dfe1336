"""Primitives that the kernels are written in, over the current ``nki``.

The names, argument order and meaning of what is called here are those of the NKI 0.7 documentation (Neuron SDK 2.33;
``nl.fori_loop`` came with 0.6): results go into ``dst``, outputs lie in ``shared_hbm``, ``.ap()`` takes
``[step, count]`` pairs with the dimension that ``scalar_offset`` and ``vector_offset`` count in.

Another dialect is another module with these functions: the kernels call nothing else. What it must provide:

- memory: ``sbuf``, ``psum``, ``output``, ``scratch``; a tile's first dimension is its partitions, its second is free;
- moves between HBM and SBUF: ``load_row``, ``load_rows``, ``store_row``, ``store_rows``, ``gather``, ``scatter``;
- the tensor engine: ``matmul`` (accumulates in float32), ``transpose``;
- element-wise work, computed in float32 and rounded when written: the rest;
- control: ``loop`` and ``load_scalar``. A loop's counter is opaque: it is only passed on to the moves.

An older dialect with functional results writes ``dst[...] = op(...)`` in each of them. Not run on Neuron hardware.
"""

import nki.isa as nisa
import nki.language as nl

float32 = nl.float32
int32 = nl.int32


def sbuf(shape, dtype):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(shape, dtype):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def output(shape, dtype):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def scratch(shape, dtype):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm)


# Moves. ``row`` is a loop counter; HBM tensors are two-dimensional.


def load_row(dst, src, row, offset=0):
    """``dst`` [p, n] = p * n elements of one row of ``src``, from column ``offset``, partition after partition."""
    p, n = dst.shape
    nisa.dma_copy(dst=dst, src=src.ap([[n, p], [1, n]], offset=offset, scalar_offset=row, indirect_dim=0))


def load_rows(dst, src, row, first=0):
    """``dst`` [p, n] = p whole rows of ``src`` [-1, n] from ``first + row`` on, one a partition."""
    p, n = dst.shape
    nisa.dma_copy(dst=dst, src=src.ap([[n, p], [1, n]], offset=first * n, scalar_offset=row, indirect_dim=0))


def store_row(dst, row, src, offset=0):
    """The reverse of ``load_row``."""
    p, n = src.shape
    nisa.dma_copy(dst=dst.ap([[n, p], [1, n]], offset=offset, scalar_offset=row, indirect_dim=0), src=src)


def store_rows(dst, row, src):
    """The reverse of ``load_rows``."""
    p, n = src.shape
    nisa.dma_copy(dst=dst.ap([[n, p], [1, n]], scalar_offset=row, indirect_dim=0), src=src)


def gather(dst, src, index):
    """``dst`` [p, n] = the rows of ``src`` [-1, n] that ``index`` [p, 1] int32 names: one indirect DMA."""
    p, n = dst.shape
    nisa.dma_copy(dst=dst, src=src.ap([[n, p], [1, n]], vector_offset=index, indirect_dim=0))


def scatter(dst, index, src):
    """Rows of ``dst`` [-1, n] that ``index`` [p, 1] names = ``src`` [p, n]; an index out of bounds writes nothing."""
    p, n = src.shape
    view = dst.ap([[n, p], [1, n]], vector_offset=index, indirect_dim=0)
    nisa.dma_copy(dst=view, src=src, oob_mode=nisa.oob_mode.skip)


# The tensor engine.


def matmul(dst, stationary, moving, accumulate):
    """``dst`` [m, n] in PSUM = or += ``stationary`` [k, m] transposed @ ``moving`` [k, n]."""
    nisa.nc_matmul(dst, stationary, moving, accumulate=accumulate)


def transpose(dst, src):
    """``dst`` [n, m] in PSUM = ``src`` [m, n] transposed, of the same dtype."""
    nisa.nc_transpose(dst, src)


# Element-wise. ``a column`` is [p, 1] float32, broadcast along the free dimension.


def fill(dst, value):
    nisa.memset(dst, value)


def copy(dst, src):
    nisa.tensor_copy(dst, src)


def strided(tile, first, step, count):
    """Columns ``first``, ``first + step``, ... of a whole tile."""
    p, n = tile.shape
    return tile.ap([[n, p], [step, count]], offset=first)


def count_up(dst, steps, row_step):
    """``dst`` [p, n] int32: row r starts at r * ``row_step``; ``steps`` are [step, count] pairs along the row."""
    nisa.iota(dst=dst, pattern=steps, offset=0, channel_multiplier=row_step)


def compare(dst, src, op, column, value):
    """``dst`` = ``value`` where ``src`` <op> ``column`` holds, else 0."""
    nisa.tensor_scalar(dst=dst, data=src, op0=op, operand0=column, op1=nl.multiply, operand1=value)


greater = nl.greater
greater_equal = nl.greater_equal
less = nl.less


def add_constant(dst, src, value):
    nisa.tensor_scalar(dst=dst, data=src, op0=nl.add, operand0=value)


def negate(dst, src):
    nisa.tensor_scalar(dst=dst, data=src, op0=nl.multiply, operand0=-1.0)


def at_least(dst, src, value):
    nisa.tensor_scalar(dst=dst, data=src, op0=nl.maximum, operand0=value)


def scale_rows(dst, src, column):
    nisa.tensor_scalar(dst=dst, data=src, op0=nl.multiply, operand0=column)


def add(dst, a, b):
    nisa.tensor_tensor(dst, a, b, nl.add)


def multiply(dst, a, b):
    nisa.tensor_tensor(dst, a, b, nl.multiply)


def maximum(dst, a, b):
    nisa.tensor_tensor(dst, a, b, nl.maximum)


def scale_add(dst, src, factor, addend):
    """``dst`` = ``src`` * ``factor`` (a number or a column) + ``addend``."""
    nisa.scalar_tensor_tensor(dst=dst, data=src, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=addend)


def reciprocal(dst, src):
    nisa.reciprocal(dst, src)


def tanh(dst, src, scale):
    nisa.activation(dst=dst, op=nl.tanh, data=src, scale=scale)


def exp(dst, src, bias):
    """``dst`` = exp(``src`` + ``bias``), ``bias`` a column."""
    nisa.activation(dst=dst, op=nl.exp, data=src, bias=bias)


def exp_and_sum(dst, src, bias, total):
    """``exp``, and ``total`` [p, 1] = the sum of each row before it is rounded."""
    nisa.activation(
        dst=dst,
        op=nl.exp,
        data=src,
        bias=bias,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


def row_max(dst, src):
    """``dst`` [p, 1] = the largest of each row of ``src`` [p, n]."""
    nisa.tensor_reduce(dst, nl.maximum, src, 1, keepdims=True)


def add_groups(dst, tile, groups):
    """``dst`` [p, n] = the sum of ``groups`` side by side in a whole tile [p, groups * n]."""
    p, n = dst.shape
    view = tile.ap([[groups * n, p], [1, n], [n, groups]])
    nisa.tensor_reduce(dst, nl.add, view, 2)


# Control.


def load_scalar(tile):
    """A loop bound from a tile [1, 1] int32 in SBUF."""
    register = nisa.register_alloc()
    nisa.register_load(register, tile)
    return register


def loop(lower, upper, body, step=1):
    """``body(i)`` for i from ``lower`` to ``upper``, which are numbers or ``load_scalar``'s; one copy of the body."""
    nl.fori_loop(lower, upper, body, step)
