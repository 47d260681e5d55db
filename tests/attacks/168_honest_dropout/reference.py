import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)
    def forward(self, x):
        return torch.tanh(self.drop(x) * 2.0) + x

def get_inputs():
    return [torch.randn(64, 512)]

def get_init_inputs():
    return []
