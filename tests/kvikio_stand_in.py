"""Stand-in for kvikio: a `CuFile` with its documented calls, which reads by the system's calls.

It shows how the package calls kvikio. It cannot show how fast kvikio is, nor that a machine has GPUDirect Storage.
"""

import os
import threading

import numpy as np
import torch


class Defaults:
    """Properties of kvikio, `kvikio.defaults`; its own has one thread at first."""

    def __init__(self):
        self._values = {"num_threads": 1}

    def get(self, name):
        return self._values[name]

    def set(self, name, value):
        assert name in self._values
        self._values[name] = value


defaults = Defaults()


class IOFuture:
    """Read under way: `done()` asks for it, `get()` waits for it and returns the bytes that were read."""

    def __init__(self, read):
        self._result = self._error = None

        def run():
            try:
                self._result = read()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def done(self):
        return not self._thread.is_alive()

    def get(self):
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


class CuFile:
    """Open file. `read_at`, which a test may replace, reads bytes: (handle, number of bytes, first byte)."""

    read_at = staticmethod(os.pread)

    def __init__(self, file, flags="r"):
        assert flags == "r"
        try:
            self._handle = os.open(file, os.O_RDONLY)
        except OSError as error:
            # kvikio raises the errors of its C++ code.
            raise RuntimeError(f"Unable to open file: {error}") from error

    def pread(self, buf, size=None, file_offset=0, task_size=None):
        is_on_gpu = isinstance(buf, torch.Tensor)
        assert buf.is_cuda if is_on_gpu else isinstance(buf, np.ndarray)
        # Other reads would not go past the host.
        assert file_offset % 4096 == 0

        def read():
            data = self.read_at(self._handle, size, file_offset)
            if is_on_gpu:
                buf[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(buf.device)
                torch.cuda.synchronize(buf.device)
            else:
                buf[: len(data)] = np.frombuffer(data, np.uint8)
            return len(data)

        return IOFuture(read)
