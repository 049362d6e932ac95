"""Ranks as threads of one process: collectives without starting processes.

    losses = run_threads(4, lambda rank: train(rank))      # a list, one result per rank

Each thread has its own default process group, on torch's threaded backend, which copies tensors between threads. Its
missing send and recv are added here, so pipeline schedules run too. torch's random number generator is shared by all
threads: draw random numbers before, or from a torch.Generator per rank.
"""

import threading
from collections import defaultdict, deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded


def run_threads(world, fn, timeout_s=120):
    """Call fn(rank) in `world` threads at once and return the results in rank order.

    The first failure is raised again here, with a note that says which rank it was; the other ranks stop at their next
    collective. Ranks that hang for timeout_s seconds are a TimeoutError.
    """
    results, failures = [None] * world, []
    store = dist.HashStore()

    def work(rank):
        dist.init_process_group(
            "threaded", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=timeout_s)
        )
        try:
            results[rank] = fn(rank)
        except SystemExit:  # how the threaded backend stops the ranks that did not fail
            pass
        except BaseException as error:
            error.add_note(f"raised by rank {rank} of {world}")
            failures.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    threads = [threading.Thread(target=work, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        if failures:
            raise failures[0]
        if late := [thread.name for thread in threads if thread.is_alive()]:
            raise TimeoutError(f"{', '.join(late)} still ran after {timeout_s} s")
        return results
    finally:
        threaded.ProcessLocalGroup.reset()
        _mail.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


class _Recv:
    """A tensor to be filled, as the work object that recv returns."""

    def __init__(self, tensor):
        self.tensor, self.arrived = tensor, threading.Event()

    def fill(self, sent):
        self.tensor.detach().copy_(sent)
        self.arrived.set()

    def wait(self, timeout=None):
        while not self.arrived.wait(0.05):
            if threaded.ProcessLocalGroup._terminate.is_set():
                raise SystemExit("another rank failed")
        return True

    def is_completed(self):
        return self.arrived.is_set()


class _Mail:
    """Tensors on their way, per (group, source, destination, tag): those that nobody has asked for, or who waits."""

    def __init__(self):
        self.lock = threading.Lock()
        self.reset()

    def reset(self):
        self.unread, self.waiting = defaultdict(deque), defaultdict(deque)

    def send(self, group, tensors, destination, tag=0):
        key = (group.pg_name, group.rank(), destination, tag)
        done = _Recv(torch.empty_like(tensors[0]))
        done.fill(tensors[0])
        with self.lock:
            if self.waiting[key]:
                self.waiting[key].popleft().fill(done.tensor)
            else:
                self.unread[key].append(done.tensor)
        return done

    def recv(self, group, tensors, source, tag=0):
        key = (group.pg_name, source, group.rank(), tag)
        work = _Recv(tensors[0])
        with self.lock:
            if self.unread[key]:
                work.fill(self.unread[key].popleft())
            else:
                self.waiting[key].append(work)
        return work


_mail = _Mail()
threaded.ProcessLocalGroup.send = lambda group, *args, **kwargs: _mail.send(group, *args, **kwargs)
threaded.ProcessLocalGroup.recv = lambda group, *args, **kwargs: _mail.recv(group, *args, **kwargs)
