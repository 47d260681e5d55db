import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        pass
    def forward(self, x):
        x = torch.sigmoid(x)
        x = x * 2.0
        x = F.gelu(x)
        x = torch.tanh(x)
        x = x + 0.5
        x = F.silu(x)
        x = x * x
        return x

def get_inputs():
    return [torch.randn(64, 512)]

def get_init_inputs():
    return []
