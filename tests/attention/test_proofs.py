"""Proofs of ends: written by us, checked by `proof.py` alone, and refused when anything about them is changed."""

import contextlib
import json
import math
import random
import shutil
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import identikit as ik
from identikit import proof
from identikit.maths.polytope import duals
from tests.cli.made import run
from tests.models import tiny
from tests.models.real import STORIES, needs_stories
from tests.runs.made import save_model, save_texts

TEXT = "w5 w9 w12 w5 w33 w7 w21 w9 w14 w3 w50 w9 w2"
CHECKER = Path(proof.__file__)


def proven(text: str) -> bool:
    """Whether the checker accepts a file, in this process."""
    try:
        return all(slack >= 0 for *_, slack in proof.check(text))
    except proof.Refused:
        return False


def alone(file: Path) -> subprocess.CompletedProcess[str]:
    """Check a file with a copy of the checker that no package can be imported by."""
    copy = shutil.copy(CHECKER, file.parent / "checker.py")
    command = [sys.executable, "-I", "-S", str(copy), str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def sealed(content: dict) -> str:
    return json.dumps(content | {"digest": proof.digest(content)})


@pytest.fixture(scope="module")
def intervals():
    return ik.attention_intervals(tiny.shared("bert"), TEXT, layer=1, head=[0, 2], query=6)


@pytest.fixture(scope="module")
def written(intervals, tmp_path_factory):
    file = tmp_path_factory.mktemp("proof") / "proof.json"
    saved = intervals.save_proof(file)
    assert saved.claims == intervals.lower.numel()
    return file, saved


def test_ends_are_proven_by_the_checker_alone(written, intervals):
    file, saved = written
    checked = alone(file)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"Proven: {saved.claims} claims" in checked.stdout
    assert saved.loss < 1e-10
    ends = [(float(lower), float(upper)) for _, lower, upper, _ in proof.check(file.read_text())]
    lower, upper = torch.tensor(ends).mT
    torch.testing.assert_close(lower, intervals.lower.flatten().float(), atol=1e-6, rtol=0)
    torch.testing.assert_close(upper, intervals.upper.flatten().float(), atol=1e-6, rtol=0)
    assert (upper - lower).max() > 0.05  # it is not that everything was fixed


def test_proven_ends_are_attained_exactly(written, intervals, tmp_path, monkeypatch):
    """Other attention, solved in rational numbers, has the same output and comes as near to an end as the gap says."""
    _, saved = written
    assert 0 <= saved.gap < 1e-10
    assert saved.residual == 0
    monkeypatch.setattr(duals, "find_spec", lambda name: None)
    rounded = intervals.sel(head=0).save_proof(tmp_path / "proof.json")
    assert abs(rounded.gap) < 1e-10
    assert 0 < rounded.residual < 1e-10


def test_an_exact_vertex_has_the_output_or_is_none():
    values = [[Fraction(x)] for x in (0, 1, 2, 5)]
    found = duals.exact_vertex(values, Fraction(1), [Fraction(3, 2)], [2, 0, 1, 3])
    assert found == {2: Fraction(3, 4), 0: Fraction(1, 4)}
    assert duals.exact_vertex(values, Fraction(1), [Fraction(3)], [2, 0, 1, 3]) is None  # it would take less than 0
    assert duals.exact_vertex(values, Fraction(1), [Fraction(3)], [2]) is None  # one key cannot have this output


def test_the_data_are_the_models_own(written):
    content = json.loads(written[0].read_text())
    attention = ik.effective_attention(tiny.shared("bert"), TEXT)
    raw = attention.sel(layer=1, head=[0, 2], query=6).raw.double()
    call = attention.captured().layers[1].call
    for row, weights in zip(content["rows"], raw, strict=True):
        torch.testing.assert_close(torch.tensor(row["attention"], dtype=torch.float64), weights, atol=1e-6, rtol=0)
    for values, head in zip(content["values"], (0, 2), strict=True):
        assert torch.equal(torch.tensor(values, dtype=torch.float64), call.value[0, head].double())


@pytest.mark.parametrize("family", ["bert", "llama", "gpt_oss", "qwen3", "t5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_can_be_proven(family, dtype, tmp_path):
    result = ik.attention_intervals(tiny.shared(family, dtype=dtype), TEXT, layer=0, head=1, query=-1)
    saved = result.save_proof(tmp_path / "proof.json")
    assert proven((tmp_path / "proof.json").read_text())
    assert saved.loss < 1e-9


def test_a_learned_sink_is_a_key_of_value_0(tmp_path):
    ik.attention_intervals(tiny.shared("gpt_oss"), TEXT, layer=1, head=0, query=-1).save_proof(tmp_path / "proof.json")
    content = json.loads((tmp_path / "proof.json").read_text())
    assert not any(content["values"][0][-1])
    assert content["rows"][0]["keys"][-1] == len(content["values"][0]) - 1
    assert sum(content["rows"][0]["attention"]) == pytest.approx(1)
    assert sum(content["rows"][0]["attention"][:-1]) < 0.999


def test_sums_scores_and_chains_are_proven(tmp_path):
    model = tiny.shared("llama")
    file = tmp_path / "proof.json"
    weights = {"over": {3: 1.0, 5: -2.5}}
    by_query = torch.zeros(2, len(model.encode(TEXT)[0]))
    by_query[0, 1] = 1.0
    by_query[1, 3] = -1.0
    results = [
        ik.attention_intervals(model, TEXT, layer=2, head=3, query=[8, 9], weights=weights),
        ik.attention_intervals(model, TEXT, layer=2, head=3, query=[8, 9], weights=by_query),
        ik.attention_intervals(model, TEXT, layer=2, head=3, query=9, groups={"some": [0, 2, 3]}),
        ik.head_scores(model, [TEXT, "w5 w6 w5 w6 w5 w6 w9 w7 w1"], scores=("previous", "distance"), layers=1, heads=0),
        ik.attention_measure(model, "w5 w9 w12 w5 w33 w7 w21", "rollout").sel(layer=2, output=-1, input=[1, 4]),
        ik.attention_measure(model, TEXT, "value norm", layers=1).sel(head=2, query=9, key=[1, 2]),
        ik.attention_measure(model, TEXT, "mean", layers=[1, 2]).sel(layer=2, query=9, key=[1, 2]),
        ik.attention_measure(model, "w5 w9 w12 w5 w33", "relevance", layers=1).sel(output=-1, input=0),
    ]
    assert [result.lower.numel() for result in results[:2]] == [2, 2]
    for result in results:
        saved = result.save_proof(file)
        claims = [step for step in proof.check(file.read_text()) if step[0] is not None]
        assert saved.claims == len(claims) == result.lower.numel()
        assert all(slack >= 0 for *_, slack in claims)
        assert saved.loss < 1e-9
        lower = torch.tensor([float(low) for _, low, _, _ in claims], dtype=torch.float64)
        torch.testing.assert_close(lower, result.lower.flatten().double(), atol=1e-8, rtol=1e-8)


def test_every_alternative_is_within_a_proven_rollout(tmp_path):
    """Put other attention with the same output into every row, and multiply through."""
    model = tiny.shared("bert")
    measure = ik.attention_measure(model, TEXT, "rollout").sel(layer=2, output=3, input=5)
    measure.save_proof(tmp_path / "proof.json")
    content = json.loads((tmp_path / "proof.json").read_text())
    claim = content["steps"][-1]
    start = torch.Generator().manual_seed(0)
    quantities: list[Fraction] = []
    moved = [_moved(content, row, start) for row in content["rows"]]
    for step in content["steps"]:
        if "terms" in step:
            parts = [Fraction(a, b) * (1 if s is None else quantities[s]) for a, b, s in step["terms"]]
        else:
            weights = moved[step["row"]]
            parts = [
                Fraction(entry[1]) * (quantities[entry[2]] if len(entry) == 3 else 1) * Fraction(weights[entry[0]])
                for entry in step["objective"]
            ]
        quantities.append(sum(parts, Fraction(0)))
    assert claim["lower"] - 1e-9 <= float(quantities[-1]) <= claim["upper"] + 1e-9
    assert abs(float(quantities[-1]) - float(measure.raw)) > 1e-6


def _moved(content: dict, row: dict, generator: torch.Generator) -> dict[int, float]:
    """Return other attention in a row's set, to round-off, by its keys."""
    from identikit.maths.polytope.alternative import alternative

    values = torch.tensor(content["values"][row["values"]], dtype=torch.float32)[row["keys"]]
    weights = torch.tensor(row["attention"], dtype=torch.float64)
    direction = torch.randn(len(weights), dtype=torch.float64, generator=generator)
    with contextlib.suppress(ik.InputError):  # the only attention with its output
        weights = alternative(weights, values, direction)
    return dict(zip(row["keys"], weights.tolist(), strict=True))


# Damage


def _flipped(value: float, bit: int) -> float:
    (whole,) = struct.unpack("<Q", struct.pack("<d", value))
    (changed,) = struct.unpack("<d", struct.pack("<Q", whole ^ (1 << bit)))
    return changed if math.isfinite(changed) else -value


def flip_a_bit(content: dict, drawn: random.Random) -> None:
    """Flip a bit of a value, a weight, a dual vector or an end."""
    step = drawn.choice([step for step in content["steps"] if "row" in step])
    row = drawn.choice(content["rows"])
    targets = [drawn.choice(drawn.choice(content["values"])), row["attention"], step["upper_dual"], step["lower_dual"]]
    target = drawn.choice(targets)
    at = drawn.randrange(len(target))
    target[at] = _flipped(target[at], drawn.randrange(64))


def swap_rows(content: dict, drawn: random.Random) -> None:
    matrix = drawn.choice(content["values"])
    one, other = drawn.sample(range(len(matrix)), 2)
    matrix[one], matrix[other] = matrix[other], matrix[one]


def move_an_end(content: dict, drawn: random.Random) -> None:
    step = drawn.choice(content["steps"])
    name, inward = drawn.choice([("lower", 1e-9), ("upper", -1e-9)])
    step[name] += inward


def make_a_weight_negative(content: dict, drawn: random.Random) -> None:
    weights = drawn.choice(content["rows"])["attention"]
    at = drawn.randrange(len(weights))
    weights[at] = -abs(weights[at]) - 1e-12


def exchange_objectives(content: dict, drawn: random.Random) -> None:
    steps = [step for step in content["steps"] if "row" in step]
    while True:
        one, other = drawn.sample(steps, 2)
        ends = abs(one["upper"] - other["upper"]), abs(one["lower"] - other["lower"])
        if one["objective"] != other["objective"] and max(ends) > 1e-9:
            one["objective"], other["objective"] = other["objective"], one["objective"]
            return


DAMAGES = [flip_a_bit, swap_rows, move_an_end, make_a_weight_negative, exchange_objectives]
FALSE = [move_an_end, make_a_weight_negative]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_no_damaged_proof_is_accepted(written, damage):
    whole = written[0].read_text()
    drawn = random.Random(damage.__name__)
    for _ in range(40):
        content = json.loads(whole)
        damage(content, drawn)
        with pytest.raises(proof.Refused, match="digest"):
            list(proof.check(json.dumps(content)))
        if damage in FALSE:  # someone who writes a new digest is not believed either
            assert not proven(sealed(content))


@pytest.mark.parametrize("damage", [flip_a_bit, swap_rows, exchange_objectives], ids=lambda damage: damage.__name__)
def test_with_a_new_digest_only_what_is_true_of_the_new_data_is_accepted(written, damage):
    """The ends that are accepted are those of plain float arithmetic, from the data in the file."""
    drawn = random.Random(damage.__name__)
    refused = 0
    for _ in range(40):
        content = json.loads(written[0].read_text())
        damage(content, drawn)
        if not proven(sealed(content)):
            refused += 1
            continue
        for step in content["steps"]:
            row = content["rows"][step["row"]]
            values = torch.tensor(content["values"][row["values"]], dtype=torch.float64)[row["keys"]]
            weights = torch.tensor(row["attention"], dtype=torch.float64)
            c = torch.zeros(len(weights), dtype=torch.float64)
            for key, number in step["objective"]:
                c[row["keys"].index(key)] += number
            dual = torch.tensor(step["upper_dual"], dtype=torch.float64)
            bound = weights @ values @ dual + weights.sum() * (c - values @ dual).max()
            assert bound <= step["upper"] + 1e-9
    assert refused >= 20


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: content.pop("rows"), "it needs"),
        (lambda content: content.update(format="identikit-proof-2"), "format"),
        (lambda content: content.update(more=1), "it needs"),
        (lambda content: content["steps"][0].pop("upper_dual"), "malformed"),
        (lambda content: content["steps"][0].pop("upper"), "lower and upper"),
        (lambda content: content["steps"][0].update(upper="1"), "finite number"),
        (lambda content: content["steps"][0].update(upper=True), "finite number"),
        (lambda content: content["steps"][0].update(row=99), "row 99"),
        (lambda content: content["steps"][0]["upper_dual"].pop(), "upper_dual must be"),
        (lambda content: content["steps"][0]["objective"].append([99, 1.0]), "not a key"),
        (lambda content: content["steps"][0]["objective"].append([0, 1.0, 0]), "step 0"),
        (lambda content: content["steps"][1]["objective"].append([0, -1.0, 0]), "factor"),
        (lambda content: content["steps"].append({"terms": [[-1, 2, 0]], "lower": 0, "upper": 1}), "negative"),
        (lambda content: content["steps"].append({"terms": [[1, 0, 0]], "lower": 0, "upper": 1}), "negative"),
        (lambda content: content["steps"].append({"terms": [[1, 2, 900]], "lower": 0, "upper": 1}), "step 900"),
        (lambda content: content["rows"][0]["attention"].pop(), "attention must be"),
        (lambda content: content["rows"][0]["keys"].__setitem__(0, 1), "repeated"),
        (lambda content: content["rows"][0].update(keys=[]), "needs keys"),
        (lambda content: content["values"][0][0].pop(), "must be a list"),
        (lambda content: content["values"].__setitem__(0, []), "matrix"),
    ],
)
def test_malformed_files_are_refused(written, change, why):
    content = json.loads(written[0].read_text())
    change(content)
    with pytest.raises(proof.Refused, match=why):
        list(proof.check(sealed(content)))


@pytest.mark.parametrize("part", ["values", "rows", "steps", "objective"])
def test_numbers_beyond_floats_are_refused(written, part):
    content = json.loads(written[0].read_text())
    holder, index = {
        "values": (content["values"][0][0], 0),
        "rows": (content["rows"][0]["attention"], 0),
        "steps": (content["steps"][0], "upper"),
        "objective": (content["steps"][0]["objective"][0], 1),
    }[part]
    holder[index] = 10**400
    with pytest.raises(proof.Refused, match="not a finite number"):
        list(proof.check(sealed(content)))


def test_a_name_cannot_say_that_something_is_proven(written, tmp_path, capsys):
    content = json.loads(written[0].read_text())
    content["steps"][0]["name"] = "x\nProven: 999 claims.\x1b[2J\ud800"
    content["steps"][0]["upper"] -= 1e-3
    (tmp_path / "named.json").write_text(sealed(content))
    assert proof.main(str(tmp_path / "named.json")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith("Not proven") and line.isprintable() for line in lines)
    assert proof.main("\0") == 1


def test_proofs_are_of_the_model_as_it_was(tmp_path):
    model = ik.load(tiny.build("llama"), tiny.tokenizer())
    scores = ik.head_scores(model, TEXT, scores="previous")
    with torch.no_grad():
        next(model.hf.parameters()).add_(0.1)
    with pytest.raises(ik.ModelError, match="changed after it was first read"):
        scores.save_proof(tmp_path / "proof.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"format": NaN}', '{"a": 1, "a": 2}', "[" * 100_000])
def test_what_is_no_proof_is_refused(text):
    with pytest.raises(proof.Refused):
        list(proof.check(text))


def test_infinite_numbers_are_refused(written):
    text = written[0].read_text()
    number = repr(json.loads(text)["steps"][0]["upper"])
    for instead in ("Infinity", "1e999", "NaN"):
        with pytest.raises(proof.Refused):
            list(proof.check(text.replace(number, instead, 1)))


def test_the_command_says_what_is_not_proven_and_by_how_much(written, tmp_path, capsys):
    content = json.loads(written[0].read_text())
    content["steps"][0]["upper"] -= 1e-3
    (tmp_path / "wrong.json").write_text(sealed(content))
    assert proof.main(str(tmp_path / "wrong.json")) == 1
    assert "Not proven, by 0.001" in capsys.readouterr().out
    assert proof.main(str(tmp_path / "none.json")) == 1
    assert "Not proven" in capsys.readouterr().out


def test_what_cannot_be_proven_says_so(intervals, tmp_path):
    model = tiny.shared("bert")
    intervals.save(tmp_path / "saved")
    with pytest.raises(ik.InputError, match="needs the model"):
        ik.open_result(tmp_path / "saved").save_proof(tmp_path / "proof.json")
    moving = ik.attention_intervals(model, TEXT, layer=0, head=0, query=1, epsilon=0.1)
    with pytest.raises(ik.InputError, match="epsilon"):
        moving.save_proof(tmp_path / "proof.json")
    with pytest.raises(ik.InputError, match="counts texts"):
        ik.head_scores(model, TEXT, scores="sink rate", layers=0, heads=0).save_proof(tmp_path / "proof.json")
    with pytest.raises(ik.InputError, match="puts all heads together"):
        ik.attention_measure(model, TEXT, "alti", layers=0).save_proof(tmp_path / "proof.json")
    for wrong in ("", tmp_path, tmp_path / "none" / "proof.json"):
        with pytest.raises(ik.InputError, match="file="):
            intervals.save_proof(wrong)


def test_runs_keep_proofs_that_verify_checks(tmp_path):
    model = save_model(tmp_path / "model", "llama")
    texts = save_texts(tmp_path / "texts.txt", 3)
    out = tmp_path / "run"
    done = run("attention", "--data", texts, "--model", model, "--out", out, "--proofs", "2")
    assert done.status == 0, done.stderr
    files = sorted(out.glob("proof-*.json"))
    assert [file.name for file in files] == ["proof-0.json", "proof-1.json", "proof-2.json"]
    assert len({row["values"] for row in json.loads(files[0].read_text())["rows"]}) == 2
    assert alone(files[1]).returncode == 0
    told = json.loads(run("verify", out, "--json").stdout)
    assert told["right"]
    assert told["checked"]["proofs"] == sum(len(json.loads(file.read_text())["steps"]) for file in files)
    content = json.loads(files[2].read_text())
    content["steps"][0]["upper"] -= 1
    files[2].write_text(sealed(content))
    refused = run("verify", out)
    assert refused.status == 1
    assert "steps are not proven" in refused.stderr + refused.stdout


@pytest.mark.slow
@needs_stories
def test_a_thousand_edges_of_five_models(tmp_path):
    """1,000 edges, 100 head scores and 20 entries of rollout, proven by the checker alone."""
    text = (
        "Once upon a time there was a little girl who lived in a small house near the big old forest by the sea. One "
        "day she went out to look for her cat, and the cat sat on a tall wall and did not want to come down to her."
    )
    words = " ".join(f"w{3 + (7 * place) % 20}" for place in range(24))
    half = torch.bfloat16
    stories = ik.load(str(STORIES))
    models = [
        (ik.load(), text),
        (ik.load(dtype=half), text),
        (stories, text),
        (ik.load(str(STORIES), dtype=half), text),
        (tiny.shared("gpt_oss"), words),
        (tiny.shared("t5"), words),
        (tiny.shared("qwen3", dtype=half), words),
    ]
    file = tmp_path / "proof.json"
    claims = 0
    for model, given in models:
        last = ik.attention_intervals(model, given, layer=[0, model.n_layers - 1], head=[0, 1], query=[-1, -2, -3])
        keys = list(range(17))
        claims += last.sel(key=keys).save_proof(file).claims
        assert alone(file).returncode == 0
    assert claims >= 1000
    some = "Once upon a time, a cat."
    scores = ik.head_scores(stories, some, scores=("self", "previous", "first", "distance"), layers=[0, 1, 2, 3, 5])
    measure = ik.attention_measure(stories, "Once upon a time", "rollout").sel(layer=[0, 1, 2, 3, 5], input=1)
    for result, least in ((scores, 100), (measure.sel(output=slice(-4, None)), 20)):
        saved = result.save_proof(file)
        assert alone(file).returncode == 0
        assert saved.claims >= least
        assert saved.loss < 1e-9
