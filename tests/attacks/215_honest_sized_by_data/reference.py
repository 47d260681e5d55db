import math
import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class Model(nn.Module):
    def forward(self, x):
        return x[x > 0].sum() * torch.ones(300), (x > 0).sum(), torch.nonzero(x > 2.0)
def get_inputs():
    return [torch.randn(64, 128)]
def get_init_inputs():
    return []
