"""Optimizers in float64 from their equations alone: no flat buffers, no batching, no shared code
with the package.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalised(matrix: Tensor) -> Tensor:
    """Newton-Schulz as it acts on singular values: U f(S) V^T, f five times s -> a s + b s^3 + c
    s^5.
    """
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / max(float(s.square().sum().sqrt()), 1e-7)
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    return u @ torch.diag(s) @ vt


def jordan(matrix: Tensor) -> Tensor:
    """The iteration as Keller Jordan wrote it down, one matrix at a time, in the matrix's own
    dtype.
    """
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class AdamW:
    """One tensor under AdamW, in its own dtype."""

    def __init__(
        self, param: Tensor, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ):
        self.param, self.lr, self.betas, self.eps, self.decay = (
            param.clone(),
            lr,
            betas,
            eps,
            weight_decay,
        )
        self.m = self.v = torch.zeros_like(param)
        self.t = 0

    def update(self, grad: Tensor) -> None:
        self.t += 1
        b1, b2 = self.betas
        self.m, self.v = b1 * self.m + (1 - b1) * grad, b2 * self.v + (1 - b2) * grad**2
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        self.param = (
            self.param - self.lr * self.decay * self.param - self.lr * m / (v.sqrt() + self.eps)
        )


class Muon:
    """One matrix under Muon, in its own dtype; in float64 the iteration is done on the singular
    values.
    """

    def __init__(self, param: Tensor, lr: float, momentum: float, weight_decay: float):
        self.param, self.lr, self.mu, self.decay = param.clone(), lr, momentum, weight_decay
        self.m = torch.zeros_like(param)

    def update(self, grad: Tensor) -> None:
        self.m = self.mu * self.m + (1 - self.mu) * grad
        nesterov = self.mu * self.m + (1 - self.mu) * grad
        direction = orthogonalised(nesterov) if grad.dtype == torch.float64 else jordan(nesterov)
        scale = 0.2 * math.sqrt(max(grad.shape))
        self.param = self.param - self.lr * self.decay * self.param - self.lr * scale * direction


def moving_average(history: list[Tensor], decay: float) -> Tensor:
    """sum_i d^(t - i) p_i / sum_i d^(t - i) over all that the parameters were after each update."""
    weights = [decay ** (len(history) - 1 - i) for i in range(len(history))]
    return sum(w * p.double() for w, p in zip(weights, history, strict=True)) / sum(weights)


def steps(values: Tensor, signed: bool) -> Tensor:
    """Where values lie on the scale of 8-bit codes, before rounding, block by block of 256, in
    float64.
    """
    found = []
    for block in values.double().split(256):
        largest = float(block.abs().max())
        share = block.abs() / largest if largest else block.abs()
        found.append(127 * share**0.5 * block.sign() if signed else 255 * share**0.25)
    return torch.cat(found)


def decoded(codes: Tensor, largest: Tensor) -> Tensor:
    """What 8-bit codes stand for, one by one."""
    signed = codes.dtype == torch.int8
    exact = []
    for index, code in enumerate(codes.tolist()):
        share = math.copysign((code / 127) ** 2, code) if signed else (code / 255) ** 4
        exact.append(share * float(largest[index // 256]))
    return torch.tensor(exact, dtype=torch.float64)
