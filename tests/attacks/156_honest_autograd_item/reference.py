import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
    def forward(self, x):
        return torch.tanh(x * self.scale) * self.scale + x

def get_inputs():
    return [torch.randn(64, 1024)]

def get_init_inputs():
    return []
