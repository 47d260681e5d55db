import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def forward(self, x):
        x = torch.sigmoid(x)
        x = x * 2.0
        x = F.gelu(x, approximate="tanh")
        x = torch.tanh(x)
        x = x + 0.5
        x = F.silu(x)
        return x * x

def get_inputs():
    return [torch.randn(64, 1024)]

def get_init_inputs():
    return []
