"""Run rounds of updates in processes that stay: each holds one system's training and continues when
told to.

So rounds of many systems are interleaved, though each loop belongs to its system, and no round pays
for compiling. A waiting process blocks on a pipe and uses no CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, TextIO
from unittest import mock

import harness
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import monograph.engine
import monograph.step
from monograph.device import clock
from monograph.loss import token_loss
from monograph.model.llama import Llama
from monograph.profiling.memory import LiveBytes

# Operators that only make views of memory or allocate it launch nothing.
QUIET = (
    "aten::view", "aten::_unsafe_view", "aten::_reshape_alias", "aten::as_strided", "aten::reshape", "aten::expand",
    "aten::slice", "aten::select", "aten::split", "aten::split_with_sizes", "aten::chunk", "aten::narrow", "aten::t",
    "aten::transpose", "aten::permute", "aten::unsqueeze", "aten::squeeze", "aten::detach", "aten::alias", "detach",
    "aten::unflatten", "aten::lift_fresh", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::resize_",
    "aten::set_", "aten::result_type", "aten::is_nonzero", "aten::item", "aten::_local_scalar_dense", "aten::new_empty",
    "aten::unbind", "aten::resolve_conj", "aten::resolve_neg", "aten::_has_compatible_shallow_copy_type",
)  # fmt: skip

# Launched as one kernel, though they call operators that prepare it.
OUR_PRODUCT = "monograph_small_matmul"
ONE_KERNEL = ("mkldnn::_linear_pointwise", OUR_PRODUCT)


class Orders:
    """The side of the process that trains: `updated()` counts, answers when a round is done and
    waits for an order.

    The first answer comes after `warm_up` updates. The order {"updates": n} times n updates;
    {"watch": "kernels"} and {"watch": "bytes"} examine one update; the end of the input ends the
    process.
    """

    def __init__(
        self,
        reply: TextIO,
        warm_up: int,
        targets: Callable[[], int],
        ready: Callable[[], dict[str, Any]],
    ):
        self.reply, self.targets, self.ready = reply, targets, ready
        self.left, self.order = warm_up, {"warm_up": warm_up}
        self.began, self.cpu, self.counted, self.watch = clock(), time.process_time(), 0, None

    def updated(self) -> None:
        """Count an update; to be called after each one."""
        self.left -= 1
        if self.left:
            return
        wall, cpu = clock() - self.began, time.process_time() - self.cpu
        answer: dict[str, Any] = {
            "wall_s": wall,
            "cpu_s": cpu,
            "targets": self.targets() - self.counted,
        }
        if "warm_up" in self.order:
            answer |= self.ready()
        if self.watch is not None:
            self.watch.__exit__(None, None, None)
            answer[self.order["watch"]] = seen(self.watch)
        self.reply.write(json.dumps(answer) + "\n")
        self.reply.flush()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # without the system's own shutdown, which would save, print or wait
        self.order = json.loads(line)
        self.left, self.watch = self.order.get("updates", 1), watch(self.order.get("watch"))
        self.counted, self.cpu, self.began = self.targets(), time.process_time(), clock()


def watch(what: str | None) -> Any:
    """Start a counter of kernels or bytes and return it; None for neither."""
    if what is None:
        return None
    if what == "kernels":
        _show_products()
    watching = (
        LiveBytes()
        if what == "bytes"
        else profile(activities=[ProfilerActivity.CPU], acc_events=True)
    )
    watching.__enter__()
    return watching


def _show_products() -> None:
    """Let the profiler see the function that captured graphs call without torch's dispatcher."""
    from torch._inductor.select_algorithm import extern_kernels

    if function := getattr(extern_kernels, OUR_PRODUCT, None):
        setattr(extern_kernels, OUR_PRODUCT, record_function(OUR_PRODUCT)(function))


def seen(watching: Any) -> int:
    """Return the peak of bytes beyond those before, or the number of operators and compiled kernels
    that ran.

    If an operator calls another one, only the called one counts.
    """
    if isinstance(watching, LiveBytes):
        return watching.peak_bytes
    leaves = [
        event.name
        for event in watching.events()
        if not event.cpu_children or event.name in ONE_KERNEL
    ]
    return sum(
        name.startswith(("aten::", "cpp_", "graph_", *ONE_KERNEL)) and name not in QUIET
        for name in leaves
    )


class FirstGradient:
    """The gradient of a system's first update, before it is clipped, and its relative error against
    float64.
    """

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        self.model = model
        self.gradients: dict[str, Tensor] = {}
        self._clip, self._update = torch.nn.utils.clip_grad_norm_, monograph.step.update

    def __enter__(self) -> FirstGradient:
        def clip(*arguments: Any, **options: Any) -> Tensor:
            self._keep()
            return self._clip(*arguments, **options)

        def update(step: Any) -> Any:
            self._keep()
            return self._update(step)

        self._patches = [
            mock.patch.object(torch.nn.utils, "clip_grad_norm_", clip),
            mock.patch.object(monograph.engine, "update", update),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        mock.patch.stopall()

    def _keep(self) -> None:
        mock.patch.stopall()  # later updates run without our patches
        for name, parameter in self.model().named_parameters():
            assert parameter.grad is not None, name
            self.gradients[name.removeprefix("net.")] = parameter.grad.detach().double().clone()


def large_batch(model: Llama, documents: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the float64 gradient of the mean loss over all targets, each document alone, by
    parameter name.
    """
    model = model.double()
    total = sum(len(targets) for _, targets in documents)
    for inputs, targets in documents:
        loss, _ = token_loss(model, {"tokens": inputs[None], "targets": targets[None]})
        (loss / total).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return |found - expected| / |expected| over all parameters together."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in found)
    return (difference / sum(float(tensor.square().sum()) for tensor in expected.values())) ** 0.5


class Child:
    """The side that gives orders: one system in its own process."""

    def __init__(
        self,
        command: list[str],
        threads: int,
        environment: dict[str, str],
        python: str = sys.executable,
    ) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        limits = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen(
            [python, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | limits | environment,
        )

    def answer(self) -> dict[str, Any]:
        """Return its answer after its warm-up or an order.

        Raises:
            ChildFailed: it ended instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self.process.wait()
        self.errors.seek(0)
        told = [
            each
            for each in self.errors.read().decode(errors="replace").splitlines()
            if each.strip()
        ]
        self.end()
        raise ChildFailed(told[-1] if told else f"exit code {self.process.returncode}", told[-40:])

    def ask(self, **order: Any) -> dict[str, Any]:
        """Give an order and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def go_on(self) -> None:
        """Let it go on to the end of its own training, and wait for that.

        Raises:
            ChildFailed: it ended otherwise.
        """
        assert self.process.stdin is not None
        try:
            self.ask(updates=sys.maxsize)
        except ChildFailed:
            if self.process.returncode:
                raise

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


class ChildFailed(Exception):
    """The process of a system ended; has its last words, and the lines before them."""


def interleaved(
    children: dict[str, Child], updates: dict[str, int], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Run every child once per round, `updates` of each, in the order of `harness.turns`."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in children}
    for name in harness.turns(children, rounds):
        answers[name].append(children[name].ask(updates=updates[name]))
    return answers
