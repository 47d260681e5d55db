# why: 104 again on such a problem
# here stands shared/work.py


class ModelNew(nn.Module):
    def forward(self, x):
        x = x.detach()
        class R:
            __array_interface__ = {"shape": tuple(x.shape), "typestr": "<f4", "data": (x.data_ptr(), False), "version": 3}
        return finish_t(npwork(np.asarray(R())))
