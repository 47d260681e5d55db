# why: op.redispatch(CPU keyset): neither mode nor RecordFunction
# here stands shared/work.py


class ModelNew(nn.Module):
    def forward(self, x):
        x = x.detach()
        ks = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        A = torch.ops.aten
        s = A.sigmoid.default.redispatch(ks, x)
        A.add_.Tensor.redispatch(ks, s, s)
        s = A.gelu.default.redispatch(ks, s, approximate="tanh")
        A.tanh_.default.redispatch(ks, s)
        s = A.add.Tensor.redispatch(ks, s, torch.full((1,), 0.5))
        s = A.silu.default.redispatch(ks, s)
        A.mul_.Tensor.redispatch(ks, s, s)
        A.mul_.Tensor.redispatch(ks, s, torch.full((1,), 0.5))
        return finish_t(s)
