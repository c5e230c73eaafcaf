"""Copies of tensors in CPU memory, from which a save is written in the background."""

from __future__ import annotations

from typing import Any

import torch


class Staging:
    """Copies to CPU memory, which need not be there before `wait` returns.

    From a GPU the copies go to pinned memory, by a stream of their own, so the calling thread does not wait for them.
    They begin when what the device's current stream has to do now is done, and what that is given later waits for them,
    for it may overwrite the values.

    Args:
        cuda: what has streams and events, as `torch.cuda`.
        device_type: the devices that have them.
    """

    def __init__(self, cuda: Any = torch.cuda, device_type: str = "cuda") -> None:
        self._cuda = cuda
        self._device_type = device_type
        self._streams: dict[torch.device, Any] = {}
        self._copied: list[Any] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, which is complete when `wait` returns."""
        if tensor.device.type != self._device_type:
            return tensor.to("cpu", copy=True)
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = self._cuda.Stream(tensor.device)
            stream.wait_stream(self._cuda.current_stream(tensor.device))
        with self._cuda.stream(stream):
            tensor.record_stream(stream)  # who frees it on another stream must not get its memory before
            tensor = tensor.resolve_conj().resolve_neg()  # torch would do that to the copy, without waiting for it
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
            return copy.copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        """End the copies: what the current streams are given from now on waits for them."""
        for device, stream in self._streams.items():
            self._cuda.current_stream(device).wait_stream(stream)
            self._copied.append(stream.record_event())

    def wait(self) -> None:
        """Block this thread until the copies are complete."""
        for event in self._copied:
            event.synchronize()
