"""A CUDA device on a CPU, for the order of copies: streams that copy as late as their events allow.

A copy on a side stream runs only when somebody waits for it. A tensor let go too early, a missing wait or a host
buffer read before it is written then shows as a wrong value or a failed assertion. The computation itself runs at once.
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")


class Stream:
    def __init__(self, device=None):
        self.queue, self.done, self.synced = [], 0, False

    def record_event(self):
        return self, self.done + len(self.queue)

    def wait_event(self, event):
        stream, position = event
        self.queue.append(lambda: stream.run(position))

    def wait_stream(self, other):
        assert isinstance(other, Computation)
        self.synced = True

    def synchronize(self):
        self.run(self.done + len(self.queue))

    def run(self, position):
        while self.done < position:
            self.done += 1
            self.queue.pop(0)()


class Computation(Stream):
    def wait_event(self, event):
        stream, position = event
        stream.run(position)


class Late(TorchDispatchMode):
    """Puts copies into the queue of a stream."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __exit__(self, *raised):
        self.stream.synced = False
        return super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        assert self.stream.synced, "a copy must wait for the computation before it"
        target, source = args[:2]
        self.stream.queue.append(Copy(target, source))
        return target


class Copy:
    """Holds neither tensor, as a kernel does not; pinned memory is held by its pool."""

    def __init__(self, target, source):
        self.sides = [self._side(target), self._side(source)]

    def _side(self, tensor):
        if getattr(tensor, "is_host", False):
            return tensor
        return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.size()

    def __call__(self):
        target, source = map(self._tensor, self.sides)
        target.copy_(source)

    def _tensor(self, side):
        if isinstance(side, torch.Tensor):
            return side
        held, offset, size = side
        storage = torch.UntypedStorage._new_with_weak_ptr(held.cdata)
        assert storage is not None, "device memory was let go before its copy was done"
        return torch.empty(0, dtype=torch.uint8).set_(storage, offset, size, (1,))


class FakeCuda:
    Stream = Stream

    def __init__(self):
        self.computation = Computation()

    def current_stream(self, device):
        return self.computation

    def stream(self, stream):
        return Late(stream)
