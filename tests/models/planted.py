"""A model whose sources are known by construction: a GPT-2 with one head that copies a token from a set position.

A hidden vector is a token's code (16 numbers) and its position's (24 numbers), both of mean 0 and of one length: the
layer norm only scales it. In layer 0, head 0 looks from each position at the one that `SOURCES` names, by their codes,
and adds some of that token's code to its own. Head 1 adds nothing, wherever it looks. Layer 1 adds nothing at all.
"""

import torch
import transformers as hf

from identikit.models.model import Model
from tests.models import tiny

TOKEN = 16
LONGEST = 24
HEAD = 32
SOURCES = [-1, -1, 1, 1, 2, 1, 4, 2, 3, 7, 5, 9, 6, 4, 12, 3, 10, 8, 11, 2, 17, 5, 13, 16]
"""The position that is copied from, by position; −1 where there is none."""

TEXTS = [
    " ".join(f"w{3 + (7 * text + 11 * place * (text + 1)) % 57}" for place in range(6 + text)) for text in range(8)
]


def truth(model: Model, texts: list[str] = TEXTS) -> list[list[int]]:
    """Return the right source of each token of each text."""
    return [SOURCES[: len(text)] for text in model.encode(texts)]


@torch.no_grad()
def planted(*, misled: bool = False, dtype: torch.dtype = torch.float64) -> Model:
    """Return the model; where it is `misled`, head 1 looks at the token before, which no output depends on."""
    torch.manual_seed(0)
    sizes = {"vocab_size": tiny.VOCABULARY, "n_embd": 2 * HEAD, "n_head": 2, "n_layer": 2, "n_positions": LONGEST}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, n_inner=8, bos_token_id=1, eos_token_id=2))
    for weight in model.transformer.h.parameters():
        weight.zero_()
    codes = torch.rand(tiny.VOCABULARY, TOKEN).argsort(1).lt(TOKEN // 2) * 2.0 - 1.0
    model.transformer.wte.weight.zero_()[:, :TOKEN] = codes
    places = torch.eye(LONGEST) - 1 / LONGEST
    model.transformer.wpe.weight.zero_()[:, TOKEN : TOKEN + LONGEST] = 4 * places
    for block in model.transformer.h:
        block.ln_1.weight.fill_(1.0)
        block.ln_2.weight.fill_(1.0)
    attention = model.transformer.h[0].attn
    query, key, value = attention.c_attn.weight.view(2 * HEAD, 3, 2, HEAD).unbind(1)  # from, head, number
    for place, source in enumerate(SOURCES):
        query[TOKEN + place, 0, max(source, 0)] = 1.4  # a weight of some 0.997
        query[TOKEN + place, 1, max(place - 1, 0)] = 2.1 if misled else 0.0  # more
    for head in range(2):
        key[TOKEN : TOKEN + LONGEST, head, :LONGEST] = torch.eye(LONGEST)
    value[:TOKEN, 0, :TOKEN] = torch.eye(TOKEN)
    attention.c_proj.weight[:TOKEN, :TOKEN] = 0.5 * torch.eye(TOKEN)
    return Model(model.to(dtype).eval(), tiny.tokenizer(), name="planted")
