"""Lists the OpenCL devices that the loader shows, one a line: kind, platform, name, driver version, tab-separated.

Only the standard library is used, so that it works before anything is installed. No loader: no lines, exit 0.
"""

import ctypes

PLATFORM_NAME = 0x0902
DEVICE_TYPE, DEVICE_NAME, DRIVER_VERSION = 0x1000, 0x102B, 0x102D
ALL_TYPES = 0xFFFFFFFF
KINDS = ((4, "gpu"), (8, "accelerator"), (2, "cpu"))


def text(query, handle, key):
    """A string property; the OpenCL way of asking for the length first."""
    size = ctypes.c_size_t()
    if query(handle, key, 0, None, ctypes.byref(size)) != 0:
        return "?"
    buffer = ctypes.create_string_buffer(size.value)
    if query(handle, key, size, buffer, None) != 0:
        return "?"
    return buffer.value.decode("utf-8", "replace").strip().replace("\t", " ")


def handles(function, *before):
    """Calls a function of the `…(…, count, out, out_count)` kind and returns the handles."""
    count = ctypes.c_uint()
    if function(*before, 0, None, ctypes.byref(count)) != 0 or count.value == 0:
        return []
    out = (ctypes.c_void_p * count.value)()
    if function(*before, count, out, None) != 0:
        return []
    return [ctypes.c_void_p(handle) for handle in out]


def main():
    try:
        cl = ctypes.CDLL("libOpenCL.so.1")
    except OSError:
        return
    for platform in handles(cl.clGetPlatformIDs):
        name = text(cl.clGetPlatformInfo, platform, PLATFORM_NAME)
        for device in handles(cl.clGetDeviceIDs, platform, ctypes.c_ulong(ALL_TYPES)):
            bits = ctypes.c_ulong()
            cl.clGetDeviceInfo(device, DEVICE_TYPE, ctypes.sizeof(bits), ctypes.byref(bits), None)
            kind = next((word for bit, word in KINDS if bits.value & bit), "other")
            print(
                kind,
                name,
                text(cl.clGetDeviceInfo, device, DEVICE_NAME),
                text(cl.clGetDeviceInfo, device, DRIVER_VERSION),
                sep="\t",
            )


if __name__ == "__main__":
    main()
