"""Plant faults that only a GPU shows into a copy of the project, one at a time: its tests on a
pretended card see them.

    python tests/pretended_gpu/environment.py run 90 python -m pretended_gpu.planted [--only TEXT]
    [--out FILE]

A fault is one edit of one line: a wait is left out, memory is not page-locked, the host reads in a
capture, a graph is stale, a tensor is on the other device. It counts as caught if its test fails,
or does not end. What is missed is printed, for a person to judge.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

assert torch.__version__  # loaded before the children, which are copies of this process

ROOT = Path(__file__).resolve().parents[2]
SRC = Path("src/monograph")
LIMIT_S = 420


class Fault(NamedTuple):
    """In `file`, `before` becomes `after`; `tests` are pytest's arguments that shall see it."""

    file: str
    before: str
    after: str
    tests: str


ORDER = "tests/pretended_gpu/test_order.py"
NEXT = f"{ORDER} -k 'streamed_is_resident and fp32 and (next or backward)'"
ON_HOST = f"{ORDER} -k 'streamed_is_resident and fp32 and host'"
OFFLOADED = f"{ORDER} -k 'resident_run and offloaded'"
OUTBOX = f"{ORDER} -k outbox"
MASKS = "tests/model/test_masks.py"
ROPE = "tests/ops/test_fused_gradients.py -k forms_for_a_gpu"
WARM_UP = f"{ORDER} -k warm_up"
WAITS = "tests/pretended_gpu/test_waits.py"
REPLAYED = "tests/laws/test_replayed_on_a_gpu.py -m gpu"
STREAMED = (
    "tests/stream/test_cuda.py -m gpu -k 'resident_on_it and bf16 and stages and not backward'"
)
PRODUCTS = "tests/ops/test_fused_gradients.py -m gpu"
PACKED = (
    "tests/laws/test_packed_is_separate.py -m gpu -k 'on_a_gpu and auto and (llama or mistral)'"
)
KERNELS = "tests/ops/test_attention_kernels.py tests/ops/test_attention.py -m gpu"
COUNTS = "tests/pretended_gpu/test_counts.py"
PARTS = "tests/predict/test_footprint.py -k one_product"
PLANNED = "tests/laws/test_planned_is_measured.py -m gpu"
LAYERS = "tests/ops/test_layer_kernels.py -m gpu"
CAPTURED = "tests/laws/test_replayed_on_a_gpu.py -m gpu -k 'another_shape or reads_is or that_fails or running_means'"
DELTA = "tests/ops/test_delta_net_kernels.py -m gpu"
DELTA_NET = f"{DELTA} -k 'by_the_layer and float32 and three and next'"
GATED = "tests/ops/test_gated_heads_kernels.py -m gpu -k float32"
LAUNCHED = "tests/laws/test_replayed_on_a_gpu.py -m gpu -k one_launch"

FAULTS = [
    # Streaming: what waits for what.
    Fault("stream/lanes.py", "stream.wait_event(self._event(mark))", "pass", NEXT),
    Fault("stream/lanes.py", "self._host.wait_for(mark.number)", "pass",
          "tests/stream/test_cuda.py -k what_the_host_writes"),
    Fault("stream/lanes.py", "[self._event(mark).synchronize for mark in work.waits]", "[]", ON_HOST),
    Fault("stream/lanes.py", "self._event(work.mark).record(stream)", "pass", NEXT),
    Fault("stream/lanes.py", "self._event(work.mark).record(stream)", "self._event(work.mark).record()", NEXT),
    Fault("stream/lanes.py", "stream.wait_event(self._event(mark))", "stream.wait_event(self._events[mark.lane][0])",
          NEXT),
    Fault("stream/lanes.py", "torch.cuda.synchronize(self.device)", "pass", NEXT),
    Fault("stream/lanes.py", "        self._host.wait_for()\n", "", ON_HOST),
    Fault("stream/lanes.py", 'stream = self._streams[work.mark.lane]', 'stream = self._streams["in"]', NEXT),
    Fault("stream/placement.py", "return pinned(like, label)", "return torch.empty_like(like, device='cpu')",
          WAITS),
    Fault("stream/slots.py", "states.append(torch.cuda.get_rng_state(self.step.device))", "pass",
          "tests/laws/test_streamed_state.py -m gpu"),
    Fault("stream/parameters.py", 'can_fuse_gradients(step, self.placement.device.type == "cuda")',
          "can_fuse_gradients(step, False)", STREAMED),
    Fault("graph/recompute.py", ".detach().to(device or tensor.device)", ".detach()",
          "tests/stream/test_cuda.py -m gpu -k share"),
    # Activations that are offloaded.
    Fault("graph/recompute.py", "self.stream.wait_stream(torch.cuda.current_stream(tensor.device))", "pass", OFFLOADED),
    Fault("graph/recompute.py", "tensor.record_stream(self.stream)", "pass", OFFLOADED),
    Fault("graph/recompute.py", "stream.wait_event(arrived)", "pass", OFFLOADED),
    Fault("graph/recompute.py", "tensor.record_stream(stream)", "pass", OFFLOADED),
    Fault("graph/recompute.py", "pin_memory=self.stream is not None", "pin_memory=False", WAITS),
    Fault("graph/recompute.py", "True), self.stream.record_event()", "True), torch.cuda.Event()", OFFLOADED),
    # The outbox of decoding.
    Fault("decode/outbox.py", "self._stream.wait_stream(torch.cuda.current_stream(self._rings[0].device))", "pass",
          OUTBOX),
    Fault("decode/outbox.py", "self._events[half].synchronize()", "pass", OUTBOX),
    Fault("decode/outbox.py", "self._events[half].record()", "pass", OUTBOX),
    Fault("decode/outbox.py", "self._half = 1 - self._half", "pass", OUTBOX),
    Fault("decode/outbox.py", "line_1.fill_(self._half * self.half_lines)", "line_1.fill_(0)", OUTBOX),
    Fault("decode/outbox.py", "pin_memory=cuda", "pin_memory=False", WAITS),
    # Windows on their way to the card.
    Fault("data/batches.py", "{key: tensor.pin_memory() for key, tensor in tensors.items()}", "tensors",
          "tests/data/test_batches.py -m gpu"),
    Fault("storage/tensor_layout.py", ".cpu()", "", "tests/storage/test_tensor_layout.py -m gpu"),
    # Captures and replays.
    Fault("graph/replay.py", "self._stream.wait_stream(current)", "pass", WARM_UP),
    Fault("graph/replay.py", "current.wait_stream(self._stream)", "pass", WARM_UP),
    Fault("graph/replay.py", "        if waits:", "        if not waits and False:", CAPTURED),
    Fault("graph/replay.py", "if not torch.equal(generator_state, torch.get_rng_state()):", "if False:",
          "tests/graph/test_replay.py -k random_numbers"),
    Fault("graph/replay.py", "                buffer.copy_(leaf)", "                pass", CAPTURED),
    Fault("graph/replay.py", "(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor)", "0 if isinstance(leaf, Tensor)",
          "tests/graph/test_static_inputs.py"),
    Fault("graph/replay.py", "except RuntimeError as error:", "except KeyError as error:", CAPTURED),
    Fault("graph/replay.py", "obstacle = recorder.warm_up(work)", "obstacle = None", CAPTURED),
    Fault("graph/replay.py", "self._graphs[variant] = _call_and_capture(work, self._recorder)",
          "self._graphs[variant] = _call_and_capture(work, self._recorder)\n"
          "                self._graphs[variant].replay()", CAPTURED),
    Fault("graph/replay.py", "leaf.device != self._device", "False", "tests/graph/test_static_inputs.py"),
    Fault("graph/capture.py", "    return any(recorded)", "    return False",
          f"{REPLAYED} -k pool"),
    Fault("graph/capture.py", 'return "blocks are recomputed between graphs"', "return None", f"{REPLAYED} -k sent_to"),
    Fault("graph/capture.py", '[AttributeValue(step.model, "blocks_captured", True)]', "[]",
          "tests/laws/test_packed_is_separate.py -m gpu -k blocks_that"),
    Fault("step/step.py", "self.recorder = CudaGraphs(self.device)", "pass", LAUNCHED),
    Fault("step/step.py", "self.loss_factor.copy_(reciprocal(total)",
          "self.loss_factor.fill_(float(total)) or self.loss_factor.copy_(reciprocal(total)", LAUNCHED),
    Fault("profiling/memory.py", "return torch.cuda.max_memory_allocated(device) + unused_graph_bytes(device)",
          "return torch.cuda.max_memory_allocated(device)", f"{REPLAYED} -k pool"),
    # Numbers that only a card computes.
    Fault("ops/fused_gradients.py", "add.dtype_out(total, left.mT", "add.dtype_out(total * 0, left.mT",
          PRODUCTS),
    Fault("ops/fused_gradients.py", "add.out(total, left.mT, right, out=total)",
          "add.out(total * 0, left.mT, right, out=total)", PRODUCTS),
    Fault("ops/fused_gradients.py", "if total.is_cuda and is_first:", "if False:", PRODUCTS),
    Fault("ops/scaled_sum_kernel.py", "if not IS_FIRST:", "if True:", PRODUCTS),
    Fault("graph/capture.py", "mode=lambda: step.parameters.begins_sums", "mode=lambda: None",
          f"{REPLAYED} -k whole_step"),
    Fault("ops/rotation.py", "is_first, -sin, sin", "~is_first, -sin, sin", ROPE),
    Fault("ops/rotation.py", "pairs.flip(axis)", "pairs", ROPE),
    Fault("ops/rotation.py", "unflatten(-1, (-1, 2) if interleaved else (2, -1))",
          "unflatten(-1, (-1, 2)).mT", ROPE),
    Fault("ops/flex_options.py", '{"FORCE_USE_FLEX_ATTENTION": True}', "{}", f"{KERNELS} -k few_queries"),
    Fault("ops/flex_options.py", '{"FORCE_USE_FLEX_ATTENTION": True}',
          '{"FORCE_USE_FLEX_ATTENTION": True, "BLOCKS_ARE_CONTIGUOUS": True}', f"{KERNELS} -k long_documents"),
    Fault("ops/flex_options.py", '{"FORCE_USE_FLEX_ATTENTION": True}',
          '{"FORCE_USE_FLEX_ATTENTION": True, "ROWS_GUARANTEED_SAFE": True}', f"{KERNELS} -k long_documents"),
    Fault("ops/attention.py", "(mask is not None or not _flash_supports(query_BHTE))", "mask is not None",
          f"{KERNELS} -k scores_of_all"),
    Fault("ops/attention.py", "if query_BHTE.dtype.itemsize != 2:", "if False:", f"{KERNELS} -k scores_of_all"),
    Fault("ops/attention.py", "heads_BKSE.repeat_interleave(groups, dim=1)",
          "heads_BKSE.repeat(1, groups, 1, 1)", f"{KERNELS} -k as_exact"),
    Fault("model/llama.py", "full_BNN = (overlap_BNN & uniform_BN[:, :, None] & uniform_BN[:, None, :]).tril(-1)",
          "full_BNN = (overlap_BNN & uniform_BN[:, :, None] & uniform_BN[:, None, :]).tril()", MASKS),
    Fault("model/llama.py", "seen & (query - key < window)", "seen & (query - key <= window)", PACKED),
    Fault("model/llama.py", "MIN_FLEX_HEAD_DIM = 16", "MIN_FLEX_HEAD_DIM = 1", f"{REPLAYED} -k one_launch"),
    Fault("model/llama.py", "high_BN = blocks_BNX.amax(dim=-1)", "high_BN = low_BN", MASKS),
    # Weights in few bits, and adapters: the scale of another block, and what belongs to another layer.
    Fault("ops/layer_kernels.py", "column_O1 * (K // 64) + begin // 64", "column_O1 * (K // 64)", LAYERS),
    Fault("ops/layer_kernels.py", "steps + block_OG // 256", "steps + block_OG // 512", LAYERS),
    Fault("ops/layer_kernels.py", "mean = tl.load(_of_layer(layer, mean_0, mean_1, mean_2, CHOICES))",
          "mean = tl.load(mean_0)", LAYERS),
    Fault("ops/layer_kernels.py", "scales = _of_layer(layer, scales_0, scales_1, scales_2, CHOICES)",
          "scales = scales_0", LAYERS),
    Fault("ops/layer_kernels.py", "b = _of_layer(layer, b_0, b_1, b_2, CHOICES)", "b = b_0", LAYERS),
    Fault("ops/layer_kernels.py", "is_column_O1 & ((ADAPTED >> layer) % 2 == 1)", "is_column_O1", LAYERS),
    # Rows with their own adapters: those of others, and what NaN in one of them does to its neighbours.
    Fault("ops/layer_kernels.py", "first_rank = slot * RANK", "first_rank = 0", LAYERS),
    Fault("ops/layer_kernels.py", "total_RO = tl.where(is_own_R1, added_RO, total_RO)", "total_RO = added_RO", LAYERS),
    # Launches, and memory that a plan counts on.
    Fault("graph/capture.py", 'compat.split_cat_options() if step.device.type == "cuda" else {}', "{}", COUNTS),
    Fault("step/on_device.py", "return device_can and reads_no_gradients", "return False", COUNTS),
    Fault("step/clip.py", "if grad.is_cuda and grad.ndim == 1:", "if False:", COUNTS),
    Fault("step/step.py", "self.lr.fill_(lr)", "self.lr.copy_(torch.tensor(lr))", COUNTS),
    Fault("ops/cross_entropy.py", 'if is_traced and device_type == "cuda" and differences is None:',
          "if False:", COUNTS),
    Fault("predict/footprint.py", "fuses_gradients(Llama, self.loss, self.precision, self.device_type == \"cuda\")",
          "False", PARTS),
    Fault("graph/siblings.py", "(nn.Parameter, FakeTensor)", "(nn.Parameter,)", PARTS),
    Fault("predict/footprint.py", '"repeated" if work.repeats_heads else "torch", "cuda")',
          '"repeated" if work.repeats_heads else "torch")', PARTS),
    Fault("graph/replay.py", "            if begun:", "            if False:", CAPTURED),
    Fault("predict/footprint.py", "has_flex_attention = self.device_type != \"cpu\" and self.compile != \"none\"",
          "has_flex_attention = self.device_type != \"cpu\"", PLANNED),
    # A token of a delta net, and of gated heads.
    Fault("ops/delta_net_kernels.py", "state_at_EV = state + (row.to(tl.int64) * H",
          "state_at_EV = state + (row.to(tl.int64) // 2 * 2 * H", DELTA_NET),
    Fault("ops/delta_net_kernels.py", "old_tap_K1 = tap_K[:, None] + is_new.to(tl.int32)",
          "old_tap_K1 = tap_K[:, None]", DELTA_NET),
    Fault("ops/delta_net_kernels.py", "other=0.0) * tl.exp(log_decay)", "other=0.0)", DELTA_NET),
    Fault("ops/delta_net_kernels.py", "tl.load(count + row) + is_new.to(tl.int64)", "tl.load(count + row)",
          DELTA_NET),
    Fault("ops/delta_net_kernels.py", "a_column = b_column + R", "a_column = b_column", DELTA_NET),
    Fault("ops/delta_net_kernels.py", "beta = tl.where(is_new, beta, 0.0)", "beta = beta",
          f"{DELTA} -k 'repeated and float32 and three and next'"),
    Fault("ops/delta_net_kernels.py", "log_decay = tl.where(is_new, log_decay, 0.0)", "log_decay = log_decay",
          f"{DELTA} -k 'repeated and float32 and three and next'"),
    Fault("ops/delta_net_kernels.py", "_log1p(tl.exp(-tl.abs(a)))", "tl.log(1 + tl.exp(-tl.abs(a)))",
          f"{DELTA} -k near_one"),
    Fault("ops/gated_heads_kernels.py", "tl.where(is_query, 2 * head, H + head)", "tl.where(is_query, head, H + head)",
          GATED),
    Fault("ops/gated_heads_kernels.py", "tl.where(is_first_E, -sin_E, sin_E)", "sin_E", GATED),
    # What a run keeps.
    Fault("session/random_state.py",
          "torch.cuda.set_rng_state(recorded_state.tensor_from_hex(saved[\"cuda\"]), device)", "pass",
          "tests/session/test_random_state.py -m gpu"),
    Fault("session/random_state.py", "_hex(torch.cuda.get_rng_state(device))", "_hex(torch.get_rng_state())",
          "tests/session/test_random_state.py -m gpu"),
    Fault("graph/siblings.py", "torch.random.fork_rng(devices=sorted(cards))", "torch.random.fork_rng(devices=[])",
          "tests/graph/test_siblings.py -m gpu"),
]  # fmt: skip


class Copy:
    """A copy of the project in which one fault at a time is planted."""

    def __init__(self, folder: Path):
        ignored = shutil.ignore_patterns("__pycache__", ".*", "runs")
        shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
        self.folder = folder

    def caught(self, fault: Fault | None, tests: str, limit_s: float) -> bool:
        """Whether the tests fail, or do not end, with this fault; without one, whether they pass."""
        file = self.folder / SRC / (fault.file if fault else "step/step.py")
        sound = file.read_text(encoding="utf-8")
        try:
            if fault:
                file.write_text(sound.replace(fault.before, fault.after, 1), encoding="utf-8")
            return _code(self.folder, shlex.split(tests), limit_s) != 0
        finally:
            file.write_text(sound, encoding="utf-8")


def _code(folder: Path, tests: list[str], limit_s: float) -> int:
    """Run pytest in a child, which has torch already, on the copy; return its exit code, or 124 if
    it does not end.
    """
    # What is copied and launched, not computed.
    of_driver = any(name in tests[0] for name in ("waits", "counts"))
    arguments = [] if of_driver else ["-p", "pretended_gpu.plugin"]
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(folder)
        sys.path.insert(0, str(folder / "src"))
        sys.dont_write_bytecode = True
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        code = 1
        try:
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments, *tests]))
        finally:  # whatever a fault raises, the child must not go on as its parent
            os._exit(code)
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def main() -> int:
    """Try the faults; print a line for each and the score; return 1 if fewer than 95 % are caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="faults whose file or edit has this text"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    asked = parser.parse_args()
    chosen = [
        fault for fault in FAULTS if asked.only in f"{fault.file} {fault.before} {fault.after}"
    ]
    rows = list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        sound: dict[str, bool] = {}
        for fault in chosen:
            began = time.monotonic()
            if fault.tests not in sound and copy.caught(None, fault.tests, 4 * LIMIT_S):
                sys.exit(f"without a fault these fail: {fault.tests}")
            sound[fault.tests] = True
            caught = copy.caught(fault, fault.tests, LIMIT_S)
            rows.append(
                {**fault._asdict(), "caught": caught, "wall_s": round(time.monotonic() - began, 1)}
            )
            print(
                f"{'caught' if caught else 'MISSED'} {fault.file}: {fault.before!r} -> {fault.after!r}",
                flush=True,
            )
            if asked.out:
                asked.out.write_text(
                    json.dumps({"schema": "monograph-planted-1", "faults": rows}, indent=1) + "\n"
                )
    score = sum(bool(row["caught"]) for row in rows)
    print(f"{score} of {len(rows)} faults caught")
    return int(score < 0.95 * len(rows))


if __name__ == "__main__":
    sys.exit(main())
