// Tokens: after each layer, is each hidden vector still nearest to its own token, by what margin, and if not, who won?
import { css, mixed } from "./colour.js";
import { activeKey, activeQuery, callCode, drawFigure, figureCanvas, figureWidth, inkOn, pointable, quoted, say, slider, wordsWidth } from "./figure.js";
import { element, percent } from "./parts.js";

const TOKENS_LEFT = 64; // pixels for the layers' names
const TOKENS_RIGHT = 64; // for the rates
const TOKENS_LEAST = 20; // pixels of the narrowest cell; what does not fit is scrolled to
const TOKENS_LEGEND = 40;

export class TokensView {
  constructor(site) {
    this.site = site;
    this.id = "tokens";
    this.title = "Tokens";
    this.help =
      "A column per token, a row per layer. Green: the hidden vector is still nearest to its own token. Orange: another token is nearer, and it is named where there is room.";
    this.about = site.view.about.identity;
    this.part = (name) => site.view.array(`identity.${name}`)?.data;
    this.n = site.names.length;
    this.high = (this.about?.layers.length ?? 0) > 12 ? 20 : 30; // pixels of a row
    this.from = 0; // the first token that is drawn
    this.layer = -1; // the row under the pointer or the cursor
    this.canvas = figureCanvas();
    this.readout = element("p", { class: "figure-readout" });
    this.scroll = slider("Tokens", { least: 0, most: 1, step: 1 }, (from) => ((this.from = from), site.store.set({})));
    this.element = element("div", {}, element("div", { class: "figure-holder" }, this.canvas), this.scroll.element, this.readout);
    this.labels = Math.min(86, 14 + 0.8 * Math.max(...site.names.map((name) => wordsWidth(name, 11))));
    this.most = this.about ? this.part("margin").reduce((most, margin) => Math.max(most, Math.abs(margin) || 0), 0) : 0;
    this.listen();
  }

  unavailable() {
    if (this.about) return null;
    return this.site.view.about.unavailable?.identity ?? "This page was made without token identity; the page of an explanation has it.";
  }

  size() {
    return [figureWidth(this.canvas), this.labels + (this.about?.layers.length ?? 0) * this.high + TOKENS_LEGEND];
  }

  /** Which tokens are drawn and how wide: all if they fit, or else a window. */
  window(width) {
    const across = Math.max(TOKENS_LEAST, width - TOKENS_LEFT - TOKENS_RIGHT);
    const count = Math.min(this.n, Math.floor(across / TOKENS_LEAST));
    const from = Math.max(0, Math.min(this.from, this.n - count));
    return { from, count, cell: Math.min(96, across / count) };
  }

  /** Keep a token in sight. */
  follow(token) {
    const { from, count } = this.window(figureWidth(this.canvas));
    if (token < from || token >= from + count) this.from = Math.max(0, token - Math.floor(count / 2));
  }

  update(state, before) {
    if (this.unavailable()) return;
    if (!before || activeQuery(state) !== activeQuery(before)) this.follow(activeQuery(state));
    drawFigure(this.canvas, this, state);
    const { from, count } = this.window(figureWidth(this.canvas));
    this.scroll.element.hidden = count === this.n;
    this.scroll.input.max = this.n - count;
    this.scroll.input.value = from;
    say(this.scroll.words, `${from} to ${from + count - 1} of ${this.n}`);
    say(this.readout, this.words(state));
  }

  winner(at) {
    const place = this.part("winner")[at];
    return this.about.vocabulary ? (this.about.vocabulary[place] ?? `token ${place}`) : this.site.names[place];
  }

  rate(row) {
    let kept = 0;
    for (let token = 0; token < this.n; token += 1) kept += this.part("recovered")[row * this.n + token] ? 1 : 0;
    return kept / this.n;
  }

  /** What one cell says. */
  cellWords(row, token) {
    const at = row * this.n + token;
    const name = quoted(this.site.names[token]);
    const margin = Math.abs(this.part("margin")[at]).toFixed(3);
    const after = `After layer ${this.about.layers[row]}, ${name}`;
    if (this.part("recovered")[at]) return `${after} is still itself, by a margin of ${margin}.`;
    return `${after} is nearer to ${quoted(this.winner(at))}, by a margin of ${margin}.`;
  }

  /** The cell under the cursor in words, or the whole history of the active token. */
  words(state) {
    const token = activeQuery(state);
    if (this.layer >= 0) return this.cellWords(this.layer, token);
    const lost = this.about.layers.filter((_, row) => !this.part("recovered")[row * this.n + token]);
    const name = quoted(this.site.names[token]);
    if (!lost.length) return `${name} is still itself after every layer.`;
    return `${name} is lost after ${lost.length === 1 ? "layer" : "layers"} ${lost.join(", ")}.`;
  }

  tint(at, colours) {
    const margin = Math.abs(this.part("margin")[at]) / (this.most || 1);
    const share = 0.14 + 0.86 * Math.sqrt(margin || 0);
    return mixed(colours.paper, this.part("recovered")[at] ? colours.sure : colours.plus, share);
  }

  paint(pen, state) {
    const colours = this.site.colours();
    const { from, count, cell } = this.window(pen.width);
    const top = this.labels;
    this.about.layers.forEach((layer, row) => {
      const y = top + row * this.high;
      const here = row === this.layer;
      pen.text(`layer ${layer}`, TOKENS_LEFT - 10, y + this.high / 2, here ? colours.focus : colours.soft, { size: 12, align: "right" });
      for (let place = 0; place < count; place += 1) this.paintCell(pen, row * this.n + from + place, TOKENS_LEFT + place * cell, y, cell, colours);
      pen.text(percent(this.rate(row)), TOKENS_LEFT + count * cell + 44, y + this.high / 2, colours.ink, { size: 12, align: "right" });
    });
    this.paintNames(pen, state, { from, count, cell }, colours);
    const bottom = top + this.about.layers.length * this.high;
    for (const [token, dash] of [[activeKey(state), true], [activeQuery(state), false]]) {
      const x = TOKENS_LEFT + (token - from) * cell;
      if (token < from || token >= from + count) continue;
      if (dash) pen.line(x + cell / 2, bottom + 3, x + cell / 2, bottom + 7, colours.focus, { width: 3 });
      else pen.rect(x, top - 1, cell - 1, bottom - top + 1, null, { stroke: colours.focus, line: 2 });
    }
    if (this.layer >= 0) this.paintCursor(pen, activeQuery(state), from, count, cell, colours);
    this.paintLegend(pen, bottom + 24, colours);
  }

  paintCell(pen, at, x, y, cell, colours) {
    const fill = this.tint(at, colours);
    pen.rect(x, y, cell - 1, this.high - 1, css(fill));
    if (this.part("recovered")[at]) return;
    const ink = inkOn(fill, colours);
    const name = this.winner(at);
    const cut = name.lastIndexOf("@");
    const [whole, parted] = [[name], cut > 0 && this.high > 20 ? [name.slice(0, cut), name.slice(cut)] : [name]];
    const lines = [whole, parted].find((parts) => parts.every((words) => wordsWidth(words, 9) <= cell - 2)) ?? [];
    lines.forEach((words, down) => {
      const middle = y + this.high / 2 + (down - (lines.length - 1) / 2) * 11;
      pen.text(words, x + (cell - 1) / 2, middle, ink, { size: 9, align: "center" });
    });
  }

  /** Names above the columns: level where all of them fit, or else all turned. */
  paintNames(pen, state, { from, count, cell }, colours) {
    const shown = this.site.names.slice(from, from + count);
    const level = shown.every((name) => wordsWidth(name, 11) < cell - 4);
    shown.forEach((name, place) => {
      const token = from + place;
      const chosen = token === activeQuery(state) || token === activeKey(state);
      const ink = chosen ? colours.focus : this.site.view.about.special[token] ? colours.soft : colours.ink;
      const style = { size: 11, weight: chosen ? "bold" : "normal" };
      const x = TOKENS_LEFT + (place + 0.5) * cell;
      if (level) pen.text(name, x, this.labels - 12, ink, { ...style, align: "center" });
      else pen.text(name, x - 3, this.labels - 8, ink, { ...style, turn: -Math.PI / 3.4, widest: (this.labels - 8) / 0.8 });
    });
  }

  paintCursor(pen, token, from, count, cell, colours) {
    if (token < from || token >= from + count) return;
    const x = TOKENS_LEFT + (token - from) * cell;
    pen.rect(x + 1, this.labels + this.layer * this.high + 1, cell - 3, this.high - 3, null, { stroke: colours.ink, line: 2 });
  }

  paintLegend(pen, y, colours) {
    let x = TOKENS_LEFT;
    for (const [words, colour] of [["still its token", colours.sure], ["another is nearer", colours.plus]]) {
      for (let step = 0; step < 5; step += 1) pen.rect(x + 9 * step, y - 5, 9, 10, css(mixed(colours.paper, colour, 0.14 + 0.86 * Math.sqrt(step / 4))));
      pen.text(words, x + 52, y, colours.soft, { size: 11 });
      x += 76 + wordsWidth(words, 11);
    }
    if (x < pen.width - 120) pen.text(`darker: by a larger margin, up to ${this.most.toFixed(2)}`, x, y, colours.soft, { size: 11 });
  }

  listen() {
    const { canvas, site } = this;
    const under = (x, y) => {
      const { from, count, cell } = this.window(figureWidth(canvas));
      const place = Math.floor((x - TOKENS_LEFT) / cell);
      const row = Math.floor((y - this.labels) / this.high);
      return place >= 0 && place < count && row < this.about.layers.length ? { token: from + place, row } : null;
    };
    const hover = (found) => {
      this.layer = Math.max(-1, found?.row ?? -1);
      site.store.set({ hoverQuery: found?.token ?? -1 });
    };
    pointable(canvas, { under, hover, choose: ({ token }) => site.store.set({ query: token }), press: (event) => this.press(event) });
  }

  press(event) {
    const state = this.site.store.get();
    const last = this.about.layers.length - 1;
    const query = { ArrowLeft: state.query - 1, ArrowRight: state.query + 1, Home: 0, End: this.n - 1 }[event.key];
    if (query !== undefined) this.site.store.set({ query: Math.max(0, Math.min(this.n - 1, query)), hoverQuery: -1 });
    else if (event.key === "ArrowDown") this.layer = Math.min(last, this.layer + 1);
    else if (event.key === "ArrowUp") this.layer = this.layer < 0 ? last : Math.max(0, this.layer - 1);
    else if (event.key === "Escape") this.layer = -1;
    else return;
    event.preventDefault();
    this.site.store.set({});
  }

  table() {
    const columns = ["layer", "position", "token", "recovered", "margin", "winner"];
    const rows = this.about.layers.flatMap((layer, row) =>
      this.site.names.map((name, token) => {
        const at = row * this.n + token;
        return [layer, token, name, Boolean(this.part("recovered")[at]), this.part("margin")[at], this.winner(at)];
      }),
    );
    return { columns, rows };
  }

  python() {
    if (this.about.candidates) return "found = ik.invert(model, text)\nprint(found.to_frame())";
    return `found = ik.explain(model, text${callCode(this.site.view, "explain")})\nprint(found.identity.to_frame())`;
  }

  describe(state) {
    const rates = this.about.layers.map((_, row) => percent(this.rate(row)));
    const first = `Tokens that are still themselves after layers ${this.about.layers[0]} to ${this.about.layers.at(-1)}: ${rates.join(", ")}.`;
    return `${first} ${this.words(state)}`;
  }
}
