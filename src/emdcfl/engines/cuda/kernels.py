"""Triton kernels for bfloat16 training steps, and the functions that launch them. Needs triton: import it only where there is a GPU.

Images are channels-last, so a pixel's channels lie side by side. Sums are taken in an order that depends on shapes alone: results are
bit-identical from run to run.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from emdcfl.core.tasks import Training

SGD_BLOCK, SGD_TOGETHER = 2048, 16
"""Numbers per program, and most tensors per launch: each is a branch of the kernel."""


@triton.jit
def _sgd(weights, gradients, velocity, copies, sizes: tl.constexpr, lr, momentum, decay, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    first = 0
    for i in tl.static_range(len(sizes)):
        last = first + (sizes[i] + BLOCK - 1) // BLOCK
        if (program >= first) & (program < last):
            at = (program - first) * BLOCK + tl.arange(0, BLOCK)
            inside = at < sizes[i]
            w = tl.load(weights[i] + at, mask=inside)
            v = tl.load(velocity[i] + at, mask=inside) * momentum + (tl.load(gradients[i] + at, mask=inside).to(tl.float32) + decay * w)
            w -= lr * v
            tl.store(velocity[i] + at, v, mask=inside)
            tl.store(weights[i] + at, w, mask=inside)
            tl.store(copies[i] + at, w.to(copies[i].dtype.element_ty), mask=inside)
        first = last


def update_copies(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], velocity: Sequence[Tensor], copies: Sequence[Tensor], training: Training
) -> None:
    r"""Update :math:`v \leftarrow \beta v + g + \lambda w`, :math:`w \leftarrow w - \eta v` and the copies of w; all have the same strides.

    torch's fused SGD reads float32 gradients, and autocast then reads all weights again to make its copies. This takes gradients as the
    backward pass leaves them, so every number passes through memory once. A copy may be the weight itself.
    """
    for begin in range(0, len(weights), SGD_TOGETHER):
        parts = [tuple(tensors[begin : begin + SGD_TOGETHER]) for tensors in (weights, gradients, velocity, copies)]
        sizes = tuple(w.numel() for w in parts[0])
        programs = sum(triton.cdiv(size, SGD_BLOCK) for size in sizes)
        _sgd[(programs,)](*parts, sizes, training.lr, training.momentum, training.weight_decay, SGD_BLOCK, num_warps=8)


@triton.jit
def _take(index, scale, last, counter, mine, own, ours, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    step, at = tl.load(counter), tl.arange(0, BLOCK)
    inside, there = at < WIDTH, step * WIDTH + at
    tl.store(mine + at, tl.load(index + there, mask=inside), mask=inside)
    tl.store(own + at, tl.load(scale + there, mask=inside), mask=inside)
    tl.store(ours + at, tl.load(last + there, mask=inside), mask=inside)
    tl.debug_barrier()  # all threads have read the counter
    tl.store(counter, step + 1)


def take(rows: Sequence[Tensor], counter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row that the counter names of each of three matrices, and count."""
    index, scale, last = rows
    found = torch.empty_like(index[0]), torch.empty_like(scale[0]), torch.empty_like(last[0])
    width = index.shape[1]
    _take[(1,)](index, scale, last, counter, *found, width, triton.next_power_of_2(width), num_warps=1)
    return found


@triton.jit
def _patches(x, m, M, k, H, W, OH, OW, CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, S: tl.constexpr, P: tl.constexpr):
    """Rows ``m`` of the matrix of patches of images ``(N, CHANNELS, H, W)``, zero outside the image."""
    n, r = m // (OH * OW), m % (OH * OW)
    c, tap = k // (KH * KW), k % (KH * KW)
    y = ((r // OW) * S - P)[:, None] + (tap // KW)[None, :]
    z = ((r % OW) * S - P)[:, None] + (tap % KW)[None, :]
    inside = (m < M)[:, None] & (c < CHANNELS)[None, :] & (y >= 0) & (y < H) & (z >= 0) & (z < W)
    return tl.load(x + (n[:, None] * CHANNELS + c[None, :]) * (H * W) + y * W + z, mask=inside, other=0.0)


@triton.jit
def _narrow_forward(
    x, w, b, out, M, H, W, OH, OW,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    OUT: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    m, k, o = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, K), tl.arange(0, OUT)
    SIZE: tl.constexpr = CHANNELS * KH * KW
    rows = _patches(x, m, M, k, H, W, OH, OW, CHANNELS, KH, KW, S, P)
    columns = tl.load(w + o[None, :] * SIZE + k[:, None], mask=(k < SIZE)[:, None], other=0.0)
    found = tl.dot(rows, columns) + tl.load(b + o).to(tl.float32)[None, :]
    tl.store(out + m[:, None] * OUT + o[None, :], tl.maximum(found, 0.0).to(out.dtype.element_ty), mask=(m < M)[:, None])


@triton.jit
def _narrow_backward(
    gradient, out, x, sums, M, H, W, OH, OW,
    BLOCKS: tl.constexpr, CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    OUT: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    k, o, program = tl.arange(0, K), tl.arange(0, OUT), tl.program_id(0)
    SIZE: tl.constexpr = CHANNELS * KH * KW
    total = tl.zeros((K, OUT), tl.float32)
    for block in range(BLOCKS):
        m = (program * BLOCKS + block) * BM + tl.arange(0, BM)
        at, inside = m[:, None] * OUT + o[None, :], (m < M)[:, None]
        alive = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) > 0.0
        g = tl.where(alive, tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32), 0.0)
        rows = _patches(x, m, M, k, H, W, OH, OW, CHANNELS, KH, KW, S, P).to(tl.float32)
        rows = tl.where((k == SIZE)[None, :], 1.0, rows)  # the column of ones sums the bias's gradient
        total = tl.dot(tl.trans(rows.to(x.dtype.element_ty)), g.to(x.dtype.element_ty), total)
    tl.store(sums + (program * K + k[:, None]) * OUT + o[None, :], total)


def _narrow_shape(x: Tensor, w: Tensor, stride: int, padding: int) -> tuple[int, ...]:
    _, channels, height, width = x.shape
    kh, kw = w.shape[2:]
    return height, width, (height + 2 * padding - kh) // stride + 1, (width + 2 * padding - kw) // stride + 1, channels, kh, kw


NARROW_BLOCK, NARROW_PROGRAMS = 128, 264


def narrow_forward(x: Tensor, w: Tensor, b: Tensor, stride: int, padding: int) -> Tensor:
    """Return relu(conv(x)), channels last, for contiguous images with few channels and contiguous weights."""
    h, wide, oh, ow, channels, kh, kw = _narrow_shape(x, w, stride, padding)
    out = x.new_empty(len(x), oh, ow, len(w))
    m, k = len(x) * oh * ow, max(16, triton.next_power_of_2(channels * kh * kw + 1))
    _narrow_forward[(triton.cdiv(m, NARROW_BLOCK),)](
        x, w, b, out, m, h, wide, oh, ow, channels, kh, kw, stride, padding, len(w), k, NARROW_BLOCK, num_warps=4
    )
    return out.permute(0, 3, 1, 2)


def narrow_sums(out: Tensor, w: Tensor) -> tuple[int, int, int]:
    """Return programs, rows of their sums, and blocks of pixels per program."""
    pixels = triton.cdiv(out.numel() // len(w), NARROW_BLOCK)
    blocks = triton.cdiv(pixels, NARROW_PROGRAMS)
    return triton.cdiv(pixels, blocks), max(16, triton.next_power_of_2(w[0].numel() + 1)), blocks


def narrow_backward(gradient: Tensor, out: Tensor, x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    """Return partial sums ``(programs, K, outputs)`` of the gradients of weights (first rows) and bias (the row after them)."""
    h, wide, oh, ow, channels, kh, kw = _narrow_shape(x, w, stride, padding)
    m = len(x) * oh * ow
    programs, k, blocks = narrow_sums(out, w)
    sums = torch.empty(programs, k, len(w), device=x.device)
    _narrow_backward[(programs,)](
        gradient, out, x, sums, m, h, wide, oh, ow, blocks, channels, kh, kw, stride, padding, len(w), k, NARROW_BLOCK, num_warps=4
    )
    return sums


@triton.jit
def _conv_pool(x, w, b, out, place, M, H, W, IN: tl.constexpr, OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, o, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    PH, PW = H // 2, W // 2
    window, corner = m // 4, m % 4  # the four pixels of a pool follow each other
    n, r = window // (PH * PW), window % (PH * PW)
    y, z = (r // PW) * 2 + corner // 2, (r % PW) * 2 + corner % 2
    total = tl.zeros((BM, BN), tl.float32)
    for i in range(9 * (IN // BK)):
        tap, part = i // (IN // BK), i % (IN // BK)
        yy, zz = y + tap // 3 - 1, z + tap % 3 - 1
        inside = (m < M) & (yy >= 0) & (yy < H) & (zz >= 0) & (zz < W)
        rows = tl.load(x + (((n * H + yy) * W + zz) * IN + part * BK)[:, None] + k[None, :], mask=inside[:, None], other=0.0)
        columns = tl.load(w + o[None, :] * (9 * IN) + (tap * IN + part * BK) + k[:, None])
        total = tl.dot(rows, columns, total)
    four = tl.reshape(total.to(out.dtype.element_ty).to(tl.float32), (BM // 4, 4, BN))
    largest, which = tl.max(four, 1, return_indices=True, return_indices_tie_break_left=True)
    found = largest + tl.load(b + o).to(tl.float32)[None, :]
    windows = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
    at, inside = windows[:, None] * OUT + o[None, :], (windows * 4 < M)[:, None]
    tl.store(out + at, tl.maximum(found, 0.0).to(out.dtype.element_ty), mask=inside)
    tl.store(place + at, tl.where(found > 0.0, which, 4).to(tl.int8), mask=inside)  # 4: ``fused.CORNERS``


CONV_POOL = {"BM": 64, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3}
"""Fastest of ten shapes on an H200 for the paper's CNN."""


def conv_pool(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return relu(max-pool(conv(x)) + b) of a 3×3 convolution and a 2×2 pool, and the place of every maximum, all channels last."""
    n, channels, height, width = x.shape
    out = x.new_empty(n, height // 2, width // 2, len(w))
    place = torch.empty_like(out, dtype=torch.int8)
    grid = triton.cdiv(n * height * width, CONV_POOL["BM"]), len(w) // CONV_POOL["BN"]
    _conv_pool[grid](x, w, b, out, place, n * height * width, height, width, channels, len(w), **CONV_POOL)
    return out.permute(0, 3, 1, 2), place.permute(0, 3, 1, 2)


@triton.jit
def _pool(x, out, place, M, H, W, C: tl.constexpr, BM: tl.constexpr):
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, C)
    OH, OW = H // 2, W // 2
    n, r = m // (OH * OW), m % (OH * OW)
    y, z = (r // OW) * 2 - 1, (r % OW) * 2 - 1
    best, which = tl.full((BM, C), float("-inf"), tl.float32), tl.zeros((BM, C), tl.int32)
    for tap in tl.static_range(9):
        yy, zz = y + tap // 3, z + tap % 3
        inside = (m < M) & (yy >= 0) & (zz >= 0)  # windows of images of even size end inside
        found = tl.load(x + (((n * H + yy) * W + zz) * C)[:, None] + c[None, :], mask=inside[:, None], other=float("-inf")).to(tl.float32)
        better = (found > best) | (found != found)
        best, which = tl.where(better, found, best), tl.where(better, tap, which)
    at, inside = m[:, None] * C + c[None, :], (m < M)[:, None]
    tl.store(out + at, best.to(out.dtype.element_ty), mask=inside)
    tl.store(place + at, which.to(tl.int8), mask=inside)


@triton.jit
def _pool_backward(gradient, place, of_x, M, OH, OW, C: tl.constexpr, BM: tl.constexpr):
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, C)
    y, z = m // OW % OH, m % OW
    here = m[:, None] * C + c[None, :]
    inside, below, right = (m < M)[:, None], ((m < M) & (y + 1 < OH))[:, None], ((m < M) & (z + 1 < OW))[:, None]
    # the four pixels at (2y, 2z) are in this window and in those below it, to its right, and both
    g, p = tl.load(gradient + here, mask=inside, other=0.0).to(tl.float32), tl.load(place + here, mask=inside, other=-1)
    gr, pr = tl.load(gradient + here + C, mask=right, other=0.0).to(tl.float32), tl.load(place + here + C, mask=right, other=-1)
    down = here + OW * C
    gb, pb = tl.load(gradient + down, mask=below, other=0.0).to(tl.float32), tl.load(place + down, mask=below, other=-1)
    both = below & right
    gd, pd = tl.load(gradient + down + C, mask=both, other=0.0).to(tl.float32), tl.load(place + down + C, mask=both, other=-1)
    n = m // (OH * OW)
    corner = (((n * 2 * OH + 2 * y) * 2 * OW + 2 * z) * C)[:, None] + c[None, :]
    kind = of_x.dtype.element_ty
    first = tl.where(p == 4, g, 0.0)
    second = tl.where(p == 5, g, 0.0) + tl.where(pr == 3, gr, 0.0)
    third = tl.where(p == 7, g, 0.0) + tl.where(pb == 1, gb, 0.0)
    fourth = (tl.where(p == 8, g, 0.0) + tl.where(pr == 6, gr, 0.0)) + (tl.where(pb == 2, gb, 0.0) + tl.where(pd == 0, gd, 0.0))
    tl.store(of_x + corner, first.to(kind), mask=inside)
    tl.store(of_x + corner + C, second.to(kind), mask=inside)
    tl.store(of_x + corner + 2 * OW * C, third.to(kind), mask=inside)
    tl.store(of_x + corner + 2 * OW * C + C, fourth.to(kind), mask=inside)


POOL_BLOCK = 16


def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maxima of 3×3 windows, two pixels apart, padded by one, and their places in the windows, all channels last."""
    n, channels, height, width = x.shape
    out = x.new_empty(n, height // 2, width // 2, channels)
    place = torch.empty_like(out, dtype=torch.int8)
    m = n * (height // 2) * (width // 2)
    _pool[(triton.cdiv(m, POOL_BLOCK),)](x, out, place, m, height, width, channels, POOL_BLOCK, num_warps=4)
    return out.permute(0, 3, 1, 2), place.permute(0, 3, 1, 2)


def pool_backward(gradient: Tensor, place: Tensor) -> Tensor:
    """Return the gradient of what was pooled."""
    n, channels, high, wide = gradient.shape
    of_x = gradient.new_empty(n, 2 * high, 2 * wide, channels)
    m = n * high * wide
    _pool_backward[(triton.cdiv(m, POOL_BLOCK),)](gradient, place, of_x, m, high, wide, channels, POOL_BLOCK, num_warps=4)
    return of_x.permute(0, 3, 1, 2)
