import math
import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32); self.b = nn.Linear(32, 32, bias=False)
    def forward(self, x):
        h = torch.zeros(x.shape[0], 32)
        out = []
        for t in range(x.shape[1]):
            h = torch.tanh(self.a(x[:, t]) + self.b(h))
            out.append(h)
        return torch.stack(out, 1), h
def get_inputs():
    return [torch.randn(4, 60, 32)]
def get_init_inputs():
    return []
