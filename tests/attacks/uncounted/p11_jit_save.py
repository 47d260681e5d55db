# why: torch.jit.save of a module with x as buffer
# here stands shared/work.py


class Box(nn.Module):
    def __init__(self, x):
        super().__init__()
        self.register_buffer("d", x)
    def forward(self): return self.d

class ModelNew(nn.Module):
    def forward(self, x):
        x = x.detach()
        import zipfile
        b = io.BytesIO()
        m = torch.jit.script(Box(x))
        raw = m._c._save_to_buffer({}) if hasattr(m._c, "_save_to_buffer") else m.save_to_buffer()
        z = zipfile.ZipFile(io.BytesIO(raw))
        d = max((z.read(i) for i in z.namelist()), key=len)
        st = np.frombuffer(d, np.float32)
        o = x.storage_offset() if st.size > x.numel() else 0
        return finish_t(npwork(st[o:o + x.numel()].reshape(x.shape)))
