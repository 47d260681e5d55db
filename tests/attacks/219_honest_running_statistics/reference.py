import math
import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.BatchNorm1d(32); self.d = nn.Dropout(0.0)
    def forward(self, x):
        return torch.relu(self.d(self.n(x))) * 3.0 + x
def get_inputs():
    return [torch.randn(128, 32)]
def get_init_inputs():
    return []
