# ruff: noqa: N802 -- functions are named as in ``cuda.bindings.driver``
"""Calls of the fake driver that give work to streams: copies, kernels, events and waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvist.device.kernels import NAMES, THREADS
from tests.support import fake_kernels
from tests.support.fake_calls import Calls, entry, find
from tests.support.fake_memory import ON_DEVICE, ON_HOST, Kind, raw_bytes
from tests.support.fake_names import CUresult, Handle, check
from tests.support.fake_streams import Event, Record, Stream, Wait

CUBIN = b"fake cubin for sm_90"


class Work(Calls):
    """What one process lets its GPUs do."""

    def new_number(self) -> int:
        """Return a number for a handle."""
        raise NotImplementedError

    def new_stream(self) -> Stream:
        """Return a stream that the machine knows."""
        stream = Stream()
        self.scheduler.streams.append(stream)
        return stream

    def enqueue(self, stream: Any, work: Callable[[], None]) -> None:
        """Give a stream a kernel of the engine's."""
        with self.lock:
            self._stream(stream).queue.append(work)

    @entry(num_results=1)
    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Handle:
        check(flags == 1 and -5 <= priority <= 0)
        number = self.new_number()
        self.context.streams[number] = self.new_stream()
        return Handle(number)

    @entry()
    def cuStreamDestroy(self, stream: Handle) -> None:
        self.context.ended_streams.append(find(self.context.streams, stream))
        del self.context.streams[int(stream)]

    @entry()
    def cuStreamSynchronize(self, stream: Handle) -> None:
        self.scheduler.drain(self._stream(stream))

    @entry()
    def cuStreamWaitEvent(self, stream: Handle, event: Handle, flags: int) -> None:
        check(flags == 0)
        record = find(self.context.events, event).record
        found = self._stream(stream)
        if record is not None:
            found.queue.append(Wait(record))

    @entry(num_results=1)
    def cuEventCreate(self, flags: int) -> Handle:
        check(0 <= flags <= 7)
        number = self.new_number()
        self.context.events[number] = Event(flags)
        return Handle(number)

    @entry()
    def cuEventRecord(self, event: Handle, stream: Handle | int) -> None:
        found = self._stream(stream)
        record = Record(found)
        find(self.context.events, event).record = record
        found.queue.append(record)

    @entry()
    def cuEventSynchronize(self, event: Handle) -> None:
        record = find(self.context.events, event).record
        if record is not None:
            self.scheduler.finish(record)

    @entry()
    def cuEventQuery(self, event: Handle) -> None:
        record = find(self.context.events, event).record
        check(record is None or record.is_done, CUresult.CUDA_ERROR_NOT_READY)

    @entry()
    def cuEventDestroy(self, event: Handle) -> None:
        find(self.context.events, event)
        del self.context.events[int(event)]

    # Host memory of the next two may be anything.

    @entry()
    def cuMemcpyHtoD(self, target: Handle | int, source: int, nbytes: int) -> None:
        """Return when the bytes were read, which is before they have landed (CUDA API synchronization behavior)."""
        self.space.bytes_at(int(target), nbytes, ON_DEVICE)
        staged = raw_bytes(source, nbytes).copy()

        def land() -> None:
            self.space.bytes_at(int(target), nbytes, ON_DEVICE)[:] = staged

        self.scheduler.drain(self.context.legacy_stream)
        self.context.legacy_stream.queue.append(land)

    @entry()
    def cuMemcpyDtoH(self, target: int, source: Handle | int, nbytes: int) -> None:
        self.scheduler.drain(self.context.legacy_stream)
        raw_bytes(target, nbytes)[:] = self.space.bytes_at(int(source), nbytes, ON_DEVICE)

    @entry()
    def cuMemcpyHtoDAsync(self, target: Handle | int, source: int, nbytes: int, stream: Handle) -> None:
        self._copy_async((int(target), ON_DEVICE), (int(source), ON_HOST), nbytes, stream)

    @entry()
    def cuMemcpyDtoHAsync(self, target: int, source: Handle | int, nbytes: int, stream: Handle) -> None:
        self._copy_async((int(target), ON_HOST), (int(source), ON_DEVICE), nbytes, stream)

    @entry()
    def cuMemsetD8Async(self, target: Handle | int, value: int, nbytes: int, stream: Handle) -> None:
        def fill() -> None:
            self.space.bytes_at(int(target), nbytes, ON_DEVICE)[:] = value

        self.space.bytes_at(int(target), nbytes, ON_DEVICE)
        self._stream(stream).queue.append(fill)

    def _copy_async(
        self, target: tuple[int, frozenset[Kind]], source: tuple[int, frozenset[Kind]], nbytes: int, stream: Handle
    ) -> None:
        def copy() -> None:
            places = [self.space.bytes_at(address, nbytes, kinds) for address, kinds in (target, source)]
            places[0][:] = places[1]

        for address, kinds in (target, source):
            self.space.bytes_at(address, nbytes, kinds)
        self._stream(stream).queue.append(copy)

    @entry(num_results=1)
    def cuModuleLoadData(self, image: bytes) -> Handle:
        check(image == CUBIN, CUresult.CUDA_ERROR_INVALID_IMAGE)
        number = self.new_number()
        self.context.modules[number] = {self.new_number(): name for name in NAMES}
        return Handle(number)

    @entry(num_results=1)
    def cuModuleGetFunction(self, module: Handle, name: bytes) -> Handle:
        functions = find(self.context.modules, module)
        numbers = [number for number, found in functions.items() if found.encode() == name]
        check(numbers, CUresult.CUDA_ERROR_NOT_FOUND)
        return Handle(numbers[0])

    @entry()
    def cuModuleUnload(self, module: Handle) -> None:
        find(self.context.modules, module)
        del self.context.modules[int(module)]

    @entry()
    def cuLaunchKernel(self, function: Handle, *arguments: Any) -> None:
        num_tiles, num_chunks, depth, *threads, shared_nbytes, stream, parameters, extra = arguments
        functions = {n: name for module in self.context.modules.values() for n, name in module.items()}
        name = find(functions, function)
        check((depth, threads, shared_nbytes, extra) == (1, [THREADS, 1, 1], 0, 0))
        check(0 < num_tiles < 2**31 and 0 < num_chunks < 2**16)
        self.launched.append(name)
        part = fake_kernels.read_arguments(parameters)
        self._stream(stream).queue.append(lambda: fake_kernels.run(name, self.space, part, num_tiles, num_chunks))

    def _stream(self, handle: Any) -> Stream:
        return find({0: self.context.legacy_stream, **self.context.streams}, handle)
