"""Fourier transforms."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operator


def _real(text: str, ndim: tuple[int, int] = (1, 3)) -> Operator:
    def operator(d: Draw) -> str:
        x = d.floats(ndim, nonempty=True)
        norm = d.choice("", ", norm='ortho'", ", norm='forward'")
        return text.format(x=x, d=d.dim(x), n=norm)

    return operator


def _complex(text: str, ndim: tuple[int, int] = (1, 3)) -> Operator:
    def operator(d: Draw) -> str:
        x = d.complexes(ndim, nonempty=True)
        norm = d.choice("", ", norm='ortho'", ", norm='forward'")
        return text.format(x=x, d=d.dim(x), n=norm)

    return operator


def _irfft(d: Draw) -> str:
    x = d.floats((1, 3), nonempty=True)
    dim = d.dim(x)
    return f"torch.fft.irfft(torch.fft.rfft({x}, dim={dim}), n={x.shape[dim]}, dim={dim})"


def _sized(d: Draw) -> str:
    x = d.floats((1, 3), nonempty=True)
    return f"torch.fft.rfft({x}, n={d.integer(1, 6)}, dim={d.dim(x)})"


OPERATORS: Mapping[str, Operator] = {
    "fft": _real("torch.fft.fft({x}, dim={d}{n})"),
    "fft_complex": _complex("torch.fft.fft({x}, dim={d}{n})"),
    "ifft": _complex("torch.fft.ifft({x}, dim={d}{n})"),
    "rfft": _real("torch.fft.rfft({x}, dim={d}{n})"),
    "rfft_sized": _sized,
    "irfft": _irfft,
    "ihfft": _real("torch.fft.ihfft({x}, dim={d}{n})"),
    "fft2": _real("torch.fft.fft2({x}{n})", (2, 3)),
    "ifft2": _complex("torch.fft.ifft2({x}{n})", (2, 3)),
    "rfft2": _real("torch.fft.rfft2({x}{n}).abs()", (2, 3)),
    "fftn": _real("torch.fft.fftn({x}{n}).real"),
    "fftshift": _real("torch.fft.fftshift({x}, dim={d})"),
    "ifftshift": _real("torch.fft.ifftshift({x})"),
    "spectrum": _real("torch.view_as_real(torch.fft.fft({x}, dim={d}{n}))"),
}
