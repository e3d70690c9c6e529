"""Images and sounds as what models read: pixels, samples or spectrograms, one token per patch or stretch of time.

`Images` and `Sounds` say how a family of models reads them; `encode_features` turns what a user passes into `Encoded`,
so that batches, results and provenance work as they do for texts.
"""

import base64
import hashlib
import io
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedConfig

from identikit.checks import shortened
from identikit.errors import InputError
from identikit.shapes import Float, Tensor
from identikit.texts.encoding import TokenLimit, label_texts
from identikit.texts.text import EncodedText

if TYPE_CHECKING:
    from PIL.Image import Image

_SMALL = 384  # pixels of the longer side of the picture that a result keeps


@dataclass(frozen=True)
class Images:
    """How a model reads images: as a grid of patches ('r0c1' is in row 0 and column 1), after tokens of its own.

    - `prefix`: the names of the tokens before the patches, but for the registers, which the configuration counts
    - `any_size`: it fits its positions to any number of patches; otherwise images have the configured size
    """

    prefix: tuple[str, ...] = ("[CLS]",)
    any_size: bool = False
    modality: ClassVar[str] = "image"

    def shape(self, config: PreTrainedConfig) -> tuple[int, ...]:
        """Return the shape of an image of the configured size."""
        return (config.num_channels, *_height_and_width(config.image_size))

    def tokens(self, config: PreTrainedConfig, features: Float[Tensor, "channel height width"]) -> tuple[str, ...]:
        """Return the names of the tokens that the model makes of an image."""
        height, width = _height_and_width(config.patch_size)
        rows = range(features.shape[1] // height)
        columns = range(features.shape[2] // width)
        return *self._names_before(config), *(f"r{row}c{column}" for row in rows for column in columns)

    def _names_before(self, config: PreTrainedConfig) -> tuple[str, ...]:
        registers = range(getattr(config, "num_register_tokens", 0))
        return *self.prefix, *(f"reg{index}" for index in registers)

    def about(
        self, config: PreTrainedConfig, reader: Any, features: Float[Tensor, "channel height width"]
    ) -> dict[str, Any]:
        """Return what is kept of an image: the picture as the model reads it, cut to size, and where its tokens are."""
        from PIL import Image

        patch_height, patch_width = _height_and_width(config.patch_size)
        height, width = features.shape[1:]
        rows = height // patch_height
        columns = width // patch_width
        box = (0.0, 0.0, float(columns * patch_width), float(rows * patch_height))
        first = len(self._names_before(config))
        grid = grid_facts(rows, columns, box, range(first, first + rows * columns))
        picture = Image.fromarray(_colours(reader, features).movedim(0, -1).expand(-1, -1, 3).numpy())
        return {"size": [width, height], "picture": small_copy(picture), "views": [grid]}

    def encode(self, image: object, name: str, source: "FeatureReader", room: TokenLimit) -> EncodedText:
        """Return one image as tokens with its pixels."""
        features = source.read(images=[open_image(image, name)])
        if not self.any_size:
            source.check_shape(name, features)
        tokens = self.tokens(source.config, features)
        if room.tokens is not None and len(tokens) > room.tokens:
            raise InputError(
                f"Reading {name}: the model makes {len(tokens)} tokens of it, and max_tokens allows {room.tokens}. "
                "An image cannot be cut; leave max_tokens out."
            )
        added = len(self._names_before(source.config))
        special = [position < added for position in range(len(tokens))]
        return _encoded(tokens, special, features, self.modality)


Window = Callable[[PreTrainedConfig], tuple[int, int, int | None]]
"""From a configuration: samples under the first token, samples from one token to the next, and the number of tokens
that every sound is padded to (None: as many as it has)."""


@dataclass(frozen=True)
class Sounds:
    """How a model reads sounds: as one token per stretch of time, named by when it begins ('0.02s').

    - `window`: how samples become tokens
    - `shape`: the shape of the features of a sound, for made-up ones and for sounds that are padded to one length
    """

    window: Window
    shape: Callable[[PreTrainedConfig], tuple[int, ...]]
    modality: ClassVar[str] = "sound"

    def tokens(self, config: PreTrainedConfig, features: Float[Tensor, "*shape"]) -> tuple[str, ...]:
        """Return the tokens that the model makes of a made-up sound, by number: no rate is known."""
        first, step, padded = self.window(config)
        return tuple(map(str, range(padded or 1 + (features.shape[-1] - first) // step)))

    def encode(self, sound: object, name: str, source: "FeatureReader", room: TokenLimit) -> EncodedText:
        """Return one sound as tokens with its features; tokens beyond its end are marked special."""
        rate = source.reader.sampling_rate
        first, step, padded = self.window(source.config)
        wave = _wave(sound, name, rate)
        if len(wave) < first:
            raise InputError(
                f"Reading {name}: it has {len(wave)} samples, and one token of the model takes {first} "
                f"({first / rate:.3g} s at {rate:,} Hz). Pass a longer sound."
            )
        if padded is not None and room.tokens is not None and room.tokens < padded:
            raise InputError(
                f"Reading {name}: the model makes {padded} tokens of every sound, and max_tokens allows {room.tokens}. "
                "Leave max_tokens out."
            )
        if room.exceeded(name, 1 + (len(wave) - first) // step):
            wave = wave[: first + ((room.tokens or 1) - 1) * step + (step - 1 if padded else 0)]
        features = source.read(wave, sampling_rate=rate)
        if padded is not None:
            source.check_shape(name, features)
        heard = 1 + (len(wave) - first) // step
        seconds = step / rate
        decimals = next((digits for digits in range(2, 6) if abs(round(seconds, digits) - seconds) < 1e-9), 6)
        tokens = tuple(f"{index * seconds:.{decimals}f}s" for index in range(padded or heard))
        special = [index >= heard for index in range(len(tokens))]
        return _encoded(tokens, special, features, self.modality)


@dataclass(frozen=True)
class FeatureReader:
    """What makes a model's features.

    - `kind`: how the model reads images or sounds
    - `reader`: its image processor or feature extractor; `argument`: the model's argument that takes what it makes
    - `config`: the model's configuration
    """

    kind: Images | Sounds
    reader: Any
    argument: str
    config: PreTrainedConfig

    def read(self, *inputs: object, **options: object) -> Float[Tensor, "*shape"]:
        """Return the features of one image or sound."""
        return self.reader(*inputs, **options, return_tensors="pt")[self.argument][0]

    def check_shape(self, name: str, features: Tensor) -> None:
        """Refuse features of a shape that the model does not take."""
        expected = self.kind.shape(self.config)
        if features.shape != expected:
            raise InputError(
                f"Reading {name}: {type(self.reader).__name__} makes {self.argument} of "
                f"{' × '.join(map(str, features.shape))}, and the model reads {' × '.join(map(str, expected))}. Use "
                "the model's own."
            )


def encode_features(source: FeatureReader, inputs: object, room: TokenLimit, *, keep: bool = True) -> list[EncodedText]:
    """Turn an image or sound, or a list of them, into tokens with features; with `keep=False` features are dropped."""
    results = []
    for name, value in label_texts(inputs, source.kind.modality):
        encoded = source.kind.encode(value, name, source, room)
        results.append(encoded if keep else replace(encoded, features=None))
    return results


def _encoded(tokens: tuple[str, ...], special: list[bool], features: Tensor, modality: str) -> EncodedText:
    """Return features under their tokens' names; a digest of the features stands in for the text."""
    digest = hashlib.sha256(features.float().numpy().tobytes()).hexdigest()
    return EncodedText((), None, tuple(special), tokens, (), f"{modality} {digest}", features=features)


def _height_and_width(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _colours(reader: Any, features: Float[Tensor, "channel height width"]) -> Tensor:
    """Return the pixels that an image processor made as the colours that they were, from 0 to 255."""
    pixels = features[:3].float().cpu()
    if getattr(reader, "do_normalize", False):
        mean = torch.tensor(reader.image_mean).reshape(-1, 1, 1)
        deviation = torch.tensor(reader.image_std).reshape(-1, 1, 1)
        pixels = pixels * deviation + mean
    white = 255.0 if getattr(reader, "do_rescale", True) else 1.0
    return (white * pixels).round().clamp(0, 255).to(torch.uint8)


def grid_facts(
    rows: int,
    columns: int,
    box: Sequence[float],
    positions: Sequence[int],
    is_overview: bool = False,
    origin: tuple[int, int] = (0, 0),
) -> dict[str, object]:
    """Return what is kept of a grid of tokens on a picture, as plain JSON values.

    Its first token is at row and column `origin` of the image, and it shows the `box` of the picture.
    """
    grid = {"rows": rows, "columns": columns, "box": list(box), "tokens": list(positions)}
    return grid | {"overview": is_overview, "from": list(origin)}


def small_copy(image: "Image") -> str:
    """Return a small copy of a picture as a JPEG in base64, to be drawn under its patches."""
    copy = image.copy()
    copy.thumbnail((_SMALL, _SMALL))
    jpeg = io.BytesIO()
    copy.save(jpeg, "JPEG", quality=80)
    return base64.b64encode(jpeg.getvalue()).decode()


def open_image(image: object, name: str) -> "Image":
    """Return an image, or the one at a path, in RGB and turned as its camera says."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise InputError("Reading images needs Pillow. Run `pip install 'identikit[vision]'`.") from error
    if isinstance(image, str | os.PathLike):
        _check_file(image, name, "images: pass the path of one")
    try:
        if isinstance(image, Image.Image):
            return ImageOps.exif_transpose(image).convert("RGB")
        if isinstance(image, str | os.PathLike):
            with Image.open(image) as opened:
                return ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # Pillow raises what it likes on damaged and on huge images
        raise InputError(
            f"Reading {name}: {shortened(str(image))} cannot be read as an image ({type(error).__name__}). Pass a PNG "
            "or JPEG."
        ) from error
    raise InputError(f"Reading {name}: got {type(image).__name__}, expected a PIL image or the path of one.")


def _check_file(path: str | os.PathLike[str], name: str, expected: str) -> None:
    """Refuse a path that leads to a folder, a pipe or nowhere; `expected` says what the model reads."""
    with suppress(OSError, ValueError):  # a name that is too long, or that no file can have
        if Path(path).is_file():
            return
    raise InputError(f"Reading {name}: there is no file {shortened(str(path))}. The model reads {expected}.")


def _wave(sound: object, name: str, rate: int) -> Float[np.ndarray, " sample"]:
    """Return the samples of a sound at a rate: a file is mixed to one channel and resampled, an array taken as is."""
    expected = "the path of a sound file, or a 1-D array of samples between -1 and 1 at the model's sampling rate"
    if isinstance(sound, str | os.PathLike):
        wave = _sound_file(sound, name, rate)
    elif isinstance(sound, torch.Tensor):
        samples = sound.detach().cpu()
        wave = np.asarray(samples.float() if samples.is_floating_point() else samples)  # NumPy has no bfloat16
    elif isinstance(sound, list | np.ndarray):
        wave = np.asarray(sound)
    else:
        raise InputError(f"Reading {name}: got {type(sound).__name__}, expected {expected}.")
    if wave.ndim != 1:
        raise InputError(
            f"Reading {name}: got an array of {wave.ndim} dimensions, expected {expected}. Mix channels to one first."
        )
    if not wave.size:
        raise InputError(f"Reading {name}: it is empty. Pass at least a few samples.")
    if wave.dtype.kind != "f":
        raise InputError(
            f"Reading {name}: its samples are {wave.dtype}, expected {expected}. Divide 16-bit ones by 32768."
        )
    if not np.isfinite(wave).all():
        raise InputError(f"Reading {name}: it holds NaN or infinity. Pass finite samples.")
    return wave.astype(np.float32)


def _sound_file(path: str | os.PathLike[str], name: str, rate: int) -> np.ndarray:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the package is there, the library that it wraps is not
        raise InputError("Reading sound files needs soundfile. Run `pip install 'identikit[audio]'`.") from error
    _check_file(path, name, "sounds: pass the path of one, or a 1-D array")
    try:
        channels, file_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise InputError(
            f"Reading {name}: {shortened(str(path))} cannot be read as sound. Pass a WAV, FLAC, OGG or MP3."
        ) from error
    wave = channels.mean(1)
    if file_rate == rate or not wave.size:
        return wave
    from scipy.signal import resample_poly

    shared = math.gcd(file_rate, rate)
    return resample_poly(wave, rate // shared, file_rate // shared).astype(np.float32)
