// Provenance: where one token's hidden vector comes from, layer by layer: a stack of its sources.
import { SERIES, mixed } from "./colour.js";
import { activeKey, activeQuery, callCode, drawFigure, figureCanvas, figureWidth, inkOn, pointOn, quoted, say, slider, wordsWidth } from "./figure.js";
import { SourceBars } from "./measures.js";
import { element, estimatedShare, percent } from "./parts.js";

const SOURCES_LEFT = 64;
const SOURCES_TOP = 26;
const SOURCES_NAMED = 7; // sources with a colour, the token's own among them

export class ProvenanceView {
  constructor(site) {
    this.site = site;
    this.id = "provenance";
    this.title = "Provenance";
    this.help =
      "One token's hidden vector after each layer, and how much each input token contributes to it. Its own token stands first, then the largest others.";
    this.about = site.view.about.attribution;
    this.n = site.names.length;
    this.high = (this.about?.layers.length ?? 0) > 12 ? 24 : 32; // pixels of a row
    this.at = { layer: -1, source: null }; // what is under the pointer or the cursor
    this.canvas = figureCanvas();
    this.says = element("p", { class: "figure-says" });
    this.readout = element("p", { class: "figure-readout" });
    this.threshold = slider("Name sources of at least", { least: 0, most: 25, step: 0.5 }, (hundredths) => site.store.set({ threshold: hundredths / 100 }));
    this.beside = new SourceBars(site);
    this.element = element(
      "div", {}, this.says, element("div", { class: "figure-controls" }, this.threshold.element),
      element("div", { class: "figure-holder" }, this.canvas), this.readout, ...(this.beside.measures.length ? [this.beside.element] : []),
    );
    this.listen();
  }

  unavailable() {
    if (this.about) return null;
    const why = this.site.view.about.unavailable?.attribution;
    return why ? `Not answered: ${why}` : "This page was made without attribution; the page of an explanation has it.";
  }

  get right() {
    return this.about.near ? 92 : 16;
  }

  /** The kept sources of a token after a layer, largest first: position, share and standard error. */
  sources(layer, output) {
    const { kept } = this.about;
    const from = (layer * this.n + output) * kept;
    const [inputs, shares, errors] = ["input", "share", "stderr"].map((name) => this.site.view.array(`attribution.${name}`)?.data);
    const found = [];
    for (let at = from; at < from + kept; at += 1) {
      if (shares[at] > 0) found.push({ input: inputs[at], share: shares[at], error: errors?.[at] ?? null });
    }
    return found;
  }

  /** The stacks of a token: its sources with a colour, the same in every layer, and in each layer what they give. */
  stacks(state) {
    const output = activeQuery(state);
    const layers = this.about.layers.map((_, layer) => this.sources(layer, output));
    const most = new Map();
    for (const { input, share } of layers.flat()) most.set(input, Math.max(most.get(input) ?? 0, share));
    const large = [...most].filter(([input, share]) => input !== output && share >= state.threshold);
    large.sort(([one, a], [other, b]) => b - a || one - other);
    const named = [output, ...large.slice(0, SOURCES_NAMED - 1).map(([input]) => input)];
    const stacks = layers.map((sources) => {
      const own = (input) => sources.find((source) => source.input === input);
      const parts = named.map(own).filter((part) => part && (part.input === output || part.share >= state.threshold));
      const total = sources.length ? 1 : 0; // no input moves some hidden vectors: nothing to share
      const others = Math.max(0, total - parts.reduce((sum, part) => sum + part.share, 0));
      return { parts, others };
    });
    return { output, named, stacks };
  }

  colour(named, input) {
    return SERIES[named.indexOf(input) % SERIES.length];
  }

  size() {
    return [figureWidth(this.canvas), SOURCES_TOP + (this.about?.layers.length ?? 0) * this.high + 52];
  }

  update(state) {
    if (this.unavailable()) return;
    drawFigure(this.canvas, this, state);
    say(this.says, this.sentence(state));
    this.threshold.input.value = 100 * state.threshold;
    const words = `${Number((100 * state.threshold).toFixed(1))}%`;
    say(this.threshold.words, `${words}; smaller ones count as “others”`);
    this.threshold.input.setAttribute("aria-valuetext", words);
    say(this.readout, this.words(state));
    this.beside.update(state, (layer, output) => {
      const place = this.about.layers.indexOf(layer);
      return place < 0 ? [] : this.sources(place, output).map(({ input, share }) => [input, share]);
    });
  }

  sentence(state) {
    const { output, stacks } = this.stacks(state);
    const own = ({ parts }) => parts.find((part) => part.input === output)?.share ?? 0;
    const { layers, probes, near } = this.about;
    const [first, last] = [own(stacks[0]), own(stacks.at(-1))].map(percent);
    const how = probes === null ? "exact" : `estimated from ${probes} random directions; whiskers are two standard errors`;
    const name = quoted(this.site.names[output]);
    const told = `${name} contributes ${first} to its own hidden vector after layer ${layers[0]} and ${last} after layer ${layers.at(-1)} (${how}).`;
    if (!near) return told;
    return `${told} In the whole text, ${percent(near[0])} of what other tokens contribute comes from within ${this.about.near_within} positions after layer ${layers[0]}, and ${percent(near.at(-1))} after layer ${layers.at(-1)}.`;
  }

  /** What is under the cursor in words. */
  words(state) {
    const { output, stacks } = this.stacks(state);
    const { layer, source } = this.at;
    if (layer < 0) return this.keyWords(state, output);
    const after = `After layer ${this.about.layers[layer]},`;
    const name = quoted(this.site.names[output]);
    if (source === -1) return `${after} all others contribute ${percent(stacks[layer].others)} to ${name}.`;
    const part = this.sources(layer, output).find(({ input }) => input === source);
    if (!part) return `${after} nothing is known to come from there.`;
    const whose = source === output ? `${name} itself contributes` : `${quoted(this.site.names[source])} contributes`;
    return `${after} ${whose} ${estimatedShare(part.share, part.error)} to ${source === output ? "its vector" : name}.`;
  }

  /** What the active key contributes, layer by layer. */
  keyWords(state, output) {
    const key = activeKey(state);
    if (key < 0) return "";
    const parts = this.about.layers.map((_, layer) => this.sources(layer, output).find(({ input }) => input === key));
    const told = parts.map((part) => (part ? estimatedShare(part.share, part.error) : "–"));
    const whom = key === output ? "itself" : quoted(this.site.names[output]);
    return `${quoted(this.site.names[key])} contributes to ${whom}, layer by layer: ${told.join(", ")}.`;
  }

  paint(pen, state) {
    const colours = this.site.colours();
    const { named, stacks, output } = this.stacks(state);
    const [left, right] = [SOURCES_LEFT, pen.width - this.right];
    const bottom = SOURCES_TOP + stacks.length * this.high;
    for (let tick = 0; tick <= 4; tick += 1) {
      const x = left + ((right - left) * tick) / 4;
      pen.line(x, SOURCES_TOP - 4, x, bottom, colours.faint);
      pen.text(`${25 * tick}%`, x, SOURCES_TOP - 13, colours.soft, { size: 11, align: tick === 4 ? "right" : tick ? "center" : "left" });
    }
    if (this.about.near) pen.text(`within ${this.about.near_within}`, pen.width - 4, SOURCES_TOP - 13, colours.soft, { size: 11, align: "right" });
    stacks.forEach((stack, layer) => {
      const y = SOURCES_TOP + layer * this.high;
      const here = layer === this.at.layer;
      pen.text(`layer ${this.about.layers[layer]}`, left - 10, y + this.high / 2, here ? colours.focus : colours.soft, { size: 12, align: "right" });
      this.paintStack(pen, state, stack, { layer, y, left, right, named, colours });
      if (this.about.near) this.paintNear(pen, this.about.near[layer], right + 16, y + this.high / 2, colours);
    });
    this.paintLegend(pen, state, named, bottom + 22, { colours, output });
  }

  /** The parts of a stack from left to right, with where they begin and end. */
  spans({ parts, others }, left, right) {
    const across = right - left;
    let x = left;
    const all = [...parts, { input: -1, share: others, error: null }].filter((part) => part.share > 0);
    return all.map((part) => ({ ...part, from: x, to: (x += part.share * across) }));
  }

  paintStack(pen, state, stack, { layer, y, left, right, named, colours }) {
    const [top, height] = [y + 3, this.high - 7];
    const spans = this.spans(stack, left, right);
    for (const { input, share, error, from, to } of spans) {
      const fill = input < 0 ? colours.faint : this.colour(named, input);
      pen.rect(from, top, Math.max(0.5, to - from - 1), height, fill);
      const told = error === null || error < share ? percent(share) : "";
      const name = input < 0 ? "others" : this.site.names[input];
      const words = [`${name} ${told}`.trim(), told].find((one) => wordsWidth(one, 11) < to - from - 8);
      const ink = inkOn(mixed(fill, fill, 0), colours);
      if (words) pen.text(words, from + 5, top + height / 2, ink, { size: 11 });
    }
    for (const { input, error, to } of spans) {
      if (error === null || input < 0) continue;
      const half = 2 * error * (right - left);
      pen.line(Math.max(left, to - half), top + height - 3, to + half, top + height - 3, colours.ink, { width: 1.5 });
    }
    const active = spans.find(({ input }) => input >= 0 && input === activeKey(state));
    const under = layer === this.at.layer ? spans.find(({ input }) => input === this.at.source) : null;
    for (const span of [active, under]) {
      if (span) pen.rect(span.from - 0.5, top - 1, span.to - span.from, height + 2, null, { stroke: colours.focus, line: 2 });
    }
  }

  paintNear(pen, share, x, middle, colours) {
    pen.rect(x, middle - 4, 32, 8, colours.wash);
    pen.rect(x, middle - 4, 32 * share, 8, colours.soft);
    pen.text(percent(share), pen.width - 4, middle, colours.ink, { size: 11, align: "right" });
  }

  paintLegend(pen, state, named, top, { colours, output }) {
    let [x, y] = [4, top];
    for (const input of [...named, -1]) {
      const words = input < 0 ? "others" : input === output ? `${this.site.names[input]} itself` : this.site.names[input];
      const across = 34 + wordsWidth(words, 11);
      if (x > 4 && x + across > pen.width) [x, y] = [4, y + 18];
      pen.rect(x, y - 5, 10, 10, input < 0 ? colours.faint : this.colour(named, input));
      const chosen = input >= 0 && input === activeKey(state);
      pen.text(words, x + 15, y, chosen ? colours.focus : colours.soft, { size: 11, weight: chosen ? "bold" : "normal" });
      x += across;
    }
  }

  listen() {
    const { canvas, site } = this;
    const under = (event) => {
      const [x, y] = pointOn(canvas, event);
      const { stacks } = this.stacks(site.store.get());
      const layer = Math.floor((y - SOURCES_TOP) / this.high);
      if (!stacks[layer]) return { layer: -1, source: null };
      const spans = this.spans(stacks[layer], SOURCES_LEFT, figureWidth(canvas) - this.right);
      const span = spans.find(({ from, to }) => x >= from && x < to);
      return span ? { layer, source: span.input } : { layer: -1, source: null };
    };
    canvas.addEventListener("pointermove", (event) => {
      this.at = under(event);
      canvas.style.cursor = this.at.source >= 0 && this.at.layer >= 0 ? "pointer" : "";
      site.store.set({ hoverKey: this.at.source ?? -1 });
    });
    canvas.addEventListener("pointerleave", () => {
      this.at = { layer: -1, source: null };
      site.store.set({ hoverKey: -1 });
    });
    canvas.addEventListener("click", (event) => {
      const { source } = under(event);
      if (source >= 0 && source !== null) site.store.set({ key: source });
    });
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    const { store } = this.site;
    const { stacks } = this.stacks(store.get());
    const layer = Math.max(0, this.at.layer);
    const shown = (row) => [...stacks[row].parts.map(({ input }) => input), ...(stacks[row].others > 0 ? [-1] : [])];
    const step = { ArrowUp: -1, ArrowDown: 1, ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.at = { layer: -1, source: null };
    else if (step === undefined) return;
    else if (this.at.layer < 0) this.at = { layer: 0, source: shown(0)[0] ?? null };
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const to = Math.max(0, Math.min(stacks.length - 1, layer + step));
      this.at = { layer: to, source: shown(to).includes(this.at.source) ? this.at.source : (shown(to)[0] ?? null) };
    } else {
      const all = shown(layer);
      this.at = { layer, source: all[Math.max(0, Math.min(all.length - 1, all.indexOf(this.at.source) + step))] ?? null };
    }
    event.preventDefault();
    store.set({ key: this.at.source ?? -1, hoverKey: -1 });
  }

  table(state) {
    const output = activeQuery(state);
    const beside = this.beside.numbers(state);
    const rows = this.about.layers.flatMap((layer, row) =>
      this.sources(row, output).map(({ input, share, error }) => [
        layer, input, this.site.names[input], share, ...(error === null ? [] : [error]), ...beside.cells(layer, input),
      ]),
    );
    const estimated = this.site.view.has("attribution.stderr");
    return { columns: ["layer", "position", "source", "contribution", ...(estimated ? ["stderr"] : []), ...beside.columns], rows };
  }

  python(state) {
    const { norm, probes } = this.about;
    const how = `${norm ? `, norm="${norm}"` : ""}${probes === null ? "" : `, probes=${probes}`}`;
    return `found = ik.token_attribution(model, text${how}${callCode(this.site.view, "text")})\nprint(found.sel(output=${activeQuery(state)}).to_frame())`;
  }

  describe(state) {
    return [this.sentence(state), this.words(state)].filter(Boolean).join(" ");
  }
}
