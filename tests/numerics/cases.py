"""Models whose weights drive numbers to their edges, with a text for each: `HOSTILE` lists them all.

Each starts as a tiny random model whose weights are then changed in place, so that nothing checks them before they are
read, as `identikit.load` would.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from identikit.models.model import Model
from tests.models import tiny

LAYER, HEAD, TOKEN = 1, 1, 2  # where the numbers are hostile, if they are at one place
TEXT = "w5 w6 w7 w8 w9 w10 w11 w12 w13"
FLOATS = (torch.float64, torch.float32)
HALVES = (torch.bfloat16, torch.float16)
EVERY = (*FLOATS, *HALVES)
HUGE = {torch.float64: 1e18, torch.float32: 1e18, torch.bfloat16: 1e18, torch.float16: 1e3}
INVERSE = {dtype: 1 / size for dtype, size in HUGE.items()}
DENORMAL = {torch.float64: 1e-310, torch.float32: 1e-40, torch.bfloat16: 1e-39, torch.float16: 1e-6}

Edit = Callable[[Any], None]
_PARTS = {
    "bert": ("encoder.layer.{}.", {
        "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
        "output": "attention.output.dense", "norm": "output.LayerNorm", "up": "intermediate.dense",
        "down": "output.dense",
    }),
    "llama": ("model.layers.{}.", {
        "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
        "output": "self_attn.o_proj", "norm": "input_layernorm", "up": "mlp.up_proj", "down": "mlp.down_proj",
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A hostile model: which tiny model, what is done to it, in which dtypes, and the text that it reads.

    `refused`: what its refusal has to say, where no right answer exists.
    """

    name: str
    family: str
    edit: Edit
    dtypes: tuple[torch.dtype, ...] = EVERY
    text: Any = TEXT
    refused: str | None = None
    sizes: tuple[tuple[str, Any], ...] = ()

    def __call__(self, dtype: torch.dtype) -> tuple[Model, Any]:
        """Return the model and the text."""
        torch.manual_seed(0)
        if self.sizes:
            blank = tiny.build(self.family)
            blank = type(blank)(type(blank.config)(**blank.config.to_dict() | dict(self.sizes)))
            made = tiny.drawn(blank.eval(), dtype=dtype)
        else:
            made = tiny.build(self.family, dtype=dtype)
        with torch.no_grad():
            self.edit(made)
        return Model(made, tiny.tokenizer(), name=f"hostile {self.name}"), self.text


def part(model: Any, what: str, layer: int = LAYER) -> Any:
    """Return a part of a layer: its value layer, its output projection, …."""
    prefix, names = _PARTS[model.config.model_type]
    return model.get_submodule(prefix.format(layer) + names[what])


def filled(what: str, *, weight: float | None = None, bias: float | None = None, layer: int = LAYER) -> Edit:
    """Fill the weight and the bias of a part with one number."""

    def edit(model: Any) -> None:
        module = part(model, what, layer)
        for name, number in (("weight", weight), ("bias", bias)):
            if number is not None and getattr(module, name, None) is not None:
                getattr(module, name).fill_(number)

    return edit


def one_entry(what: str, number: float, layer: int = LAYER) -> Edit:
    """Put one number into the weight of a part."""
    return lambda model: part(model, what, layer).weight.view(-1)[:1].fill_(number)


def scaled(what: str, by: dict[torch.dtype, float] | float, layer: int = LAYER) -> Edit:
    """Multiply the weight and the bias of a part."""

    def edit(model: Any) -> None:
        for parameter in part(model, what, layer).parameters():
            wide = parameter.double() * (by[parameter.dtype] if isinstance(by, dict) else by)
            parameter.copy_(wide)

    return edit


def ignored_value(model: Any) -> None:
    """Make the value of one token huge and all others tiny, and let hardly any query look at it."""
    uneven_values(model)

    def unlike(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        sharp = output * 60
        sharp[:, TOKEN : TOKEN + 1] = 0
        return sharp

    part(model, "key").register_forward_hook(unlike)


def no_head(model: Any) -> None:
    """Make the values of one head 0."""
    width = model.config.hidden_size // model.config.num_attention_heads
    for parameter in part(model, "value").parameters():
        parameter[HEAD * width : (HEAD + 1) * width] = 0


def uneven_values(model: Any) -> None:
    """Make the value of one token huge and all others tiny."""
    huge = HUGE[model.dtype]

    def uneven(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if output.shape[1] <= TOKEN:
            return output
        size = torch.full(output.shape[1:2], 1 / huge, dtype=output.dtype)
        size[TOKEN] = huge
        return output * size[:, None]

    part(model, "value").register_forward_hook(uneven)


def uneven_columns(model: Any) -> None:
    """Make some dimensions of the values huge and others tiny."""
    huge = HUGE[model.dtype]
    for parameter in part(model, "value").parameters():
        parameter[::3] *= huge
        parameter[1::3] /= huge


def low_rank_output(model: Any) -> None:
    """Make the output projection of rank 1."""
    weight = part(model, "output").weight
    weight.copy_(weight[:, :1].double() @ weight[:1].double())


def both(*edits: Edit) -> Edit:
    """Make several changes."""

    def edit(model: Any) -> None:
        for one in edits:
            one(model)

    return edit


def no_embeddings(model: Any) -> None:
    """Make all embeddings 0."""
    for name, parameter in model.named_parameters():
        if "embed" in name and "norm" not in name.lower():
            parameter.zero_()


def no_epsilon(model: Any) -> None:
    """Let norms divide by 0."""
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 0.0)


def score_bias(number: float) -> Edit:
    """Put one number into the bias on the scores of T5's heads."""

    def edit(model: Any) -> None:
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight[1] = number

    return edit


def sinks(number: float) -> Edit:
    """Set the learned sinks of a layer."""
    return lambda model: model.model.layers[LAYER].self_attn.sinks.fill_(number)


def nothing(model: Any) -> None:
    """Change nothing: the text or the sizes are what is hostile."""


def _of_both(name: str, edit: Edit, **options: Any) -> list[Case]:
    return [Case(f"{name}, {family}", family, edit, **options) for family in _PARTS]


_LAYER = f"layer {LAYER}"
HOSTILE: list[Case] = [
    *_of_both("NaN in a value weight", one_entry("value", torch.nan), refused=_LAYER),
    *_of_both("NaN in the MLP", one_entry("down", torch.nan), refused=_LAYER),
    *_of_both("NaN in the last MLP", one_entry("down", torch.nan, layer=2), refused="layer 2"),
    *_of_both("infinity in the MLP", one_entry("up", torch.inf), refused=_LAYER),
    *_of_both("infinity in the keys", one_entry("key", torch.inf), refused=_LAYER),
    *_of_both("MLP overflows", both(scaled("up", 3e3), scaled("down", 3e3)), dtypes=(torch.float16,), refused=_LAYER),
    *_of_both("values overflow", scaled("value", 6e4), dtypes=(torch.float16,), refused=_LAYER),
    *_of_both("scores overflow", both(scaled("query", 1e3), scaled("key", 1e3)), dtypes=EVERY),
    *_of_both("values of a head are 0", no_head),
    *_of_both("values are 0", filled("value", weight=0, bias=0)),
    *_of_both("values are equal", filled("value", weight=0)),
    *_of_both("one value is huge", uneven_values),
    *_of_both("one value is huge and ignored", ignored_value, dtypes=(torch.float32, *HALVES)),
    *_of_both("squares of values underflow", scaled("value", DENORMAL), dtypes=(torch.float64,),
              refused="L1H[01]: the largest entry"),
    *_of_both("squares of the output projection underflow", scaled("output", DENORMAL), dtypes=(torch.float64,),
              refused="L1H[01]: the largest entry"),
    *_of_both("keys are huge, queries tiny", both(scaled("key", HUGE), scaled("query", INVERSE)), dtypes=FLOATS),
    *_of_both("dimensions of values are uneven", uneven_columns),
    *_of_both("values are denormal", scaled("value", DENORMAL), dtypes=(torch.float32, *HALVES)),
    *_of_both("values are huge", scaled("value", HUGE)),
    *_of_both("output projection is denormal", scaled("output", DENORMAL), dtypes=(torch.float32, *HALVES)),
    *_of_both("output projection is 0", filled("output", weight=0)),
    *_of_both("output projection is 0 without bias", filled("output", weight=0, bias=0)),
    *_of_both("output projection of rank 1", low_rank_output),
    *_of_both("softmax is saturated", scaled("query", 1e3)),
    *_of_both("softmax is half saturated", scaled("query", 50.0)),
    *_of_both("scores are equal", filled("query", weight=0, bias=0)),
    *_of_both("queries are denormal", scaled("query", DENORMAL)),
    *_of_both("MLP is denormal", scaled("down", DENORMAL)),
    *_of_both("norm of weight 0", filled("norm", weight=0)),
    *_of_both("norm of weight and bias 0", filled("norm", weight=0, bias=0)),
    *_of_both("last norm of weight and bias 0", filled("norm", weight=0, bias=0, layer=2)),
    *_of_both("embeddings are 0", no_embeddings),
    *_of_both("embeddings are 0 and norms divide by 0", both(no_embeddings, no_epsilon), refused="layer 0|any answer"),
    *_of_both("identical tokens", nothing, text="w5 " * 9),
    *_of_both("one token", nothing, text=[5]),
    *_of_both("two tokens", nothing, text=[5, 6]),
    *_of_both("special tokens only", nothing, text=[1, 2, 1, 2, 1, 2, 1, 2]),
    *_of_both("as many tokens as positions", nothing, text=[3 + i % 57 for i in range(64)]),
    *_of_both("values of one dimension", nothing, sizes=(("hidden_size", 4), ("head_dim", None))),
    *_of_both("one head", nothing, sizes=(("num_attention_heads", 1), ("num_key_value_heads", 1), ("head_dim", None))),
    *_of_both("a vocabulary of 2", nothing, sizes=(("vocab_size", 2), ("pad_token_id", 0), ("bos_token_id", 0),
                                                   ("eos_token_id", 1)), text=[0, 1, 1, 0, 1, 0, 0, 1, 1]),
    Case("bias of -1e30 on scores, t5", "t5", score_bias(-1e30), dtypes=(*FLOATS, torch.bfloat16)),
    Case("infinitely negative bias on scores, t5", "t5", score_bias(-torch.inf)),
    Case("bias of 1e4 on scores, t5", "t5", score_bias(1e4)),
    Case("sinks take everything, gpt_oss", "gpt_oss", sinks(1e4)),
    Case("sinks take nothing, gpt_oss", "gpt_oss", sinks(-1e4)),
]  # fmt: skip
