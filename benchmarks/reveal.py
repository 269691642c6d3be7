"""Revealing an order of additions with many masks per call, against one mask per call as published.

    python benchmarks/reveal.py

Both in one run on the same kernel; the trees must be equal. Source of the one-by-one pattern: Xie et al., USENIX ATC
2025, "FPRev".
"""

import dataclasses

import torch

from vlmlab.reveal import reveal_order
from vlmlab.reveal_ops import linear, matmul
from vlmlab.summation import same_order

CASES = {
    "linear bf16, n = 1024, 830 rows": linear(1024, torch.bfloat16, tokens=830),
    "linear fp32, n = 1024, 1 row": linear(1024, tokens=1),
    "linear fp32, n = 256, 16 rows": linear(256, tokens=16),
    "linear bf16, n = 256, 1 row": linear(256, torch.bfloat16, tokens=1),
    "matmul bf16, n = 256, 64 rows": matmul(256, torch.bfloat16, tokens=64),
    "matmul fp32, n = 256, 64 rows": matmul(256, tokens=64),
}


def main():
    """Print one line per case."""
    for name, box in CASES.items():
        reveal_order(box)  # warm
        many = min((reveal_order(box) for _ in range(3)), key=lambda found: found.seconds)
        one = reveal_order(dataclasses.replace(box, rows=1))
        same = many.tree is not None and same_order(many.tree, one.tree)
        print(
            f"{name}: {many.calls} calls in {many.seconds:.4f} s, one by one {one.calls} calls in {one.seconds:.3f} s: "
            f"{one.seconds / many.seconds:.0f} times faster; same tree: {same}; replay: {many.replay_bitwise_equal}"
        )


if __name__ == "__main__":
    main()
