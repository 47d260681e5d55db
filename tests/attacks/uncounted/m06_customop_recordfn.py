# why: custom op hides from the mode; a record_function named aten::neg eats the seen count of a tiny visible neg, its children are skipped
# here stands shared/work.py


LIB = torch.library.Library("mine", "FRAGMENT")
LIB.define("work(Tensor x) -> Tensor")
SH = [None]
def impl(t):
    SH[0] = SH[0]()
    return torch.zeros(1)
LIB.impl("work", impl, "CPU")
def hidden(f):
    SH[0] = f
    torch.ops.mine.work(torch.zeros(1))
    return SH[0]

class ModelNew(nn.Module):
    def forward(self, x):
        x = x.detach()
        def go():
            with torch.autograd.profiler.record_function("aten::neg"):
                return work(x)
        s = hidden(go)
        torch.neg(torch.zeros(1))
        return finish_t(s)
