"""Replace a chunk's logits by the gradient of its loss, as an operator of compiled graphs on a GPU.

The kernel is in `monograph.ops.logits_kernel`. It is imported only where it runs, because a machine
without a GPU may have no Triton, but it traces the operator `replace_logits_` to plan for a GPU.

Shapes: C tokens, V vocabulary.
"""

import torch
from torch import Tensor

from monograph.ops.logit_cap import cap_slope, capped

# The most columns that a program of the kernel reads at once.
COLUMNS = 8192
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def can_replace_logits(logits_CV: Tensor) -> bool:
    """Return whether `replace_logits_` takes logits of this dtype."""
    return logits_CV.dtype in _DTYPES


# It has the tag `flexible_layout` because a compiler may pad rows; a contiguous layout would need a
# copy.
@torch.library.custom_op(
    "monograph::replace_logits_", mutates_args=("logits_CV",), tags=[torch.Tag.flexible_layout]
)
def replace_logits_(
    logits_CV: Tensor, targets_C: Tensor, mask_C: Tensor, cap: float | None = None
) -> Tensor:
    """Replace logits by the gradient of their cross-entropy, and return the cross-entropies.

    loss[c] = mask[c] (logsumexp(z[c]) - z[c, target[c]])
    z[c] becomes mask[c] (softmax(z[c]) - onehot(target[c]))

    With a cap, y = cap tanh(z / cap) takes the place of z, and what z becomes has the factor
    1 - (y / cap)^2.

    Args:
        logits_CV: [C, V] bf16, fp16 or fp32. It is read as fp32, and a gradient has its dtype.
        targets_C: [C] int64, in [0, V).
        mask_C: [C] fp32, 0 for tokens without a target.
        cap: see above; None: logits have no cap.

    Returns:
        [C] fp32, in nats.
    """
    if logits_CV.is_cuda:
        from monograph.ops.logits_kernel import launch

        losses_C = torch.empty_like(mask_C)
        launch(logits_CV, targets_C, mask_C, losses_C, COLUMNS, cap)
        return losses_C
    return _replace_slowly(logits_CV, targets_C, mask_C, cap)


@replace_logits_.register_fake
def _(logits_CV: Tensor, targets_C: Tensor, mask_C: Tensor, cap: float | None = None) -> Tensor:
    return torch.empty_like(mask_C)


def _replace_slowly(
    logits_CV: Tensor, targets_C: Tensor, mask_C: Tensor, cap: float | None
) -> Tensor:
    """Do what `replace_logits_` does, by PyTorch's operators."""
    capped_CV = capped(logits_CV.to(mask_C.dtype), cap)
    # Not `log_softmax`: on a CPU it adds up a row in as many sums as a vector register has numbers, so that its
    # rounding grows with the vocabulary. `logsumexp` adds up by halves.
    lse_C1 = capped_CV.logsumexp(-1, keepdim=True)
    target_C1 = targets_C.unsqueeze(-1)
    losses_C = (lse_C1 - capped_CV.gather(-1, target_C1)).squeeze(-1) * mask_C
    onehot_CV = torch.zeros_like(capped_CV).scatter_(-1, target_C1, 1.0)
    grad_CV = ((capped_CV - lse_C1).exp() - onehot_CV) * mask_C.unsqueeze(-1)
    if cap is not None:
        grad_CV = grad_CV * cap_slope(capped_CV, cap)
    logits_CV.copy_(grad_CV)
    return losses_C
