"""Hidden vectors that another tool saved: one file for each text, as vLLM writes them or as NumPy does."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from identikit.checks import is_path, shortened
from identikit.errors import InputError
from identikit.results.provenance import Provenance, package_versions
from identikit.shapes import Float, Int, Tensor
from identikit.tokens.states import HiddenStates

_IDS = ".token_ids.npy"
_EXPECTED = (
    "Expected one .safetensors file for each text with hidden_states (token, layer, feature) and token_ids, as vLLM "
    f"writes them, or NAME.npy (layer, token, feature) beside NAME{_IDS}."
)


def saved_states(folder: str | os.PathLike[str], settings: Mapping[str, object]) -> tuple[HiddenStates, Provenance]:
    """Read the vectors of all texts in a folder, in the order of the files' names, with their provenance.

    The first layer has to be what enters the model's first block: for vLLM, layer 0.
    """
    if not is_path(folder) or not Path(folder).is_dir():
        raise InputError(f"states={shortened(folder)} cannot be used: it is not a folder. {_EXPECTED}")
    digest = hashlib.sha256()
    texts: list[tuple[Tensor, Tensor]] = []
    for path in _files(Path(folder)):
        hidden, ids = _read(path)
        if texts and texts[0][0].shape[::2] != hidden.shape[::2]:
            raise InputError(
                f"Reading {path}: it has {hidden.shape[0]} layers of {hidden.shape[2]} numbers, and the files before "
                f"it have {texts[0][0].shape[0]} of {texts[0][0].shape[2]}. Keep the texts of one model in a folder."
            )
        digest.update(path.name.encode() + hidden.numpy().tobytes() + ids.numpy().tobytes())
        texts.append((hidden, ids))
    vectors = torch.cat([hidden for hidden, _ in texts], 1)
    lengths = torch.tensor([len(ids) for _, ids in texts])
    all_ids = torch.cat([ids for _, ids in texts])
    _check_inputs(vectors[0], all_ids, lengths, os.fspath(folder))
    name = Path(folder).resolve().name
    text = hashlib.sha256(all_ids.numpy().tobytes()).hexdigest()
    dtype = str(vectors.dtype).removeprefix("torch.")
    options = {**settings, "texts": len(texts)}
    origin = (name, None, digest.hexdigest(), "none", "none", text, dtype, "cpu")
    provenance = Provenance(*origin, options, package_versions())
    return HiddenStates(vectors[0], vectors[1:], lengths, name), provenance


def _files(folder: Path) -> list[Path]:
    """List the files of texts."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".npy")]
    files = [path for path in files if not path.name.endswith(_IDS)]
    if not files:
        raise InputError(f"states={folder} cannot be used: there are no hidden vectors in it. {_EXPECTED}")
    return files


def _read(path: Path) -> tuple[Float[Tensor, "layer token d"], Int[Tensor, " token"]]:
    """Read the hidden vectors and token ids of one text, or refuse the file."""
    try:
        tensors = _safetensors(path) if path.suffix == ".safetensors" else _arrays(path)
    except (OSError, ValueError, KeyError, SafetensorError, TypeError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        raise InputError(f"Reading {path}: {str(reason).rstrip('.')}. {_EXPECTED}") from None
    hidden = tensors["hidden"]
    ids = tensors["ids"]
    whole_ids = not (ids.is_floating_point() or ids.is_complex())
    if hidden.ndim != 3 or not hidden.is_floating_point() or ids.ndim != 1 or not whole_ids:
        shapes = f"vectors of shape {tuple(hidden.shape)}, {hidden.dtype}, ids of {tuple(ids.shape)}, {ids.dtype}"
        raise InputError(f"Reading {path}: it holds {shapes}. {_EXPECTED}")
    hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
    if hidden.shape[1] != len(ids) or len(hidden) < 2 or not bool(hidden.isfinite().all()):
        raise InputError(
            f"Reading {path}: {len(hidden)} layers of {hidden.shape[1]} vectors and {len(ids)} token ids. Expected a "
            "vector for each id in at least two layers, the first of which enters the first block, all finite."
        )
    return hidden.contiguous(), ids.long()


def _safetensors(path: Path) -> Mapping[str, Tensor]:
    """Read a file as vLLM writes it: tokens first."""
    stored = load(path.read_bytes())
    hidden = stored["hidden_states"]
    return {"hidden": hidden.transpose(0, 1) if hidden.ndim == 3 else hidden, "ids": stored["token_ids"]}


def _arrays(path: Path) -> Mapping[str, Tensor]:
    """Read NumPy's files: layers first."""
    ids = path.with_name(path.stem + _IDS)
    return {
        name: torch.from_numpy(np.load(file, allow_pickle=False)) for name, file in (("hidden", path), ("ids", ids))
    }


def _check_inputs(
    inputs: Float[Tensor, "token d"], ids: Int[Tensor, " token"], lengths: Int[Tensor, " sentence"], folder: str
) -> None:
    """Refuse a first layer that depends on the context.

    An id at a position must have the same input vector in most texts. The first token of a text is left out: a causal
    model gives it the same vector in every layer.
    """
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    first_rows: dict[tuple[int, int], int] = {}
    agrees: list[bool] = []  # for each token that an earlier text has at the same position
    for row, (token, position) in enumerate(zip(ids.tolist(), positions.tolist(), strict=True)):
        first = first_rows.setdefault((token, position), row)
        if position and first != row:
            agrees.append(bool((inputs[row] - inputs[first]).abs().max() <= 1e-3 * inputs[first].abs().max()))
    if agrees and sum(agrees) < len(agrees) / 2:
        raise InputError(
            f"Reading {folder}: in the first layer, {len(agrees) - sum(agrees)} of {len(agrees)} tokens differ from "
            "the same token at the same place of another text, so these are not input vectors. Save what enters the "
            "first block as well (for vLLM, layer 0), first of all."
        )
