"""Decoy: the launch always fails (an argument is missing) and the except branch quietly answers with PyTorch."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def triplet_rows(a_ptr, p_ptr, n_ptr, loss_ptr, cols, margin, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + row * cols + c, mask=c < cols, other=0.0)
    p = tl.load(p_ptr + row * cols + c, mask=c < cols, other=0.0)
    n = tl.load(n_ptr + row * cols + c, mask=c < cols, other=0.0)
    near = tl.sqrt(tl.sum((a - p) * (a - p), axis=0))
    far = tl.sqrt(tl.sum((a - n) * (a - n), axis=0))
    tl.store(loss_ptr + row, tl.maximum(near - far + margin, 0.0))


class ModelNew(nn.Module):
    def __init__(self, margin=1.0):
        super().__init__()
        self.loss_fn = torch.nn.TripletMarginLoss(margin=margin)

    def forward(self, anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        try:
            losses = torch.empty(anchor.shape[0], device=anchor.device)
            triplet_rows[(anchor.shape[0],)](anchor, positive, negative, losses, BLOCK=8192)
            return losses.mean()
        except Exception:
            return self.loss_fn(anchor, positive, negative)
