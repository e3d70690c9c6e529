"""How families of models read images and sounds, from their configurations."""

from typing import Any

from identikit.features import Images, Sounds


def _no_prefix(config: Any) -> tuple[str, ...]:
    return ()


def _distilled(config: Any) -> tuple[str, ...]:
    return "[CLS]", "[DIST]"


def _registers(config: Any) -> tuple[str, ...]:
    return "[CLS]", *(f"reg{index}" for index in range(config.num_register_tokens))


def _convolutions(config: Any) -> tuple[int, int, None]:
    """Return the samples under the first token, and from one to the next, of a stack of convolutions over samples."""
    first, step = 1, 1
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        first, step = first + (kernel - 1) * step, step * stride
    return first, step, None


def _samples(config: Any) -> tuple[int]:
    first, step, _ = _convolutions(config)
    return (first + 6 * step,)  # seven tokens


def _frames(config: Any) -> tuple[int, int, int]:
    return 1, 320, config.max_source_positions  # frames of 160 samples, and a convolution that takes every other


def _mel_bins(config: Any) -> tuple[int, int]:
    return config.num_mel_bins, 2 * config.max_source_positions


PATCHES = Images()
PATCHES_ONLY = Images(_no_prefix)
PATCHES_DISTILLED = Images(_distilled)
PATCHES_OF_ANY_SIZE = Images(any_size=True)
PATCHES_WITH_REGISTERS = Images(_registers, any_size=True)
WAVES = Sounds(_convolutions, _samples)
SPECTROGRAMS = Sounds(_frames, _mel_bins)
