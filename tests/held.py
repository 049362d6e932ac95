"""Bytes that autograd saves for backward, for tests."""

import threading
import weakref
from contextlib import contextmanager
from unittest.mock import patch

import torch

from meg_compile.runtime.regather import Regather


class Held(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of activations that are saved at the moment (`now`) and were at most (`peak`), apart from parameters and
    integers. Of what `Regather` keeps, a part of the sequence is held."""

    def __init__(self, parameters):
        self.now = self.peak = 0
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.readers = {}
        super().__init__(self.pack, lambda saved: saved.value)

    def pack(self, value):
        saved = Saved(value)
        tensor = value if isinstance(value, torch.Tensor) else value[0].gathering.part
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self.parameters or tensor.dtype == torch.int64:
            return saved
        count, size = self.readers.get(key, (0, storage.nbytes()))
        self.readers[key] = count + 1, size
        if count == 0:
            self.now += size
            self.peak = max(self.peak, self.now)
        weakref.finalize(saved, self.drop, key)
        return saved

    def drop(self, key):
        count, size = self.readers[key]
        if count > 1:
            self.readers[key] = count - 1, size
        else:
            del self.readers[key]
            self.now -= size


class Saved:
    def __init__(self, value):
        self.value = value


_HELD: dict[int, Held] = {}
_pack, _unpack = Regather._pack, Regather._unpack


@contextmanager
def holding(parameters):
    """Counts what this thread saves inside, whatever other hooks the stages put in front."""
    held = _HELD[threading.get_ident()] = Held(parameters)
    with held:
        yield held


@contextmanager
def looking_into_regather():
    """Around all threads."""

    def pack(regather, tensor):
        held = _HELD.get(threading.get_ident())
        return _pack(regather, tensor) if held is None else held.pack(_pack(regather, tensor))

    def unpack(regather, saved):
        return _unpack(regather, saved.value if isinstance(saved, Saved) else saved)

    with patch.object(Regather, "_pack", pack), patch.object(Regather, "_unpack", unpack):
        yield
