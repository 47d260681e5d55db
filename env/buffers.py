"""Memory that the judge owns and lends to workers: a memfd on the CPU, one driver allocation a buffer on a GPU.

Runs in the judge (`Buffer.create`) and in the workers (`Buffer.attach`). Torch's own sharing of CUDA memory exports
whole allocator segments, whose neighbours become readable and writable, and its handles don't cross PID namespaces. A
`cuMemCreate` allocation with a POSIX descriptor does neither: a worker can reach the bytes of this buffer and no
others.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import torch


class SharedMemoryError(RuntimeError):
    """Shared memory could not be made or mapped. short_of_memory: since the device has too little of it left."""

    def __init__(self, message: str, short_of_memory: bool = False):
        super().__init__(message)
        self.short_of_memory = short_of_memory


class Buffer:
    """`nbytes` bytes as a flat uint8 tensor `.tensor` [nbytes] that another process can map through `.fd`."""

    def __init__(self, tensor: torch.Tensor, fd: int, nbytes: int, release: Any):
        self.tensor = tensor
        self.fd = fd
        self.nbytes = nbytes
        self._release = release

    @classmethod
    def create(cls, nbytes: int, device: str) -> Buffer:
        """Allocate in this process. Raises SharedMemoryError where the memory isn't there."""
        return _create_cuda(nbytes) if device == "cuda" else _map_cpu(os.memfd_create("kernel-judge"), nbytes, True)

    @classmethod
    def attach(cls, fd: int, nbytes: int, device: str) -> Buffer:
        """Map a buffer that another process made, from its descriptor (which this object then owns)."""
        if fd < 3:
            # Where a candidate closed the standard streams, a descriptor takes their number, and CUDA takes 0 for none.
            fd, low = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3), fd
            os.close(low)
        return _attach_cuda(fd, nbytes) if device == "cuda" else _map_cpu(fd, nbytes, False)

    def close(self) -> None:
        """Unmap and free. The tensor must not be used afterwards."""
        if self._release is not None:
            self.tensor = None  # type: ignore[assignment]
            self._release()
            self._release = None


def _map_cpu(fd: int, nbytes: int, new: bool) -> Buffer:
    try:
        if new:
            os.ftruncate(fd, nbytes)
        mapped = mmap.mmap(fd, nbytes)
    except (OSError, ValueError) as error:
        os.close(fd)
        raise SharedMemoryError(f"no shared memory of {nbytes} bytes: {error}") from error
    # mmap keeps itself alive through the tensor; the descriptor is closed with the buffer.
    return Buffer(torch.frombuffer(mapped, dtype=torch.uint8), fd, nbytes, lambda: os.close(fd))


class _Pointer:
    """A device address dressed up for torch.as_tensor, which then holds a reference to this object."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise SharedMemoryError(
            "judging on a GPU needs the package cuda-bindings (see requirements-gpu.txt)"
        ) from error
    return driver


def _call(driver: Any, name: str, *args: Any) -> Any:
    code, *values = getattr(driver, name)(*args)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise SharedMemoryError(f"{name} failed: {code.name}", code.name == "CUDA_ERROR_OUT_OF_MEMORY")
    return values[0] if values else None


def _properties(driver: Any) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = torch.cuda.current_device()
    return properties


def _map_cuda(driver: Any, handle: Any, fd: int, size: int, nbytes: int) -> Buffer:
    address = _call(driver, "cuMemAddressReserve", size, 0, 0, 0)
    _call(driver, "cuMemMap", address, size, 0, handle, 0)
    access = driver.CUmemAccessDesc()
    access.location = _properties(driver).location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _call(driver, "cuMemSetAccess", address, size, [access], 1)

    def release() -> None:
        torch.cuda.synchronize()
        _call(driver, "cuMemUnmap", address, size)
        _call(driver, "cuMemAddressFree", address, size)
        _call(driver, "cuMemRelease", handle)
        os.close(fd)

    return Buffer(torch.as_tensor(_Pointer(int(address), nbytes), device="cuda"), fd, nbytes, release)


def _create_cuda(nbytes: int) -> Buffer:
    driver = _driver()
    properties = _properties(driver)
    flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = _call(driver, "cuMemGetAllocationGranularity", properties, flag)
    size = -(-nbytes // granularity) * granularity
    handle = _call(driver, "cuMemCreate", size, properties, 0)
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fd = int(_call(driver, "cuMemExportToShareableHandle", handle, kind, 0))
    # The rounded size travels as the buffer's own, since both ends must map whole granules.
    return _map_cuda(driver, handle, fd, size, size)


def _attach_cuda(fd: int, nbytes: int) -> Buffer:
    driver = _driver()
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = _call(driver, "cuMemImportFromShareableHandle", fd, kind)
    return _map_cuda(driver, handle, fd, nbytes, nbytes)
