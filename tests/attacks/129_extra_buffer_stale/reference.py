import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(512, 512) / 22.0)
    def forward(self, x):
        return x + torch.tanh(self.w @ self.w @ self.w)[: x.shape[0]]

def get_inputs():
    return [torch.randn(64, 512)]

def get_init_inputs():
    return []
