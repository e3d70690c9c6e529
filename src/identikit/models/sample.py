"""Made-up batches, for measuring and proving a model."""

import torch
from transformers import PreTrainedConfig

from identikit.shapes import Bool, Float, Int, Tensor
from identikit.texts.features import Images, Sounds
from identikit.texts.text import TokenBatch


def sample_tokens(config: PreTrainedConfig, lengths: tuple[int, ...], pad_id: int) -> TokenBatch:
    """Return sequences of made-up tokens of these lengths, padded on the right."""
    n = max(lengths)
    vocabulary = config.get_text_config().vocab_size
    keep = torch.arange(n) < torch.tensor(lengths)[:, None]
    ids = (pad_id + 1 + torch.arange(n) * 7 % (vocabulary - 1)) % vocabulary
    return _batch(keep, ids=torch.where(keep, ids, pad_id))


def sample_features(config: PreTrainedConfig, kind: Images | Sounds, count: int) -> TokenBatch:
    """Return `count` made-up images or sounds."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, *kind.shape(config), generator=generator, dtype=torch.float32)
    n = len(kind.tokens(config, features[0]))
    return _batch(torch.ones(count, n, dtype=torch.bool), features=features)


def _batch(
    keep: Bool[Tensor, "batch n"],
    *,
    ids: Int[Tensor, "batch n"] | None = None,
    features: Float[Tensor, "batch *shape"] | None = None,
) -> TokenBatch:
    rows = len(keep)
    return TokenBatch(
        ids=ids,
        keep=keep,
        special=torch.zeros_like(keep),
        segments=None,
        tokens=tuple(("?",) * int(n) for n in keep.sum(-1)),
        words=((),) * rows,
        order=tuple(range(rows)),
        features=features,
    )
