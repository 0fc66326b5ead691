# Run: pytest tests/laws/test_replayed_on_a_gpu.py (needs a CUDA device)
"""Law 1 on a GPU: a micro-step that is captured as a CUDA graph gives the bits of one that is
called.
"""

from __future__ import annotations

import gc

import pytest
import torch

from batches import packed, ragged, tiny_llama
from laws.replaying import Moving, Reads, assert_same_bits, cross_entropy, trained, windows_of
from monograph.graph.capture import stop_replaying
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.graph.replay import CudaGraphs, NotReplayable, Replays
from monograph.loss import MtpLoss, TokenLoss
from monograph.optim import AdamW
from monograph.profiling.memory import peak_memory_bytes, reset_peak_memory, unused_graph_bytes
from monograph.resident import Resident
from waits import no_waits

# The deterministic mode warns of what it cannot order; that shows as other bits, if it matters.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic")]
CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _one_order():
    """Sums in one order, or two calls of the same would differ in bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def engine(recorder, model=None, *, precision="fp32", policy=None, loss=None, micro_batch=2):
    made = Resident(
        (model or tiny_llama()).to(CARD), loss=loss or TokenLoss(), optim=AdamW(lr=1e-2), clip=0.5,
        precision=Precision(precision), remat=policy, micro_batch=micro_batch,
    )  # fmt: skip
    made.step.recorder, made.step.announce = recorder, pytest.fail
    return made


def with_flex_attention():
    """Heads of 16: packed rows take flex attention, which refuses smaller ones."""
    return tiny_llama(hidden_size=64)


def compare(make, batch, backend="inductor", scope="whole"):
    results = []
    for recorder in (None, CudaGraphs(CARD)):
        made = make(recorder)
        assert made.capture(batch(6), backend, scope) is None
        results.append(trained(made, windows_of(batch, 4)))
    # Where products add gradients, an update's first micro-step writes them: a graph of its own.
    parameters = made.step.parameters
    assert made.step.micro_step.graph_count == 1 + parameters.begins_sums
    assert_same_bits(*results)
    return made


@pytest.mark.parametrize(("precision", "batch"), [("fp32", packed), ("bf16", ragged)])
def test_the_whole_step(precision, batch):
    compare(lambda recorder: engine(recorder, with_flex_attention(), precision=precision), batch)


@pytest.mark.parametrize(("micro_batch", "backend"), [(2, "inductor"), (6, "aot_eager")])
def test_block_by_block(micro_batch, backend):
    compare(
        lambda recorder: engine(recorder, precision="bf16", micro_batch=micro_batch),
        packed,
        backend,
        "blocks",
    )


def test_a_head_for_multi_token_prediction():
    """Its products add to the sums of the embedding and of the output head, too."""
    made = compare(
        lambda recorder: engine(
            recorder, tiny_llama(mtp_num_hidden_layers=1), precision="bf16", loss=MtpLoss()
        ),
        packed,
        "aot_eager",
    )
    assert made.step.parameters.begins_sums
    assert float(made.loss.take_mean()) > 1


@pytest.mark.parametrize("policy", [Remat.Full(), Remat.Budget(0.3)])
def test_recomputed_inside_the_graph(policy):
    compare(
        lambda recorder: engine(recorder, with_flex_attention(), precision="bf16", policy=policy),
        packed,
    )


def test_fp16_and_its_scale():
    def made(recorder):
        found = engine(recorder, precision="fp16")
        found.step.loss_scale.fill_(2.0**24)
        return found

    compare(made, ragged, "aot_eager")


def test_dropout_and_running_means():
    """Random numbers of a replay are those of a call: torch counts them on, replay by replay."""
    made = compare(
        lambda recorder: engine(recorder, Moving(), loss=cross_entropy), ragged, "aot_eager"
    )
    assert int(made.model.norm.num_batches_tracked) == 12


def test_one_launch_a_micro_batch_and_no_wait(monkeypatch):
    made = Resident(tiny_llama().to(CARD), micro_batch=2)
    window = {name: tensor.to(CARD) for name, tensor in packed(6).items()}
    assert made.capture(window) is None
    addresses, launched, replay = (
        [plane.grad.data_ptr() for plane in made.step.planes],
        [],
        torch.cuda.CUDAGraph.replay,
    )
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (launched.append(graph), replay(graph))
    )
    with no_waits():
        made.accumulate(window)
        made.update()
    assert len(launched) == 3
    assert addresses == [plane.grad.data_ptr() for plane in made.step.planes]


def test_another_shape_is_another_graph():
    results = []
    windows = [packed(6, seed=seed) if seed % 2 else ragged(6, seed=seed) for seed in range(6)]
    for recorder in (None, CudaGraphs(CARD)):
        made = engine(recorder)
        assert made.capture(packed(6), "aot_eager") is None
        results.append(trained(made, windows))
    assert made.step.micro_step.graph_count == 2
    assert_same_bits(*results)


def test_a_loss_that_reads_is_called_and_its_line_named():
    lines: list[str] = []
    made = engine(CudaGraphs(CARD), loss=Reads())
    made.step.announce = lines.append
    assert made.capture(ragged(6), "aot_eager", "blocks") is None
    trained(made, windows_of(ragged))
    [line] = lines
    assert "the host waits for the device at" in line and "replaying.py" in line


def test_blocks_sent_to_the_host_are_called():
    lines: list[str] = []
    made = engine(CudaGraphs(CARD), policy=Remat.Offload())
    made.step.announce = lines.append
    assert made.capture(ragged(6), "aot_eager", "blocks") is None
    trained(made, windows_of(ragged))
    assert lines == ["micro-steps are launched one by one: blocks are recomputed between graphs"]


@pytest.mark.parametrize("error", ["of the driver", "of the work"])
def test_a_capture_that_fails_leaves_the_device_as_it_was(error):
    ones = torch.ones(4, device=CARD)
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(CARD)

    def fails():
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**26, device=CARD)
            if error == "of the work":
                raise RuntimeError("no")
            torch.cuda.current_stream().synchronize()
        ones.mul_(2)

    stream = torch.cuda.current_stream(CARD)
    with pytest.raises(NotReplayable, match="the capture failed"):
        Replays(fails, CudaGraphs(CARD)).run(2)
    assert torch.cuda.current_stream(CARD) == stream
    assert ones.tolist() == [4.0] * 4
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(CARD) < held + 2**26
    assert torch.nn.functional.dropout(ones, 0.5).isfinite().all()
    compare(lambda recorder: engine(recorder, Moving(), loss=cross_entropy), ragged, "aot_eager")


def test_the_pool_is_part_of_the_peak_and_is_given_back():
    gc.collect()
    torch.cuda.empty_cache()
    # What earlier tests' graphs hold.
    others = unused_graph_bytes(CARD)
    made = engine(
        CudaGraphs(CARD), tiny_llama(hidden_size=256, intermediate_size=512), micro_batch=32
    )
    # By it flex attention would copy a number to the card.
    assert made.capture(ragged(32), "aot_eager") is None
    reset_peak_memory(CARD)
    made.accumulate(ragged(32))
    held, peak = torch.cuda.memory_reserved(CARD), peak_memory_bytes(CARD)
    assert peak > torch.cuda.max_memory_allocated(CARD) + others
    assert peak == torch.cuda.max_memory_allocated(CARD) + unused_graph_bytes(CARD)
    assert stop_replaying(made.step)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(CARD) < held
    reset_peak_memory(CARD)
    assert unused_graph_bytes(CARD) == others
    assert peak_memory_bytes(CARD) == torch.cuda.max_memory_allocated(CARD) + others
