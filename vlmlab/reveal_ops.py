"""This machine's kernels as callables that sum, for `reveal`.

OPS             name to adapter: sum, mean, dot, matmul, linear, attention, layer_norm, rms_norm, hf_norm, sglang_norm,
                softmax

Every adapter fills a short batch of masks up, since the shape chooses the kernel.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from vlmlab import kernels
from vlmlab.arithmetic import rms_norm as engines_norm
from vlmlab.errors import VlmlabError
from vlmlab.floats import format_of, round_to
from vlmlab.reveal import BlackBox


def torch_sum(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu", rows: int = 256) -> BlackBox:
    """torch.sum over the last axis of [rows, n]."""
    return _reduction("sum", n, dtype, device, rows, lambda x: x.sum(-1))


def torch_mean(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu", rows: int = 256) -> BlackBox:
    """torch.mean over the last axis of [rows, n]."""
    return _reduction("mean", n, dtype, device, rows, lambda x: x.mean(-1), 1.0 / n)


def _reduction(
    name: str,
    n: int,
    dtype: torch.dtype,
    device: str,
    rows: int,
    reduce: Callable[[Tensor], Tensor],
    scale: float = 1.0,
) -> BlackBox:
    def run(numbers: Tensor) -> Tensor:
        return reduce(_filled(numbers, rows, dtype, device))[: len(numbers)]

    return BlackBox(name, n, dtype, run, rows, scale, _accumulator(dtype))


def _filled(numbers: Tensor, rows: int, dtype: torch.dtype, device: str) -> Tensor:
    if len(numbers) == rows and numbers.dtype == dtype and device == "cpu":
        return numbers
    x = torch.zeros(rows, numbers.shape[1], dtype=dtype, device=device)
    x[: len(numbers)] = numbers.to(device)
    return x


def _accumulator(dtype: torch.dtype) -> str:
    return "fp64" if dtype == torch.float64 else "fp32"


def linear(
    n: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tokens: int = 1,
    row: int = 0,
    width: int = 512,
    threads: int | None = None,
) -> BlackBox:
    """One row of torch.nn.functional.linear on [tokens, n] with a weight [width, n]; masks are rows of the weight.

    Args: n: summands. tokens: rows of the batch, M. row: which of them. width: output features. threads: of torch on
    the CPU, None for as many as there are.
    """

    def multiply(x: Tensor, numbers: Tensor) -> Tensor:
        weight = _filled(numbers, width, dtype, device)
        batch = x.to(device).expand(tokens, n).contiguous()
        with _threads(threads):
            return functional.linear(batch, weight)[row, : len(numbers)]

    return _product("linear", n, dtype, multiply, width)


def matmul(
    n: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tokens: int = 512,
    row: int = 0,
    width: int = 512,
    threads: int | None = None,
) -> BlackBox:
    """One row of torch.matmul of [tokens, n] with [n, width]; masks are columns of the second. Args: as in linear."""

    def multiply(x: Tensor, numbers: Tensor) -> Tensor:
        right = _filled(numbers, width, dtype, device).T.contiguous()
        batch = x.to(device).expand(tokens, n).contiguous()
        with _threads(threads):
            return torch.matmul(batch, right)[row, : len(numbers)]

    return _product("matmul", n, dtype, multiply, width)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dot(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> BlackBox:
    """torch.dot; one mask per call."""
    return _product("dot", n, dtype, lambda x, numbers: torch.dot(numbers[0].to(device), x.to(device))[None], 1)


def _product(
    name: str, n: int, dtype: torch.dtype, multiply: Callable[[Tensor, Tensor], Tensor], rows: int
) -> BlackBox:
    ones = torch.ones(n, dtype=dtype)
    return BlackBox(name, n, dtype, lambda x: multiply(ones, x), rows, 1.0, _accumulator(dtype), multiply)


def attention(
    n: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tokens: int = 1,
    row: int = 0,
    width: int = 64,
    channel: int = 0,
    threads: int | None = 1,
) -> BlackBox:
    """One channel of scaled_dot_product_attention over n equally weighted keys; masks are sequences of a batch.

    Not channels: on the CPU the channels of one product are not all added in the same order, and with several threads
    not even the same channel of every sequence. The weights in bf16 come from a rough exponential there, so that few
    replayed sums may fall on the other side of a tie.

    Args: n: keys. tokens: queries. row: which of them. width: channels of a head. channel: which of them. threads: of
    torch on the CPU, None for as many as there are.
    """
    sequences = 64

    def run(numbers: Tensor) -> Tensor:
        values = torch.zeros(sequences, 1, n, width, dtype=dtype, device=device)
        values[: len(numbers), 0, :, channel] = numbers.to(device)
        queries = torch.zeros(sequences, 1, tokens, width, dtype=dtype, device=device)
        with _threads(threads):
            out = functional.scaled_dot_product_attention(queries, torch.zeros_like(values), values)
        return out[: len(numbers), 0, row, channel]

    inverse = torch.tensor(1.0 / n, dtype=torch.promote_types(dtype, torch.float32)).item()
    return BlackBox("attention", n, dtype, run, sequences, inverse, _accumulator(dtype))


# ---------------------------------------------------------------------------------------------------- positive sums


def layer_norm(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu", rows: int = 256) -> BlackBox:
    """The mean inside torch.nn.functional.layer_norm of [rows, n], read back from the first number's result."""

    def run(numbers: Tensor) -> Tensor:
        x = _filled(numbers, rows, dtype, device)
        y = functional.layer_norm(x, (n,), eps=0.0)[: len(numbers), :].double().cpu()
        exact = numbers.double()
        at = exact.abs().argmin(1, keepdim=True)
        deviation = exact.var(1, unbiased=False, keepdim=True).sqrt()
        return (exact.gather(1, at) - y.gather(1, at) * deviation)[:, 0]

    return BlackBox("layer_norm", n, dtype, run, rows, 1.0 / n, _accumulator(dtype))


def _norm(
    name: str, n: int, dtype: torch.dtype, device: str, rows: int, norm: Callable[[Tensor], Tensor], eps: float = 1e-6
) -> BlackBox:
    """A norm over [rows, n] by the root mean square. The sum of squares is read from the largest number's result."""

    def roots(numbers: Tensor) -> Tensor:
        return numbers.double().sqrt().to(dtype)

    def run(numbers: Tensor) -> Tensor:
        y = norm(_filled(roots(numbers), rows, dtype, device))[: len(numbers)]
        return y.gather(1, numbers.argmax(1, keepdim=True).to(device))[:, 0]

    def summands(numbers: Tensor) -> Tensor:
        return roots(numbers).float().square().double()

    def finish(total: Tensor, numbers: Tensor) -> Tensor:
        inverse = ((total.float().to(device) / n) + eps).rsqrt()  # where the kernel runs: rsqrt differs
        largest = roots(numbers).amax(1).float().to(device)
        return round_to((largest * inverse).double().cpu(), format_of(dtype))

    return BlackBox(name, n, dtype, run, rows, summands=summands, finish=finish)


def rms_norm(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu", rows: int = 256) -> BlackBox:
    """torch.nn.functional.rms_norm."""
    return _norm("rms_norm", n, dtype, device, rows, lambda x: functional.rms_norm(x, (n,), eps=1e-6))


def hf_norm(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu", rows: int = 256) -> BlackBox:
    """Transformers' RMSNorm."""
    ones = torch.ones(n, dtype=dtype, device=device)
    return _norm("hf_norm", n, dtype, device, rows, lambda x: engines_norm(x, ones, 1e-6, "hf"))


def sglang_norm(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu", rows: int = 256) -> BlackBox:
    """SGLang's RMSNorm: its own kernel on CUDA, which takes no float32, its torch path elsewhere.

    Raises: VlmlabError: SGLang's kernel cannot be loaded or does not take the dtype.
    """
    way = "sglang" if device == "cpu" else "kernel"
    if way == "kernel" and (dtype == torch.float32 or "rms_norm" not in kernels.available(device, {})):
        raise VlmlabError(f"SGLang's norm kernel for {device} is not there or does not take {dtype}")
    ones = torch.ones(n, dtype=dtype, device=device)
    return _norm("sglang_norm", n, dtype, device, rows, lambda x: engines_norm(x, ones, 1e-6, way))


def softmax(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu", rows: int = 256) -> BlackBox:
    """The denominator of torch.softmax over the last axis of [rows, n], read from the largest number's result.

    Replayed on one 1 and small numbers of 16 sizes. What the kernel makes of each is asked of itself, at its place and
    beside a 1 that swallows it, since its exponential is not torch.exp.
    """
    sizes = torch.exp2(-25.0 - torch.arange(1, 17, dtype=torch.float64) / 5)

    def of(numbers: Tensor) -> Tensor:
        return torch.softmax(_filled(numbers.double().log().to(dtype), rows, dtype, device), -1)[: len(numbers)]

    def draw(count: int, generator: torch.Generator) -> Tensor:
        numbers = sizes[torch.randint(len(sizes), (count, n), generator=generator)]
        return numbers.scatter(1, torch.randint(n, (count, 1), generator=generator), 1.0)

    def summands(numbers: Tensor) -> Tensor:
        places, found = torch.arange(n), torch.ones_like(numbers)
        for size in sizes:
            alone = torch.zeros(n, n, dtype=torch.float64)
            alone[places, places], alone[places, (places + 1) % n] = size, 1.0
            made = torch.cat([of(part).double().cpu() for part in alone.split(rows)]).diagonal()
            found = torch.where(numbers == size, made, found)
        return found

    def finish(total: Tensor, numbers: Tensor) -> Tensor:
        return round_to((1.0 / total.float()).double(), format_of(dtype))

    return BlackBox("softmax", n, dtype, lambda x: of(x).amax(1), rows, summands=summands, finish=finish, draw=draw)


OPS: dict[str, Callable[..., BlackBox]] = {
    "sum": torch_sum,
    "mean": torch_mean,
    "dot": dot,
    "matmul": matmul,
    "linear": linear,
    "attention": attention,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "hf_norm": hf_norm,
    "sglang_norm": sglang_norm,
    "softmax": softmax,
}
