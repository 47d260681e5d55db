import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(512))
    def forward(self, x):
        h = F.gelu(torch.tanh(torch.sigmoid(x) * 2.0) + 0.5)
        h = torch.softmax(F.silu(h), dim=-1)
        return x * 2.0 + self.gamma * h

def get_inputs():
    return [torch.randn(64, 512)]

def get_init_inputs():
    return []
