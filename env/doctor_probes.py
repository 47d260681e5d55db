"""What `env.doctor` tries inside a worker, and what each missing thing costs.

The sources run in the sandboxed process as a candidate would; `ADVICE` is text for people. Nothing here decides.
"""

from __future__ import annotations


def fill(source: str, **values: object) -> str:
    """A probe with its @name@ places filled with Python literals."""
    for name, value in values.items():
        source = source.replace(f"@{name}@", repr(value))
    return source


_HEAD = """
import ctypes, errno, json, os, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
f = {}
class Probe:
    pass
def attempt(action):
    try:
        return "done: " + str(action())[:80]
    except BaseException as error:
        code = getattr(error, "errno", None)
        return "refused: " + (errno.errorcode.get(code, "") if code else type(error).__name__)
def get_init_inputs():
    return [json.dumps(f)]
"""

# What a worker must not reach.
REACH = (
    _HEAD
    + """
def connect():
    with socket.create_connection(("127.0.0.1", @port@), timeout=2):
        return "connected"
def append(path):
    with open(path, "a") as file:
        file.write("x")
f["read a file of yours"] = attempt(lambda: len(open(@secret@).read()))
f["read the project"] = attempt(lambda: len(open(@readme@).read()))
f["list other workers"] = attempt(lambda: os.listdir(@home@))
f["write outside its folder"] = attempt(lambda: append(@secret@))
f["reach the network"] = attempt(connect)
f["signal the judge"] = attempt(lambda: os.kill(@judge@, 0))
f["read the judge's memory"] = attempt(lambda: open("/proc/%d/mem" % @judge@, "rb"))
if libc.ptrace(16, @judge@, 0, 0) == 0:
    libc.ptrace(17, @judge@, 0, 0)
    f["trace the judge"] = "done: attached"
else:
    f["trace the judge"] = "refused: " + errno.errorcode.get(ctypes.get_errno(), "")
"""
)

LEAVE_BEHIND = (
    _HEAD
    + """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        libc.prctl(15, @name@.encode(), 0, 0, 0)
        time.sleep(300)
    os._exit(0)
os.wait()
"""
)

HOG = (
    _HEAD
    + """
keep = []
for _ in range(@mebibytes@ // 16):
    keep.append(ctypes.create_string_buffer(16 << 20))
    ctypes.memset(keep[-1], 1, 16 << 20)
    time.sleep(0.002)
"""
)

FORK_BOMB = (
    _HEAD
    + """
script = "n=0; while [ $n -lt @processes@ ]; do sleep 60 & n=$((n+1)); done; sleep 0.5"
subprocess.run(["sh", "-c", script], stderr=subprocess.DEVNULL)
"""
)

_KERNEL = """
import torch, triton, triton.language as tl
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
def doubles(device, dtype):
    x = torch.arange(100, device=device).to(dtype)
    y = torch.empty_like(x)
    double[(1,)](x, y, 100, BLOCK=128)
    if not torch.equal(y, x * 2):
        raise ValueError("wrong values")
    return "right values"
def said(action):
    try:
        return "done: " + str(action())[:120]
    except BaseException as error:
        return "failed: " + (type(error).__name__ + ": " + str(error)).strip().splitlines()[0][:160]
"""

INTERPRETER = _HEAD + _KERNEL + 'f["Triton\'s interpreter"] = said(lambda: doubles("cpu", torch.float32))\n'

# Needs no GPU: goes through ptxas, as a candidate's first call does.
COMPILE = (
    _HEAD
    + _KERNEL
    + """
def compiled():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    source = ASTSource(double, {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {(3,): 128})
    made = triton.compile(source, target=GPUTarget("cuda", @capability@, 32))
    return "%d bytes for sm_%d" % (len(made.asm["cubin"]), @capability@)
def stub():
    with open("stub.c", "w") as file:
        file.write("int answer(void) { return 42; }")
    subprocess.run(["cc", "-shared", "-fPIC", "stub.c", "-o", "stub.so"], check=True, capture_output=True)
    if ctypes.CDLL(os.path.abspath("stub.so")).answer() != 42:
        raise ValueError("wrong value")
    return "built and loaded a library"
f["Triton compiles"] = said(compiled)
f["C compiler"] = said(stub)
"""
)

CUDA = (
    _HEAD
    + _KERNEL
    + """
def context():
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    return "%s, %.0f of %.0f GiB free" % (torch.cuda.get_device_name(), free / 2**30, total / 2**30)
def events():
    from torch.profiler import ProfilerActivity, profile
    x = torch.zeros(1 << 20, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        x.add_(1)
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    found = [event for event in profiler.profiler.kineto_results.events() if event.device_type() == on_device]
    if not found:
        raise RuntimeError("no device activity was recorded")
    return "%d device activities" % len(found)
f["CUDA in a worker"] = said(context)
f["Triton on the GPU"] = said(lambda: doubles("cuda", torch.float32))
f["bfloat16"] = said(lambda: doubles("cuda", torch.bfloat16))
f["profiler events"] = said(events)
"""
)

# What it costs that something is missing, and what to do about it.
ADVICE = {
    "user namespace": (
        "Without it an unprivileged judge has no other namespace either. Allow them (sysctl "
        "kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0; in a container, a seccomp profile that"
        " lets unshare through) or run as root."
    ),
    "mount namespace": (
        "Workers see this machine's files and /dev/shm; Landlock alone keeps them out. Needs root with "
        "CAP_SYS_ADMIN or a user namespace."
    ),
    "network namespace": "seccomp alone keeps workers off the network. Needs CAP_SYS_ADMIN or a user namespace.",
    "ipc namespace": "seccomp alone keeps workers from System V memory. Needs CAP_SYS_ADMIN or a user namespace.",
    "pid namespace": (
        "Workers can see other processes, and what they leave behind is searched for instead of being ended by "
        "the kernel. Needs CAP_SYS_ADMIN or a user namespace."
    ),
    "own /proc": (
        "Workers can read what the kernel says about this machine's processes, as far as Landlock lets them. "
        "Needs the mount and PID namespaces, and a container that doesn't mask /proc."
    ),
    "own /dev/shm": (
        "Workers have no /dev/shm at all: programs that want shared memory or semaphores fail. Needs the mount "
        "namespace."
    ),
    "read-only mounts": (
        "Modes, times and attributes of your files could be changed by a worker of your user. Needs the mount "
        "namespace and Linux 5.12."
    ),
    "own uid": "Workers run as the judge's own user. Run the judge as root, with Python where other users can read it.",
    "process limit": (
        "A fork bomb is ended by counting, ten times a second, instead of being refused by the kernel. Run as "
        "root, or allow user namespaces on Linux 5.14 or newer."
    ),
    "no new privileges": "A setuid program could give a worker root. Nothing but a very old kernel lacks this.",
    "no capabilities": "A worker could use the judge's privileges. Run the judge as an ordinary user or as plain root.",
    "writes only to scratch": (
        "A worker can change any file that the judge's user can, unless mounts are read-only. Needs Landlock: "
        "Linux 5.13 with `landlock` in the lsm= list, and a container profile that allows its system calls."
    ),
    "reads only what Python needs": "A worker can read your files, the project's tests among them. Needs Landlock.",
    "signals stay inside": "Without a PID namespace, a worker could end the judge. Needs Landlock of Linux 6.12.",
    "seccomp": (
        "Workers have the kernel's whole interface: more ways out, and the network where it has no namespace. "
        "Needs x86_64 or aarch64 and a kernel with CONFIG_SECCOMP_FILTER."
    ),
    "limits": "Core dumps, huge files and floods of descriptors are possible. The hard limits of this session are odd.",
    "own process group": "A worker can't be stopped as a whole. Something is wrong with this system's setsid.",
    "nothing outlives it": "Processes of one candidate go on while the next is measured. Allow PID namespaces.",
    "read a file of yours": "Run on a machine that holds nothing you would miss, or get Landlock.",
    "read the project": "Candidates can read the tests and earlier runs. Get Landlock.",
    "list other workers": "Candidates can look at each other. Get Landlock.",
    "write outside its folder": "Don't run foreign code here.",
    "reach the network": "Don't run foreign code here.",
    "signal the judge": "A candidate can end its judge. Get a PID namespace, or Landlock of Linux 6.12.",
    "read the judge's memory": "Don't run foreign code here: it can read the expected outputs.",
    "trace the judge": "Don't run foreign code here: it can take over its judge.",
    "leave a process behind": "One candidate's processes disturb the next. Allow PID namespaces.",
    "fill the memory": "A candidate can bring this machine down. Set a memory limit from outside (cgroup, container).",
    "fork bomb": "A candidate can bring this machine down. Set a limit on processes from outside (cgroup, ulimit -u).",
    "GPU": "Times are modelled on the CPU and say nothing about a GPU. Nothing to do where there is none.",
    "cuda-bindings": "No judging on a GPU: buffers can't be shared. pip install -r requirements-gpu.txt",
    "CUDA in a worker": (
        "No judging on a GPU. Find the layer that the driver doesn't like: KERNEL_JUDGE_LAYERS_OFF='own "
        "uid,seccomp' python -m env.doctor --device cuda, one name at a time."
    ),
    "Triton on the GPU": "No judging on a GPU. The message names the cause; a C compiler and ptxas are needed.",
    "profiler events": (
        "No kernel table and no profiling ratio. Another profiler may hold the GPU, or the container lacks the "
        "rights (NVreg_RestrictProfilingToAdminUsers=0, --cap-add SYS_ADMIN)."
    ),
    "clocks and throttling": "A slow sample can't be told from a throttled GPU. pip install nvidia-ml-py",
    "bfloat16": (
        "Problems in bfloat16 can't be judged here. Triton's interpreter gets them wrong without a word: use a "
        "GPU of compute capability 8.0 or newer."
    ),
    "Triton's interpreter": "No judging on the CPU. The message names the cause.",
    "Triton compiles": "Candidates that the compiler refuses are only found on a GPU. The message names the cause.",
    "C compiler": "Triton can't build its launcher: no judging on a GPU. Install gcc or clang as `cc`.",
}
