import torch
import triton
import triton.language as tl


@triton.jit
def fused(x_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    i = tl.program_id(0) * cols + c
    mask = c < cols
    v = tl.load(x_ptr + i, mask=mask, other=0.0)
    # x = torch.sigmoid(x)
    v = tl.sigmoid(v)
    # x = F.layer_norm(x, (x.shape[-1],))
    v = v - tl.sum(tl.where(mask, v, 0.0), axis=0) / cols
    v = v / tl.sqrt(tl.sum(tl.where(mask, v * v, 0.0), axis=0) / cols + 1e-5)
    # x = x * x
    v = v * v
    tl.store(out_ptr + i, v, mask=mask)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = x.new_empty(x.shape[0])
        fused[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
        return out
