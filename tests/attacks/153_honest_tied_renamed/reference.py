import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(64, 64, bias=False)
        self.dec = nn.Linear(64, 64, bias=False)
        self.dec.weight = self.enc.weight
        self.norm = nn.LayerNorm(64)
    def forward(self, x):
        return self.norm(self.dec(torch.relu(self.enc(x))))

def get_inputs():
    return [torch.randn(32, 64)]

def get_init_inputs():
    return []
