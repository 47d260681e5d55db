# why: ctypes.cast + np.ctypeslib.as_array
# here stands shared/work.py


class ModelNew(nn.Module):
    def forward(self, x):
        x = x.detach()
        import ctypes
        p = ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))
        return finish_t(npwork(np.ctypeslib.as_array(p, shape=tuple(x.shape))))
