import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 64)
    def forward(self, x):
        h = self.qkv(x)
        return h.transpose(0, 1).contiguous()

def get_inputs():
    return [torch.randn(128, 64)]

def get_init_inputs():
    return []
