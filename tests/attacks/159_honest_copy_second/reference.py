import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
    def forward(self, x):
        h = torch.tanh(x)
        return h, h.clone()

def get_inputs():
    return [torch.randn(64, 1024)]

def get_init_inputs():
    return []
