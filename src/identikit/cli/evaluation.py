"""The command that tests explanations over a dataset."""

from functools import partial
from typing import Annotated

import typer

from identikit.cli import option
from identikit.cli.datasets import DatasetRun, number_or_word, over_a_dataset


@over_a_dataset
def evaluate(
    run: DatasetRun,
    measures: Annotated[
        list[str] | None,
        typer.Option(
            "--measure",
            help="token attribution, a reading of attention such as rollout, or leave one out; repeat for more. "
            "Default: token attribution, mean, norm and rollout. The baselines random and reversed are always there.",
        ),
    ] = None,
    tests: Annotated[
        list[str] | None,
        typer.Option("--test", help="curves, leave one out, determined or randomised; repeat for more. Default: all."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="prediction: the probability of the next token or class that the model itself predicts. Default: the "
            "last hidden vectors.",
        ),
    ] = None,
    replacement: Annotated[
        str | None,
        typer.Option(
            "--replacement",
            help="What takes the place of tokens: mask, pad, or draw, another token of the data. Default: the mask if "
            "the tokenizer has one, else a draw.",
        ),
    ] = None,
    beam: Annotated[
        int, typer.Option("--beam", min=1, help="Width of the search for the best and the worst order.")
    ] = 5,
    probes: Annotated[
        str | None,
        typer.Option(
            "--probes", help="Random directions that token attribution is estimated from, or exact. Default: 32."
        ),
    ] = None,
    max_tokens: option.MaxTokens = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed for orders, draws, shuffled layers and intervals.")
    ] = 0,
) -> None:
    """Test explanations over a dataset: do the sources that a measure ranks highest really move the model?"""
    from identikit.explanation import evaluation_dataset as job
    from identikit.explanation.faithfulness import TESTS, EvaluationOptions

    options = EvaluationOptions(
        measures=tuple(measures or EvaluationOptions.measures),
        tests=tuple(tests or TESTS),
        target=target,
        replacement=replacement,
        beam=beam,
        probes=None if probes is None else number_or_word(probes),
        seed=seed,
        truncate=run.truncate,
        max_tokens=max_tokens,
    )
    run.compute(
        "evaluate",
        options,
        gather=job.evaluation_statistics,
        tables=job.evaluation_tables,
        report=partial(job.evaluation_report, options),
    )
