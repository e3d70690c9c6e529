"""What `token_attribution` gives back."""

from collections.abc import Callable
from dataclasses import replace
from math import isnan, nan
from typing import TYPE_CHECKING, Any

from identikit.errors import InputError
from identikit.maths.mixing import outweighed, own_contribution
from identikit.results.facts import Fact
from identikit.results.gathered import largest_entries, word_groups
from identikit.results.measure import optional_array, stored_array
from identikit.results.result import Result
from identikit.results.words import mean_and_error, percent
from identikit.shapes import Float, Tensor
from identikit.texts.text import SOURCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LISTED = 5  # how many targets print names


class TokenAttribution(Result):
    """How much each input token contributes to each hidden vector of one text: (layer, input, output).

    A contribution is a share of the norms of the hidden vector's derivatives by the inputs (Eq. 11). Where the hidden
    vectors are a decoder's, inputs are the tokens of its target, and then those of the source.

    - `contribution`: sums to 1 over inputs (all 0 for a hidden vector that no input moves)
    - `stderr`: standard errors of the contributions; None where they are exact
    - `norm`: of the Jacobian blocks; `probes`: how many random directions, None where exact; `engine`: what computed it
    - `underflow`: by layer, which share of the pairs of tokens that attention connects came out as exactly 0, too small
      for the number format; None where that is not known
    - `cls`, `separator`: where [CLS] and the first [SEP] stand, if there are any
    """

    kind = "token attribution"
    same = ("norm",)
    main = ("contribution",)

    contribution = stored_array(
        "layer input output",
        "What each input contributes to each hidden vector.",
        range="0 to 1",
        words={"input": "sum", "output": "mean"},
    )
    stderr = optional_array(
        "layer input output", "Standard errors of the contributions; None where they are exact.", range="0 or more"
    )

    @property
    def own(self) -> Float[Tensor, "*axis"]:
        """What each token contributes to its own hidden vector: (layer, token)."""
        return self._by_token(own_contribution)

    @property
    def outweighed(self) -> Tensor:
        """Whether another token contributes more to a hidden vector than its own: (layer, token)."""
        return self._by_token(outweighed)

    @property
    def from_source(self) -> Float[Tensor, "*axis"]:
        """What the tokens of the source contribute to each hidden vector of a decoder, together: (layer, token)."""
        return self._by_token(lambda whole: whole[:, len(self.tokens) :].sum(1))

    def _by_token(self, measure: Callable[[Tensor], Tensor]) -> Tensor:
        numbers = measure(self.whole())
        return numbers[0] if self.axis("layer").single else numbers

    def whole(self) -> Float[Tensor, "layer input output"]:
        """Return the contributions of all inputs to all outputs, the axis of layers kept."""
        if not all(self.axis(name).tokens == tuple(self.text_of(name)["tokens"]) for name in ("input", "output")):
            raise InputError("This reading needs every input and output of the text: take it before selecting some.")
        return self.read("contribution")

    def words(self) -> "TokenAttribution":
        """Return the result by words: the contributions of a word's pieces are added up, those to them averaged."""
        by_words = super().words()
        groups = word_groups(len(self.tokens), self.about["words"])
        word_of = {piece: word for word, group in enumerate(groups) for piece in group}
        moved = {name: word_of.get(self.about[name]) for name in ("cls", "separator")}
        return replace(by_words, about={**by_words.about, **moved})

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, counted from 0."""
        return self.axis("layer").values

    @property
    def targets(self) -> tuple[int, ...]:
        """The output positions."""
        return self.axis("output").values

    norm = Fact("The norm of the Jacobian blocks.")
    probes = Fact("How many random directions were used; None where contributions are exact.")
    engine = Fact('What computed it: "sweep", "generic" or "reverse".')
    causal = Fact("Whether tokens see only what comes before them.")
    underflow = Fact("By layer, which share of connected pairs underflowed to 0; None where that is not known.")
    cls = Fact("Where [CLS] stands.")
    separator = Fact("Where the first [SEP] stands.")

    def describe(self) -> str:
        """Return how much tokens contribute to their own hidden vectors, or where the selected vector came from."""
        method = "exact" if self.probes is None else f"estimated from {self.probes} random directions"
        output = self.axis("output")
        if output.single:
            return f"Largest sources of {output.label} ({self.norm} norm, {method}): {self._sources(5)}."
        try:
            whole = self.whole()
        except InputError:
            after = self.axis("layer").label if self.axis("layer").single else self.layers[-1]
            last = self if self.axis("layer").single else self.sel(layer=self.layers[-1])
            sources = []
            for index, position in enumerate(self.targets[:_LISTED]):
                sources.append(f"{output.name_of(index)}: {last.sel(output=position)._sources(3)}")
            unlisted = f"; and {len(self.targets) - _LISTED} more" if len(self.targets) > _LISTED else ""
            return f"Largest sources after layer {after} ({self.norm} norm, {method}): {'; '.join(sources)}{unlisted}."
        medians = own_contribution(whole).median(-1).values
        first = self.layers[0]
        last = self.layers[-1]
        at_last = f" and {percent(float(medians[-1]))} after layer {last}" if last != first else ""
        share = max(self.underflow or [0.0])
        lost = f" In the worst layer, {share:.2%} of the contributions underflowed to 0." if share else ""
        vector = "the probabilities at its own place" if self.norm == "fisher" else "its own hidden vector"
        source = ""
        if SOURCE in self.about:
            share_of = percent(float(self.from_source[-1].median()))
            source = f" The source contributes {share_of} to a vector after layer {last} (median)."
        return (
            f"A token contributes {percent(float(medians[0]))} to {vector} after layer {first}{at_last} "
            f"(medians; {self.norm} norm, {method}).{source} {self.largest_words()}{lost}"
        )

    def _sources(self, count: int) -> str:
        """Return the largest sources of the selected vector, each with its standard error where it is estimated."""
        sources = []
        largest = largest_entries(self, "contribution", count)
        errors = self.stderr
        shares = self.contribution.flatten()
        order = shares.abs().nan_to_num(-1).topk(min(count, len(shares))).indices.tolist()
        for (share, labels), index in zip(largest, order, strict=True):
            error = 0.0 if errors is None else float(errors.flatten()[index])
            source = f"{labels.get('input', self.axis('input').label)} {mean_and_error(2)((share, error or nan))}"
            sources.append(source + (f" (layer {labels['layer']})" if labels.get("layer") else ""))
        return ", ".join(sources)

    def largest_words(self) -> str:
        """Return how many tokens are their own largest contributor in the last layer, and how many no input moves."""
        last = self.whole()[-1]
        lost = float(outweighed(last[None]).double().mean())
        unmoved = int((last.sum(0) == 0).sum())
        share = f"{percent(lost)} of the tokens are no longer their" if lost else "every token is still its"
        after = f"After layer {self.layers[-1]},"
        if unmoved:
            moved = "" if unmoved == last.shape[1] else f" Of the others, {share} own largest contributor."
            vectors = f"{unmoved} of the {last.shape[1]} hidden vectors"
            return f"{after} no input moves {vectors}: their derivatives are 0.{moved}"
        return f"{after} {share} own largest contributor."

    def plot(self, **options: Any) -> Any:
        """Draw where one selected token came from, layer by layer; or one layer as a map, by default the last."""
        from identikit import plots

        if self.axis("output").single:
            return plots.sources(self, **options)
        return plots.attribution_map(self if self.axis("layer").single else self.sel(layer=-1), **options)


class OutputAttribution(Result):
    """How much each input token contributes to an output of a text, such as a logit: (target, input).

    A contribution is a share of the lengths of the output's derivatives by the inputs: Eq. 11, for one number.

    - `contribution`: sums to 1 over inputs (all 0 for a number that no input moves)
    - `gradient_x_input`: the derivative along the vector that enters the first block, with its sign. (Along an
      embedding sum that goes through a norm first, it would be 0.) That of a contrast is the difference of the two
    - `target`: what each output is called; `value`: the numbers; `probability`: of a token or class, else None
    """

    kind = "output attribution"
    main = ("contribution", "gradient_x_input")

    contribution = stored_array(
        "target input", "What each input contributes to each output.", range="0 to 1", words={"input": "sum"}
    )
    gradient_x_input = stored_array(
        "target input",
        "The derivative of each output along the vector that enters the first block.",
        label="gradient × input",
        words={"input": "sum"},
    )

    target = Fact("What each output is called.")
    value = Fact("The number of each output.")
    probability = Fact("The probability of each token or class; None where the output is neither.")

    def describe(self) -> str:
        """Return what each output is, and its largest sources."""
        axis = self.axis("target")
        sentences = []
        for label in axis.values[:_LISTED]:
            index = self.target.index(label)
            probability = self.probability[index]
            value = f"{self.value[index]:.4g}"
            if probability is not None:
                value += f", probability {percent(probability)}"
            of_label = self if axis.single else self.sel(target=label)
            sources = [
                f"{labels.get('input', of_label.axis('input').label)} {share:.2f}"
                for share, labels in largest_entries(of_label, "contribution", _LISTED)
            ]
            sentences.append(f"Largest sources of {label} ({value}): {', '.join(sources)}.")
        if len(axis) > _LISTED:
            sentences.append(f"And {len(axis) - _LISTED} more.")
        return " ".join(sentences)

    def plot(self, **options: Any) -> "Axes":
        """Draw what each input contributes: as bars, or for several outputs as a map."""
        from identikit import plots

        return plots.token_scores(self, **options)


class Scores(Result):
    """A score of each token of a text, by anybody's method: (input), (output, input) or (layer, output, input).

    - `score`: the scores, which may have a sign
    - `name`: what they are called; `target`: the output that they explain, None where nobody said
    - `details`: what else the method says, such as the number at a baseline
    """

    kind = "scores"
    main = ("score",)

    score = stored_array(
        "layer output input",
        "The score of each input, over those of these axes that there are.",
        missing="There is no score.",
        words={"input": "sum", "output": "mean"},
    )

    name = Fact("What the scores are called.")
    target = Fact("The output that they explain; None where nobody said.")
    details = Fact("What else the method says, such as the number at a baseline.")

    def describe(self) -> str:
        """Return which entries are largest."""
        largest = []
        entries = [entry for entry in largest_entries(self, "score", _LISTED) if not isnan(entry[0])]
        if not entries:
            return f"There are no numbers ({self.name})."
        for value, labels in entries:
            names = [f"layer {labels['layer']}"] if "layer" in labels else []
            names += [" → ".join(labels[name] for name in ("input", "output") if name in labels)]
            largest.append(f"{' '.join(filter(None, names))} {value:.3g}".strip())
        target = "" if self.target is None else f" of the {self.target}"
        gap = self.details.get("gap")
        error = "" if gap is None else f" Their sum misses the difference from the baseline by {abs(gap):.2g}."
        return f"Largest scores{target} ({self.name}): {', '.join(largest)}.{error}"

    def plot(self, **options: Any) -> "Axes":
        """Draw the scores: bars where they are of tokens, and a map where they are of pairs; of layers, the last."""
        from identikit import plots

        layered = any(axis.name == "layer" and not axis.single for axis in self.axes)
        return plots.token_scores(self.sel(layer=-1) if layered else self, **options)
