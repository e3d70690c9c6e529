"""The user's model in strange surroundings: the numbers are the plain ones, and the model is as it came."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as hf_logging

import identikit as ik
from tests.hostile.cases import Case, crossed, proved
from tests.hostile.made import TEXT, copied, same, saved
from tests.models import tiny

TEXTS = [f"w{i} w{i + 1} w{i + 2}" for i in range(4, 34)]
CALLS: dict[str, Callable[[Any], Any]] = {
    "attention": lambda model: ik.effective_attention(model, TEXT),
    "intervals": lambda model: ik.attention_intervals(model, TEXT, layer=0, head=0, query=[2, 3]),
    "alternative": lambda model: ik.alternative_attention(model, TEXT, layer=0, head=0, query=3),
    "attribution": lambda model: ik.token_attribution(model, "w5 w6 w7"),
    "identifiability": lambda model: ik.token_identifiability(model, TEXTS, maps="naive", distances="cosine"),
    "inversion": lambda model: ik.invert(model, "w5 w6"),
    "explain": lambda model: ik.explain(model, "w5 w6 w7", probes="exact"),
}


def _of(call: str) -> str:
    return "llama" if call == "inversion" else "bert"


@cache
def expected(call: str) -> Any:
    """Return the answer in plain surroundings."""
    return CALLS[call](tiny.loaded(_of(call)))


def cases() -> Iterator[Case]:
    """Yield the cases with models in memory."""
    for (what, surroundings), call, slow in crossed(SURROUNDINGS.items(), CALLS):
        yield Case(f"{call} {what}", "models", _surrounded(surroundings, call), "either", slow=slow)
    for (what, change), call, slow in crossed(CHANGES.items(), CALLS):
        yield Case(f"{call} of a model {what}", "models", _changed(change, call), "either", slow=slow)
    for what, wrap in WRAPPED.items():
        yield Case(f"a model {what}", "models", _wrapped(wrap), "either", slow="compiled" in what)
    for first in CALLS:
        yield Case(
            f"two threads, {first} beside the others", "models", _threads(first), "right", slow=first != "attribution"
        )
    yield Case("two threads that load", "models", _loading_threads, "right")
    for what, change in AFTERWARDS.items():
        yield Case(f"weights {what} after loading", "models", _afterwards(change), "either")
    for level in (10, 20, 30, 40):
        yield Case(f"a verbosity of {level}", "models", _verbosity(level), "right")
    yield Case("a run stopped in the middle of a model", "models", _interrupted, "right")


def state_of(model: hf.PreTrainedModel) -> dict[str, Any]:
    """Return everything about a model, and about the process, that a call has to leave as it was."""
    return {
        "training": [module.training for module in model.modules()],
        "hooks": [
            (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
            for module in model.modules()
        ],
        "forwards": [module.__dict__.get("forward") for module in model.modules()],
        "classes": [type(module) for module in model.modules()],
        "gradients": [(parameter.requires_grad, parameter.grad is None) for parameter in model.parameters()],
        "places": [(parameter.data_ptr(), parameter.dtype) for parameter in model.parameters()],
        "weights": [parameter.detach().double().sum().item() for parameter in model.parameters()],
        "config": model.config.to_dict() | {"attention": model.config._attn_implementation},
        "verbosity": (hf_logging.get_verbosity(), hub_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
        "random": torch.get_rng_state().tolist()[:64],
    }


@contextmanager
def unchanged(model: hf.PreTrainedModel) -> Iterator[None]:
    """Prove that a model and the process are as before, also after an error."""
    before = state_of(model)
    try:
        yield
    finally:
        for name, value in state_of(model).items():
            proved(value == before[name], f"the model's {name} changed")


# Surroundings


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _switched(switch: Callable[[Any], object], to: Any, back: Any) -> Iterator[None]:
    switch(to)
    try:
        yield
    finally:
        switch(back)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "under autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "under autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "in inference mode": torch.inference_mode,
    "without gradients": torch.no_grad,
    "with gradients on": torch.enable_grad,
    "with a default of float64": lambda: _default_dtype(torch.float64),
    "with a default of bfloat16": lambda: _default_dtype(torch.bfloat16),
    "with a default device of meta": lambda: torch.device("meta"),
    "with deterministic algorithms": lambda: _switched(torch.use_deterministic_algorithms, True, False),
    "with anomalies detected": lambda: torch.autograd.set_detect_anomaly(True),
    "with denormals flushed": lambda: _switched(torch.set_flush_denormal, True, False),
    "with fast matrix products": lambda: _switched(torch.set_float32_matmul_precision, "medium", "highest"),
    "with saved tensors packed": lambda: torch.autograd.graph.save_on_cpu(),
}


def _surrounded(surroundings: Callable[[], AbstractContextManager[Any]], call: str) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        wanted, model = expected(call), tiny.loaded(_of(call))
        with surroundings(), unchanged(model.hf):
            found = CALLS[call](model)
        same(found, wanted, within=1e-4)

    return run


# The model itself


def _hooked(model: hf.PreTrainedModel) -> None:
    """Look at everything, and change nothing."""
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
        module.register_forward_pre_hook(lambda *_: None)


def _implementation(name: str) -> Callable[[hf.PreTrainedModel], None]:
    return lambda model: model.set_attn_implementation(name)


def _with_gradients(model: hf.PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


CHANGES: dict[str, Callable[[hf.PreTrainedModel], object]] = {
    "in training mode": lambda model: model.train(),
    "with parts in training mode": lambda model: [module.train() for module in list(model.modules())[::3]],
    "with frozen weights": lambda model: model.requires_grad_(False),
    "with gradients on its weights": _with_gradients,
    "with hooks that only look": _hooked,
    "with eager attention": _implementation("eager"),
    "with fused attention": _implementation("sdpa"),
    "that returns attentions": lambda model: (
        model.set_attn_implementation("eager") or setattr(model.config, "output_attentions", True)
    ),
    "that returns hidden states": lambda model: setattr(model.config, "output_hidden_states", True),
    "that returns tuples": lambda model: setattr(model.config, "return_dict", False),
    "that keeps a cache": lambda model: setattr(model.config, "use_cache", True),
    "with gradient checkpointing": lambda model: model.train().gradient_checkpointing_enable(),
    "with dropout everywhere": lambda model: [setattr(m, "p", 0.5) for m in model.modules() if hasattr(m, "p")],
}


def _changed(change: Callable[[hf.PreTrainedModel], object], call: str) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        wanted, inner = expected(call), tiny.build(_of(call))
        change(inner)
        model = ik.load(inner, tiny.tokenizer())
        with unchanged(inner):
            found = CALLS[call](model)
        same(found, wanted, within=1e-4)

    return run


def _scripted(model: hf.PreTrainedModel) -> Any:
    return torch.jit.trace(model, (torch.tensor([[5, 6]]),), strict=False)


WRAPPED: dict[str, Callable[[hf.PreTrainedModel], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "with a compiled forward": lambda model: model.compile(backend="eager") or model,
    "in parallel on no devices": torch.nn.DataParallel,
    "traced": _scripted,
    "without weights": lambda model: model.to("meta"),
    "with weights in two precisions": lambda model: model.base_model.encoder.layer[1].half() and model,
    "that is only its state": lambda model: model.state_dict(),
    "that is a class": type,
    "under a transformation": lambda model: torch.func.functional_call,
}


def _wrapped(wrap: Callable[[hf.PreTrainedModel], Any]) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        model = ik.load(wrap(tiny.build("bert")), tiny.tokenizer())
        found = CALLS["attention"](model)
        mixed = any(parameter.dtype == torch.float16 for parameter in model.hf.parameters())
        same(found, expected("attention"), within=1e-2 if mixed else 1e-4)

    return run


# Threads


def _threads(first: str) -> Callable[[Path], None]:
    """One thread repeats a call while another does the others, on one model: all numbers are the plain ones."""

    def run(_: Path) -> None:
        wanted = {call: expected(call) for call in CALLS if _of(call) == _of(first)}
        model = tiny.loaded(_of(first))
        faults: list[BaseException] = []

        def work(calls: list[str]) -> None:
            try:
                for call in calls:
                    same(CALLS[call](model), wanted[call], within=1e-5)
            except BaseException as error:
                faults.append(error)

        others = [call for call in wanted if call not in (first, "explain")] or [first]
        workers = [threading.Thread(target=work, args=(calls,)) for calls in ([first] * 6, others * 2)]
        with unchanged(model.hf):
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        if faults:
            raise faults[0]

    return run


def _loading_threads(_: Path) -> None:
    """Two threads load at once: both models are right, and transformers is as loud as before."""
    before = hf_logging.get_verbosity(), hub_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    found: list[Any] = []

    def load() -> None:
        try:
            for _ in range(4):
                found.append(CALLS["attention"](ik.load(saved("bert"))))
        except BaseException as error:
            found.append(error)

    workers = [threading.Thread(target=load) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for one in found:
        if isinstance(one, BaseException):
            raise one
        same(one, found[0])
    after = hf_logging.get_verbosity(), hub_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    proved(len(found) == 8 and after == before, f"the verbosity was {before} and is {after}")


# Afterwards


def _data(model: hf.PreTrainedModel) -> None:
    model.encoder.layer[1].attention.self.query.weight.data.add_(0.3)


def _state(model: hf.PreTrainedModel) -> None:
    model.load_state_dict(tiny.build("bert", seed=1).state_dict())


def _module(model: hf.PreTrainedModel) -> None:
    model.encoder.layer[1] = tiny.build("bert", seed=1).encoder.layer[1]


def _swapped(model: hf.PreTrainedModel) -> None:
    """Exchange two rows in place: sums stay."""
    weight = model.encoder.layer[0].attention.self.key.weight.data
    weight.copy_(weight.roll(1, 0))


AFTERWARDS: dict[str, Callable[[hf.PreTrainedModel], None]] = {
    "changed in place": _data,
    "loaded anew": _state,
    "of another block put in": _module,
    "with two rows exchanged": _swapped,
}


def _afterwards(change: Callable[[hf.PreTrainedModel], None]) -> Callable[[Path], None]:
    """A result never claims the hash of weights it was not computed from."""

    def run(_: Path) -> None:
        model = ik.load(tiny.build("bert"), tiny.tokenizer())
        before = ik.effective_attention(model, TEXT)
        change(model.hf)
        found = ik.effective_attention(model, TEXT)
        proved(found.provenance.weights != before.provenance.weights, "the result claims the hash of the old weights")
        other = tiny.build("bert")
        change(other)
        same(found, ik.effective_attention(ik.load(other, tiny.tokenizer()), TEXT))

    return run


def _verbosity(level: int) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        before = hf_logging.get_verbosity(), hub_logging.get_verbosity()
        with ExitStack() as stack:
            stack.callback(hf_logging.set_verbosity, before[0])
            stack.callback(hub_logging.set_verbosity, before[1])
            hf_logging.set_verbosity(level)
            hub_logging.set_verbosity(level)
            model = ik.load(saved("bert"))
            CALLS["attention"](model)
            broken = copied("bert", place)
            (broken / "config.json").write_text("{")
            with suppress(ik.ModelError):
                ik.load(broken)
            proved((hf_logging.get_verbosity(), hub_logging.get_verbosity()) == (level, level), "it is not as it was")

    return run


def _interrupted(_: Path) -> None:
    """Ctrl-C inside a block: the model is as it came, and the next call is right."""
    model = tiny.loaded("bert")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for call in CALLS:
        if _of(call) == "bert":
            handle = model.hf.encoder.layer[1].register_forward_hook(stop)
            with unchanged(model.hf):
                try:
                    CALLS[call](model)
                    proved(False, f"{call} ran without the model")
                except KeyboardInterrupt:
                    pass
            handle.remove()
    same(CALLS["attention"](model), expected("attention"))
