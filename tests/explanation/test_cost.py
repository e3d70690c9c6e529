"""What is planned before a model is loaded, against what it then takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import identikit as ik
from identikit.cli.endings import with_own_options
from identikit.cli.main import app
from identikit.explanation.cost import planned
from identikit.models.load.load import _default_folder

# The peak of a process of its own, in bytes: all of it, with Python and torch. Not ru_maxrss, which begins with the
# size of the process that started it.
_PEAK = """
import sys
import identikit as ik
import identikit.explanation.cost
model = ik.load(sys.argv[1])
text = [100 + 7 * place % 800 for place in range(int(sys.argv[3]))]
getattr(ik, sys.argv[2])(model, text)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
_CALLS = {"attention": "effective_attention", "exact attribution": "token_attribution"}


def _made_up(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=30522, hidden_size=512, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(_default_folder()).save_pretrained(folder)
    return folder


def test_the_plan_reads_only_headers(tmp_path: Path):
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path)
    found = planned(tmp_path, 20)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert found.parameters == numbers
    assert found.stored == {"BF16": 2 * numbers}
    assert found.weights == 4 * numbers
    longer = planned(tmp_path, 200)
    assert all(more.bytes > less.bytes for more, less in zip(longer.analyses[:3], found.analyses[:3], strict=True))


def test_the_command_prints_words_or_json():
    runner = CliRunner()
    said = runner.invoke(app, ["plan", "--tokens", "16"]).stdout
    assert "22.7 million parameters" in said
    assert "exact attribution" in said and "learned maps" in said and " 0.0 " not in said
    assert "auto" not in runner.invoke(app, ["plan", "--help"]).stdout  # what is in the checkpoint is not planned
    given = json.loads(runner.invoke(app, ["plan", "--tokens", "16", "--json"]).stdout)
    assert given["stored"]["F32"] == given["weights"]
    assert given["peak"]["attention"] > given["weights"]


def test_more_tokens_than_the_model_reads_are_not_planned():
    said = CliRunner().invoke(app, ["plan", "--tokens", "513"])
    assert said.exit_code and "--tokens 513 cannot be planned" in with_own_options(str(said.exception))
    assert "reads at most 512 tokens" in str(said.exception)
    assert planned(tokens=512).tokens == 512


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"dtype": "int8"}, {"model": "/no/such/folder"}])
def test_what_cannot_be_planned_is_refused_in_a_line(wrong: dict[str, object]):
    with pytest.raises(ik.IdentikitError) as caught:
        planned(**wrong)  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [planned, ik.load])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"num_hidden_layers": 10**7}, "10000000 layers"),
        ({"hidden_size": 0}, "shape|size"),
        ({"hidden_size": 10**6}, "shape|size"),
        ({"vocab_size": 7}, "shape|size"),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused_at_once(read, wrong: dict[str, int], why: str, tmp_path: Path):
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(ik.ModelError, match=why):
        read(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(("which", "tokens"), [("packaged", 32), ("made up", 24)])
@pytest.mark.parametrize("analysis", _CALLS)
def test_planned_memory_is_within_a_fifth_of_the_peak(which: str, tokens: int, analysis: str, tmp_path: Path):
    folder = _default_folder() if which == "packaged" else str(_made_up(tmp_path))
    script = [sys.executable, "-c", _PEAK, folder, _CALLS[analysis], str(tokens)]
    peak = 1024 * int(subprocess.run(script, check=True, capture_output=True, text=True).stdout)
    command = [sys.executable, "-m", "identikit", "plan", folder, "--tokens", str(tokens), "--json"]
    given = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert given["peak"][analysis] == pytest.approx(peak, rel=0.2)
